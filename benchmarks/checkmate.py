"""What Checkmate costs a training: its tap, and its policies when a shadow is slow or gone.

Trainers and shadows (`lastgood shadow serve`) are processes of this machine, over loopback. Every iteration is saved.

Where there are at least two cores for each of two ranks and one more, two ranks train with DistributedDataParallel and
the hook, each has two cores (one to compute, one free), and shadows have the others. Where there are fewer, one rank
trains alone and shares the cores with the shadows; the cost of the tap is then that of the one at the optimizer's step.
Policies are always compared with the hook: without it gradients are copied, and `block` is as `queue`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import Comparison, Report, TextTable, command_line, interleaved, main, say, sizes

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lastgood.errors import HostError
from lastgood.units import MIB, format_bytes
from tests.gradients.support.shadow_processes import ShadowProcess, shadow_processes

GOAL = 0.97
POLICIES = ("block", "queue", "drop")
FAULTS = ("stopped", "killed")
CORES_EACH = 2
WARM_UP = 3
ANSWER_S = 240.0
BYTES_PER_PARAMETER = 12
"""Of the state of LinearTraining; 4 of them are gradients."""


class Ranks:
    """The trainers, as processes of `script` that answer in lines of JSON."""

    def __init__(self, folder: Path, plan: dict[str, Any], script: str = "checkmate_rank.py") -> None:
        path = folder / "plan.json"
        path.write_text(json.dumps(plan))
        self._logs = [folder / f"rank-{rank}.log" for rank in range(plan["ranks"])]
        self._answers: list[queue.Queue[str]] = []
        self._processes = []
        for rank, log in enumerate(self._logs):
            with log.open("wb") as file:
                process = subprocess.Popen(
                    [sys.executable, str(Path(__file__).with_name(script)), str(path), str(rank)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=file,
                    text=True,
                )
            lines: queue.Queue[str] = queue.Queue()
            threading.Thread(target=self._read, args=(process, lines), daemon=True).start()
            self._processes.append(process)
            self._answers.append(lines)

    @staticmethod
    def _read(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put("")

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait(30)

    def ask(self, **work: Any) -> None:
        """Give all ranks the same work."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(work) + "\n")
            process.stdin.flush()

    def answers(self) -> list[Any]:
        """The next line of every rank. Raises HostError where one has ended, or says nothing in time."""
        found = []
        for rank, lines in enumerate(self._answers):
            try:
                line = lines.get(timeout=ANSWER_S)
            except queue.Empty:
                raise HostError(f"rank {rank} has said nothing for {ANSWER_S:g} s: {self._tail(rank)}") from None
            if not line:
                raise HostError(f"rank {rank} has ended: {self._tail(rank)}")
            found.append(json.loads(line))
        return found

    def _tail(self, rank: int) -> str:
        return self._logs[rank].read_text(errors="replace")[-2000:]


# -- the tap -----------------------------------------------------------------------------------------------------------


def measure_tap(
    ranks: Ranks, shadows: list[ShadowProcess], options: argparse.Namespace, count: int, report: Report
) -> None:
    """Iterations with the tap and without it, in turn."""
    say("tap: with it and without it, in turn")
    hook = count > 1
    how = f"{count} ranks, DDP's hook" if hook else "1 rank, optimizer's step"
    order = list(interleaved(("without", "tap"), options.rounds, options.seed))
    pids = [shadow.process.pid for shadow in shadows]
    ranks.ask(work="overhead", order=order, iterations=options.iterations, warm_up=WARM_UP, shadow_pids=pids, hook=hook)
    of_ranks = ranks.answers()
    report.results["tap"] = of_ranks

    def values(side: str, key: str) -> list[list[float]]:
        """For each round the values of all ranks."""
        own = [[row[key] for row in rows if row["side"] == side] for rows in of_ranks]
        return [list(one) for one in zip(*own, strict=True)]

    rates = {side: [options.iterations / max(one) for one in values(side, "seconds")] for side in ("tap", "without")}
    cpu = {side: [statistics.mean(one) for one in values(side, "cpu_s")] for side in ("tap", "without")}
    report.comparisons.append(
        Comparison(f"tap, {how}", "it/s", "with", rates["tap"], "without", rates["without"], GOAL)
    )
    report.comparisons.append(
        Comparison(
            "CPU of a trainer",
            "it/CPU s",
            "with",
            [1 / one for one in cpu["tap"]],
            "without",
            [1 / one for one in cpu["without"]],
        )
    )
    shadows_cpu = statistics.median(one[0] for one in values("tap", "shadows_cpu_s"))
    medians = {side: statistics.median(values) for side, values in cpu.items()}
    report.tables.append(
        TextTable(
            "CPU milliseconds for an iteration: medians",
            ("a trainer without the tap", "with it", "all shadows"),
            [tuple(f"{1e3 * one:.1f}" for one in (medians["without"], medians["tap"], shadows_cpu))],
        )
    )


# -- policies ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Phase:
    """What happened between two instants; an iteration counts where it ended, a save where it was asked for."""

    name: str
    seconds: float
    iterations: int
    longest_s: float
    """Between the ends of two iterations, of which the second lies in it."""
    waited_s: float
    """For room in connections, by the rank that waited longest."""
    durable: int
    failed: int

    @property
    def rate(self) -> float:
        """Iterations per second."""
        return self.iterations / self.seconds


def phases_of(of_ranks: list[dict[str, Any]], marks: list[tuple[str, float]], end_s: float) -> list[Phase]:
    """Cut a run into phases: `marks` says when each begins, `end_s` when the last one ends."""
    ends = [at for at, _ in of_ranks[0]["iterations"]]
    found = []
    for number, (name, begin) in enumerate(marks):
        until = marks[number + 1][1] if number + 1 < len(marks) else end_s
        inside = [index for index, at in enumerate(ends) if begin <= at < until]
        gaps = [ends[index] - (ends[index - 1] if index else marks[0][1]) for index in inside]
        waits = [_waited_until(rank, until) - _waited_until(rank, begin) for rank in of_ranks]
        outcomes = [outcome for at, outcome in of_ranks[0]["saves"] if begin <= at < until]
        found.append(
            Phase(
                name,
                until - begin,
                len(inside),
                max(gaps, default=until - begin),
                max(waits),
                outcomes.count("durable"),
                outcomes.count("failed"),
            )
        )
    return found


def _waited_until(rank: dict[str, Any], instant: float) -> float:
    return float(max((waited for at, waited in rank["iterations"] if at < instant), default=0.0))


def until_whole(saves: list[tuple[float, str]], healed_s: float) -> int | None:
    """How many saves from `healed_s` on came before the last failure was over; None: it was the last save."""
    failures = [index for index, (_, outcome) in enumerate(saves) if outcome != "durable"]
    if not failures:
        return 0
    if failures[-1] == len(saves) - 1:
        return None
    return sum(at >= healed_s for at, _ in saves[: failures[-1] + 1])


def measure_policy(
    ranks: Ranks, shadows: list[ShadowProcess], folder: Path, policy: str, fault: str, options: argparse.Namespace
) -> dict[str, Any]:
    """One training: well, then with its last shadow stopped or killed, then with it back."""
    say(f"policy {policy}, a shadow {fault}")
    stop = folder / f"stop-{policy}-{fault}"
    ranks.ask(work="policy", knobs={"policy": policy}, warm_up=WARM_UP, stop=str(stop))
    began_s = max(one["began_s"] for one in ranks.answers())
    time.sleep(options.well_s)
    victim = shadows[-1]
    fault_s = time.perf_counter()
    if fault == "stopped":
        victim.process.send_signal(signal.SIGSTOP)
        time.sleep(options.stop_s)
        victim.process.send_signal(signal.SIGCONT)
    else:
        victim.kill()
        port = victim.described["port"]
        shadows[-1] = ShadowProcess(folder, len(shadows) - 1, len(shadows), "--threads", "1", port=port)
        shadows[-1].wait_ready()
    healed_s = time.perf_counter()
    time.sleep(options.after_s)
    end_s = time.perf_counter()
    stop.touch()
    of_ranks = ranks.answers()
    marks = [("well", began_s), (fault, fault_s), ("back", healed_s)]
    phases = phases_of(of_ranks, marks, end_s)
    return {
        "policy": policy,
        "fault": fault,
        "phases": [{**asdict(one), "iterations_per_s": one.rate} for one in phases],
        "until_whole": until_whole(of_ranks[0]["saves"], healed_s),
        "facts": [one["facts"] for one in of_ranks],
        "errors": of_ranks[0]["errors"],
        "ranks": [{key: one[key] for key in ("iterations", "saves")} for one in of_ranks],
        "marks": marks,
        "end_s": end_s,
    }


def table_of(runs: list[dict[str, Any]]) -> TextTable:
    """All runs, a line for each phase."""
    columns = ("policy", "shadow", "s", "it/s", "longest it, s", "waited, s", "durable", "failed", "cut off", "whole")
    table = TextTable("Policies", columns)
    for run in runs:
        for phase in run["phases"]:
            cut, whole = "", ""
            if phase["name"] == "back":
                cut = str(sum(one["cut_off"] for one in run["facts"]))
                whole = "not yet" if run["until_whole"] is None else f"after {run['until_whole']}"
            table.rows.append(
                (
                    run["policy"],
                    phase["name"],
                    f"{phase['seconds']:.1f}",
                    f"{phase['iterations_per_s']:.2f}",
                    f"{phase['longest_s']:.2f}",
                    f"{phase['waited_s']:.2f}",
                    str(phase["durable"]),
                    str(phase["failed"]),
                    cut,
                    whole,
                )
            )
    return table


# -- all of it ---------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace, folder: Path) -> Report:
    """The tap, then every policy with every fault, with the same trainers and shadows."""
    cores = sorted(os.sched_getaffinity(0))
    count = options.ranks or (2 if len(cores) > 2 * CORES_EACH else 1)
    apart = len(cores) > count * CORES_EACH
    own = [cores[CORES_EACH * rank : CORES_EACH * (rank + 1)] for rank in range(count)] if apart else []
    if apart:
        os.sched_setaffinity(0, cores[count * CORES_EACH :])  # what is started here, shadows too, stays there
    [state_bytes], [queue_bytes] = options.size, options.queue
    gradient_bytes = 4 * state_bytes // BYTES_PER_PARAMETER
    settings = {
        "ranks": count,
        "tap": "bucket" if count > 1 else "step",
        "shadows": options.shadows,
        "state_bytes": state_bytes,
        "queue_bytes": queue_bytes,
        "batch": options.batch,
        "iterations": options.iterations,
        "well_s": options.well_s,
        "stop_s": options.stop_s,
        "after_s": options.after_s,
        "cores": own,
    }
    report = Report(settings=settings)
    with contextlib.ExitStack() as stack:
        shadows = stack.enter_context(shadow_processes(folder, options.shadows, "--threads", "1"))
        plan = {
            **settings,
            "directory": str(folder / "job"),
            "meeting": str(folder / "meeting"),
            "places": {
                "shadows": [shadow.address for shadow in shadows],
                "token_file": str(folder / "token"),
            },
            # So many buckets that every shadow has some.
            "knobs": {
                "bucket_bytes": max(1, gradient_bytes // (4 * options.shadows)),
                "queue_bytes": queue_bytes,
            },
        }
        ranks = stack.enter_context(Ranks(folder, plan))
        measure_tap(ranks, shadows, options, count, report)
        runs = [
            measure_policy(ranks, shadows, folder, policy, fault, options)
            for policy in options.policies
            for fault in options.faults
        ]
    report.results["policies"] = runs
    report.tables.append(table_of(runs))
    report.notes.append(
        f"{format_bytes(gradient_bytes)} of gradients and a batch of {options.batch} rows on each rank; "
        f"{options.shadows} shadows; {format_bytes(queue_bytes)} of queue for each"
    )
    report.notes.append(
        f"each rank has {CORES_EACH} cores, shadows have the other {len(cores) - count * CORES_EACH}"
        if apart
        else f"trainers and shadows share {len(cores)} cores: the goal is for a trainer with a free one, and what "
        "shadows compute is lost to the training here"
    )
    report.notes.append("whole: after so many saves once the shadow was back; killed: until its new process was ready")
    return report


def _names(allowed: tuple[str, ...]) -> Any:
    def parse(text: str) -> list[str]:
        found = text.split(",")
        if not set(found) <= set(allowed):
            raise argparse.ArgumentTypeError(f"must be some of {','.join(allowed)}, not {text}")
        return found

    return parse


if __name__ == "__main__":
    parser = command_line(__doc__, rounds=7)
    parser.add_argument("--ranks", type=int, default=0, help="trainers (default: 2, with fewer than 5 cores 1)")
    parser.add_argument("--shadows", type=int, default=2, help="shadows (default: 2)")
    parser.add_argument("--size", type=sizes, help="of model and optimizer (default: 64MiB; with --quick 2MiB)")
    parser.add_argument("--queue", type=sizes, help="queue_bytes (default: 64MiB; with --quick 4MiB)")
    parser.add_argument("--batch", type=int, default=256, help="rows of a rank's batch (default: 256)")
    parser.add_argument("--iterations", type=int, help="in a round of the tap (default: 20; with --quick 5)")
    parser.add_argument("--well-s", type=float, help="seconds before the fault (default: 4; with --quick 0.5)")
    parser.add_argument("--stop-s", type=float, help="seconds for which a shadow is stopped (default: as --well-s)")
    parser.add_argument("--after-s", type=float, help="seconds after it (default: 8; with --quick 1)")
    parser.add_argument("--policies", type=_names(POLICIES), default=POLICIES, help="default: block,queue,drop")
    parser.add_argument("--faults", type=_names(FAULTS), default=FAULTS, help="default: stopped,killed")

    def with_defaults(options: argparse.Namespace, folder: Path) -> Report:
        quick = options.quick
        options.size = options.size or [2 * MIB if quick else 64 * MIB]
        options.queue = options.queue or [4 * MIB if quick else 64 * MIB]
        options.iterations = options.iterations or (5 if quick else 20)
        options.well_s = options.well_s or (0.5 if quick else 4.0)
        options.stop_s = options.stop_s or options.well_s
        options.after_s = options.after_s or (1.0 if quick else 8.0)
        return measure(options, folder)

    main(parser, with_defaults, __file__)
