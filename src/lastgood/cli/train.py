"""`lastgood train`: one rank of a training under Checkmate, its place taken from a launcher's environment."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from lastgood.cli._output import console, emit_json
from lastgood.processes import keep_stdout

__all__ = ["train"]


def train(
    model: Annotated[str, typer.Option(help="A workload, for instance resnet50 or vgg16.")],
    token_file: Annotated[Path, typer.Option(help="File with the token that the shadows have.")],
    directory: Annotated[Path, typer.Option(help="Folder for the job's id: with it a restart goes on.")],
    steps: Annotated[
        int, typer.Option(min=0, help="Train until this many steps are done, those of earlier incarnations too.")
    ],
    shadow: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST:PORT", help="The shadows, in the order of their numbers [default: asked for]."),
    ] = None,
    shadows_at: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="MASTER_ADDR:MASTER_PORT of shadows with --rendezvous [default: this process's own].",
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads to compute with [default: one for each of --cpus, else torch's].")
    ] = None,
    cpus: Annotated[
        str | None, typer.Option(help="CPUs to stay on, as 0-3,8; shared out by LOCAL_RANK under torchrun.")
    ] = None,
    policy: Annotated[str, typer.Option(help="If a shadow is slow: block, queue or drop.")] = "block",
    configfile: Annotated[
        Path | None, typer.Option(help="A configuration file [default: the checkout's config/laptop.yaml].")
    ] = None,
    config: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="Override one key of the file.")] = None,
    timeout_s: Annotated[
        float, typer.Option(help="Longest wait for the other ranks, and for shadows' addresses.")
    ] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome to stdout as JSON.")] = False,
) -> None:
    """Train one rank of a data-parallel training, every step of which shadows keep; start one for each rank.

    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say where it is, as torchrun sets them; NUM_TRAINING and NUM_STORAGE
    as in the paper's artefact (docs/checkmate.md). Model, data, seed and device are those of the configuration.
    """
    from lastgood.experiments.config.yaml_file import parse_overrides
    from lastgood.experiments.plan.grid import find_root
    from lastgood.experiments.plan.load import load_config
    from lastgood.gradients.shadow.launch_env import find_trainer, own_cpus

    place = find_trainer(os.environ)
    pinned = own_cpus(cpus, os.environ)
    settings = load_config(configfile or find_root() / "config" / "laptop.yaml", parse_overrides(config or []))
    settings.workload_options(model)  # refuses an unknown one
    if as_json:
        keep_stdout()
    if pinned:
        os.sched_setaffinity(0, pinned)  # before torch starts threads, which inherit it

    import torch

    from lastgood.checkpointers.checkmate.system import Checkmate
    from lastgood.training.loop import configure_compute
    from lastgood.training.shadowed import join_trainers, leave_trainers, train_with_shadows

    if settings.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    # What cannot be is said before the other ranks are waited for.
    Checkmate(directory, shadows=shadow or (), token_file=str(token_file), policy=policy)
    configure_compute(threads or len(pinned) or torch.get_num_threads(), deterministic=settings.device == "cpu")
    join_trainers(place, settings.device, timeout_s)
    addresses = shadow or _ask(shadows_at, place.shadows, timeout_s)
    checkpointer = Checkmate(directory, shadows=addresses, token_file=str(token_file), policy=policy)
    workload = settings.build_workload(model)

    def report(text: str) -> None:
        if place.rank == 0:
            console.print(f"{model}: {text}")

    found = train_with_shadows(workload, checkpointer, place, steps, settings.device, report)
    leave_trainers()
    if found.losses:
        report(
            f"loss {found.losses[0]:.4g} at step {found.first_step + 1}, {found.losses[-1]:.4g} at {found.last_step}"
        )
    report(f"step {found.last_step}; of {len(found.losses)} saves {found.durable} durable, {found.failed} failed")
    if as_json:
        emit_json({"rank": place.rank, "cpus": sorted(os.sched_getaffinity(0)), **asdict(found)})


def _ask(shadows_at: str | None, shadows: int, timeout_s: float) -> list[str]:
    from lastgood.errors import ConfigError
    from lastgood.gradients.shadow.rendezvous import ask_addresses

    text = shadows_at or f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(
            f"{text!r} is no HOST:PORT of shadows' store; give --shadow, --shadows-at, or MASTER_ADDR and MASTER_PORT"
        )
    return ask_addresses(host, int(port), shadows, timeout_s)
