"""`lastgood stellatrain train`: one rank of a training by the sparse engine, its place taken from a launcher."""

from __future__ import annotations

import os
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from lastgood.cli._output import console, emit_json
from lastgood.cli.stellatrain_serve import choosing
from lastgood.errors import ConfigError, WaitTimeout

__all__ = ["train"]


def train(
    workload: Annotated[str, typer.Option(help="A workload, for instance resnet18 or vgg16.")] = "resnet18",
    steps: Annotated[
        int, typer.Option(min=1, help="Train until this many steps are done, those of earlier incarnations too.")
    ] = 100,
    compressor: Annotated[str, typer.Option(help="topk, threshold, v16, randomk or none.")] = "v16",
    compression: Annotated[float, typer.Option(help="The share of the gradient that is not sent.")] = 0.99,
    staleness: Annotated[int, typer.Option(min=0, max=1, help="Iterations between sending and applying.")] = 1,
    values: Annotated[str, typer.Option(help="How values are sent: float32, float16 or bfloat16.")] = "float32",
    mode: Annotated[
        str, typer.Option(help="plain: elements that nobody sent stay; lazy: as a dense step would move them.")
    ] = "plain",
    system: Annotated[
        str | None, typer.Option(help="Keeps checkpoints, for instance pccheck [default: none are made].")
    ] = None,
    directory: Annotated[
        Path | None, typer.Option(help="Folder of the checkpoints; each rank has one below it.")
    ] = None,
    interval_steps: Annotated[int, typer.Option(min=1, help="Steps between two checkpoints.")] = 50,
    my_address: Annotated[
        str | None,
        typer.Option(metavar="HOST", help="This machine's for the others [default: by which it reaches rank 0]."),
    ] = None,
    noise: Annotated[
        bool, typer.Option("--noise", help="Train on random pixels and labels, without a data set.")
    ] = False,
    controller: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT|own",
            help="Tell each iteration to `lastgood stellatrain serve` there, or in rank 0, and do as it chooses.",
        ),
    ] = None,
    token_file: Annotated[Path | None, typer.Option(help="File with the token of --controller HOST:PORT.")] = None,
    least_compression: Annotated[float, typer.Option(help="No less is taken from a controller.")] = 0.9,
    surface: Annotated[
        Path | None, typer.Option(help="A profile by `lastgood stellatrain profile`, for --controller own.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads to compute with [default: torch's].")] = None,
    configfile: Annotated[
        Path | None, typer.Option(help="A configuration file [default: the checkout's config/laptop.yaml].")
    ] = None,
    config: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="Override one key of the file.")] = None,
    timeout_s: Annotated[float, typer.Option(help="Longest wait for the other ranks.")] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome to stdout as JSON.")] = False,
) -> None:
    """Train one rank over a slow link: each sends 1 % of its gradient; start one process on each node.

    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say where it is, as torchrun and `lastgood launch` set them; without
    them it trains alone. Model, seed and device are those of the configuration.
    """
    from lastgood.experiments.config.yaml_file import parse_overrides
    from lastgood.experiments.plan.grid import find_root
    from lastgood.experiments.plan.load import load_config

    overrides = parse_overrides(config or [])
    settings = load_config(configfile or find_root() / "config" / "laptop.yaml", overrides)
    settings.workload_options(workload)  # refuses an unknown one
    telemetry = _telemetry(controller, token_file, surface)
    if system is not None and directory is None:
        raise ConfigError(f"--system {system} needs a place for its checkpoints: --directory FOLDER")

    from lastgood._lazy import dist, torch
    from lastgood.checkpointers.base import Checkpointer
    from lastgood.checkpointers.baselines.none import NoCheckpointing
    from lastgood.checkpointers.registry import checkpointer_class
    from lastgood.sparse.control.own_controller import own_controller
    from lastgood.sparse.control.telemetry_server import Choosing
    from lastgood.sparse.ranks import ranks_of_torch
    from lastgood.training.loop import configure_compute
    from lastgood.training.sparse import noise_like, train_sparse

    if settings.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    configure_compute(threads or torch.get_num_threads(), deterministic=settings.device == "cpu")
    together = int(os.environ.get("WORLD_SIZE", "1")) > 1
    server = None
    if together:
        _join(timeout_s)
    try:
        ranks = ranks_of_torch(my_address)
        checkpointer: Checkpointer = NoCheckpointing(".", interval_steps=0)
        if system is not None:
            checkpointer = checkpointer_class(system)(str(directory), interval_steps=interval_steps)

        def report(text: str) -> None:
            if ranks.rank == 0:
                console.print(f"{workload}: {text}")

        engine: dict[str, Any] = {
            "compressor": compressor,
            "compression": compression,
            "staleness": staleness,
            "values": values,
            "mode": mode,
            "timeout_s": timeout_s,
            "seed": settings.seed,
        }
        if isinstance(telemetry, Choosing):
            server, telemetry = own_controller(ranks, telemetry, timeout_s)
        if telemetry is not None:
            engine.update(telemetry=telemetry, least_compression=min(least_compression, compression))
        built = settings.build_workload(workload)
        if noise:
            built.data = noise_like(built.data)
        found = train_sparse(built, checkpointer, ranks, engine, steps, settings.device, report)
        if together:
            dist.barrier()  # rank 0 serves the store
    finally:
        if server is not None:
            server.close()
        if together:
            dist.destroy_process_group()
    if found.losses:
        report(f"loss {found.losses[0]:.4g} at step {found.first_step + 1}, {found.losses[-1]:.4g} at {steps}")
        a_step = found.sent_bytes / len(found.losses)
        report(f"{found.iterations_per_s:.3g} iterations/s, {a_step / 1e6:.3g} MB sent a step by each rank")
    if found.setting is not None:
        sizes = ", ".join(map(str, found.setting["samples"]))
        report(f"setting {found.setting['number']}: batches of {sizes}, compression {found.setting['compression']:g}")
    if system is not None:
        report(f"checkpoints: {found.durable} durable, {found.failed} failed")
    if as_json:
        emit_json({"rank": ranks.rank, **asdict(found)})


def _telemetry(controller: str | None, token_file: Path | None, surface: Path | None) -> Any:
    """The client of --controller, how rank 0's own one chooses, or None; before anything is connected."""
    if controller == "own":
        return choosing(None, 0.0, surface, 5.0, 1.0)
    if surface is not None:
        raise ConfigError("--surface is for --controller own; a server elsewhere is given it")
    if controller is None:
        return None
    if token_file is None:
        raise ConfigError(f"--controller {controller} needs the token that its server has: --token-file FILE")

    from lastgood.sparse.control.telemetry import TelemetryClient
    from lastgood.tokens import read_token

    return TelemetryClient(controller, read_token(token_file))


def _join(timeout_s: float) -> None:
    from lastgood._lazy import dist

    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    except (RuntimeError, ValueError) as error:  # torch's own, of several classes
        where = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
        ranks = os.environ["WORLD_SIZE"]
        raise WaitTimeout(f"{ranks} ranks did not meet at {where} (MASTER_ADDR) in {timeout_s:g} s: {error}") from error
