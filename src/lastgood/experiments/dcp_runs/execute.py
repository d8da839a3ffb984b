"""Starts the ranks of the suite on this machine or on hosts, and makes one record of what they did."""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from lastgood.errors import LastgoodError
from lastgood.experiments.dcp.models import build_on_meta, model_bytes
from lastgood.experiments.dcp.places import BucketPlace, FolderPlace
from lastgood.experiments.dcp.storages import storage_named
from lastgood.experiments.dcp_runs.order import DcpOrder, DcpResult, newest_saved
from lastgood.experiments.dcp_runs.server import OWN_BUCKET, RunningServer, own_server
from lastgood.experiments.machine.exclusive import exclusive_machine
from lastgood.experiments.machine.facts import where_run
from lastgood.experiments.multirank.capacity import Need, check_needs
from lastgood.experiments.plan.machine_checks import PROCESS_BYTES
from lastgood.experiments.records.dcp import DcpRecord, DcpSpec
from lastgood.experiments.runs.logs import keep_logs_of_failure
from lastgood.experiments.services.place import Place, RankHosts, find_place
from lastgood.mounts import lies_in_memory
from lastgood.text import parse_model, read_bytes
from lastgood.units import MIB

__all__ = ["execute_dcp", "needs_of_spec", "new_suffix", "order_of", "record_of", "run_dcp"]

Report = Callable[[str], None]
_RUN_S: Final = 24 * 3600.0
_FETCH_S: Final = 120.0
_MOST_BYTES: Final = 64 * MIB
_MOST_CACHED: Final = 0.05
"""Of a load's bytes: of a kernel that keeps more, the load says how fast memory is."""


def new_suffix() -> str:
    """A name for a checkpoint that no other has: the time, and eight random digits."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return f"{now:%Y-%m-%d-%H-%M-%S}-{secrets.token_hex(4)}"


def execute_dcp(spec: DcpSpec, _data_dir: Path, scratch: Path, logs: Path, report: Report) -> DcpRecord:
    """Save and load in a folder of the run's own below `scratch`, and return the record. See `run_dcp`."""
    return run_dcp(spec, None, new_suffix(), scratch, logs, report, RankHosts())


def run_dcp(
    spec: DcpSpec,
    place: FolderPlace | BucketPlace | None,
    suffix: str,
    scratch: Path,
    logs: Path,
    report: Report,
    given: RankHosts,
    *,
    keep: bool = False,
    server: RunningServer | None = None,
) -> DcpRecord:
    """Start all ranks of `spec`, wait for them, and return their one record.

    `place` is where checkpoints go and stay; None: a folder below `scratch`, or a bucket of a server of the run's own,
    removed at the end. `server` is one that the caller runs. Raises ConfigError for a storage that is missing;
    NoCheckpoint for a load of a suffix that is not there; HostError for hosts that have no room; LaunchError, with its
    last lines, for a rank that fails: its log is in `logs` then.
    """
    storage_named(spec.storage, spec.medium)
    with exclusive_machine(spec, scratch.absolute(), report) as mine, contextlib.ExitStack() as stack:
        hosts = stack.enter_context(find_place(spec, given, report))
        if place is None and spec.medium == "s3":
            report("starting an S3 server")
            url = f"s3://{OWN_BUCKET}/checkpoints"
            server = stack.enter_context(own_server(mine.folder / "server", url))
            place = BucketPlace(url, server.access)
        at = place or FolderPlace(mine.folder / "checkpoints")
        if spec.operation == "load" and hosts.remote is None:
            newest_saved(at, suffix)
        room = at.path if isinstance(at, FolderPlace) else mine.folder
        check_needs(spec, needs_of_spec(spec, hosts, server), hosts, room, report)
        order = order_of(spec, at, suffix, server, keep=keep)
        with keep_logs_of_failure(mine.folder, logs, report, dict):
            result = _launch(order, hosts, mine.folder, report)
        wall_s = time.monotonic() - mine.began_s
        return record_of(spec, result, at, suffix, mine.started_at, wall_s, room.parent, server)


def order_of(
    spec: DcpSpec, at: FolderPlace | BucketPlace, suffix: str, server: RunningServer | None, *, keep: bool
) -> DcpOrder:
    """What ranks are told."""
    return DcpOrder(
        spec=spec,
        place=str(at),
        access=at.access if isinstance(at, BucketPlace) else None,
        watch=None if server is None else server.watch,
        suffix=suffix,
        keep=keep,
    )


def record_of(
    spec: DcpSpec,
    result: DcpResult,
    place: FolderPlace | BucketPlace,
    suffix: str,
    started_at: str,
    wall_s: float,
    scratch: Path,
    server: RunningServer | None = None,
) -> DcpRecord:
    """The record of what rank 0 gave. `scratch` is the folder whose file system is told."""
    durable = storage_named(spec.storage, spec.medium).durable(spec.storage_options)
    return DcpRecord(
        spec=spec,
        started_at=started_at,
        wall_s=wall_s,
        where=where_run(scratch),
        place=str(place),
        suffix=suffix,
        hosts=result.hosts,
        state_bytes=result.state_bytes,
        setup_s=result.setup_s,
        raw_write_bytes_per_s=result.raw_write_bytes_per_s,
        raw_read_bytes_per_s=result.raw_read_bytes_per_s,
        durable=durable,
        server=None if server is None else server.name,
        iterations=result.iterations,
        invalid=_why_invalid(spec, result, place, durable),
    )


def needs_of_spec(spec: DcpSpec, hosts: Place, server: RunningServer | None = None) -> Mapping[str, Need]:
    """What the ranks take of each host, by its name, at least: processes, states, and two checkpoints on the disk.

    A server keeps the space of all that it is given, also of what was removed; each iteration puts twice a checkpoint.
    """
    complete = model_bytes(build_on_meta(spec.model)) * (3 if spec.state == "full" else 1)
    groups = {"ddp": 1, "fsdp1": spec.ranks, "fsdp2": spec.ranks}[spec.spread]
    if spec.sharding == "hybrid":
        groups //= spec.replicas
    copies = 2 if spec.saving != "sync" else 1
    state = complete // groups * copies if spec.device == "cpu" else complete // groups * (copies - 1)
    if spec.medium == "disk":
        written = 0 if spec.operation == "load" else 2 * complete // spec.ranks
    else:
        written = 0 if server is None else 2 * (spec.warmup + spec.iterations) * complete // spec.ranks
    return {
        host.name: Need(host.slots, host.slots * (PROCESS_BYTES + state), host.slots * written)
        for host in hosts.hosts.hosts
    }


def _launch(order: DcpOrder, hosts: Place, folder: Path, report: Report) -> DcpResult:
    spec = order.spec
    path = folder / "result.json"
    order = order.model_copy(update={"result": str(path), "parent": os.getpid() if hosts.remote is None else None})
    report(f"starting {spec.ranks} ranks on {', '.join(hosts.hosts.names)}")
    program = [sys.executable, "-m", "lastgood.experiments.dcp_runs.bench", order.model_dump_json()]
    hosts.start(program, {"OMP_NUM_THREADS": "1"}, folder / "ranks", _RUN_S, report)
    if path.exists():
        text = read_bytes(path, _MOST_BYTES, LastgoodError)
    elif hosts.remote is not None:
        text = hosts.remote.run(hosts.hosts.names[0], ["cat", str(path)], _FETCH_S, max_output_bytes=_MOST_BYTES).stdout
    else:
        text = b""
    what = f"{hosts.hosts.names[0]}: rank 0 left no result at {path}"
    return parse_model(DcpResult, text, what, most_bytes=_MOST_BYTES, error=LastgoodError)


def _why_invalid(spec: DcpSpec, result: DcpResult, place: FolderPlace | BucketPlace, durable: bool) -> list[str]:
    """Why the numbers must not be compared with others."""
    found = []
    if isinstance(place, FolderPlace) and lies_in_memory(place.path):
        found.append("the checkpoints were in memory (tmpfs), not on a disk")
    if not durable and spec.operation != "load":
        found.append("files were not flushed, so saves may have ended in the page cache")
    if any((one.cached_share or 0) > _MOST_CACHED for one in result.iterations):
        found.append("files were still in the page cache when they were loaded")
    if any(one.equal is False for one in result.iterations):
        found.append("a load did not give what was saved")
    if spec.iterations < 3:
        found.append("fewer than three iterations, so no spread")
    return found
