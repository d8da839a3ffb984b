"""What PCcheck holds in memory beside a training, and whether it grows over many saves.

Each side is a process of its own that trains the same layers: `none`, then PCcheck. Over `none` it may hold its pool,
5 % of it and 64 MB. The slope is fitted to the resident memory after each save, once that save is durable.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import Limit, Report, TextTable, cannot, command_line, interleaved, judge, main, say, sizes

from lastgood.errors import ConfigError, LastgoodError
from lastgood.units import MIB, format_bytes

SPARE_BYTES = 64e6
POOL_FACTOR = 1.05
_BLOCKS = 12
"""Samples are averaged in so many blocks before the fit: neighbours are too much alike to count as separate facts."""
_STUDENT_T = 2.228
"""95 %, two-sided, at _BLOCKS - 2 degrees of freedom."""
_TIMEOUT_S = 1800.0
_SIDES = ("none", "pccheck")


# -- the parent ----------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace, folder: Path) -> Report:
    if options.device == "cuda":
        from lastgood.experiments.machine.facts import cuda_devices

        if not cuda_devices():
            cannot("--device cuda, and this machine shows no CUDA device")
    if options.saves < 2 * _BLOCKS:
        raise ConfigError(f"--saves {options.saves}: a slope needs at least {2 * _BLOCKS}")
    [size] = options.size
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in _SIDES}
    for number, side in interleaved(_SIDES, options.rounds, options.seed):
        say(f"round {number + 1} of {options.rounds}: {side}, {options.saves} saves")
        found[side].append(_in_a_process(options, side, size, folder / f"{side}-{number}"))
    state_bytes, pool_bytes = found["pccheck"][0]["state_bytes"], found["pccheck"][0]["pool_bytes"]
    report = Report(
        settings={"device": options.device, "saves": options.saves, "state_bytes": state_bytes},
        results={"pool_bytes": pool_bytes, "allowed_bytes": POOL_FACTOR * pool_bytes + SPARE_BYTES, **found},
        notes=[
            f"state {format_bytes(state_bytes)}, pool {format_bytes(pool_bytes)}; one save a step, each waited for; "
            "peak of the resident memory from the end of the warm-up on"
            + ("" if found["pccheck"][0]["peak_is_exact"] else " (sampled after each save: the kernel keeps no peak)")
        ],
    )
    _judge_size(options, found, report)
    _judge_growth(options, found, report)
    return report


def _in_a_process(options: argparse.Namespace, side: str, size: int, folder: Path) -> dict[str, Any]:
    arguments = ["--worker", side, "--parent", str(os.getpid()), "--directory", str(folder), "--size", str(size)]
    command = [sys.executable, __file__, *arguments, "--saves", str(options.saves), "--device", options.device]
    command += ["--warmup", str(options.warmup)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise LastgoodError(f"the process of {side} ended with {done.returncode}; its own message is above")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _judge_size(options: argparse.Namespace, found: dict[str, list[dict[str, Any]]], report: Report) -> None:
    def median(side: str, key: str) -> float:
        return float(statistics.median(answer[key] for answer in found[side]))

    over = median("pccheck", "peak_rss_bytes") - median("none", "peak_rss_bytes")
    # Pinned memory may be the driver's and not of the process's pages; then it is not in the resident memory.
    unseen = median("pccheck", "pinned_bytes") if options.device == "cuda" else 0.0
    limit = report.results["allowed_bytes"]
    how = "peak RSS over none; at most pool + 5 % + 64 MB"
    report.limits.append(Limit("host memory", "MB", over / 1e6, limit / 1e6, judge(over, at_most=limit), how))
    keys = ["peak_rss_bytes"]
    if options.device == "cuda":
        keys += ["pinned_bytes", "peak_device_bytes"]
        both = over + unseen
        how = "as above, pinned memory counted on top in case the resident memory leaves it out"
        report.limits.append(Limit("host + pinned", "MB", both / 1e6, limit / 1e6, judge(both, at_most=limit), how))
        device = median("pccheck", "peak_device_bytes") - median("none", "peak_device_bytes")
        report.limits.append(Limit("device memory", "MB", device / 1e6, SPARE_BYTES / 1e6, "not judged", "over none"))
    table = TextTable("Memory, MB: medians over rounds", ("what", *_SIDES, "over none"))
    for key in keys:
        values = [median(side, key) / 1e6 for side in _SIDES]
        table.rows.append((key.removesuffix("_bytes"), *(f"{v:.1f}" for v in values), f"{values[1] - values[0]:.1f}"))
    report.tables.append(table)


def _judge_growth(options: argparse.Namespace, found: dict[str, list[dict[str, Any]]], report: Report) -> None:
    slopes = {side: [fit(answer["rss_bytes"]) for answer in found[side]] for side in _SIDES}
    table = TextTable("Growth of the resident memory, KiB per save: slope +- standard error", ("round", *_SIDES))
    for number in range(options.rounds):
        cells = (f"{slopes[s][number][0] / 1024:.3f} +- {slopes[s][number][1] / 1024:.3f}" for s in _SIDES)
        table.rows.append((str(number + 1), *cells))
    report.tables.append(table)
    report.results["slopes_bytes_per_save"] = slopes
    slope = statistics.mean(s for s, _ in slopes["pccheck"]) - statistics.mean(s for s, _ in slopes["none"])
    variance = sum(error**2 for side in _SIDES for _, error in slopes[side]) / options.rounds**2
    noise = _STUDENT_T * math.sqrt(variance)
    how = f"growth per save over none's; at most {_STUDENT_T} standard errors"
    verdict = judge(slope, at_most=noise)
    report.limits.append(Limit("growth", "KiB/save", slope / 1024, noise / 1024, verdict, how))


def fit(values: Sequence[float]) -> tuple[float, float]:
    """Slope per sample and its standard error, by least squares over the means of equal blocks of samples."""
    length = len(values) // _BLOCKS
    tail = values[len(values) - length * _BLOCKS :]
    means = [statistics.fmean(tail[number * length : (number + 1) * length]) for number in range(_BLOCKS)]
    places = [length * (number - (_BLOCKS - 1) / 2) for number in range(_BLOCKS)]
    total = sum(place**2 for place in places)
    slope = sum(place * mean for place, mean in zip(places, means, strict=True)) / total
    centre = statistics.fmean(means)
    residual = sum((mean - centre - slope * place) ** 2 for place, mean in zip(places, means, strict=True))
    return slope, math.sqrt(residual / (_BLOCKS - 2) / total)


# -- a side --------------------------------------------------------------------------------------------------------


def work(options: argparse.Namespace) -> dict[str, Any]:
    """Train and save in this process; what its memory was."""
    import torch
    from training_state import LinearTraining

    from lastgood.checkpointers.events import Outcome
    from lastgood.checkpointers.registry import checkpointer_class
    from lastgood.state import flatten

    [size] = options.size
    training = LinearTraining(size, options.device)
    training.step()
    kind = checkpointer_class(options.worker)
    checkpointer = kind(options.directory, kind.Options())
    checkpointer.start(training.state)
    cuda = options.device == "cuda"

    def save() -> None:
        training.step()
        checkpointer.save(training.steps)
        checkpointer.drain()

    try:
        # Until the list of events is full: up to its bound it grows, and then no more.
        for _ in range(options.warmup):
            save()
        exact = _forget_peak()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        rss = []
        for _ in range(options.saves):
            save()
            rss.append(_status_bytes("VmRSS"))
        bad = [event for event in checkpointer.events if event.outcome is not Outcome.DURABLE]
        if bad:
            raise LastgoodError(f"a checkpoint is {bad[0].outcome.value}: {bad[0].error}")
        layout = flatten(training.state).layout
        pinned = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) if cuda else 0
        return {
            "state_bytes": layout.payload_bytes,
            "pool_bytes": checkpointer.options.host_bytes(layout.stream_bytes),
            "peak_rss_bytes": _status_bytes("VmHWM") if exact else max(rss),
            "peak_is_exact": exact,
            "pinned_bytes": pinned,
            "peak_device_bytes": torch.cuda.max_memory_allocated() if cuda else 0,
            "rss_bytes": rss,
        }
    finally:
        checkpointer.close()


def _forget_peak() -> bool:
    """Start the kernel's peak of this process's resident memory again; False if it cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise LastgoodError(f"/proc/self/status has no {key}; this benchmark needs Linux with /proc")


def _work_and_answer(options: argparse.Namespace) -> None:
    from lastgood.processes import die_with_parent

    die_with_parent(options.parent)
    try:
        answer = work(options)
    except LastgoodError as error:
        say(f"memory, {options.worker}: {error}")
        raise SystemExit(1) from None
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    parser = command_line(__doc__, rounds=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--size", type=sizes, help="bytes of the state (default: 100MB; --quick: 8MiB)")
    parser.add_argument("--saves", type=int, help="saves of each side (default: 200; --quick: 36)")
    parser.add_argument("--worker", choices=_SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--warmup", type=int, help="saves before them (default: 110; --quick: 10)")
    parsed = parser.parse_known_args()[0]
    parser.set_defaults(size=[8 * MIB] if parsed.quick else [100_000_000])
    parser.set_defaults(saves=36 if parsed.quick else 200, warmup=10 if parsed.quick else 110)
    if parsed.worker is not None:
        _work_and_answer(parser.parse_args())
    else:
        main(parser, measure, __file__)
