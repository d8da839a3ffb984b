"""Published claims against our CSV files: reproduced, refuted, or not testable at this scale. Pure over frames.

The claims are the rows of figures/reference/*.csv of kind `paper` and `artefact`; rules.py holds a rule for each
metric. A verdict needs all repetitions to agree. docs/report.md explains the verdicts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pandas as pd

from lastgood.errors import LastgoodError
from lastgood.experiments.claims.evidence import Evidence
from lastgood.experiments.claims.outcome import Outcome, Published, Verdict, elsewhere, unknown_metric
from lastgood.experiments.claims.rules import RULES
from lastgood.experiments.systems.papers import PCCHECK
from lastgood.experiments.tables.csv_text import rows_csv
from lastgood.experiments.tables.files import FigureCsv, goodput_rows, places_of, run_rows
from lastgood.experiments.tables.published import MOST_VALUE, parse_interval, read_reference
from lastgood.text import parse_csv, parse_number, read_bytes

__all__ = [
    "CLAIM_COLUMNS",
    "VERDICTS",
    "ClaimRow",
    "claims_csv",
    "claims_markdown",
    "judge_claims",
    "load_claims",
    "load_reference",
]

VERDICTS: tuple[Verdict, ...] = ("reproduced", "refuted", "not testable")
_ORDER: dict[str, int] = {verdict: place for place, verdict in enumerate(VERDICTS)}
_TESTED_KINDS = ("paper", "artefact")
_MOST_ROWS = 10_000
_MOST_BYTES = 16 << 20
_REFERENCE_COLUMNS = [field.name for field in fields(Published)]


@dataclass(frozen=True)
class ClaimRow:
    """One claim on one workload of one machine; the fields are the columns of claims.csv, in their order."""

    claim: str
    statement: str
    workload: str
    machine: str
    scale: str
    verdict: str
    measured: float | None
    """Median, in `unit`."""
    measured_low: float | None
    measured_high: float | None
    values: int
    """How many values stand behind it."""
    published: float
    unit: str
    accepted: str
    reason: str
    tolerance: str
    setting: str
    kind: str
    source: str


CLAIM_COLUMNS = tuple(field.name for field in fields(ClaimRow))
_NUMBERS = {"measured", "measured_low", "measured_high", "published"}


def load_reference(folder: Path) -> list[Published]:
    """All published numbers in `folder`, by file name and row.

    Raises LastgoodError, naming file and row, for a row that is none, and if `folder` holds no CSV file.
    """
    paths = sorted(folder.glob("*.csv"))
    if not paths:
        raise LastgoodError(f"{folder}: no published numbers (*.csv) are there; name their folder with --reference")
    return [row for path in paths for row in _rows_of(path)]


def _rows_of(path: Path) -> Iterable[Published]:
    for number, line in read_reference(path, _REFERENCE_COLUMNS):
        try:
            values: dict[str, Any] = {name: line[name] for name in _REFERENCE_COLUMNS}
            values["interval_steps"] = parse_interval(line["interval_steps"]) if line["interval_steps"] else None
            values["value"] = parse_number(line["value"], least=-MOST_VALUE, most=MOST_VALUE)
            yield Published(**values)
        except ValueError as error:
            raise LastgoodError(f"{path}:{number}: not a published number: {error}") from error


def judge_claims(csvs: Sequence[FigureCsv], reference: Sequence[Published]) -> list[ClaimRow]:
    """A row for each claim, workload and machine; the order is that of `reference`. Pure."""
    evidences = _evidences(csvs)
    rows: list[ClaimRow] = []
    for evidence in evidences:
        for published in reference:
            if published.kind in _TESTED_KINDS:
                rows += [_row(published, outcome, evidence) for outcome in _outcomes(published, reference, evidence)]
    return rows


def _outcomes(published: Published, reference: Sequence[Published], evidence: Evidence) -> Iterable[Outcome]:
    far = elsewhere(published)
    if far is not None:
        # The artefact's runs without checkpoints, and PCcheck's, are parts of the other systems' ratios.
        whole = published.metric != "iterations_per_s" or (
            published.interval_steps != 0 and published.system != PCCHECK
        )
        return [far] if whole else []
    if published.metric not in RULES:
        return [unknown_metric(published)]
    rule = RULES[published.metric]
    if rule is None:
        return []
    return rule(published, list(reference), evidence)


def _evidences(csvs: Sequence[FigureCsv]) -> list[Evidence]:
    """One for each machine and scale: numbers of two machines are never put against each other."""
    runs, goodput = run_rows(csvs), goodput_rows(csvs)
    groups = sorted({*places_of(runs), *places_of(goodput)})
    if not groups:
        return [Evidence("", "", runs.iloc[0:0], goodput.iloc[0:0])]
    return [
        Evidence(machine, scale, _of(runs, machine, scale), _of(goodput, machine, scale)) for machine, scale in groups
    ]


def _of(frame: pd.DataFrame, machine: str, scale: str) -> pd.DataFrame:
    return frame[(frame["machine"] == machine) & (frame["scale"] == scale)]


def _row(published: Published, outcome: Outcome, evidence: Evidence) -> ClaimRow:
    sample = outcome.sample
    reason = outcome.reason
    if sample.values and evidence.scale != "paper":
        reason += f"; tested at {evidence.scale} scale, with a smaller model than the paper's"
    if outcome.verdict == "refuted" and evidence.shares_cores:
        reason += "; training takes all cores here, so copies and writes take time from it"
    parts = [published.figure, published.workload, published.system, published.metric]
    if published.interval_steps is not None:
        parts.append(f"f{published.interval_steps}")
    return ClaimRow(
        claim=re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()),
        machine=evidence.machine,
        scale=evidence.scale,
        measured=sample.median if sample.values else None,
        measured_low=sample.low if sample.values else None,
        measured_high=sample.high if sample.values else None,
        values=len(sample.values),
        published=published.value,
        reason=reason,
        **{name: getattr(outcome, name) for name in ("statement", "workload", "verdict", "accepted", "tolerance")},
        **{name: getattr(published, name) for name in ("unit", "setting", "kind", "source")},
    )


# -- files ---------------------------------------------------------------------------------------------------------


def claims_csv(rows: Sequence[ClaimRow]) -> bytes:
    """The claims as CSV, a row for each."""
    return rows_csv(rows, CLAIM_COLUMNS)


def load_claims(path: Path) -> list[ClaimRow]:
    """Read what `claims_csv` wrote. Raises LastgoodError, naming the file and the row, if it is something else."""
    rows: list[ClaimRow] = []
    number = 1
    try:
        content = read_bytes(path, _MOST_BYTES, LastgoodError)
        lines = parse_csv(content, str(path), CLAIM_COLUMNS, most_bytes=_MOST_BYTES, most_rows=_MOST_ROWS)
        for number, line in lines:  # noqa: B007 - for the message below
            if line["verdict"] not in VERDICTS or len(line) > len(CLAIM_COLUMNS):
                raise ValueError("not a row of claims")
            values: dict[str, Any] = dict(line)
            for name in _NUMBERS:
                values[name] = parse_number(line[name], least=-MOST_VALUE, most=MOST_VALUE) if line[name] else None
            if values["published"] is None:
                raise ValueError("no published number")
            rows.append(ClaimRow(**{**values, "values": int(parse_number(line["values"], least=0, most=_MOST_ROWS))}))
    except (LastgoodError, ValueError) as error:
        raise LastgoodError(
            f"{path}: no table of claims: line {number}: {error}; make it with `lastgood claims`"
        ) from error
    return rows


def claims_markdown(rows: Sequence[ClaimRow]) -> str:
    """The claims as a Markdown page, decided verdicts first."""
    counts = Counter(row.verdict for row in rows)
    places = sorted({f"{row.machine}, {row.scale} scale" for row in rows if row.machine})
    lines = [
        "# Published claims against these runs",
        "",
        f"{'; '.join(places) or 'No runs'}. " + ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS) + ".",
        "Only ratios and shapes are compared. docs/report.md explains verdicts and tolerances.",
        "",
        "| verdict | claim | tested on | measured | accepted | why |",
        "|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: _ORDER[row.verdict]):
        measured = "" if row.measured is None else f"{row.measured:.3g}"
        verdict = row.verdict if row.measured is None else f"{row.verdict} ({row.scale} scale)"
        cells = (verdict, row.statement, row.workload, measured, row.accepted, row.reason)
        lines.append("| " + " | ".join(_cell(text) for text in cells) + " |")
    lines += ["", "Sources: " + "; ".join(dict.fromkeys(_cell(row.source) for row in rows)) + "."]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """Text that stays inside one cell of a Markdown table and is no markup."""
    return re.sub(r"\s+", " ", text).replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")
