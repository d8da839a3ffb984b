"""`lastgood advise`: which system, at which interval, for a training that fails now and then."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lastgood.cli._app import App
from lastgood.cli._output import console, emit_json, emit_table
from lastgood.errors import ConfigError
from lastgood.units import format_rate, format_seconds

if TYPE_CHECKING:
    from lastgood.experiments.advise.cells import Measured
    from lastgood.experiments.advise.model import Advice, Costs, Question, Rates

__all__ = ["app"]

app = App(invoke_without_command=True)

_GB = 1e9
_HOUR_S = 3600.0

Device = Literal["cpu", "cuda"]
_Records = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder with run records or tidy CSV files.", show_default=False)
]
_Ceilings = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Record of the ceilings (default: this machine's, in results/).", show_default=False
    ),
]
_Machine = Annotated[str | None, typer.Option(help="Which machine's runs, if the records have several.")]
_Device = Annotated[
    Device | None,
    typer.Option(metavar="cpu|cuda", help="Where the training runs (default: as the records or ceilings)."),
]
_Json = Annotated[bool, typer.Option("--json", help="Print everything to stdout as JSON.")]


@app.callback()
def advise(
    context: typer.Context,
    state_gb: Annotated[
        float | None, typer.Option(help="Size of one node's checkpoint in GB (10**9 bytes).", show_default=False)
    ] = None,
    iter_ms: Annotated[
        float | None, typer.Option(help="One iteration without checkpoints, in milliseconds.", show_default=False)
    ] = None,
    mtbf_h: Annotated[
        float | None, typer.Option(help="Mean time between failures of one node, in hours.", show_default=False)
    ] = None,
    nodes: Annotated[int, typer.Option(help="Nodes; a failure of any of them stops the job.")] = 1,
    records: _Records = None,
    ceilings: _Ceilings = None,
    intervals: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="Compare exactly these intervals (default: each system's best)."),
    ] = None,
    hide_ms: Annotated[
        float | None,
        typer.Option(help="From a save to the next update, in ms (default: 0 on a CPU, else 0.85 of the iteration)."),
    ] = None,
    restart_s: Annotated[float, typer.Option(help="From a failure to the begin of loading, in seconds.")] = 60.0,
    job_h: Annotated[
        float, typer.Option(help="Length of the job in hours; only Gemini's worst case needs it.")
    ] = 168.0,
    in_flight: Annotated[int, typer.Option(help="PCcheck's checkpoints in flight.")] = 2,
    network_gbit: Annotated[
        float | None, typer.Option(help="Network to a peer in Gbit/s, if it was not measured.", show_default=False)
    ] = None,
    machine: _Machine = None,
    device: _Device = None,
    as_json: _Json = False,
) -> None:
    """Say which system and interval give the best goodput for a state, an iteration time and a failure rate.

    From the records of runs if they are given, from this machine's ceilings alone otherwise; the answer says which.
    `lastgood advise score --records DIR` says how good such advice was on workloads that it had not seen.
    """
    if context.invoked_subcommand is not None:
        return
    from lastgood.experiments.advise.model import Question
    from lastgood.experiments.advise.model import advise as answer

    if state_gb is None or iter_ms is None or mtbf_h is None:
        raise ConfigError("--state-gb, --iter-ms and --mtbf-h are needed (or `lastgood advise score --records DIR`)")
    measured, rates, place = _evidence(records, ceilings, machine, device)
    if network_gbit is not None:
        if not 0 < network_gbit <= 1e5:
            raise ConfigError(f"--network-gbit must be above 0 and at most 100000, not {network_gbit:g}")
        rates = replace(rates, network=network_gbit * 1e9 / 8)
    question = Question(
        state_bytes=state_gb * _GB,
        iteration_s=iter_ms / 1e3,
        mtbf_s=mtbf_h * _HOUR_S,
        nodes=nodes,
        hide_s=_hide_s(hide_ms, iter_ms, measured, rates),
        restart_s=restart_s,
        job_s=job_h * _HOUR_S,
        max_in_flight=in_flight,
    )
    costs, notes = _costs(question, rates, measured)
    found = answer(question, costs, rates, _numbers(intervals))
    sentence = _sentence(found, question, place, measured)
    if as_json:
        emit_json(
            {
                "answer": sentence,
                "question": asdict(question),
                "ceilings_bytes_per_s": asdict(rates),
                "costs_s_per_byte": [asdict(cost) for cost in costs.values()],
                "advice": [asdict(row) for row in found],
                "notes": notes,
            }
        )
        return
    typer.echo(sentence)
    _show(found, costs, question, rates)
    for note in notes:
        console.print(f"note: {note}")


@app.command("score")
def score_command(
    records: _Records = None,
    ceilings: _Ceilings = None,
    mtbf_h: Annotated[
        str, typer.Option(metavar="H,H,...", help="Hours between failures of the job to score at.")
    ] = "0.02,0.1,1",
    machine: _Machine = None,
    device: _Device = None,
    as_json: _Json = False,
) -> None:
    """Hold out one workload after the other, advise it from the rest, print the regret against its best measured cell.

    The ceilings are those that the CSV files carry, or those of --ceilings.
    """
    from lastgood.experiments.advise.score import score, summary

    if records is None:
        raise ConfigError("--records DIR is needed: a folder with run records or tidy CSV files of several workloads")
    measured, rates, _ = _evidence(records, ceilings, machine, device)
    assert measured is not None
    scores = score(measured.cells, rates, [hours * _HOUR_S for hours in _floats(mtbf_h, "--mtbf-h")])
    if as_json:
        emit_json({"summary": summary(scores), "scores": [asdict(found) for found in scores], "notes": measured.notes})
        return
    emit_table(
        f"Held-out advice on {measured.machine}, {len(measured.cells)} measured cells",
        (
            "workload",
            "MTBF",
            "best measured",
            "goodput",
            "from records",
            "regret",
            "from ceilings",
            "regret",
            "best elsewhere",
            "regret",
            "median",
        ),
        (
            (
                found.workload,
                format_seconds(found.job_mtbf_s),
                found.best,
                f"{found.best_goodput:.4f}",
                found.from_records,
                f"{found.records_regret:.2%}",
                found.from_model,
                f"{found.model_regret:.2%}",
                found.from_others,
                f"{found.others_regret:.2%}",
                f"{found.median_regret:.2%}",
            )
            for found in scores
        ),
    )
    typer.echo(summary(scores))
    for note in measured.notes:
        console.print(f"note: {note}")


def _evidence(
    records: Path | None, ceilings: Path | None, machine: str | None, device: Device | None
) -> tuple[Measured | None, Rates, str]:
    """Measured cells if there are records, the ceilings, and where these are from."""
    from lastgood.experiments.advise.cells import rates_of, read_cells
    from lastgood.experiments.ceilings.record import load_ceilings
    from lastgood.experiments.machine.facts import machine_label

    measured = None if records is None else read_cells(records, machine=machine, device=device)
    if ceilings is None and measured is not None and measured.rates is not None:
        return measured, measured.rates, f"the ceilings in the CSV files of {measured.machine}"
    label = measured.machine if measured is not None else machine or machine_label()
    path = ceilings or Path("results", label, "ceilings.json")
    if not path.exists():
        raise ConfigError(
            f"{path}: no ceilings of this machine; make them: lastgood ceilings --scratch DIR --out {path}, "
            "or name a file with --ceilings"
        )
    record = load_ceilings(path)
    if measured is not None and record.machine != measured.machine:
        raise ConfigError(f"{path} is of {record.machine}, and the records are of {measured.machine}; name its own")
    chosen: Device = device or (measured.device if measured is not None else "cuda" if record.device else "cpu")
    return measured, rates_of(record, chosen), f"the ceilings of {record.machine}, {record.measured_at[:10]}"


def _hide_s(hide_ms: float | None, iter_ms: float, measured: Measured | None, rates: Rates) -> float | None:
    """As given; else, of CUDA trainings, the share of the iteration that it had in the records."""
    from lastgood.experiments.advise.model import hide_share

    if hide_ms is not None:
        return hide_ms / 1e3
    return hide_share(measured.cells) * iter_ms / 1e3 if measured is not None and rates.device == "cuda" else None


def _costs(question: Question, rates: Rates, measured: Measured | None) -> tuple[dict[str, Costs], list[str]]:
    from lastgood.experiments.advise.model import ONE_NODE, copies_in_peers, fit_costs, model_costs

    model, notes = model_costs(rates, question)
    if measured is None:
        return model, notes
    fitted = fit_costs(measured.cells, rates, question)
    notes = list(measured.notes)
    # Ceilings are what a machine does at best: beside measured numbers they would win unfairly.
    absent = sorted(model.keys() - fitted.keys())
    if absent:
        notes.append(f"not in the records, so not compared: {', '.join(absent)}")
    for system in [name for name in fitted if question.nodes < 2 and copies_in_peers(name)]:
        del fitted[system]
        notes.append(f"{system} is left out: {ONE_NODE}")
    if not fitted:
        raise ConfigError("the records hold no system that could be advised")
    sizes = [cell.state_bytes for cell in measured.cells]
    times = [cell.iteration_s for cell in measured.cells]
    for what, value, low, high in (
        ("state", question.state_bytes / _GB, min(sizes) / _GB, max(sizes) / _GB),
        ("iteration", question.iteration_s * 1e3, min(times) * 1e3, max(times) * 1e3),
    ):
        if not low / 2 <= value <= high * 2:
            unit = "GB" if what == "state" else "ms"
            notes.append(
                f"the {what} of {value:.3g} {unit} is far from those measured ({low:.3g} to {high:.3g} {unit}): "
                "costs are scaled in proportion"
            )
    return fitted, notes


def _numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) <= 9 for part in parts) or len(parts) > 1000:
        raise ConfigError(f"--intervals {text[:80]!r}: write whole numbers with commas between, such as 1,10,100")
    return [int(part) for part in parts]


def _floats(text: str, option: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not 0 < len(found) <= 100:
        raise ConfigError(f"{option} {text[:80]!r}: write numbers with commas between, such as 0.1,1,10")
    return found


def _sentence(found: list[Advice], question: Question, place: str, measured: Measured | None) -> str:
    best = found[0]
    basis = f"the model over {place}" if measured is None else f"measured runs of {measured.machine} and {place}"
    if best.goodput <= 0:
        return (
            f"No system gets anywhere: a failure comes every {format_seconds(question.job_mtbf_s)} and costs at least "
            f"{format_seconds(min(row.lost_s for row in found))}; from {basis}."
        )
    return (
        f"Use {best.system} every {best.interval_steps} iterations "
        f"(a checkpoint every {format_seconds(best.period_s)}): "
        f"goodput {best.goodput:.4f} of a training without failures and checkpoints, "
        f"{best.useful_hours_per_day:.2f} useful hours a day; from {basis}.{_rivals(found)}"
    )


def _rivals(found: list[Advice]) -> str:
    """A sentence on systems that may be as good, for all that was measured."""
    from lastgood.experiments.advise.model import undecided

    rivals = undecided(found)
    if not rivals:
        return ""
    lone = [row for row in rivals if found[0].of_one_run or row.of_one_run]
    return "".join(
        f" Undecided, {why}: {found[0].system}{_span(found[0])} and "
        f"{', '.join(f'{row.system} every {row.interval_steps}{_span(row)}' for row in rows)}."
        for why, rows in (
            ("the intervals of goodput overlap", [row for row in rivals if row not in lone]),
            ("one run without pairs does not tell them apart", lone),
        )
        if rows
    )


def _span(row: Advice) -> str:
    """The interval of a goodput."""
    interval = row.goodput_interval
    return "" if interval is None else f" ({interval.low:.4f} to {interval.high:.4f})"


def _show(found: list[Advice], costs: dict[str, Costs], question: Question, rates: Rates) -> None:
    emit_table(
        f"A failure of the job every {format_seconds(question.job_mtbf_s)}, "
        f"restart {format_seconds(question.restart_s)} before loading",
        ("system", "interval", "every", "slowdown", "lost per failure", "goodput", "hours/day", "from"),
        (
            (
                row.system,
                row.interval_steps,
                format_seconds(row.period_s),
                f"{row.slowdown:.4f}",
                format_seconds(row.lost_s),
                f"{row.goodput:.4f}{_span(row)}",
                f"{row.useful_hours_per_day:.2f}",
                row.source,
            )
            for row in found
        ),
    )
    ceilings = f"write {format_rate(rates.write)}, copy {format_rate(rates.copy)}"
    ceilings += f", read {format_rate(rates.read)}" if rates.read else ""
    ceilings += f", network {format_rate(rates.network)}" if rates.network else ""
    emit_table(
        "What one checkpoint costs",
        ("system", "stall", "busy", "durable after", "load"),
        (
            (
                cost.system,
                *(
                    format_seconds(price * question.state_bytes)
                    for price in (cost.stall, cost.busy, cost.durable, cost.load)
                ),
            )
            for cost in costs.values()
        ),
    )
    typer.echo(f"Ceilings: {ceilings}. A copy hides for {format_seconds(question.hidden_s(rates))}.")
