"""The CSV files of the figure of remote checkpoints: a row for each block, return or checkpoint of a run."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from lastgood.errors import LastgoodError
from lastgood.experiments.ceilings.record import CeilingsRecord, load_ceilings
from lastgood.experiments.dcp.storages import STORAGES
from lastgood.experiments.records.remote import WAYS, ComingBack, RemoteRecord, TrainingBlock, Way
from lastgood.experiments.tables.columns import same_named
from lastgood.experiments.tables.csv_text import Collected, median_lines
from lastgood.experiments.tables.panels import PanelRecords, load_panel

__all__ = ["REMOTE_COLUMNS", "RemoteRow", "collect_remote", "collect_remote_files"]

_KNOWN_FROM: Final = 3
"""The first checkpoint of which it is known what did not change."""
_LABELS: Final[dict[Way, str]] = {
    "alone": "no checkpoints",
    "tier-off": "PCcheck",
    "tier": "PCcheck + S3",
    "disk": "disk",
    "lost-node": "S3 for one\nlost node",
    "s3": "S3",
    "all": "all trained",
    "frozen": "90 % frozen",
    "lora": "LoRA",
}


@dataclass(frozen=True)
class RemoteRow:
    """One block, return or checkpoint; the fields are the columns of the tidy CSV, in their order.

    None is an empty field: each part fills the columns that are its own.
    """

    figure: str
    panel: str
    machine: str
    scale: str
    part: str
    way: str
    label: str
    """In the picture."""
    repetition: int
    width: int
    layers: int
    state_bytes: int
    """Of one rank's state; of bytes, of that state."""
    steps: int | None
    interval_steps: int | None
    remote_every: int | None
    steps_per_s: float | None
    durable_steps_per_s: float | None
    """Until the last checkpoint is where it goes."""
    ratio: float | None
    """To the median of training without checkpoints in the same run."""
    lag_steps: float | None
    """Median over the steps of a block; the next one is the longest."""
    lag_steps_max: float | None
    lag_s: float | None
    lag_s_max: float | None
    sent: int | None
    failed: int | None
    ranks: int | None
    back_s: float | None
    """From attach to the end of the first step, of the slowest rank; the next two are its parts."""
    attach_s: float | None
    step_s: float | None
    bound_s: float | None
    """A step, and the state as fast as plain reads of the disk, or plain gets, give it."""
    equal: bool | None
    """Whether what came back is what was saved."""
    checkpoint: int | None
    """Its number, from 1."""
    sent_bytes: int | None
    changed_bytes: int | None
    server: str
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


REMOTE_COLUMNS = tuple(field.name for field in fields(RemoteRow))


def collect_remote_files(
    figure: str,
    panel: str,
    paths: Sequence[Path],
    ceilings: Path,
    *,
    partial: bool = False,
    expected: int | None = None,
    reference: Path | None = None,  # noqa: ARG001 - as for other kinds
) -> Collected[RemoteRow]:
    """Load records (`load_panel`) and collect them; no published numbers stand beside these."""
    of = load_panel(RemoteRecord, figure, panel, paths, expected, partial=partial)
    return collect_remote(of, load_ceilings(ceilings))


def collect_remote(of: PanelRecords[RemoteRecord], ceilings: CeilingsRecord) -> Collected[RemoteRow]:
    """Pure. Raises LastgoodError for records of more than one cell, or of another machine than the ceilings'."""
    if len({record.spec.cell_hash for record in of.records}) > 1:
        raise LastgoodError(f"{of.name}: records of several settings; a panel shows one")
    of.refuse_other_machines(ceilings)
    rows = []
    for record in sorted(of.records, key=lambda record: record.spec.repetition):
        common = {
            **dict.fromkeys(REMOTE_COLUMNS),
            **of.shared_columns(record, REMOTE_COLUMNS),
            "server": record.server,
            "state_bytes": record.state_bytes,
            # Each part says itself what is its own.
            **dict.fromkeys(("steps", "interval_steps", "remote_every", "ranks")),
        }
        own = sorted(_own(record, ceilings), key=lambda row: WAYS[record.spec.part].index(row["way"]))
        rows += [RemoteRow(**{**common, "label": _label(record, row["way"]), **row}) for row in own]
    marks = [f"{record.spec.title()}: {mark}" for record in of.records for mark in record.marks()]
    return of.collected(rows, REMOTE_COLUMNS, _wide(rows), marks)


def _label(record: RemoteRecord, way: Way) -> str:
    spec = record.spec
    if way == "async-save":
        storage = next(storage.label for storage in STORAGES if storage.name == spec.dcp_storage)
        return f"DCP async to S3\n({storage})"
    if way == "other-ranks":
        return f"S3 on {spec.other_ranks}\n(saved by {spec.ranks})"
    return _LABELS[way]


def _own(record: RemoteRecord, ceilings: CeilingsRecord) -> Iterator[dict[str, Any]]:
    spec = record.spec
    without = [one.steps_per_s for one in record.training if one.way == "alone"]
    for block in record.training:
        yield {
            "steps": spec.steps,
            "interval_steps": spec.interval_steps,
            "remote_every": spec.remote_every,
            "ratio": block.steps_per_s / statistics.median(without) if without else None,
            **same_named(block, ("way", "steps_per_s", "durable_steps_per_s", "sent", "failed")),
            **_lags(block),
        }
    for one in record.returns:
        yield {
            **same_named(one, ("way", "ranks", "attach_s", "step_s", "equal")),
            "back_s": one.attach_s + one.step_s,
            "bound_s": _bound_s(record, one, ceilings),
        }
    for sent in record.checkpoints:
        yield {
            **same_named(sent, ("way", "state_bytes", "changed_bytes", "sent_bytes")),
            "checkpoint": sent.number,
        }


def _lags(block: TrainingBlock) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for name, values in (("lag_steps", block.lag_steps), ("lag_s", block.lag_s)):
        found[name] = statistics.median(values) if values else None
        found[f"{name}_max"] = max(values) if values else None
    return found


def _bound_s(record: RemoteRecord, one: ComingBack, ceilings: CeilingsRecord) -> float | None:
    """At most what was seen: a disk, or a bucket, that was faster than its plain reads can do that."""
    if one.way == "disk":
        rate: float | None = ceilings.disk.read_bytes_per_s
    else:
        rate = statistics.median(record.raw_read_bytes_per_s) if record.raw_read_bytes_per_s else None
    if rate is None:
        return None
    # Ranks hold the same: each writes its share, and of a lost node only that share is missing.
    share = 1 / record.spec.ranks if one.way == "lost-node" else 1.0
    fastest = min(other.attach_s + other.step_s for other in record.returns if other.way == one.way)
    return min(fastest, share * record.state_bytes / rate + one.step_s)


def _wide(rows: Sequence[RemoteRow]) -> list[list[str]]:
    """Medians: a row for each way, columns for what its part is about."""
    columns: dict[str, tuple[str, ...]] = {
        "training": ("steps_per_s", "durable_steps_per_s", "ratio", "lag_steps", "lag_s"),
        "return": ("back_s", "attach_s", "step_s", "bound_s"),
        "bytes": ("state_bytes", "changed_bytes", "sent_bytes"),
    }
    names = columns[rows[0].part] if rows else ()
    values: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        if row.checkpoint is not None and row.checkpoint < _KNOWN_FROM:
            continue
        for name in names:
            value = getattr(row, name)
            if value is not None:
                values[row.way, name].append(float(value))
    ways = {row.way: row.label.replace("\n", " ") for row in rows}
    return [["way", *names], *median_lines(ways, names, values)]
