"""`lastgood sparsebench`: how long StellaTrain's compressors take, beside torch and this machine's memory."""

from __future__ import annotations

from typing import Annotated

import typer

from lastgood.cli._output import emit_json, emit_table, reporter
from lastgood.units import format_seconds

__all__ = ["sparsebench"]


def sparsebench(
    elements: Annotated[int, typer.Option(min=1000, max=1 << 32, help="Of the gradient, in float32.")] = 25_000_000,
    compression: Annotated[float, typer.Option(min=0, max=0.9999999, help="The share that is not sent.")] = 0.99,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Timed rounds: each way once, in turn.")] = 7,
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Threads of each way [default: all cores].")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all that was measured to stdout as JSON.")] = False,
) -> None:
    """Time compressors beside torch.topk, one read of the data, and one pass of two reads and a write.

    With a residual the bound is the pass, else the read. Waits until no run is being timed.
    """
    from lastgood.experiments.machine.facts import usable_cores
    from lastgood.experiments.optbench.sparse import SparseOrder, run_sparse_bench

    order = SparseOrder(
        elements=elements,
        compression=compression,
        rounds=rounds,
        threads=usable_cores() if threads is None else threads,
    )
    result = run_sparse_bench(order, reporter("sparsebench"))
    if as_json:
        emit_json(result.model_dump(mode="json"))
        return
    title = f"{elements} elements of float32, {result.count} sent ({compression:.4%} not), {order.threads} threads"
    rows = [
        (
            row.name,
            format_seconds(row.median_s),
            format_seconds(min(row.seconds)),
            format_seconds(max(row.seconds)),
            f"{row.of_bound:.2f} of {row.bound}",
            "" if row.energy_kept is None else f"{row.energy_kept:.3f}",
        )
        for row in result.rows
    ]
    emit_table(title, ("way", "median", "least", "most", "speed", "energy kept"), rows)
