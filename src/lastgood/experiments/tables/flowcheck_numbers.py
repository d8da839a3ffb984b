"""What each part of FlowCheck's figure has to show: the numbers of its record, and what it was asked for, in words."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from lastgood.experiments.formulas.mirror_node import node_need
from lastgood.experiments.records.flowcheck import (
    ALONE,
    MIRRORED,
    STAGES,
    WATCHED,
    CaptureResult,
    CaptureSettings,
    FlowcheckRecord,
    LivesResult,
    LivesSettings,
    RecoveryResult,
    RecoverySettings,
    SizingResult,
    SizingSettings,
    StageBlock,
    StagesResult,
    StagesSettings,
    TrainingResult,
    TrainingSettings,
    Window,
)
from lastgood.experiments.systems.labels import system_label
from lastgood.mirror.odds import RingJob, chunk_copies, lost_step_probability
from lastgood.units import GIB, format_bytes, format_seconds

__all__ = ["GAP", "LINK", "NUMBERS", "PUBLISHED_MEASURES", "UNRECOVERABLE", "WORDS", "Number", "watched_name"]

Source = Literal["measured", "simulated", "formula", "model", "published"]
UNRECOVERABLE: Final = "iterations that cannot be recovered (share)"
PUBLISHED_MEASURES: Final = {
    "unrecoverable": UNRECOVERABLE,
    "effective_time": "at the trace's own rate of failures (%)",
}
"""Metrics of figures/reference/flowcheck.csv whose measure has another name."""


@dataclass(frozen=True)
class Number:
    """One number of a panel."""

    measure: str
    """What it is, with its unit: a small picture of the panel."""
    series: str
    """Whose it is, for the legend."""
    source: Source
    place: str
    """Its place on the x axis, as text."""
    x: float | None
    """The same, if it is a number."""
    y: float
    y_low: float | None = None
    y_high: float | None = None
    count: int | None = None
    """Iterations, steps or frames that it stands for."""
    note: str | None = None
    """What makes it not comparable, or wrong."""
    setting: str | None = None
    """Of a published number: where it was."""
    paper_source: str | None = None


# -- training ----------------------------------------------------------------------------------------------------------

ITERATION: Final = "iteration (ms)"
_WAYS: Final = {ALONE: "no checkpoints", MIRRORED: "mirror only", WATCHED: "FlowCheck"}


def _way(variant: str) -> str:
    return _WAYS.get(variant) or system_label(variant)


def _training_numbers(record: FlowcheckRecord) -> Iterator[Number]:
    result = record.result
    assert isinstance(result, TrainingResult)
    for place, variant in enumerate(_ordered(result)):
        for block in result.blocks:
            if block.variant == variant:
                times = sorted(block.iteration_s)
                quarter = len(times) // 4
                yield Number(
                    measure=ITERATION,
                    series=_way(variant),
                    source="measured",
                    place=_way(variant),
                    x=float(place),
                    y=1000 * block.median_s,
                    y_low=1000 * times[quarter],
                    y_high=1000 * times[-1 - quarter],
                    count=len(times),
                )


def _ordered(result: TrainingResult) -> list[str]:
    """Alone, mirrored, watched, and then the others as they are named."""
    found = dict.fromkeys(block.variant for block in result.blocks)
    own = [variant for variant in _WAYS if variant in found]
    return [*own, *sorted(variant for variant in found if variant not in own)]


def _training_words(record: FlowcheckRecord) -> str:
    settings, result = record.spec.settings, record.result
    assert isinstance(settings, TrainingSettings) and isinstance(result, TrainingResult)
    shape = settings.shape
    medians = {
        variant: statistics.median(block.median_s for block in result.blocks if block.variant == variant)
        for variant in _ordered(result)
    }
    alone = medians.get(ALONE)
    ratios = [
        f"{_way(variant)} {value / alone:.3g}" for variant, value in medians.items() if alone and variant != ALONE
    ]
    rate = "unlimited links" if settings.rate is None else f"links of {settings.rate}"
    absent = f" Left out: {'; '.join(result.left_out)}." if result.left_out else ""
    marks = "".join(f" {mark}." for mark in record.marks())
    threads = f"{settings.threads} thread{'' if settings.threads == 1 else 's'}"
    blocks = f"{settings.rounds} block{'' if settings.rounds == 1 else 's'}"
    return (
        f"A GPT of {shape.blocks} blocks, width {shape.width}, data-parallel (Gloo, {threads} a rank) over "
        f"{settings.ranks} nodes of a testbed on this machine ({rate}); the mirror node is one more, and shares these "
        f"cores. {blocks} of {settings.steps} iterations, shuffled: median, whisker the middle half, circles blocks. "
        f"Times training alone: {', '.join(ratios)}.{absent}{marks}"
    )


# -- lives -------------------------------------------------------------------------------------------------------------

EFFECTIVE: Final = "effective training time (%)"
EFFECTIVE_AT_RATE: Final = "at the trace's own rate of failures (%)"


def _lives_numbers(record: FlowcheckRecord) -> Iterator[Number]:
    settings, result = record.spec.settings, record.result
    assert isinstance(settings, LivesSettings) and isinstance(result, LivesResult)
    alone_s = result.alone_s
    for place, window in enumerate(result.windows):
        name = _way(window.variant)
        wrong = f"{name}: {window.differing} LOSSES DIFFER" if window.differing else None
        share = window.useful_steps * alone_s / settings.window_s
        yield Number(EFFECTIVE, name, "measured", name, float(place), 100 * share, count=len(window.lives), note=wrong)
    for place, window in enumerate(result.windows):
        rate = effective_at_rate(settings, result, window)
        if rate is not None:
            name = _way(window.variant)
            yield Number(
                EFFECTIVE_AT_RATE, name, "model", name, float(place), 100 * rate, count=settings.trace_failures
            )


def effective_at_rate(settings: LivesSettings, result: LivesResult, window: Window) -> float | None:
    """The share of useful time had failures come as seldom as in the trace; None without a failure in the window.

    Between failures it trains at the rate that it had in the window, and each failure costs what one cost there: steps
    done again, and the restore.
    """
    lost, restores = window.lost_steps, [life.restore_s for life in window.lives[1:] if life.restore_s is not None]
    if not lost or not restores:
        return None
    done = window.useful_steps + sum(lost)
    trained_s = settings.window_s - sum(restores) - (window.lives[0].restore_s or 0.0)
    if done == 0 or trained_s <= 0:
        return None
    step_s = trained_s / done
    cost_s = statistics.mean(lost) * step_s + statistics.mean(restores)
    return max(0.0, 1 - settings.trace_failures * cost_s / settings.trace_s) * result.alone_s / step_s


def _lives_words(record: FlowcheckRecord) -> str:
    settings, result = record.spec.settings, record.result
    assert isinstance(settings, LivesSettings) and isinstance(result, LivesResult)
    told = []
    for window in result.windows:
        lost = ", ".join(map(str, window.lost_steps)) or "none"
        restores = [life.restore_s for life in window.lives[1:] if life.restore_s is not None]
        took = f", restores of {format_seconds(statistics.median(restores))}" if restores else ""
        told.append(f"{_way(window.variant)}: {lost} iterations lost by kill{took}")
    absent = f" Left out: {'; '.join(result.left_out)}." if result.left_out else ""
    marks = "".join(f" {mark}." for mark in record.marks())
    kills = "once" if len(settings.failures_s) == 1 else f"{len(settings.failures_s)} times"
    return (
        f"The training of (a), a checkpoint of each iteration, all {settings.training.ranks} ranks killed "
        f"{kills} in {settings.window_s:g} s of restoring and training (start-up stands "
        f"outside), at moments of the trace {settings.trace_name}. 100 %: training alone, "
        f"{format_seconds(result.alone_s)} an iteration, never killed. Right: the same costs at the trace's own rate, "
        f"{settings.trace_failures} failures in {format_seconds(settings.trace_s)}. {'; '.join(told)}.{absent}{marks}"
    )


# -- capture -----------------------------------------------------------------------------------------------------------

LOST: Final = "frames lost (share)"


def _capture_numbers(record: FlowcheckRecord) -> Iterator[Number]:
    result = record.result
    assert isinstance(result, CaptureResult)
    for point in result.points:
        yield Number(
            measure=LOST,
            series=f"{point.device}, {point.frame_bytes} B",
            source="measured",
            place=f"{point.asked_bits_per_s / 1e9:g} Gbit/s",
            x=point.offered_bits_per_s / 1e9,
            y=point.lost_share,
            count=point.sent_frames,
        )


def _capture_words(record: FlowcheckRecord) -> str:
    settings, result = record.spec.settings, record.result
    assert isinstance(settings, CaptureSettings) and isinstance(result, CaptureResult)
    missing = sum(point.sent_frames - point.captured_frames for point in result.points)
    ring = sum(point.kernel_dropped for point in result.points)
    absent = f" Left out: {'; '.join(result.left_out)}." if result.left_out else ""
    return (
        f"Raw frames over a veth pair for {settings.seconds:g} s at each point, sender and capture on cores of one "
        f"machine; x is what was sent. Captured: taken from a kernel ring of {format_bytes(settings.ring_bytes)} and "
        f"copied once. {ring} of {missing} missing frames were dropped at that ring, the others before it.{absent}"
    )


# -- recovery ----------------------------------------------------------------------------------------------------------

RECOVERABLE: Final = "iterations that can be recovered (share)"
_LINE_POINTS: Final = 60
_PUBLISHED_LOSS: Final = 1e-9
"""Where lines begin, so that the published estimate lies beside them."""


def _recovery_numbers(record: FlowcheckRecord) -> Iterator[Number]:
    settings, result = record.spec.settings, record.result
    assert isinstance(settings, RecoverySettings) and isinstance(result, RecoveryResult)
    for watched in settings.watched:
        yield from _formula(settings, watched)
    for point in result.points:
        source: Source = "simulated" if point.source == "simulation" else "measured"
        low, high = _wilson(point.recovered, point.iterations)
        name = watched_name(settings.ranks, point.watched)
        place, wrong = f"{point.loss_rate:g}", f"{point.differing} DIFFER" if point.differing else None
        yield Number(
            RECOVERABLE, name, source, place, point.loss_rate, point.share, low, high, point.iterations, note=wrong
        )
        if point.recovered < point.iterations:
            lost = 1 - point.share
            yield Number(UNRECOVERABLE, name, source, place, point.loss_rate, lost, 1 - high, 1 - low, point.iterations)


def _formula(settings: RecoverySettings, watched: tuple[int, ...]) -> Iterator[Number]:
    job = RingJob(settings.ranks, settings.gradient_bytes, settings.payload_bytes)
    least, most = _PUBLISHED_LOSS, max(settings.loss_rates)
    name = watched_name(settings.ranks, watched)
    for number in range(_LINE_POINTS):
        rate = least * (most / least) ** (number / (_LINE_POINTS - 1))
        lost = lost_step_probability(job, watched, rate)
        if rate >= min(settings.loss_rates) * 0.999:
            yield Number(RECOVERABLE, name, "formula", f"{rate:.3g}", rate, 1 - lost)
        if lost > 0:
            yield Number(UNRECOVERABLE, name, "formula", f"{rate:.3g}", rate, lost)


def watched_name(ranks: int, watched: Sequence[int]) -> str:
    """``2 watched, neighbours``: how many, and whether links of any two of them are shared."""
    if len(watched) == 1:
        return "1 watched"
    shared = sum((rank + 1) % ranks in watched for rank in watched)
    how = "apart" if not shared else "neighbours" if shared >= len(watched) - 1 else "partly neighbours"
    return f"{len(watched)} watched, {how}"


def _wilson(count: int, total: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson)."""
    z, share = 1.96, count / total
    middle = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return max(0.0, middle - half), min(1.0, middle + half)


def _recovery_words(record: FlowcheckRecord) -> str:
    settings, result = record.spec.settings, record.result
    assert isinstance(settings, RecoverySettings) and isinstance(result, RecoveryResult)
    copies = "; ".join(
        f"{watched_name(settings.ranks, watched)}: {_copies(settings.ranks, watched)}" for watched in settings.watched
    )
    counts = [f"{settings.simulated} iterations simulated"] if settings.simulated else []
    measured = [point for point in result.points if point.source == "measurement"]
    if measured:
        wrong = sum(point.differing for point in measured)
        verdict = "all gradients called complete equal the true ones" if not wrong else f"{wrong} GRADIENTS DIFFER"
        most = max(point.iterations for point in measured)
        counts.append(f"up to {most} measured ({verdict})")
    absent = f" Left out: {'; '.join(result.left_out)}." if result.left_out else ""
    return (
        f"{settings.ranks} ranks, {format_bytes(settings.gradient_bytes)} reduced in an iteration, packets of "
        f"{settings.payload_bytes} B, both directions of each watched link, losses independent; "
        f"{', '.join(counts)} at each point (whisker: 95 % interval). Copies of the chunks: {copies}.{absent}"
    )


def _copies(ranks: int, watched: Sequence[int]) -> str:
    found = Counter(chunk_copies(ranks, watched))
    return ", ".join(f"{found[count]} x {count}" for count in sorted(found))


# -- stages ------------------------------------------------------------------------------------------------------------

GAP: Final = "from step to step"
"""Series of the time that a node has for a step."""
_STEP: Final = "time of a step (ms)"
_SHARE: Final = "share of the gap between steps (%)"


def _stages_numbers(record: FlowcheckRecord) -> Iterator[Number]:
    result = record.result
    assert isinstance(result, StagesResult)
    widths = sorted({block.width for block in result.blocks})
    shares = []
    for block in result.blocks:
        x = float(widths.index(block.width))
        name = f"{block.parameters / 1e6:.3g} M, width {block.width}"
        count = block.last.steps - block.first.steps
        for stage, seconds in block.step_s.items():
            yield Number(_STEP, stage, "measured", name, x, 1000 * seconds, count=count)
            shares.append(Number(_SHARE, stage, "measured", name, x, 100 * seconds / block.gap_s, count=count))
        yield Number(_STEP, GAP, "measured", name, x, 1000 * block.gap_s, count=len(block.iteration_s))
    yield from shares


def _stages_words(record: FlowcheckRecord) -> str:
    settings, result = record.spec.settings, record.result
    assert isinstance(settings, StagesSettings) and isinstance(result, StagesResult)
    training = settings.training
    told = []
    for width in settings.widths:
        blocks = [block for block in result.blocks if block.width == width]
        if blocks:
            told.append(f"width {width} {statistics.median(map(_busy_share, blocks)):.2g}")
    absent = f" Left out: {'; '.join(result.left_out)}." if result.left_out else ""
    marks = "".join(f" {mark}." for mark in record.marks())
    return (
        f"The training of (a) by the width of its GPT, watched: {training.ranks} ranks and the mirror node share the "
        f"cores of this machine. Seconds of each stage by the node's own clocks (wall clock, so waits for a core "
        f"count), over the steps between two looks at them; line: median from one step of rank 0 to the next, "
        f"of {training.steps}. parse: from frames to messages; extract: bytes to their places; take over: gradients "
        f"into the shadow's slots, and the norm that they are clipped by; update: the optimizer, in a thread of its "
        f"own. All stages together, of the gap: {', '.join(told)}.{absent}{marks}"
    )


def _busy_share(block: StageBlock) -> float:
    return sum(block.step_s[name] for name in STAGES) / block.gap_s


# -- sizing ------------------------------------------------------------------------------------------------------------

LINK: Final = "link (Gbit/s)"
_MEMORY: Final = "memory (GiB)"
_CORES: Final = "cores"


def _sizing_numbers(record: FlowcheckRecord) -> Iterator[Number]:
    settings, result = record.spec.settings, record.result
    assert isinstance(settings, SizingSettings) and isinstance(result, SizingResult)
    for place, model in enumerate(settings.models):
        need = node_need(model, settings.node, result.node_rates, settings.optimizer)
        values: Mapping[tuple[str, str], float | None] = {
            (LINK, "mean rate"): need.mean_bits_per_s / 1e9,
            (LINK, "peak rate"): need.peak_bits_per_s / 1e9,
            (_MEMORY, "versions and gradient"): need.state_bytes / GIB,
            (_MEMORY, "frames that wait"): need.ring_bytes / GIB,
            (_CORES, "capture"): need.capture_cores,
            (_CORES, "parse and extract"): need.parse_cores,
            (_CORES, "update"): need.update_cores,
        }
        for (measure, series), value in values.items():
            if value is not None:
                name = f"{model.name}, {model.gpus}"
                yield Number(measure, series, "model", name, float(place), value, count=need.nodes)


def _sizing_words(record: FlowcheckRecord) -> str:
    settings, result = record.spec.settings, record.result
    assert isinstance(settings, SizingSettings) and isinstance(result, SizingResult)
    node = settings.node
    rates = {rate.name: rate for rate in result.rates}
    units = {"capture": "Gbit/s", "parse": "Gbit/s", "update": "million parameters/s"}
    factors = {"capture": 8e-9, "parse": 8e-9, "update": 1e-6}
    told = [
        f"{name} {rates[name].per_core_s * factors[name]:.3g} {units[name]} ({rates[name].how})"
        for name in units
        if name in rates
    ]
    absent = [name for name in units if name not in rates]
    lacking = f" Not measured here, and so not in the cores: {', '.join(absent)}." if absent else ""
    count = len(settings.models)
    iterations = ", ".join(f"{model.name} {model.iteration_s:.3g} s" for model in settings.models)
    return (
        f"A node watches {node.watched} GPUs of different rings, both directions of links of "
        f"{node.gpu_link_bits_per_s / 1e9:g} Gbit/s; {node.gradient_bytes} B of gradient a parameter, "
        f"{settings.optimizer}, two versions kept. Iterations by FLOPs over the published rate: {iterations} "
        f"({'; '.join(dict.fromkeys(model.source for model in settings.models))}). "
        f"One core of this machine: {'; '.join(told)}.{lacking} The {count} trainings were not run: a model, whose "
        "formulas stand in the documentation."
    )


NUMBERS: Final[dict[str, Callable[[FlowcheckRecord], Iterable[Number]]]] = {
    "training": _training_numbers,
    "lives": _lives_numbers,
    "capture": _capture_numbers,
    "recovery": _recovery_numbers,
    "stages": _stages_numbers,
    "sizing": _sizing_numbers,
}
WORDS: Final[dict[str, Callable[[FlowcheckRecord], str]]] = {
    "training": _training_words,
    "lives": _lives_words,
    "capture": _capture_words,
    "recovery": _recovery_words,
    "stages": _stages_words,
    "sizing": _sizing_words,
}
