"""`lastgood mirror describe`: a training as data, for the mirror node (docs/flowcheck.md)."""

from __future__ import annotations

import os
import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lastgood.cli._output import console, emit_json
from lastgood.errors import ConfigError
from lastgood.units import format_bytes, option_bytes

if TYPE_CHECKING:
    from lastgood.mirror.job.description import JobDescription
    from lastgood.mirror.job.factory import Training

__all__ = ["describe"]

_DEFAULT_STEPS = 100_000


class _Backend(str, Enum):
    GLOO = "gloo"
    NCCL = "nccl"


class _Hook(str, Enum):
    NONE = "none"
    FP16 = "fp16"
    BF16 = "bf16"


def describe(
    out: Annotated[Path, typer.Option(help="The file to write, as job.json.")],
    ranks: Annotated[int, typer.Option(min=2, help="Ranks of the training.")],
    model: Annotated[str | None, typer.Option(help="A workload, for instance resnet18.")] = None,
    factory: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="The function that the training script itself uses; the current folder is searched too.",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="For how many steps the schedule is told.")] = _DEFAULT_STEPS,
    reductions: Annotated[
        int | None, typer.Option(min=1, help="Reductions for each update; backward passes under no_sync are none.")
    ] = None,
    clip_norm: Annotated[float | None, typer.Option(help="Limit of the norm of all gradients.")] = None,
    clip_value: Annotated[float | None, typer.Option(help="Limit of each element of the gradients.")] = None,
    hook: Annotated[_Hook, typer.Option(help="torch's hook that compresses gradients.")] = _Hook.NONE,
    bucket_cap_mb: Annotated[float | None, typer.Option(help="As DistributedDataParallel has it.")] = None,
    find_unused_parameters: Annotated[bool | None, typer.Option(help="As DistributedDataParallel has it.")] = None,
    static_graph: Annotated[bool | None, typer.Option(help="As DistributedDataParallel has it.")] = None,
    forward_sync_buffers: Annotated[bool | None, typer.Option(help="As DistributedDataParallel has it.")] = None,
    backend: Annotated[_Backend, typer.Option(help="What carries the collectives.")] = _Backend.GLOO,
    network: Annotated[Literal["sockets", "roce"], typer.Option(help="What carries NCCL.")] = "sockets",
    nccl: Annotated[str, typer.Option(metavar="VERSION", help="NCCL's version, as 2.28.")] = "",
    protocol: Annotated[str, typer.Option(help="NCCL_PROTO: simple or ll; empty: as NCCL picks it.")] = "",
    channels: Annotated[int, typer.Option(min=1, max=64, help="Channels that NCCL may use.")] = 1,
    buffsize: Annotated[str, typer.Option(metavar="SIZE", help="NCCL_BUFFSIZE.")] = "4MiB",
    queue_pairs: Annotated[int, typer.Option(min=1, max=128, help="NCCL_IB_QPS_PER_CONNECTION, over RoCE.")] = 1,
    split_data: Annotated[
        bool, typer.Option("--split-data", help="NCCL_IB_SPLIT_DATA_ON_QPS=1: each message is cut over them.")
    ] = False,
    configfile: Annotated[
        Path | None, typer.Option(help="With --model: a configuration [default: the checkout's config/laptop.yaml].")
    ] = None,
    config: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="Override one key of the file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a summary to stdout as JSON.")] = False,
) -> None:
    """Describe a training to the mirror node: tensors, optimizer and schedule, DDP's settings, ranks, backend.

    Call it on a device of the trainers' kind, once for each change of the script. What it writes holds no code.
    """
    if (model is None) == (factory is None):
        raise ConfigError("lastgood mirror describe takes --model or --factory, one of them")
    from lastgood.mirror.job.describe import describe as describe_training
    from lastgood.mirror.job.description import Backend, write_job

    training = _from_workload(model, configfile, config or []) if model is not None else _from_factory(str(factory))
    given: dict[str, Any] = {
        "bucket_cap_mb": bucket_cap_mb,
        "find_unused_parameters": find_unused_parameters,
        "static_graph": static_graph,
        "forward_sync_buffers": forward_sync_buffers,
        "hook": None if hook is _Hook.NONE else hook.value,
    }
    training.ddp = {**training.ddp, **{key: value for key, value in given.items() if value is not None}}
    training.reductions_per_step = reductions or training.reductions_per_step
    training.clip_norm = training.clip_norm if clip_norm is None else clip_norm
    training.clip_value = training.clip_value if clip_value is None else clip_value
    carrier = Backend(
        kind=backend.value,
        network=network,
        version=nccl,
        protocol=protocol,  # type: ignore[arg-type] # the model refuses other words
        channels=channels,
        buffer_bytes=option_bytes("--buffsize", buffsize),
        queue_pairs=queue_pairs,
        split_data=split_data,
    )
    job = describe_training(training, ranks=ranks, backend=carrier, steps=steps)
    write_job(job, out)
    _tell(job, out, as_json)


def _from_workload(name: str, configfile: Path | None, overrides: list[str]) -> Training:
    from lastgood.experiments.config.yaml_file import parse_overrides
    from lastgood.experiments.plan.grid import find_root
    from lastgood.experiments.plan.load import load_config
    from lastgood.mirror.job.factory import Training

    settings = load_config(configfile or find_root() / "config" / "laptop.yaml", parse_overrides(overrides))
    settings.workload_options(name)  # refuses an unknown one
    built = settings.build_workload(name)
    # As training.parallel wraps it.
    ddp = {"find_unused_parameters": name == "blob"}
    return Training(built.model, built.optimizer, built.scheduler, ddp=ddp, name=name)


def _from_factory(path: str) -> Training:
    from lastgood.mirror.job.factory import call_factory

    if (here := os.getcwd()) not in sys.path:  # noqa: PTH109 - as sys.path has it
        sys.path.insert(0, here)
    return call_factory(path)


def _tell(job: JobDescription, out: Path, as_json: bool) -> None:
    from lastgood.mirror.job.ddp import bucket_bytes, initial_buckets

    gradients = sum(bucket_bytes(job, bucket) for bucket in initial_buckets(job))
    summary = {
        "file": str(out),
        "parameters": len(job.parameters),
        "trainable": len(job.trainable),
        "buffers": len(job.buffers),
        "gradient_bytes": gradients,
        "optimizer": job.spec.kind,
        "scheduler": job.rules.scheduler or None,
        "steps": job.rules.steps,
        "ranks": job.ranks,
        "backend": job.backend.kind,
    }
    if as_json:
        emit_json(summary)
        return
    ends = "for ever" if job.rules.steps is None else f"for {job.rules.steps} steps"
    console.print(
        f"{out}: {len(job.trainable)} trainable of {len(job.parameters)} parameters, {len(job.buffers)} buffers, "
        f"{format_bytes(gradients)} of gradients a step; {job.spec.kind}, {ends}; {job.ranks} ranks over "
        f"{job.backend.kind}"
    )
