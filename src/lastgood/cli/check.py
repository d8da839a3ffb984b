"""`lastgood check`: whether run records hold what they claim."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lastgood.cli._output import emit_json
from lastgood.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lastgood.experiments.records.run import RunRecord

__all__ = ["check", "print_verdict"]


def check(
    records: Annotated[list[Path], typer.Argument(help="Run records (JSON).")],
    min_durable: Annotated[int, typer.Option(min=0, help="Durable checkpoints that each record must hold.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdicts to stdout as JSON.")] = False,
) -> None:
    """Check that each run restored its state to the bit and holds enough durable checkpoints; exit 1 if one did not."""
    from lastgood.experiments.records.run import RunRecord

    verdicts = [(path, record, record.faults(min_durable)) for path in records for record in [RunRecord.load(path)]]
    if as_json:
        emit_json([{"record": str(path), "passed": not faults, "faults": faults} for path, _, faults in verdicts])
    else:
        for path, record, faults in verdicts:
            print_verdict(path, record, faults)
    if any(faults for _, _, faults in verdicts):
        raise typer.Exit(1)


def print_verdict(path: Path, record: RunRecord, faults: list[str]) -> None:
    """Print what a record shows, and its faults, to stdout."""
    typer.echo("\n".join([f"{'FAILED' if faults else 'passed'}: {path}", *_facts(record)]))
    for fault in faults:
        typer.echo(f"  fault: {fault}")


def _facts(record: RunRecord) -> list[str]:
    clocks, counts, proof = record.clocks, record.counts, record.proof
    lines = [
        f"  {record.spec.title()}: {clocks.iterations_per_s:.3g} iterations/s over {clocks.measured_steps} steps",
        f"  {counts.durable} of {counts.started} checkpoints durable, {format_bytes(record.workload.state_bytes)} each",
    ]
    if proof is not None:
        after = len(proof.next_losses_restored)
        losses = "equal" if proof.next_losses_live == proof.next_losses_restored else "NOT equal"
        lines += [
            f"  restored step {proof.restored_step} in a new process in {format_seconds(proof.restore_s)}",
            f"  state {'equal to the bit' if proof.equal else 'NOT equal'}; losses of {after} further steps {losses}",
        ]
    return lines
