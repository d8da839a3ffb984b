"""The CSV files of StellaTrain's figure: a row for each block of a training over links, or timing of a kernel."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal

from lastgood.cluster.testbed.state import rate_text
from lastgood.errors import LastgoodError
from lastgood.experiments.records.stellatrain import (
    ALONE,
    KERNELS,
    READ,
    WAYS,
    Kernel,
    LinkBlock,
    StellatrainRecord,
    Way,
)
from lastgood.experiments.tables.csv_text import Collected, median_lines
from lastgood.experiments.tables.panels import PanelRecords, load_panel

__all__ = ["STELLATRAIN_COLUMNS", "StellatrainRow", "collect_stellatrain", "collect_stellatrain_files", "link_bound"]

_BITS: Final = 8
_WAY_LABELS: Final[dict[Way, str]] = {
    "alone": "compute alone",
    "ddp": "DDP",
    "fp16": "DDP, fp16 hook",
    "powersgd-1": "PowerSGD, rank 1",
    "powersgd-4": "PowerSGD, rank 4",
    "topk-0": "Lastgood top-k",
    "v16-0": "Lastgood v16",
    "topk-1": "Lastgood top-k, staleness 1",
    "v16-1": "Lastgood v16, staleness 1",
}
_KERNEL_LABELS: Final[dict[Kernel, str]] = {
    "read": "one read",
    "sgd-dense": "SGD\ndense",
    "sgd-single": "SGD\nsingle",
    "sgd-blocks": "SGD\nblocks",
    "adam-dense": "Adam\ndense",
    "adam-single": "Adam\nsingle",
    "adam-blocks": "Adam\nblocks",
    "torch-topk": "torch\n.topk",
    "topk": "top-k",
    "threshold": "threshold",
    "v16": "v16",
    "randomk": "random",
}


@dataclass(frozen=True)
class StellatrainRow:
    """One block, or one timing; the fields are the columns of the tidy CSV, in their order.

    None is an empty field: each part fills the columns that are its own.
    """

    figure: str
    panel: str
    machine: str
    scale: str
    part: str
    way: str
    """Or the kernel."""
    label: str
    """In the picture."""
    repetition: int
    round: int
    rate_bits_per_s: int | None
    model: str | None
    parameters: int | None
    batch: int | None
    threads: int
    compression: float
    steps: int | None
    steps_per_s: float | None
    sent_bytes_per_step: float | None
    """Of the node that sent more."""
    compute_s: float | None
    """An iteration of both nodes that compute at the same time and send nothing, in the same round."""
    bound_steps_per_s: float | None
    """The lower of what compute and link allow for as many bytes."""
    binds: str | None
    of_bound: float | None
    elements: int | None
    seconds: float | None
    of_read: float | None
    """To one read of as many floats in the same round."""
    energy_kept: float | None
    elements_kept: int | None
    cpu: str
    cores: int
    memory_bytes: int
    kernel: str
    torch: str
    git_revision: str | None
    git_dirty: bool | None
    started_at: str
    record: str
    runs_expected: int
    runs_missing: str


STELLATRAIN_COLUMNS = tuple(field.name for field in fields(StellatrainRow))


def link_bound(
    compute_s: float, sent_bytes_per_step: float, rate_bits_per_s: float
) -> tuple[float, Literal["compute", "link"]]:
    """Iterations per second that compute and link allow, and which of them sets it. Pure."""
    link_s = _BITS * sent_bytes_per_step / rate_bits_per_s
    return (1 / link_s, "link") if link_s > compute_s else (1 / compute_s, "compute")


def collect_stellatrain_files(
    figure: str,
    panel: str,
    paths: Sequence[Path],
    ceilings: Path,  # noqa: ARG001 - bounds are of rates that each run measured or set itself
    *,
    partial: bool = False,
    expected: int | None = None,
    reference: Path | None = None,  # noqa: ARG001 - as for other kinds
) -> Collected[StellatrainRow]:
    """Load records (`load_panel`) and collect them; no published numbers stand beside these."""
    return collect_stellatrain(load_panel(StellatrainRecord, figure, panel, paths, expected, partial=partial))


def collect_stellatrain(of: PanelRecords[StellatrainRecord]) -> Collected[StellatrainRow]:
    """Pure. Raises LastgoodError for records of more than one cell."""
    if len({record.spec.cell_hash for record in of.records}) > 1:
        raise LastgoodError(f"{of.name}: records of several settings; a panel shows one")
    rows = []
    for record in sorted(of.records, key=lambda record: record.spec.repetition):
        common = {**dict.fromkeys(STELLATRAIN_COLUMNS), **of.shared_columns(record, STELLATRAIN_COLUMNS)}
        common |= {"part": record.spec.part, "parameters": record.parameters}
        own = _of_links(record) if record.blocks else _of_kernels(record)
        rows += [StellatrainRow(**{**common, **row}) for row in own]
    wide = _wide_links(rows) if rows[0].part == "links" else _wide_kernels(rows)
    return of.collected(rows, STELLATRAIN_COLUMNS, wide, _above(rows))


def _of_links(record: StellatrainRecord) -> Iterator[dict[str, Any]]:
    settings = record.spec.links
    assert settings is not None
    alone = {(block.rate_bits_per_s, block.round): block for block in record.blocks if block.way == ALONE}
    places = {rate: place for place, rate in enumerate(settings.rates_bits_per_s)}
    ordered = sorted(
        record.blocks, key=lambda block: (places[block.rate_bits_per_s], WAYS.index(block.way), block.round)
    )
    for block in ordered:
        yield {
            "way": block.way,
            "label": _way_label(block.way, settings.average_every),
            "round": block.round,
            "rate_bits_per_s": block.rate_bits_per_s,
            "model": settings.model,
            "batch": settings.batch,
            "threads": settings.threads,
            "compression": settings.compression,
            "steps": block.steps,
            "steps_per_s": block.steps_per_s,
            "sent_bytes_per_step": block.sent_bytes_per_step,
            **_bound(block, alone.get((block.rate_bits_per_s, block.round))),
        }


def _way_label(way: Way, average_every: int) -> str:
    return f"local SGD, mean of {average_every}" if way == "post-local" else _WAY_LABELS[way]


def _bound(block: LinkBlock, alone: LinkBlock | None) -> dict[str, Any]:
    if alone is None:
        return {}
    compute_s = 1 / alone.steps_per_s
    bound, binds = link_bound(compute_s, block.sent_bytes_per_step, block.rate_bits_per_s)
    share = block.steps_per_s / bound
    return {"compute_s": compute_s, "bound_steps_per_s": bound, "binds": binds, "of_bound": share}


def _of_kernels(record: StellatrainRecord) -> Iterator[dict[str, Any]]:
    settings = record.spec.kernels
    assert settings is not None
    read = next((one.seconds for one in record.times if one.kernel == READ), None)
    for one in sorted(record.times, key=lambda one: KERNELS.index(one.kernel)):
        for number, seconds in enumerate(one.seconds):
            yield {
                "way": one.kernel,
                "label": _KERNEL_LABELS[one.kernel],
                "round": number,
                "threads": settings.threads,
                "compression": settings.compression,
                "elements": settings.elements,
                "seconds": seconds,
                "of_read": None if read is None else seconds / read[number],
                "energy_kept": one.energy_kept,
                "elements_kept": one.elements_kept,
            }


def _above(rows: Sequence[StellatrainRow]) -> list[str]:
    """Ways whose median is above the median of their bound: a result that somebody must look at."""
    found: dict[tuple[int, str], list[float]] = defaultdict(list)
    for row in rows:
        if row.rate_bits_per_s is not None and row.of_bound is not None and row.way != ALONE:
            found[row.rate_bits_per_s, row.label].append(row.of_bound)
    return [
        f"{label} at {rate_text(rate)}: {statistics.median(shares):.2f} of its bound; compute alone was disturbed"
        for (rate, label), shares in found.items()
        if statistics.median(shares) > 1
    ]


def _wide_links(rows: Sequence[StellatrainRow]) -> list[list[str]]:
    """Medians: a row for each way, for each rate iterations/s, their share of the bound, and bytes sent."""
    columns = {"steps_per_s": "iterations/s", "of_bound": "of bound", "sent_bytes_per_step": "bytes"}
    values: dict[tuple[str, tuple[int, str]], list[float]] = defaultdict(list)
    rates = list(dict.fromkeys(row.rate_bits_per_s for row in rows if row.rate_bits_per_s is not None))
    for row in rows:
        for name in columns:
            value = getattr(row, name)
            if value is not None and row.rate_bits_per_s is not None:
                values[row.label, (row.rate_bits_per_s, name)].append(value)
    places = [(rate, name) for rate in rates for name in columns]
    header = ["way", *(f"{rate_text(rate)} {columns[name]}" for rate, name in places)]
    return [header, *median_lines({row.label: row.label for row in rows}, places, values)]


def _wide_kernels(rows: Sequence[StellatrainRow]) -> list[list[str]]:
    """Medians: a row for each kernel."""
    names = ("seconds", "of_read", "energy_kept", "elements_kept")
    values: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        for name in names:
            value = getattr(row, name)
            if value is not None:
                values[row.way, name].append(float(value))
    labels = {row.way: row.label.replace("\n", " ") for row in rows}
    return [["kernel", *names], *median_lines(labels, names, values)]
