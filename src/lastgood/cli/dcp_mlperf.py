"""`lastgood dcp mlperf`: records of the suite beside the rules of MLPerf Storage."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lastgood.cli._output import console, emit_table

__all__ = ["mlperf"]


def mlperf(
    records: Annotated[
        list[Path],
        typer.Argument(
            metavar="SAVE [LOAD]",
            help="Record of a save and of the load after it, as --record wrote them; or of a save-and-load.",
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="Write the summary, one JSON file, there.")] = None,
) -> None:
    """Sum up runs as MLPerf Storage's checkpoint results do, and say which of its rules they keep and break.

    A result of that name comes only from MLCommons' own tool. Its rules want ten saves and then ten loads, none before
    them that does not count: --iterations 10 --warmup 0 --state full.
    """
    from lastgood.errors import ConfigError
    from lastgood.experiments.dcp_runs.mlperf import summarize
    from lastgood.experiments.records.dcp import DcpRecord
    from lastgood.files import write_result

    if len(records) > 2:
        raise ConfigError(f"{len(records)} records: name that of a save and that of a load")
    save, *rest = (DcpRecord.load(path) for path in records)
    summary = summarize(save, *rest)
    emit_table(
        f"{summary.model} on {summary.num_accelerators} processes, storage {summary.storage}",
        ("metric", "value"),
        ((name, f"{value:.4g}") for name, value in summary.metric.items()),
    )
    emit_table(
        "Rules of MLPerf Storage",
        ("", "rule", "found"),
        (("kept" if rule.met else "BROKEN", rule.name, rule.found) for rule in summary.rules),
    )
    broken = len(summary.broken)
    console.print(f"{len(summary.rules) - broken} of {len(summary.rules)} rules kept; {summary.note}")
    if out is not None:
        write_result(out, summary.model_dump_json(indent=1).encode())
