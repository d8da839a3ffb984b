"""`lastgood tune`: PCcheck's settings for a folder, measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lastgood.cli._output import console, emit_json, emit_table, reporter
from lastgood.errors import ConfigError
from lastgood.names import nearest
from lastgood.units import format_bytes, format_seconds, option_bytes

if TYPE_CHECKING:
    from lastgood.checkpointers.pccheck.tuning_file import Tuning
    from lastgood.training.tuning import Limits

__all__ = ["tune"]


def tune(
    directory: Annotated[Path, typer.Argument(help="The job's checkpoint folder, or where it will be.")],
    workload: Annotated[str | None, typer.Option(help="Train this workload of the configuration.")] = None,
    configfile: Annotated[
        Path | None,
        typer.Option(help="With --workload: a configuration file [default: the checkout's config/laptop.yaml]."),
    ] = None,
    config: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="With --workload: override one key of the file.")
    ] = None,
    iteration_s: Annotated[
        float | None, typer.Option(help="Instead of --workload: seconds of one iteration without checkpoints.")
    ] = None,
    state_bytes: Annotated[
        str | None, typer.Option(help="Instead of --workload: size of one checkpoint, such as 1.1GB or 512MiB.")
    ] = None,
    slowdown: Annotated[float, typer.Option(help="What checkpoints may cost: 1.05 is 5 %.")] = 1.05,
    keep: Annotated[int, typer.Option(help="Complete checkpoints to keep.")] = 2,
    budget_s: Annotated[float, typer.Option(help="Seconds for all measurements, about.")] = 60.0,
    out: Annotated[Path | None, typer.Option(help="File of the settings [default: pccheck.yaml in DIRECTORY].")] = None,
    end_with: Annotated[int | None, typer.Option(metavar="PID", help="End when the parent process PID ends.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all that was measured to stdout as JSON.")] = False,
) -> None:
    """Choose checkpoints in flight, writer threads, chunk size and interval for PCcheck, and write them as YAML.

    Give a workload, which is then trained with and without checkpoints, or the two numbers of your own training. Waits
    until no run is being timed.
    """
    from lastgood.experiments.machine.facts import machine_label, usable_cores
    from lastgood.experiments.machine.lock import machine_turn
    from lastgood.processes import die_with_parent

    if end_with is not None:
        die_with_parent(end_with)
    _refuse_mixed(workload, configfile, config, iteration_s, state_bytes)
    size = option_bytes("--state-bytes", state_bytes or "0")

    report = reporter("tune")
    with machine_turn(report):
        from lastgood.checkpointers.pccheck.tuning_file import TUNING_FILE, write_tuning
        from lastgood.training.tuning import Limits
        from lastgood.training.tuning import tune as tune_numbers

        limits = Limits(seconds=budget_s, cores=usable_cores(), memory_bytes=_memory_bytes())
        shared: dict[str, Any] = {"slowdown": slowdown, "keep": keep, "machine": machine_label(), "report": report}
        if workload is not None:
            found = _tune_workload(directory, workload, configfile, config or [], limits, shared)
        else:
            assert iteration_s is not None  # by _refuse_mixed
            found = tune_numbers(directory, iteration_s=iteration_s, state_bytes=size, limits=limits, **shared)
    path = out or directory / TUNING_FILE
    if as_json:
        emit_json({**found.model_dump(mode="json"), "kept": found.kept})
    else:
        _print(found)
    for warning in found.warnings:
        console.print(f"warning: {warning}")
    if found.kept is False:
        report(f"nothing written to {path}")
        raise typer.Exit(1)
    write_tuning(path, found)
    report(f"a checkpoint every {found.interval_steps} steps; written to {path}")


def _refuse_mixed(
    workload: str | None,
    configfile: Path | None,
    config: list[str] | None,
    iteration_s: float | None,
    state_bytes: str | None,
) -> None:
    numbers = iteration_s is not None or state_bytes is not None
    if (workload is not None) == numbers:
        raise ConfigError("give either --workload NAME, or --iteration-s T and --state-bytes S")
    if numbers and (iteration_s is None or state_bytes is None):
        raise ConfigError("--iteration-s and --state-bytes belong together: give both")
    if numbers and (configfile is not None or config):
        raise ConfigError("--configfile and --config say how --workload trains; they mean nothing without it")


def _memory_bytes() -> int:
    """What is available, or less if a container has a limit."""
    import psutil

    from lastgood.experiments.machine.facts import memory_bytes

    used = psutil.Process().memory_info().rss
    return max(1, min(psutil.virtual_memory().available, memory_bytes() - used))


def _tune_workload(
    directory: Path,
    workload: str,
    configfile: Path | None,
    config: list[str],
    limits: Limits,
    shared: dict[str, Any],
) -> Tuning:
    """Build the workload as a run of that configuration would, and tune with it."""
    from lastgood.experiments.config.yaml_file import parse_overrides
    from lastgood.experiments.machine.facts import cuda_devices
    from lastgood.experiments.plan.grid import find_root
    from lastgood.experiments.plan.load import parse_config
    from lastgood.training.tuning import tune_training
    from lastgood.workloads.registry import workload_names

    if workload not in workload_names():
        known = workload_names()
        raise ConfigError(
            f"--workload: unknown model {workload!r}{nearest(workload, known)}; known: {', '.join(known)}"
        )
    settings, sources = parse_config(
        configfile or find_root() / "config" / "laptop.yaml", {**parse_overrides(config), "models": [workload]}
    )
    if settings.device == "cuda" and not cuda_devices():
        raise ConfigError(sources.problem(("device",), "'cuda': this machine shows no CUDA device; allowed here: cpu"))
    from lastgood.checkpointers.baselines.none import NoCheckpointing
    from lastgood.training.loop import TrainingLoop, configure_compute

    report: Callable[[str], None] = shared["report"]
    report(f"building {workload}")
    configure_compute(settings.thread_count, deterministic=False)
    built = settings.build_workload(workload)
    loop = TrainingLoop(built, NoCheckpointing(directory), 0, settings.device)
    built.model.train()
    return tune_training(directory, lambda: loop.train(1), loop.state, limits=limits, **shared)


def _print(found: Tuning) -> None:
    rows = []
    for point in found.curve:
        slots = point.max_in_flight + found.options.keep
        rows.append(
            (
                "*" if point == found.chosen else "",
                point.max_in_flight,
                point.writer_threads,
                format_bytes(point.chunk_bytes),
                len(point.write_s),
                format_seconds(point.worst_write_s),
                format_seconds(point.median_write_s),
                format_seconds(min(point.write_s)),
                format_bytes(slots * found.state_bytes),
                point.interval_steps(found.slowdown, found.iteration_s),
            )
        )
    how = "direct I/O" if found.direct_io else "buffered, fdatasync"
    title = (
        f"Write curve of {found.machine}, {found.measured_at}: {format_bytes(found.state_bytes)} of state, "
        f"{format_seconds(found.iteration_s)} an iteration, slowdown {found.slowdown:g}, {how}"
    )
    emit_table(title, ("", "N", "p", "b", "writes", "worst", "median", "least", "disk", "f"), rows)
    if found.not_tried:
        console.print(f"not tried, for lack of time or memory: {len(found.not_tried)} combinations; --json names them")
    if found.checks:
        emit_table(
            "Training with checkpoints against training without",
            ("interval", "checkpoints", "without", "with", "predicted", "measured", ""),
            (
                (
                    check.interval_steps,
                    check.checkpoints,
                    format_seconds(check.plain_iteration_s),
                    format_seconds(check.iteration_s),
                    f"{check.predicted:.3f}",
                    f"{check.measured:.3f}",
                    "kept" if check.measured <= found.slowdown else "over",
                )
                for check in found.checks
            ),
        )
