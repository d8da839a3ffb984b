"""`lastgood dcp ...`: saves and loads through torch.distributed.checkpoint (DCP), timed and compared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lastgood.cli._app import App
from lastgood.cli._output import console, emit_table, reporter
from lastgood.cli.dcp_clean import clean
from lastgood.cli.dcp_flags import (
    LOGS,
    SCRATCH,
    Async,
    Backend,
    Cache,
    Ddp,
    Endpoint,
    Fsdp,
    Gbps,
    Hostfile,
    Iterations,
    Logs,
    Model,
    PartSize,
    Prefixes,
    Reader,
    Record,
    Region,
    Replicas,
    SavedStorage,
    SavedWorldSize,
    Scratch,
    Seed,
    Server,
    Sharding,
    SshConfig,
    State,
    Storage,
    Suffix,
    Sync,
    Threads,
    Uri,
    Warmup,
    WorldSize,
)
from lastgood.cli.dcp_mlperf import mlperf
from lastgood.cli.dcp_specs import Reached, reached, spec_of, spec_of_saved, started_by_torchrun

if TYPE_CHECKING:
    from lastgood.errors import LaunchError
    from lastgood.experiments.records.dcp import DcpRecord, DcpSpec, Operation

__all__ = ["app"]

app = App(help="The suite for torch.distributed.checkpoint: save, load, compare.", no_args_is_help=True)
app.command()(mlperf)
app.command()(clean)


@app.command(
    "save-and-load", help="Save and load in turn; every load reads the disk, and is compared with what was saved."
)
@app.command(
    "save", help="Save a model's state some times over, and print the name of the last checkpoint, which stays."
)
def save(
    context: typer.Context,
    uri: Uri,
    model: Model = None,
    backend: Backend = "gloo",
    iterations: Iterations = 3,
    warmup: Warmup = 1,
    world_size: WorldSize = 1,
    hostfile: Hostfile = None,
    ssh_config: SshConfig = None,
    region: Region = None,
    endpoint_url: Endpoint = None,
    server: Server = None,
    storage: Storage = None,
    thread_count: Threads = None,
    sync_files: Sync = None,
    part_size: PartSize = None,
    target_gbps: Gbps = None,
    prefix_strategy: Prefixes = None,
    s3_reader: Reader = None,
    state: State = None,
    sharding: Sharding = None,
    replicas: Replicas = None,
    fsdp: Fsdp = None,
    ddp: Ddp = False,
    asynchronous: Async = None,
    planner_cache: Cache = False,
    suffix: Annotated[str | None, typer.Option("--suffix", help="Name of the checkpoint [default: a new one].")] = None,
    keep_all: Annotated[bool, typer.Option("--keep-all", help="Keep the checkpoint of every iteration.")] = False,
    seed: Seed = 0,
    scratch: Scratch = SCRATCH,
    logs: Logs = LOGS,
    record: Record = None,
) -> None:
    """Save a model's state, and with ``save-and-load`` load it as well: both commands have the same flags."""
    flags = locals()
    operation: Operation = "save" if context.command.name == "save" else "save-and-load"
    _run(operation, spec_of(operation, flags), flags)


@app.command()
def load(
    uri: Uri,
    suffix: Suffix,
    backend: Backend = "gloo",
    iterations: Iterations = 3,
    warmup: Warmup = 1,
    world_size: SavedWorldSize = None,
    hostfile: Hostfile = None,
    ssh_config: SshConfig = None,
    region: Region = None,
    endpoint_url: Endpoint = None,
    server: Server = None,
    storage: SavedStorage = None,
    thread_count: Threads = None,
    part_size: PartSize = None,
    target_gbps: Gbps = None,
    s3_reader: Reader = None,
    sharding: Sharding = None,
    replicas: Replicas = None,
    fsdp: Fsdp = None,
    ddp: Ddp = False,
    scratch: Scratch = SCRATCH,
    logs: Logs = LOGS,
    record: Record = None,
) -> None:
    """Load a checkpoint some times over, on any number of ranks, and compare it with what was saved.

    Model and state are those that were saved.
    """
    flags = locals()
    with reached(flags) as at:
        _run("load", spec_of_saved(flags, at), flags, at)


@app.command()
def newload(
    uri: Uri,
    suffix: Annotated[
        str | None, typer.Option("--suffix", help="Name of the checkpoint [default: the newest there].")
    ] = None,
    retries: Annotated[int, typer.Option("--retries", help="How often a load that failed is tried again.")] = 2,
    backend: Backend = "gloo",
    iterations: Iterations = 3,
    warmup: Warmup = 1,
    world_size: SavedWorldSize = None,
    hostfile: Hostfile = None,
    ssh_config: SshConfig = None,
    region: Region = None,
    endpoint_url: Endpoint = None,
    server: Server = None,
    storage: SavedStorage = None,
    thread_count: Threads = None,
    part_size: PartSize = None,
    target_gbps: Gbps = None,
    s3_reader: Reader = None,
    sharding: Sharding = None,
    replicas: Replicas = None,
    fsdp: Fsdp = None,
    ddp: Ddp = False,
    scratch: Scratch = SCRATCH,
    logs: Logs = LOGS,
    record: Record = None,
) -> None:
    """As load, but look first: list the suffixes, check metadata and sizes of files, and try again what fails."""
    from lastgood.errors import ConfigError, LaunchError, NoCheckpoint
    from lastgood.experiments.dcp.storages import check_files
    from lastgood.experiments.dcp_runs.order import newest_saved, saved_name, suffixes_in

    if not 0 <= retries <= 100:
        raise ConfigError(f"--retries {retries}: from 0 to 100")
    given = locals()
    with reached(given) as at:
        known = suffixes_in(at.place)
        if not known:
            raise NoCheckpoint(f"{at.place}: no checkpoint of `lastgood dcp save`")
        console.print(f"dcp newload: {len(known)} suffixes in {at.place}: {', '.join(known[-10:])}")
        flags = {**given, "suffix": suffix or known[-1]}
        spec = spec_of_saved(flags, at)
        number = newest_saved(at.place, flags["suffix"]).number
        there = at.place.below(flags["suffix"], saved_name(number))
        nbytes, files = check_files(there, spec.storage, spec.storage_options)
        console.print(f"dcp newload: {flags['suffix']}: {files} files, {nbytes} bytes, nothing is missing")
        for attempt in range(retries + 1):
            try:
                _run("newload", spec, flags, at)
                return
            except LaunchError as error:
                if attempt == retries or started_by_torchrun() is not None:
                    raise
                console.print(f"dcp newload: attempt {attempt + 1} of {retries + 1} failed: {error}")


@app.command()
def benchmark(
    configuration: Annotated[Path, typer.Argument(help="A YAML file of the S3 connector's benchmarks, as it is.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="KEY=VALUE: epochs=1 +path=/nvme checkpoint.suffix=NAME; A,B: both.")
    ] = None,
    warmup: Warmup = 1,
    endpoint_url: Endpoint = None,
    server: Server = None,
    scratch: Scratch = SCRATCH,
    logs: Logs = LOGS,
    records: Annotated[Path | None, typer.Option("--records", help="Folder for a record of each run.")] = None,
) -> None:
    """Measure all combinations that a configuration of Hydra's names. Hydra itself is not needed."""
    from lastgood.errors import ConfigError
    from lastgood.experiments.dcp_runs.sweep import read_sweep

    sweep = read_sweep(configuration, overrides or [])
    if sweep.unused:
        console.print(f"dcp benchmark: not used: {', '.join(sweep.unused)}")
    nothing = dict.fromkeys(("state", "replicas", "fsdp", "asynchronous", "hostfile", "ssh_config", "suffix", "record"))
    nothing |= dict.fromkeys(("model", "thread_count", "sync_files", "sharding", "region", "endpoint_url", "server"))
    given = {"backend": "gloo", "world_size": 1, "storage": "s3", "iterations": 3, "planner_cache": False, "seed": 0}
    given |= {"endpoint_url": endpoint_url, "server": server}
    folders = {"scratch": scratch, "logs": logs, "warmup": warmup}
    rows = []
    # All are looked at before the first is made.
    runs = [{**nothing, **given, "ddp": sweep.ddp, **folders, **run} for run in sweep.runs]
    for flags in runs:
        # The benchmarks' own word for their connector.
        flags["storage"] = "s3torchconnector" if flags["storage"] == "s3" else flags["storage"]
    load = sweep.operation == "load"
    with contextlib.ExitStack() as stack:
        # One server for all runs, if there is to be one.
        places = {flags["uri"]: flags for flags in runs}
        if server is not None and len(places) > 1:
            raise ConfigError(f"--server: {len(places)} URIs, and a server has one")
        at = {uri: stack.enter_context(reached(flags)) for uri, flags in places.items()}
        specs = [spec_of_saved(flags, at[flags["uri"]]) if load else spec_of("save", flags) for flags in runs]
        for number, (spec, flags) in enumerate(zip(specs, runs, strict=True)):
            if records is not None:
                flags["record"] = records / f"{number:04d}.json"
            made = _run(f"benchmark {number + 1} of {len(specs)}", spec, flags, at[flags["uri"]])
            if made is not None:
                options = " ".join(f"{key}={value}" for key, value in spec.storage_options.items())
                rate = made.median_mib_per_s(sweep.operation)
                assert rate is not None
                rows.append((spec.model, spec.spread, spec.ranks, spec.storage, options, f"{rate:.0f}", made.suffix))
    if rows:
        columns = ("model", "spread", "ranks", "storage", "options", "MiB/s", "suffix")
        emit_table(f"{configuration.name}: {sweep.operation}", columns, rows)


@app.command()
def wait(
    duration: Annotated[float, typer.Option(help="Minutes.")] = 2.0,
) -> None:
    """Do nothing for some minutes, and end: keeps the nodes of a job allocated between two measurements."""
    import time

    from lastgood.errors import ConfigError

    if not 0 < duration <= 7 * 24 * 60:
        raise ConfigError(f"--duration {duration}: minutes, more than 0 and at most a week")
    console.print(f"dcp wait: idle for {duration:g} minutes")
    time.sleep(duration * 60)


def _run(command: str, spec: DcpSpec, flags: Mapping[str, Any], at: Reached | None = None) -> DcpRecord | None:
    from lastgood.experiments.dcp_runs.execute import new_suffix, run_dcp
    from lastgood.experiments.dcp_runs.order import check_suffix
    from lastgood.experiments.services.place import RankHosts

    if at is None:
        with reached(flags) as own:
            return _run(command, spec, flags, own)
    suffix = check_suffix(flags["suffix"]) if flags["suffix"] is not None else new_suffix()
    keep = bool(flags.get("keep_all"))
    report = reporter(f"dcp {command}")
    if started_by_torchrun() is not None:
        made = _as_a_rank(spec, at, suffix, keep, report)
    else:
        hosts = RankHosts(hostfile=flags["hostfile"], ssh_config=flags["ssh_config"])
        made = run_dcp(
            spec, at.place, suffix, flags["scratch"], flags["logs"], report, hosts, keep=keep, server=at.server
        )
    if made is None:
        return None
    if flags["record"] is not None:
        made.write(flags["record"])
    _print(made)
    return made


def _as_a_rank(spec: DcpSpec, at: Reached, suffix: str, keep: bool, report: Callable[[str], None]) -> DcpRecord | None:
    """Under torchrun each rank is one of these commands; the first one's suffix is everybody's."""
    import datetime
    import time

    from lastgood.experiments.dcp.places import FolderPlace
    from lastgood.experiments.dcp_runs.bench import run_rank
    from lastgood.experiments.dcp_runs.execute import order_of, record_of
    from lastgood.processes import keep_stdout

    keep_stdout()  # its last line is the suffix
    started_at = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    began = time.monotonic()
    try:
        result = run_rank(order_of(spec, at.place, suffix, None, keep=keep), report)
    except Exception as error:
        raise _of_this_rank(error) from error
    if result is None:
        return None
    scratch = at.place.path.parent if isinstance(at.place, FolderPlace) else Path.cwd()
    return record_of(spec, result, at.place, result.suffix, started_at, time.monotonic() - began, scratch)


def _of_this_rank(error: Exception) -> LaunchError:
    """What has failed here, named as ranks of our own launch are; torchrun's summary of its ranks has it as well."""
    import os
    import socket

    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    from lastgood.errors import LastgoodError, LaunchError

    said = str(error) if isinstance(error, LastgoodError) else f"{type(error).__name__}: {error}"
    told = LaunchError(f"rank {os.environ['RANK']} on {socket.gethostname()}: {said}")
    try:
        raise told from None
    except LaunchError as raised:  # the summary shows the error that is being handled
        get_error_handler().record_exception(raised)
    return told


def _print(record: DcpRecord) -> None:
    from lastgood.units import format_bytes, format_seconds

    spec = record.spec
    rows = []
    for one in record.iterations:
        skew, coordination = one.skew_s, one.coordination_s
        rows.append(
            (
                f"{one.operation}{' (warm-up)' if one.warmup else ''}",
                f"{one.mib_per_s:.0f}",
                format_seconds(one.slowest_s),
                format_seconds(max(rank.stall_s for rank in one.ranks)),
                "" if skew is None else format_seconds(skew),
                "" if coordination is None else format_seconds(coordination),
                {None: "", True: "equal", False: "DIFFERENT"}[one.equal],
            )
        )
    state = f"{spec.model} ({format_bytes(record.state_bytes)})"
    title = f"{state}, {spec.spread} on {spec.ranks} ranks, storage {spec.storage}"
    emit_table(title, ("", "MiB/s", "slowest rank", "stall", "skew", "coordination", "compared"), rows)
    console.print(record.summary())
    for reason in record.invalid:
        console.print(f"not to be compared: {reason}")
    # Last, so that a script can take it from the last line.
    print(record.suffix)  # noqa: T201
