"""What tables of all kinds of measurement share: which records of a panel there are, and what each row says of its."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from lastgood.errors import LastgoodError
from lastgood.experiments.ceilings.record import CeilingsRecord
from lastgood.experiments.records.base import Record
from lastgood.experiments.tables.columns import same_named
from lastgood.experiments.tables.csv_text import Collected

__all__ = ["PanelRecords", "RecordsThere", "load_panel", "records_there"]

RecordT = TypeVar("RecordT", bound=Record[Any])


class _Row(Protocol):
    @property
    def git_revision(self) -> str | None: ...
    @property
    def git_dirty(self) -> bool | None: ...


RowT = TypeVar("RowT", bound=_Row)

_NAMED_PARTS = 4
"""Parts of a record's path that name it in messages: its workload or part, its system or state, variant, repetition."""


@dataclass(frozen=True)
class RecordsThere:
    """Which of a panel's records there are."""

    paths: list[Path]
    missing: list[str]
    """Short names of the others."""
    expected: int


def records_there(
    panel: str, paths: Sequence[Path], expected: int | None, partial: bool, name_of: Callable[[Path], str]
) -> RecordsThere:
    """Look for the records of a panel. Raises LastgoodError if there is none, or one is missing and not `partial`."""
    there = [path for path in paths if path.exists()]
    missing = [name_of(path) for path in paths if not path.exists()]
    wanted = max(len(paths), expected or 0)
    if not there:
        raise LastgoodError(f"{panel}: none of its {wanted} run records is there")
    if not partial and len(there) < wanted:
        named = f": {', '.join(missing)}" if missing else ""
        raise LastgoodError(
            f"{panel}: {len(there)} of {wanted} run records are there{named}; run what is missing, or use --partial"
        )
    return RecordsThere(there, missing, wanted)


@dataclass(frozen=True)
class PanelRecords(Generic[RecordT]):
    """The records of one panel of a figure, of one kind of measurement."""

    figure: str
    panel: str
    records: Sequence[RecordT]
    expected: int
    """How many there are once all are measured."""
    missing: Sequence[str] = ()
    """Short names of those that are not there."""

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.figure} {self.panel}"

    def refuse_other_machines(self, ceilings: CeilingsRecord) -> None:
        """Raise LastgoodError if a record is of another machine than the ceilings."""
        others = ", ".join(sorted({record.spec.machine for record in self.records} - {ceilings.machine}))
        if others:
            raise LastgoodError(f"{self.name}: records of {others}, and ceilings of {ceilings.machine}")

    def shared_columns(self, record: RecordT, columns: Collection[str]) -> dict[str, Any]:
        """What each row of a record says: those of `columns` that its spec and its machine name, and where it is from.

        A table sets columns of another name or meaning itself, after these.
        """
        return {
            **same_named(record.spec, columns),
            **same_named(record.where, columns),
            "figure": self.figure,
            "panel": self.panel,
            "torch": record.where.versions.get("torch", "unknown"),
            "started_at": record.started_at,
            "record": str(record.spec.record_path()),
            "runs_expected": self.expected,
            "runs_missing": "; ".join(self.missing),
        }

    def collected(
        self, rows: list[RowT], columns: Sequence[str], wide: list[list[str]], marks: Sequence[str] = ()
    ) -> Collected[RowT]:
        """The rows, with a warning for revisions that are mixed and for each of `marks`."""
        mixed = len({(row.git_revision, row.git_dirty) for row in rows}) > 1
        warnings = [f"{self.name}: {mark}" for mark in (*(["mixed revisions"] if mixed else []), *marks)]
        return Collected(rows, columns, wide, warnings, f"{len(self.records)} of {self.expected} runs")


def load_panel(
    kind: type[RecordT], figure: str, panel: str, paths: Sequence[Path], expected: int | None, *, partial: bool
) -> PanelRecords[RecordT]:
    """Load the records of a panel. With `partial`, those that are not there are named; without, they are an error.

    `expected` is the number of runs of the complete figure, if `paths` does not name all of them.
    """
    there = records_there(
        f"{figure} {panel}", paths, expected, partial, lambda path: "/".join(path.parts[-_NAMED_PARTS:])
    )
    return PanelRecords(figure, panel, [kind.load_placed(path) for path in there.paths], there.expected, there.missing)
