"""The report: one HTML file with the figures, the numbers behind them, the claims and the machine. Nothing is fetched.

It is made of the tidy CSV files, the pictures beside them, the ceilings record and the claims. The same inputs give the
same bytes. docs/report.md describes the page.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from lastgood.errors import LastgoodError
from lastgood.experiments.ceilings.record import CeilingsRecord
from lastgood.experiments.claims.judge import VERDICTS, ClaimRow
from lastgood.experiments.report.table import Table, cells_table
from lastgood.experiments.systems.labels import system_label, system_rank, workload_label
from lastgood.experiments.tables.files import FigureCsv, places_of
from lastgood.experiments.tables.marked import all_marks
from lastgood.units import format_bytes, format_rate, format_seconds

__all__ = ["MOST_PAGE_BYTES", "build_report", "picture_of"]

_MOST_SVG_BYTES = 512 << 10
_MOST_PNG_BYTES = 4 << 20
MOST_PAGE_BYTES = 32 << 20
"""More than a browser on a phone opens gladly; 25 panels of today make about 5 MiB."""

_MACHINE_FACTS = (
    ("cpu", "Processor"),
    ("cores", "Cores"),
    ("memory_bytes", "Memory"),
    ("gpu", "GPU"),
    ("kernel", "Kernel"),
    ("scratch_filesystem", "Checkpoint file system"),
    ("scratch_device", "Checkpoint disk"),
    ("device", "Trained on"),
    ("threads", "Training threads"),
    ("scale", "Scale"),
    ("data_name", "Data"),
)


@dataclass(frozen=True)
class _Fact:
    name: str
    value: str
    mixed: bool = False


@dataclass(frozen=True)
class _Panel:
    """One picture with its words."""

    anchor: str
    title: str
    caption: str
    alt: str
    picture: Markup | None
    csv: Markup
    csv_name: str


def build_report(
    csvs: Sequence[FigureCsv],
    figures_dir: Path,
    *,
    ceilings: CeilingsRecord | None = None,
    claims: Sequence[ClaimRow] | None = None,
    title: str = "Checkpointing systems side by side",
) -> bytes:
    """The page. `figures_dir` holds the pictures, named like the CSV files.

    Raises LastgoodError if a picture or the complete page is too large, naming the limit.
    """
    table = cells_table(csvs)
    here = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(here), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.get_template("page.html.jinja").render(
        title=title,
        style=Markup((here / "page.css").read_text(encoding="utf-8")),
        script=Markup((here / "page.js").read_text(encoding="utf-8")),
        machines=_machines(csvs, ceilings),
        summary=_summary(csvs, table, claims),
        panels=[_panel(one, figures_dir) for one in csvs],
        table=table,
        ceilings=ceilings,
        ceiling_rows=list(_rates("", ceilings.model_dump(mode="json", exclude={"where"}))) if ceilings else [],
        tested=[row for row in claims or () if row.verdict != VERDICTS[-1]],
        untested=[row for row in claims or () if row.verdict == VERDICTS[-1]],
        claims_given=claims is not None,
        warnings=_warnings(csvs),
        workload_label=workload_label,
    )
    data = page.encode()
    if len(data) > MOST_PAGE_BYTES:
        raise LastgoodError(
            f"the report would be {format_bytes(len(data))}, and {format_bytes(MOST_PAGE_BYTES)} is the most; "
            "name fewer CSV files"
        )
    return data


def picture_of(one: FigureCsv, figures_dir: Path) -> Path | None:
    """The picture to embed: the SVG, or the PNG if there is no SVG or it is above 512 KiB; None if none is there.

    Raises LastgoodError for a PNG above 4 MiB.
    """
    svg, png = (figures_dir / f"{one.path.stem}{ending}" for ending in (".svg", ".png"))
    if svg.is_file() and svg.stat().st_size <= _MOST_SVG_BYTES:
        return svg
    if not png.is_file():
        return None
    if png.stat().st_size > _MOST_PNG_BYTES:
        raise LastgoodError(f"{png}: above {format_bytes(_MOST_PNG_BYTES)}, too large to embed; draw it again")
    return png


def _panel(one: FigureCsv, figures_dir: Path) -> _Panel:
    picture = picture_of(one, figures_dir)
    frame = one.frame
    systems = [system_label(name) for name in sorted(set(frame["system"].astype(str)), key=system_rank)]
    words = [f"{len(frame)} rows: {', '.join(systems)}"]
    if "interval_steps" in frame.columns:
        intervals = sorted({int(value) for value in frame["interval_steps"].dropna()} - {0})
        if intervals:
            words.append(f"{'interval' if len(intervals) == 1 else 'intervals'} {', '.join(map(str, intervals))}")
    if "repetition" in frame.columns:
        count = frame["repetition"].nunique()
        words.append("one run each" if count == 1 else f"{count} repetitions")
    words.append(", ".join(f"{machine}, {scale} scale" for machine, scale in places_of(frame)))
    caption = "; ".join(word for word in words if word) + "."
    # An SVG inside <img> runs no script and has names of its own, so two of them cannot clash.
    media_type = "image/svg+xml" if picture is not None and picture.suffix == ".svg" else "image/png"
    lacking = _lacking(frame)
    return _Panel(
        anchor=f"{one.figure}-{one.panel}",
        title=one.title,
        caption=f"{caption} {lacking}".strip(),
        alt=f"{one.title}. {caption} The numbers are in the table below and in {one.path.name}.",
        picture=None if picture is None else _data_url(picture.read_bytes(), media_type),
        csv=_data_url(one.path.read_bytes(), "text/csv"),
        csv_name=one.path.name,
    )


def _data_url(data: bytes, media_type: str) -> Markup:
    return Markup(f"data:{media_type};base64,{base64.b64encode(data).decode()}")


def _lacking(frame: pd.DataFrame) -> str:
    if "runs_expected" not in frame.columns:
        return ""
    expected = int(frame["runs_expected"].max())
    return f"Partial: {len(frame)} of {expected} runs." if len(frame) < expected else ""


# -- machine, ceilings, summary ------------------------------------------------------------------------------------


def _machines(csvs: Sequence[FigureCsv], ceilings: CeilingsRecord | None) -> list[tuple[str, list[_Fact]]]:
    """Each machine with its facts. A fact with several values is marked: such runs are hard to compare."""
    names = sorted({str(name) for one in csvs if "machine" in one.frame.columns for name in one.frame["machine"]})
    found = []
    for name in names:
        frames = [one.frame[one.frame["machine"] == name] for one in csvs if "machine" in one.frame.columns]
        facts = []
        for column, words in _MACHINE_FACTS:
            values = _values(frames, column)
            if column == "memory_bytes":
                values = [format_bytes(float(value)) for value in values]
            if values:
                free = column in ("data_name", "scale")
                facts.append(_Fact(words, ", ".join(values), mixed=len(values) > 1 and not free))
        revisions = sorted({text for frame in frames for text in _revisions(frame)})
        if revisions:
            facts.append(_Fact("Revision", ", ".join(revisions), mixed=len(revisions) > 1))
        days = sorted({str(value)[:10] for value in _values(frames, "started_at")})
        if days:
            facts.append(_Fact("Measured", days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"))
        if ceilings is not None and ceilings.machine == name:
            versions = [f"{package} {version}" for package, version in sorted(ceilings.where.versions.items())]
            facts.append(_Fact("Versions", ", ".join(versions)))
        found.append((name, facts))
    return found


def _values(frames: Sequence[pd.DataFrame], column: str) -> list[str]:
    values = {value for frame in frames if column in frame.columns for value in frame[column].dropna()}
    return [str(value) for value in sorted(values, key=str)]


def _revisions(frame: pd.DataFrame) -> list[str]:
    if not {"git_revision", "git_dirty"} <= set(frame.columns):
        return []
    pairs = zip(frame["git_revision"].dropna(), frame.loc[frame["git_revision"].notna(), "git_dirty"], strict=True)
    return [f"{str(revision)[:10]}{' with changes' if str(dirty) == 'True' else ''}" for revision, dirty in pairs]


def _rates(prefix: str, part: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Every rate and time that a part of the ceilings sums up in one number."""
    for name, value in part.items():
        words = f"{prefix} {name}".strip()
        if isinstance(value, dict):
            yield from _rates(words, value)
        elif isinstance(value, float) and value > 0 and name.endswith("bytes_per_s"):
            yield _words(words.removesuffix("bytes_per_s")), format_rate(value)
        elif isinstance(value, float) and name.startswith("median_") and name.endswith("_s"):
            yield _words(words.removesuffix("_s")), format_seconds(value)
        elif isinstance(value, list) and name == "peers":
            for peer in value:
                yield from _rates(f"network to {peer.get('address', '')}", peer)


def _words(text: str) -> str:
    return text.replace("_", " ").strip().capitalize()


def _summary(csvs: Sequence[FigureCsv], table: Table, claims: Sequence[ClaimRow] | None) -> list[tuple[str, str, str]]:
    """Number, what it counts, and a tone."""
    proofs = Counter(cell.text for cell in table.cells_of("proof") if cell.tone)
    wrong, unproved = proofs["DIFFERS"], proofs["not proved"]
    equal, cells = proofs["equal"], proofs.total()
    words = "cells restored equal to the bit" + (f", {wrong} DIFFER" if wrong else "")
    words += f", {unproved} not proved" if unproved else ""
    counts = [
        (str(sum(len(one.frame) for one in csvs)), f"rows of numbers in {len(csvs)} panels", ""),
        (f"{equal} of {cells}", words, "bad" if wrong else "good" if cells and equal == cells else "weak"),
    ]
    doubted = sum(bool(cell.tone) for cell in table.cells_of("of_none"))
    if doubted:
        counts.append((str(doubted), "ratios above training without checkpoints, not credible", "bad"))
    if claims is not None:
        verdicts = Counter(row.verdict for row in claims)
        reproduced, refuted, untested = (verdicts[verdict] for verdict in VERDICTS)
        counts += [
            (str(reproduced), "published claims reproduced", "good" if reproduced else ""),
            (str(refuted), "refuted here", "bad" if refuted else ""),
            (str(untested), "not testable at this scale", "weak"),
        ]
    return counts


def _warnings(csvs: Sequence[FigureCsv]) -> list[str]:
    """Notes of the rows and what their pictures mark, each once, with the panels that it is about."""
    notes: dict[str, list[str]] = {}
    for one in csvs:
        texts = list(one.frame["notes"].dropna()) if "notes" in one.frame.columns else []
        noted = sorted({part.strip() for text in texts for part in str(text).split(";") if part.strip()})
        for note in [*noted, *all_marks(one.frame)]:
            notes.setdefault(note, []).append(one.title)
    return [f"{note} ({', '.join(titles)})" for note, titles in notes.items()]
