"""What checkpoints cost a training: throughput against training without them, and against what the machine allows.

Without --intervals: a sweep over 1, 10, 25 and 50 on CUDA; on the CPU none against PCcheck at twice the smallest
interval at which the disk does not bind. Systems take turns, round by round. The bound is that of
lastgood.experiments.formulas.bound over ceilings that are measured before and after, in the same command.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import Comparison, Report, TextTable, cannot, command_line, interleaved, main, say, spread

from lastgood.experiments.ceilings.disk import DiskPlan, measure_disk
from lastgood.experiments.ceilings.measure import measure_device_copies, measure_memory_copy
from lastgood.experiments.formulas.bound import Bound, throughput_bound
from lastgood.experiments.machine.facts import usable_cores
from lastgood.units import MIB, format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from runs import Run, Trainer

ROOT = Path(__file__).resolve().parent.parent
BOUND_GOAL = 0.97
NONE_GOAL, NONE_GOAL_FROM = 0.99, 25
"""On CUDA: of training without checkpoints, at this interval and above."""
PLAIN_GOAL, PLAIN_GOAL_TO = 1.0, 10
"""On CUDA: of the plain loop, up to this interval."""
_MOST_INTERVAL = 100_000


def measure(options: argparse.Namespace, folder: Path) -> Report:
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        cannot("--device cuda, and torch sees no CUDA device")
    from runs import Trainer

    names = options.workload or (["vgg16"] if options.device == "cuda" else ["vgg16", "opt"])
    report = Report(
        settings={
            "device": options.device,
            "threads": options.threads,
            "iterations": options.iterations,
            "max_saves": options.max_saves,
            "minutes": options.minutes,
            "workloads": names,
        }
    )
    ceilings = Ceilings(folder, options.device, options.quick)
    found: list[tuple[Trainer, list[Run]]] = []
    for name in names:
        say(f"{name}: building")
        trainer = Trainer(
            name,
            config=options.config or ROOT / "config" / ("gpu.yaml" if options.device == "cuda" else "laptop.yaml"),
            device=options.device,
            threads=options.threads,
            data_dir=options.data_dir,
            folder=folder,
            knobs=dict(options.pccheck or ()),
            seed=options.seed,
        )
        found.append((trainer, _train(options, trainer, ceilings)))
        ceilings.measure(trainer.state_bytes)
    report.results["ceilings"] = ceilings.as_json()
    report.notes.append(ceilings.sentence())
    for trainer, runs in found:
        _judge(options, trainer, runs, ceilings, report)
    report.notes += [
        "it/s: training alone; as many checkpoints are in progress when its clock starts as when it stops. durable: "
        "the drain counts as well, which a short run feels more than a long one",
        "lost: time beyond the steps of `none`; the stalls are waits; other is what copies, checksums and writes took "
        "from training that went on (cores, memory, the interpreter); on CUDA a stall in save may hide behind the "
        "device, and other is then below zero. CPU: of the whole process, beyond that of `none`; copy and persist: "
        "from the save to its last byte's leaving the training's memory, and to its durability",
    ]
    return report


# -- the bound -----------------------------------------------------------------------------------------------------


class Ceilings:
    """B and C of the bound: medians over all rounds, since a shared disk drifts, and the runs are medians as well.

    The disk is measured as checkpoints load it: passes of some seconds over a file larger than three states. Short
    bursts go to a virtual disk's cache at a rate that nobody can keep. B is the best pattern's median: the best pass of
    each round would be a median of maxima, which no pattern keeps up.
    """

    def __init__(self, folder: Path, device: str, quick: bool) -> None:
        self._folder = folder
        self._device = device
        self._quick = quick
        self.persist: dict[str, list[float]] = {}
        """By pattern, a value a round."""
        self.copy: list[float] = []

    def measure(self, state_bytes: int) -> None:
        """Measure both once more, with plain system calls and copies."""
        say("ceilings")
        sustained = DiskPlan(
            file_bytes=-(-max(512 * MIB, 3 * state_bytes) // (16 * MIB)) * 16 * MIB,
            jobs=(2, 4),
            block_bytes=(4 * MIB, 16 * MIB),
            directions=("write",),
            repetitions=1,
            fill_budget_s=10.0,
            pass_budget_s=2.0,
        )
        disk = measure_disk(self._folder, DiskPlan.quick() if self._quick else sustained)
        if not disk.direct_io:
            cannot(f"{self._folder}: this file system has no direct I/O")
        for point in disk.write:
            pattern = f"{point.jobs} x {format_bytes(point.block_bytes)}"
            self.persist.setdefault(pattern, []).append(point.median_bytes_per_s)
        size = (32 if self._quick else 256) * MIB
        if self._device == "cuda":
            self.copy.append(measure_device_copies(size)[1]["device_to_host_pinned_bytes_per_s"])
        else:
            curves = measure_memory_copy(size, repetitions=3 if self._quick else 7)
            self.copy.append(max(curve.median_bytes_per_s for curve in curves))

    def bound(self, none: Sequence[Run], interval: int, state_bytes: int) -> Bound:
        """The bound over the medians of the runs without checkpoints."""
        return throughput_bound(
            iteration_s=statistics.median(1 / run.iterations_per_s for run in none),
            interval_steps=interval,
            state_bytes=state_bytes,
            copy_bytes_per_s=statistics.median(self.copy),
            persist_bytes_per_s=self.persist_bytes_per_s,
            hide_s=statistics.median(run.hide_s for run in none),
        )

    @property
    def persist_bytes_per_s(self) -> float:
        """B of the bound."""
        return max(statistics.median(rates) for rates in self.persist.values())

    def as_json(self) -> dict[str, Any]:
        """Every measurement, bytes per second."""
        return {
            "persist_bytes_per_s": self.persist_bytes_per_s,
            "persist_by_pattern_bytes_per_s": self.persist,
            "copy_bytes_per_s": self.copy,
        }

    def sentence(self) -> str:
        """For the reader of the table."""
        disk = "; ".join(
            f"{pattern}: {', '.join(format_rate(rate) for rate in rates)}" for pattern, rates in self.persist.items()
        )
        copy = ", ".join(format_rate(value) for value in self.copy)
        return (
            f"ceilings over the rounds: disk (sustained, direct I/O, jobs x block) {disk}; copy {copy}; the best "
            "pattern's median and the copies' median make the bound"
        )


def _free_interval(none: Sequence[Run], state_bytes: int, ceilings: Ceilings) -> int:
    """The smallest interval at which the disk does not bind. A copy that does not hide costs something at every one."""
    interval = 1
    while ceilings.bound(none, interval, state_bytes).binds == "disk":
        interval += 1
        if interval == _MOST_INTERVAL:
            cannot(f"{format_bytes(state_bytes)} need more than {interval} steps between checkpoints on this disk")
    return interval


# -- running -------------------------------------------------------------------------------------------------------


def _train(options: argparse.Namespace, trainer: Trainer, ceilings: Ceilings) -> list[Run]:
    ceilings.measure(trainer.state_bytes)
    if options.intervals is None:
        say(f"{trainer.name}: looking for the interval")
        look = [trainer.run("none", 0, max(5, options.iterations // 3), 0) for _ in range(2)]
        intervals = [2 * _free_interval(look, trainer.state_bytes, ceilings)]
        systems = options.systems or ["pccheck"]
    else:
        intervals = options.intervals
        systems = options.systems or ["pccheck", "plain_loop"]
    cells = {f"{system} f{interval}": (system, interval) for system in systems for interval in intervals}
    # More of the runs that all others are compared with, the more others there are.
    for number in range(max(1, len(intervals) // 2)):
        cells[f"none {number}"] = ("none", 0)
    found: list[Run] = []
    begin = round_begin = time.monotonic()
    for number, cell in interleaved(list(cells), options.rounds, options.seed):
        if found and number != found[-1].round:
            now = time.monotonic()
            if options.minutes is not None and now + (now - round_begin) - begin > options.minutes * 60:
                say(f"{trainer.name}: another round would not end within {options.minutes:g} minutes")
                break
            round_begin = now
            ceilings.measure(trainer.state_bytes)
        system, interval = cells[cell]
        run = trainer.run(system, interval, _steps(options, interval), number)
        say(f"{trainer.name}, round {number + 1} of {options.rounds}, {cell}: {run.iterations_per_s:.2f} it/s")
        found.append(run)
    return found


def _steps(options: argparse.Namespace, interval: int) -> int:
    """About as many steps as asked for, in whole intervals, with at least two saves and not too many."""
    if interval == 0:
        return int(options.iterations)
    saves = min(max(2, round(options.iterations / interval)), options.max_saves)
    return int(saves * interval)


# -- judging -------------------------------------------------------------------------------------------------------


def _judge(options: argparse.Namespace, trainer: Trainer, runs: list[Run], ceilings: Ceilings, report: Report) -> None:
    none = [run for run in runs if run.system == "none"]
    none_rates = _rates(none)
    iteration_s = statistics.median(1 / run.iterations_per_s for run in none)
    none_cpu_s = statistics.median(run.cpu_s / run.steps for run in none)
    hide_s = statistics.median(run.hide_s for run in none)
    copy_s = trainer.state_bytes / statistics.median(ceilings.copy)
    report.notes.append(
        f"{trainer.name} {trainer.sizes}: state {trainer.state_bytes / 1e6:.0f} MB; "
        f"step {format_seconds(iteration_s)}, of which {format_seconds(hide_s)} can hide a copy of "
        f"{format_seconds(copy_s)}; pccheck {trainer.knobs}"
    )
    speed = TextTable(
        f"{trainer.name} on {options.device}: throughput, medians (lowest..highest)",
        ("interval", "system", "it/s", "of none", "of bound", "binds", "durable it/s", "of bound", "durable saves"),
    )
    speed.rows.append(("", "none", spread([run.iterations_per_s for run in none]), "1", *[""] * 5))
    profile = TextTable(
        f"{trainer.name} on {options.device}: where the time goes, medians, ms per save",
        ("interval", "system", "lost", "stall in save", "stall before update", "other", "CPU", "copy", "persist"),
    )
    cells = sorted({(run.interval, run.system) for run in runs if run.system != "none"})
    bounds: dict[str, Any] = {}
    for interval, system in cells:
        cell = [run for run in runs if (run.interval, run.system) == (interval, system)]
        bound = ceilings.bound(none, interval, trainer.state_bytes)
        bounds[str(interval)] = {"iterations_per_s": bound.iterations_per_s, "binds": bound.binds}
        speed.rows.append((str(interval), system, *_speed_row(cell, none_rates, bound)))
        profile.rows.append((str(interval), system, *_time_row(cell, iteration_s, none_cpu_s)))
        if system == "pccheck":
            plain = [run for run in runs if (run.interval, run.system) == (interval, "plain_loop")]
            report.comparisons += _comparisons(options, trainer.name, interval, cell, plain, none_rates, bound)
    report.tables += [speed, profile]
    report.results[trainer.name] = {
        "sizes": trainer.sizes,
        "knobs": trainer.knobs,
        "state_bytes": trainer.state_bytes,
        "iteration_s": iteration_s,
        "hide_s": hide_s,
        "bounds": bounds,
        "runs": [run.as_json() for run in runs],
    }


def _rates(runs: Sequence[Run]) -> list[float]:
    """One throughput a round; the median where a round has several runs."""
    rounds = sorted({run.round for run in runs})
    return [statistics.median(run.iterations_per_s for run in runs if run.round == number) for number in rounds]


def _speed_row(cell: Sequence[Run], none_rates: Sequence[float], bound: Bound) -> tuple[str, ...]:
    rates = [run.iterations_per_s for run in cell]
    durable = [run.durable_iterations_per_s for run in cell]
    return (
        spread(rates),
        f"{statistics.median(rates) / statistics.median(none_rates):.3f}",
        f"{statistics.median(rates) / bound.iterations_per_s:.3f}",
        bound.binds,
        spread(durable),
        f"{statistics.median(durable) / bound.iterations_per_s:.3f}",
        f"{sum(run.durable for run in cell)} of {sum(run.saves for run in cell)}",
    )


def _time_row(cell: Sequence[Run], iteration_s: float, none_cpu_s: float) -> tuple[str, ...]:
    def per_save(values: list[float]) -> float:
        return statistics.median(value / max(1, run.saves) for value, run in zip(values, cell, strict=True))

    lost = per_save([run.elapsed_s - run.steps * iteration_s for run in cell])
    save, update = per_save([run.stall_save_s for run in cell]), per_save([run.stall_update_s for run in cell])
    cpu = per_save([run.cpu_s - run.steps * none_cpu_s for run in cell])
    copy = [value for run in cell for value in run.copy_s]
    persist = [value for run in cell for value in run.persist_s]
    columns = [lost, save, update, lost - save - update, cpu, *(statistics.median(v) for v in (copy, persist) if v)]
    return tuple(f"{value * 1e3:.1f}" for value in columns)


def _comparisons(
    options: argparse.Namespace,
    name: str,
    interval: int,
    pccheck: Sequence[Run],
    plain: Sequence[Run],
    none_rates: list[float],
    bound: Bound,
) -> list[Comparison]:
    rates = _rates(pccheck)
    what = f"{name} f{interval}"
    cuda = options.device == "cuda"
    # On the CPU the goal is one for the interval that the disk leaves free, and no other.
    bound_goal = BOUND_GOAL if cuda or options.intervals is None else None
    none_goal = NONE_GOAL if cuda and interval >= NONE_GOAL_FROM else None
    found = [
        Comparison(what, "it/s", "pccheck", rates, "bound", [bound.iterations_per_s], bound_goal),
        Comparison(what, "it/s", "pccheck", rates, "none", none_rates, none_goal),
    ]
    if plain:
        plain_goal = PLAIN_GOAL if cuda and interval <= PLAIN_GOAL_TO else None
        plain_rates = _rates(plain)
        found.append(Comparison(what, "it/s", "pccheck", rates, "plain loop", plain_rates, plain_goal))
    return found


# -- command line --------------------------------------------------------------------------------------------------


def _names(known: Sequence[str]) -> Any:
    def parse(text: str) -> list[str]:
        found = text.split(",")
        if unknown := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
        return found

    return parse


def _intervals(text: str) -> list[int]:
    found = [int(part) for part in text.split(",")]
    if not all(1 <= interval < _MOST_INTERVAL for interval in found):
        raise argparse.ArgumentTypeError(f"intervals are steps, from 1 to {_MOST_INTERVAL - 1}: {text}")
    return found


def _knob(text: str) -> tuple[str, Any]:
    import yaml

    key, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"KEY=VALUE, not {text!r}")
    return key, yaml.safe_load(value)


def _parser() -> argparse.ArgumentParser:
    from lastgood.workloads.registry import workload_names

    parser = command_line(__doc__, rounds=5)
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--workload", type=_names(workload_names()), help="default: vgg16,opt on the CPU, vgg16 on CUDA")
    add("--config", type=Path, help="file with the workloads' sizes (default: config/laptop.yaml, on CUDA gpu.yaml)")
    add("--data-dir", type=Path, default=Path("data"), help="prepared data; made if missing (default: ./data)")
    add("--intervals", type=_intervals, help="steps between checkpoints, as 1,10,25,50")
    add("--systems", type=_names(("pccheck", "plain_loop")), help="beside none (default in a sweep: both)")
    add("--iterations", type=int, help="steps of each run, about (default: 60, on CUDA 200; --quick: 12)")
    add("--max-saves", type=int, help="a run ends after as many saves at the latest (default: 20, on CUDA 12)")
    add("--minutes", type=float, help="begin no round of a workload that would end later (default on CUDA: 6)")
    add("--threads", type=int, default=usable_cores(), help="of torch (default: all cores)")
    add("--pccheck", type=_knob, action="append", metavar="KEY=VALUE", help="a knob, as max_in_flight=3; repeatable")
    return parser


if __name__ == "__main__":
    parser = _parser()
    parsed = parser.parse_known_args()[0]
    cuda = parsed.device == "cuda"
    parser.set_defaults(
        iterations=12 if parsed.quick else 200 if cuda else 60,
        max_saves=12 if cuda else 20,
        minutes=6.0 if cuda else None,
        full_rounds=3 if cuda else 7,
        intervals=[1, 10, 25, 50] if cuda else None,
    )
    main(parser, measure, __file__)
