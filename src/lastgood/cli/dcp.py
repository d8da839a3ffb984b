"""`lastgood dcp ...`: saves and loads through torch.distributed.checkpoint (DCP), timed and compared."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lastgood.cli._app import App
from lastgood.cli._output import console, emit_table, reporter
from lastgood.cli.dcp_mlperf import mlperf

if TYPE_CHECKING:
    from lastgood.experiments.records.dcp import DcpRecord, DcpSpec, Operation

__all__ = ["app"]

app = App(help="The suite for torch.distributed.checkpoint: save, load, compare.", no_args_is_help=True)
app.command()(mlperf)

_Uri = Annotated[str, typer.Option("--uri", help="Folder for checkpoints, or file://FOLDER.")]
_Suffix = Annotated[str, typer.Option("--suffix", help="Name of the checkpoint, as `save` printed it last.")]
_Model = Annotated[
    str | None,
    typer.Option("--model", help="L7b to L70b, llama3-8b to -405b, vit-base, T0_3B; a twin: L7b-64MB [default: L7b]."),
]
_Backend = Annotated[str, typer.Option("--backend", help="gloo: the state is in host memory; nccl: on GPUs.")]
_Iterations = Annotated[int, typer.Option("--iterations", help="Timed saves or loads.")]
_Warmup = Annotated[int, typer.Option("--warmup", help="Untimed ones before them.")]
_WorldSize = Annotated[
    int, typer.Option("--world-size", "--world_size", help="Ranks, on this machine. Under torchrun it says how many.")
]
_SavedWorldSize = Annotated[
    int | None, typer.Option("--world-size", "--world_size", help="Ranks [default: as many as saved it].")
]
_SavedStorage = Annotated[
    str | None, typer.Option("--storage", help="disk, fsspec, hf or lastgood [default: what saved it].")
]
_Hostfile = Annotated[Path | None, typer.Option("--hostfile", help="Hosts for the ranks, one a line: NAME slots=N.")]
_SshConfig = Annotated[
    Path | None, typer.Option("--ssh-config", help="With --hostfile: an ssh configuration [default: your own].")
]
_Storage = Annotated[str, typer.Option("--storage", help="disk, fsspec, hf or lastgood.")]
_Threads = Annotated[
    int | None, typer.Option("--thread-count", "--thread_count", help="Threads of each rank's writer or reader.")
]
_Sync = Annotated[
    bool | None, typer.Option("--sync-files/--no-sync-files", help="Whether files are flushed to the disk.")
]
_State = Annotated[str | None, typer.Option("--state", help="model, or full: with AdamW's moments [default: model].")]
_Sharding = Annotated[
    str | None,
    typer.Option("--sharding", help="full, or hybrid: groups of ranks hold the same shards [default: full]."),
]
_Replicas = Annotated[int | None, typer.Option("--replicas", help="With --sharding hybrid: how many groups.")]
_Fsdp = Annotated[int | None, typer.Option("--fsdp", help="2: fully_shard; 1: FullyShardedDataParallel [default: 2].")]
_Ddp = Annotated[bool, typer.Option("--ddp", help="A complete copy on each rank, in place of FSDP.")]
_Async = Annotated[
    str | None, typer.Option("--async", help="thread or process: save by async_save [default: save, which waits].")
]
_Cache = Annotated[bool, typer.Option("--planner-cache", "--planner_cache", help="Keep plans from save to save.")]
_Seed = Annotated[int, typer.Option("--seed", help="Of the numbers in the state.")]
_Scratch = Annotated[Path, typer.Option("--scratch", help="Folder for the run's own files, on a disk.")]
_Logs = Annotated[Path, typer.Option("--logs", help="Folder for logs of ranks that fail.")]
_Record = Annotated[Path | None, typer.Option("--record", help="Write the record, one JSON file, there.")]
_SCRATCH = Path("scratch")
_LOGS = Path("logs/dcp")


@app.command()
def save(
    uri: _Uri,
    model: _Model = None,
    backend: _Backend = "gloo",
    iterations: _Iterations = 3,
    warmup: _Warmup = 1,
    world_size: _WorldSize = 1,
    hostfile: _Hostfile = None,
    ssh_config: _SshConfig = None,
    storage: _Storage = "disk",
    thread_count: _Threads = None,
    sync_files: _Sync = None,
    state: _State = None,
    sharding: _Sharding = None,
    replicas: _Replicas = None,
    fsdp: _Fsdp = None,
    ddp: _Ddp = False,
    asynchronous: _Async = None,
    planner_cache: _Cache = False,
    suffix: Annotated[str | None, typer.Option("--suffix", help="Name of the checkpoint [default: a new one].")] = None,
    keep_all: Annotated[bool, typer.Option("--keep-all", help="Keep the checkpoint of every iteration.")] = False,
    seed: _Seed = 0,
    scratch: _Scratch = _SCRATCH,
    logs: _Logs = _LOGS,
    record: _Record = None,
) -> None:
    """Save a model's state some times over, and print the name of the last checkpoint, which stays."""
    flags = locals()
    _run("save", _spec("save", flags), flags)


@app.command(name="save-and-load")
def save_and_load(
    uri: _Uri,
    model: _Model = None,
    backend: _Backend = "gloo",
    iterations: _Iterations = 3,
    warmup: _Warmup = 1,
    world_size: _WorldSize = 1,
    hostfile: _Hostfile = None,
    ssh_config: _SshConfig = None,
    storage: _Storage = "disk",
    thread_count: _Threads = None,
    sync_files: _Sync = None,
    state: _State = None,
    sharding: _Sharding = None,
    replicas: _Replicas = None,
    fsdp: _Fsdp = None,
    ddp: _Ddp = False,
    asynchronous: _Async = None,
    planner_cache: _Cache = False,
    suffix: Annotated[str | None, typer.Option("--suffix", help="Name of the checkpoint [default: a new one].")] = None,
    keep_all: Annotated[bool, typer.Option("--keep-all", help="Keep the checkpoint of every iteration.")] = False,
    seed: _Seed = 0,
    scratch: _Scratch = _SCRATCH,
    logs: _Logs = _LOGS,
    record: _Record = None,
) -> None:
    """Save and load in turn; every load reads the disk, and is compared with what was saved."""
    flags = locals()
    _run("save-and-load", _spec("save-and-load", flags), flags)


@app.command()
def load(
    uri: _Uri,
    suffix: _Suffix,
    backend: _Backend = "gloo",
    iterations: _Iterations = 3,
    warmup: _Warmup = 1,
    world_size: _SavedWorldSize = None,
    hostfile: _Hostfile = None,
    ssh_config: _SshConfig = None,
    storage: _SavedStorage = None,
    thread_count: _Threads = None,
    sharding: _Sharding = None,
    replicas: _Replicas = None,
    fsdp: _Fsdp = None,
    ddp: _Ddp = False,
    scratch: _Scratch = _SCRATCH,
    logs: _Logs = _LOGS,
    record: _Record = None,
) -> None:
    """Load a checkpoint some times over, on any number of ranks, and compare it with what was saved.

    Model and state are those that were saved.
    """
    flags = locals()
    _run("load", _spec_of_saved(flags), flags)


@app.command()
def newload(
    uri: _Uri,
    suffix: Annotated[
        str | None, typer.Option("--suffix", help="Name of the checkpoint [default: the newest there].")
    ] = None,
    retries: Annotated[int, typer.Option("--retries", help="How often a load that failed is tried again.")] = 2,
    backend: _Backend = "gloo",
    iterations: _Iterations = 3,
    warmup: _Warmup = 1,
    world_size: _SavedWorldSize = None,
    hostfile: _Hostfile = None,
    ssh_config: _SshConfig = None,
    storage: _SavedStorage = None,
    thread_count: _Threads = None,
    sharding: _Sharding = None,
    replicas: _Replicas = None,
    fsdp: _Fsdp = None,
    ddp: _Ddp = False,
    scratch: _Scratch = _SCRATCH,
    logs: _Logs = _LOGS,
    record: _Record = None,
) -> None:
    """As load, but look first: list the suffixes, check metadata and sizes of files, and try again what fails."""
    from lastgood.errors import ConfigError, LaunchError, NoCheckpoint
    from lastgood.experiments.dcp.storages import check_files
    from lastgood.experiments.dcp_runs.execute import check_place
    from lastgood.experiments.dcp_runs.order import newest_saved, saved_folder, suffixes_in

    if not 0 <= retries <= 100:
        raise ConfigError(f"--retries {retries}: from 0 to 100")
    place = check_place(uri)
    known = suffixes_in(place)
    if not known:
        raise NoCheckpoint(f"{place}: no checkpoint of `lastgood dcp save`")
    console.print(f"dcp newload: {len(known)} suffixes in {place}: {', '.join(known[-10:])}")
    flags = {**locals(), "suffix": suffix or known[-1]}
    spec = _spec_of_saved(flags)
    folder = place / flags["suffix"]
    nbytes, files = check_files(saved_folder(folder, newest_saved(folder).number), spec.storage)
    console.print(f"dcp newload: {flags['suffix']}: {files} files, {nbytes} bytes, nothing is missing")
    for attempt in range(retries + 1):
        try:
            _run("newload", spec, flags)
            return
        except LaunchError as error:
            if attempt == retries or _torchrun() is not None:
                raise
            console.print(f"dcp newload: attempt {attempt + 1} of {retries + 1} failed: {error}")


@app.command()
def benchmark(
    configuration: Annotated[Path, typer.Argument(help="A YAML file of the S3 connector's benchmarks, as it is.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="KEY=VALUE: epochs=1 +path=/nvme checkpoint.suffix=NAME; A,B: both.")
    ] = None,
    warmup: _Warmup = 1,
    scratch: _Scratch = _SCRATCH,
    logs: _Logs = _LOGS,
    records: Annotated[Path | None, typer.Option("--records", help="Folder for a record of each run.")] = None,
) -> None:
    """Measure all combinations that a configuration of Hydra's names. Hydra itself is not needed."""
    from lastgood.experiments.dcp_runs.sweep import read_sweep

    sweep = read_sweep(configuration, overrides or [])
    if sweep.unused:
        console.print(f"dcp benchmark: not used: {', '.join(sweep.unused)}")
    nothing = dict.fromkeys(("state", "replicas", "fsdp", "asynchronous", "hostfile", "ssh_config", "suffix", "record"))
    nothing |= dict.fromkeys(("model", "thread_count", "sync_files", "sharding"))
    given = {"backend": "gloo", "world_size": 1, "storage": "s3", "iterations": 3, "planner_cache": False, "seed": 0}
    folders = {"scratch": scratch, "logs": logs, "warmup": warmup}
    rows = []
    # All are looked at before the first is made.
    runs = [{**nothing, **given, "ddp": sweep.ddp, **folders, **run} for run in sweep.runs]
    load = sweep.operation == "load"
    specs = [_spec_of_saved(flags) if load else _spec("save", flags) for flags in runs]
    for number, (spec, flags) in enumerate(zip(specs, runs, strict=True)):
        if records is not None:
            flags["record"] = records / f"{number:04d}.json"
        made = _run(f"benchmark {number + 1} of {len(specs)}", spec, flags)
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


def _torchrun() -> tuple[int, int] | None:
    """(rank, ranks) if a launcher started this process as one of several ranks."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def _spec(operation: Operation, flags: Mapping[str, Any]) -> DcpSpec:
    from lastgood.errors import ConfigError
    from lastgood.experiments.dcp.storages import storage_named

    storage = storage_named(flags["storage"])
    if storage.tensors_only and flags["state"] == "full":
        raise ConfigError(
            f"--state full: storage {storage.name} keeps tensors only, no hyperparameters; use --state model"
        )
    given = {name: flags[name] for name in ("thread_count", "sync_files") if flags[name] is not None}
    return _checked(
        flags,
        operation=operation,
        model=flags["model"] or "L7b",
        state=flags["state"] or "model",
        storage=storage.name,
        storage_options=storage.resolved(given),
        saving=flags["asynchronous"] or "sync",
        planner_cache=flags["planner_cache"],
        seed=flags["seed"],
        **_over_ranks(flags, flags["world_size"]),
    )


def _spec_of_saved(flags: Mapping[str, Any]) -> DcpSpec:
    from lastgood.experiments.dcp.storages import storage_named
    from lastgood.experiments.dcp_runs.execute import check_place
    from lastgood.experiments.dcp_runs.order import check_suffix, newest_saved

    saved = newest_saved(check_place(flags["uri"]) / check_suffix(flags["suffix"])).spec
    storage = storage_named(flags["storage"] or saved.storage)
    given = {"thread_count": flags["thread_count"]} if flags["thread_count"] is not None else {}
    if storage.name == saved.storage:
        given = {**saved.storage_options, **given}
    named = any(flags[name] for name in ("sharding", "replicas", "fsdp", "ddp"))
    kept = {"spread": saved.spread, "sharding": saved.sharding, "replicas": saved.replicas}
    ranks = _over_ranks(flags, flags["world_size"] or saved.ranks)
    return _checked(
        flags,
        operation="load",
        model=saved.model,
        state=saved.state,
        storage=storage.name,
        storage_options=storage.resolved(given),
        seed=saved.seed,
        **(ranks if named else {**ranks, **kept}),
    )


def _over_ranks(flags: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    from lastgood.cluster.hostfile import read_hostfile
    from lastgood.errors import ConfigError

    if flags["ddp"] and flags["fsdp"] is not None:
        raise ConfigError("--ddp and --fsdp: give one of them")
    if flags["fsdp"] not in (None, 1, 2):
        raise ConfigError(f"--fsdp {flags['fsdp']}: 1 or 2")
    if flags["replicas"] is not None and flags["sharding"] != "hybrid":
        raise ConfigError("--replicas is for --sharding hybrid")
    started = _torchrun()
    nodes = 1
    if started is not None:
        world_size = started[1]
        nodes = max(1, world_size // int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size))))
    elif flags["hostfile"] is not None:
        hosts = read_hostfile(flags["hostfile"])
        world_size, nodes = hosts.slots, len(hosts.hosts)
    found: dict[str, Any] = {
        "ranks": world_size,
        "nodes": nodes,
        "spread": "ddp" if flags["ddp"] else f"fsdp{flags['fsdp'] or 2}",
        "sharding": flags["sharding"] or "full",
    }
    if flags["replicas"] is not None:
        found["replicas"] = flags["replicas"]
    return found


def _checked(flags: Mapping[str, Any], **fields: Any) -> DcpSpec:
    """The spec. Raises ConfigError, which names the option, for a value that is impossible."""
    from pydantic import ValidationError

    from lastgood.errors import ConfigError
    from lastgood.experiments.dcp.models import MODELS
    from lastgood.experiments.machine.facts import machine_label
    from lastgood.experiments.records.dcp import DcpSpec

    if fields["model"] not in MODELS:
        raise ConfigError(f"--model {fields['model']}: unknown; known: {', '.join(MODELS)}")
    try:
        return DcpSpec(
            machine=machine_label(),
            scale="laptop" if fields["model"].endswith("MB") else "paper",
            backend=flags["backend"],
            iterations=flags["iterations"],
            warmup=flags["warmup"],
            **fields,
        )
    except ValidationError as error:
        first = error.errors()[0]
        option = (
            {"saving": "async", "ranks": "world-size"}.get(str(first["loc"][0]), str(first["loc"][0]))
            if first["loc"]
            else ""
        )
        said = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"--{option}: {said}" if option else said) from error


def _run(command: str, spec: DcpSpec, flags: Mapping[str, Any]) -> DcpRecord | None:
    from lastgood.experiments.dcp_runs.execute import check_place, new_suffix, run_dcp
    from lastgood.experiments.dcp_runs.order import check_suffix
    from lastgood.experiments.services.place import RankHosts

    place = check_place(flags["uri"])
    suffix = check_suffix(flags["suffix"]) if flags["suffix"] is not None else new_suffix()
    keep = bool(flags.get("keep_all"))
    report = reporter(f"dcp {command}")
    if _torchrun() is not None:
        made = _as_a_rank(spec, place, suffix, keep, report)
    else:
        hosts = RankHosts(hostfile=flags["hostfile"], ssh_config=flags["ssh_config"])
        made = run_dcp(spec, place, suffix, flags["scratch"], flags["logs"], report, hosts, keep=keep)
    if made is None:
        return None
    if flags["record"] is not None:
        made.write(flags["record"])
    _print(made)
    return made


def _as_a_rank(spec: DcpSpec, place: Path, suffix: str, keep: bool, report: Callable[[str], None]) -> DcpRecord | None:
    """Under torchrun each rank is one of these commands; the first one's suffix is everybody's."""
    import datetime
    import time

    from lastgood.experiments.dcp_runs.bench import run_rank
    from lastgood.experiments.dcp_runs.execute import record_of
    from lastgood.experiments.dcp_runs.order import DcpOrder

    started_at = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    began = time.monotonic()
    result = run_rank(DcpOrder(spec=spec, place=str(place), suffix=suffix, keep=keep), report)
    if result is None:
        return None
    return record_of(spec, result, place, result.suffix, started_at, time.monotonic() - began)


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
