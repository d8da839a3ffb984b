"""`lastgood shadow bench`: how long a shadow's complete update takes, against threads and shards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from lastgood.cli._output import emit_json, emit_table, reporter
from lastgood.errors import ConfigError
from lastgood.units import format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from lastgood.experiments.optbench.bench import BenchOrder, BenchResult

__all__ = ["bench"]

_TIMEOUT_S = 6 * 3600.0
_FETCH_S = 60.0
_MAX_RESULT_BYTES = 16 << 20


def bench(
    model: Annotated[
        str,
        typer.Option(help="resnet50, resnet152, vgg11, vit_h_14, gpt3_medium, gpt3_large, gpt3_xl or gpt3_6_7B."),
    ],
    optimizer: Annotated[str, typer.Option(help="sgd, adam or adamw.")] = "adamw",
    implementation: Annotated[str, typer.Option(help="The trainer's: fused, foreach or single.")] = "fused",
    arithmetic: Annotated[
        str, typer.Option(help="The trainer's: cpu (torch's own steps) or cuda (native ones).")
    ] = "cpu",
    threads: Annotated[
        str | None, typer.Option(help="Threads of a shadow, as 1,2,4 [default: 1 and all cores].")
    ] = None,
    steps: Annotated[int, typer.Option(help="Timed updates for each number of threads.")] = 5,
    bucket: Annotated[str, typer.Option(help="Size of a bucket; bucket i is on shard i mod shards.")] = "25MiB",
    nodes: Annotated[Path | None, typer.Option(help="A hostfile: a shard for each slot of its hosts.")] = None,
    logs: Annotated[Path, typer.Option(help="With --nodes: folder for logs, on every host.")] = Path("logs/optbench"),
    ssh_config: Annotated[
        Path | None, typer.Option(help="With --nodes: an ssh configuration [default: $LASTGOOD_SSH_CONFIG].")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all that was measured to stdout as JSON.")] = False,
) -> None:
    """Time complete updates (clip and optimizer) of a model's parameters in float32, in buckets spread over shards.

    Alone it is one shard. Under torchrun every rank is one, and the first prints; --nodes launches them on hosts.
    """
    order = _order(model, optimizer, implementation, arithmetic, threads, steps, bucket)
    report = reporter("shadow bench")
    if nodes is not None:
        result: BenchResult | None = _on_nodes(order, nodes, logs, ssh_config, report)
    else:
        from lastgood.experiments.optbench.bench import run_bench

        result = run_bench(order, report)
    if result is None:
        return
    if as_json:
        emit_json(result.model_dump(mode="json"))
    else:
        _print(result)


def _order(
    model: str, optimizer: str, implementation: str, arithmetic: str, threads: str | None, steps: int, bucket: str
) -> BenchOrder:
    from pydantic import ValidationError

    from lastgood.experiments.machine.facts import usable_cores
    from lastgood.experiments.optbench.bench import BenchOrder
    from lastgood.workloads.optimizer_shapes import MODELS

    if model not in MODELS:
        raise ConfigError(f"--model {model}: unknown; known: {', '.join(MODELS)}")
    try:
        counts = [int(one) for one in threads.split(",")] if threads else sorted({1, usable_cores()})
    except ValueError:
        counts = [0]
    if not all(1 <= count <= 1024 for count in counts):
        raise ConfigError(f"--threads {threads}: write numbers from 1 to 1024, as in 1,2,4")
    try:
        return BenchOrder(
            model=model,
            optimizer=cast(Literal["sgd"], optimizer),
            implementation=cast(Literal["fused"], implementation),
            arithmetic=cast(Literal["cpu"], arithmetic),
            threads=tuple(counts),
            steps=steps,
            bucket_bytes=parse_bytes(bucket),
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"--{str(first['loc'][0]).removesuffix('_bytes')}: {first['msg']}") from error
    except ValueError as error:
        raise ConfigError(f"--bucket: {error}") from error


def _on_nodes(
    order: BenchOrder, nodes: Path, logs: Path, ssh_config: Path | None, report: Callable[[str], None]
) -> BenchResult:
    import sys

    from lastgood.cluster.hostfile import read_hostfile
    from lastgood.cluster.launch.job import launch
    from lastgood.cluster.ssh.remote import Remote, SshOptions
    from lastgood.errors import LaunchError
    from lastgood.experiments.optbench.bench import BenchResult
    from lastgood.text import parse_model

    hosts = read_hostfile(nodes)
    remote = Remote(SshOptions.choose(ssh_config))
    logs = logs.absolute()
    path = logs / "result.json"
    program = [sys.executable, "-m", "lastgood.experiments.optbench.bench", order.model_dump_json(), str(path)]
    # A result of an earlier call must not pass for this one's.
    remote.run(hosts.names[0], ["rm", "-f", "--", str(path)], _FETCH_S)
    launch(program, hosts, "torchrun", log_dir=logs, timeout_s=_TIMEOUT_S, remote=remote, report=report)
    text = remote.run(hosts.names[0], ["cat", str(path)], _FETCH_S, max_output_bytes=_MAX_RESULT_BYTES).stdout
    what = f"{hosts.names[0]}: rank 0 left no result at {path}"
    return parse_model(BenchResult, text, what, most_bytes=_MAX_RESULT_BYTES, error=LaunchError)


def _print(result: BenchResult) -> None:
    order = result.order
    title = (
        f"{order.model}, {result.parameters / 1e6:.1f} million parameters in {result.buckets} buckets on "
        f"{result.shards} shards: {order.implementation} {order.optimizer}, arithmetic of {order.arithmetic}, "
        f"{format_bytes(max(result.shard_bytes))} a shard at most"
    )
    rows = [
        (
            row.threads,
            format_seconds(row.median_s),
            format_seconds(min(row.update_s)),
            format_seconds(max(row.update_s)),
            f"{row.parameters_per_s / 1e9:.3f}",
        )
        for row in result.rows
    ]
    emit_table(title, ("threads", "update", "least", "most", "billion parameters/s"), rows)
