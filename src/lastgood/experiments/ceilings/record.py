"""What this machine can do at best, measured and never assumed: disk, memory, network and, with CUDA, device copies.

It stands apart from Lastgood's own engine on purpose: plain system calls from Python threads (which release the
interpreter lock), so that the bound drawn in a figure does not rest on the code that the figure judges. docs/timing.md
says how each number is to be read.
"""

from __future__ import annotations

import importlib.util
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import psutil
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from lastgood.errors import LastgoodError
from lastgood.experiments.ceilings.disk import DiskCeilings, DiskPlan, measure_disk, refuse_memory_filesystem
from lastgood.experiments.ceilings.network import (
    LoopbackCeilings,
    NetworkPlan,
    PeerCeilings,
    measure_loopback,
    measure_peer,
)
from lastgood.experiments.machine.facts import cuda_devices, usable_cores, where_run
from lastgood.experiments.machine.lock import machine_lock
from lastgood.experiments.records.run import MOST_RECORD_BYTES, WhereRun
from lastgood.files import write_result
from lastgood.text import is_whole, parse_json, parse_model, read_bytes
from lastgood.units import MIB

__all__ = [
    "CEILINGS_VERSION",
    "CeilingsRecord",
    "CopyCurve",
    "Peer",
    "cached_or_measured",
    "load_ceilings",
    "measure_ceilings",
]

CEILINGS_VERSION: Literal[2] = 2
_NEW_IN_VERSION = "it has the network, and the spread of the best disk pattern"
_LOCK_TIMEOUT_S = 4 * 3600.0
_COPY_BUDGET_S = 1.0


@dataclass(frozen=True)
class Peer:
    """Another machine to measure the network to, where `lastgood ceilings --serve-peer` runs with the same token."""

    host: str
    port: int
    token: str = field(repr=False)

    @property
    def address(self) -> str:
        """As it is written in a record."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _moment(text: str) -> str:
    datetime.fromisoformat(text)
    return text


class CopyCurve(_Part):
    """Copies of one kind, one value per repetition."""

    threads: int
    bytes_per_s: list[float]
    """Bytes copied per second (each is read once and written once)."""
    median_bytes_per_s: float


class CeilingsRecord(_Part):
    """The ceilings of one machine on one day. Values are medians over repetitions; the curves hold every repetition."""

    ceilings_version: Literal[2] = CEILINGS_VERSION
    machine: str
    measured_at: Annotated[str, AfterValidator(_moment)]
    """UTC, ISO 8601."""
    wall_s: float
    quick: bool
    """Whether this is a short look, good for tests and not for figures."""
    where: WhereRun
    disk: DiskCeilings
    memory_copy: list[CopyCurve]
    memory_copy_bytes_per_s: float
    loopback: LoopbackCeilings
    peers: list[PeerCeilings] = Field(default_factory=list)
    """One for each machine that `--peer` named."""
    device: str | None = None
    """The CUDA device, where there is one and torch is installed."""
    device_to_host_pinned_bytes_per_s: float | None = None
    device_to_host_pageable_bytes_per_s: float | None = None
    host_to_device_pinned_bytes_per_s: float | None = None
    host_to_device_pageable_bytes_per_s: float | None = None

    @property
    def persist_bytes_per_s(self) -> float:
        """B of the bound: the best disk write, flush included."""
        return self.disk.write_bytes_per_s

    @property
    def network_bytes_per_s(self) -> float | None:
        """What this machine sends to its slowest measured peer; None where no peer was measured."""
        return min((peer.send_bytes_per_s for peer in self.peers), default=None)

    def copy_bytes_per_s(self, device: Literal["cpu", "cuda"]) -> float:
        """C of the bound: memory to memory on the CPU, device to pinned memory on CUDA.

        Raises LastgoodError for CUDA runs when no CUDA device was measured.
        """
        if device == "cpu":
            return self.memory_copy_bytes_per_s
        if self.device_to_host_pinned_bytes_per_s is None:
            raise LastgoodError(
                f"the ceilings of {self.machine}, {self.measured_at}, hold no device copy, but the runs were on CUDA; "
                "remove their file and make them again on the machine with the device"
            )
        return self.device_to_host_pinned_bytes_per_s

    def write(self, path: Path) -> None:
        """Write atomically: a reader sees the whole record or none."""
        write_result(path, (self.model_dump_json(indent=1) + "\n").encode())

    def still_good(self, machine: str, where: WhereRun, quick: bool) -> bool:
        """Whether this was measured today, on the same machine and scratch folder, and as thoroughly as asked."""
        same_day = datetime.fromisoformat(self.measured_at).date() == datetime.now(timezone.utc).date()
        # What was installed or committed since does not change what the machine can do.
        unlike = {"versions", "git_revision", "git_dirty"}
        same_place = self.where.model_dump(exclude=unlike) == where.model_dump(exclude=unlike)
        return same_day and same_place and self.machine == machine and (quick or not self.quick)


def load_ceilings(path: Path) -> CeilingsRecord:
    """Read and check one record. Raises LastgoodError, naming the file and the field, if it is not one."""
    again = "remove it, and `lastgood ceilings` or the workflow makes it again"
    what = f"{path}: not a ceilings record of version {CEILINGS_VERSION}"
    text = read_bytes(path, MOST_RECORD_BYTES, LastgoodError)
    found = parse_json(text, what, most_bytes=MOST_RECORD_BYTES, error=LastgoodError)
    version = found.get("ceilings_version") if isinstance(found, dict) else None
    if is_whole(version, 0, CEILINGS_VERSION - 1):
        raise LastgoodError(
            f"{path}: ceilings of version {version}, and this Lastgood reads version {CEILINGS_VERSION} "
            f"({_NEW_IN_VERSION}); {again}"
        )
    return parse_model(CeilingsRecord, text, what, most_bytes=MOST_RECORD_BYTES, advice=again, error=LastgoodError)


def cached_or_measured(
    path: Path,
    scratch: Path,
    machine: str,
    *,
    quick: bool = False,
    force: bool = False,
    peer: Peer | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> tuple[CeilingsRecord, bool]:
    """The ceilings of today in `path`, measured and written there if they are not there yet, or if `force` says so.

    Returns the record, and whether anything was measured just now. A damaged file at `path` is measured anew. A good
    record that only lacks `peer` keeps its other numbers.
    """
    if path.exists() and not force:
        try:
            found = load_ceilings(path)
        except LastgoodError as error:
            report(f"{error}; measuring anew")
        else:
            if found.still_good(machine, where_run(scratch), quick):
                if peer is None or any(known.address == peer.address for known in found.peers):
                    return found, False
                with _our_turn(report):
                    measured = _measure_peer(peer, quick, report)
                found = found.model_copy(update={"peers": [*found.peers, measured]})
                found.write(path)
                return found, True
    record = measure_ceilings(scratch, machine, quick=quick, peer=peer, report=report)
    record.write(path)
    return record, True


@contextmanager
def _our_turn(report: Callable[[str], None]) -> Iterator[None]:
    lock = machine_lock()
    lock.acquire(_LOCK_TIMEOUT_S, report)
    with lock:
        yield


def _measure_peer(peer: Peer, quick: bool, report: Callable[[str], None]) -> PeerCeilings:
    report(f"network to {peer.address}")
    return measure_peer(peer.host, peer.port, peer.token, NetworkPlan.peer(quick))


def measure_ceilings(
    scratch: Path,
    machine: str,
    *,
    quick: bool = False,
    peer: Peer | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> CeilingsRecord:
    """Measure disk, memory, network and device copies on an otherwise idle machine; waits its turn to measure.

    `scratch` is made if it is not there. It takes about 25 seconds at most (`quick`: two or three), and 10 more with a
    `peer`; `report` is told each stage, and whom the machine lock waits for. Raises ConfigError where `scratch` is in
    memory, StorageError where it is full or not writable, and LastgoodError where the peer does not answer.
    """
    refuse_memory_filesystem(scratch)
    with _our_turn(report):
        begin = time.perf_counter()
        # First, so that a peer that does not answer is known before the rest has been measured.
        peers = [_measure_peer(peer, quick, report)] if peer is not None else []
        report("disk")
        disk = measure_disk(scratch, DiskPlan.quick() if quick else DiskPlan())
        report("memory copy")
        memory = measure_memory_copy(32 * MIB if quick else 256 * MIB, repetitions=3 if quick else 7)
        report("loopback")
        loopback = measure_loopback(NetworkPlan.quick() if quick else NetworkPlan())
        device_facts: dict[str, float] = {}
        device = None
        if cuda_devices() and importlib.util.find_spec("torch") is not None:
            report("device copies")
            device, device_facts = measure_device_copies(32 * MIB if quick else 256 * MIB)
        wall_s = time.perf_counter() - begin
    return CeilingsRecord(
        machine=machine,
        measured_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        wall_s=wall_s,
        quick=quick,
        where=where_run(scratch),
        disk=disk,
        memory_copy=memory,
        memory_copy_bytes_per_s=max(curve.median_bytes_per_s for curve in memory),
        loopback=loopback,
        peers=peers,
        device=device,
        **device_facts,
    )


def measure_memory_copy(size_bytes: int, repetitions: int) -> list[CopyCurve]:
    """Copy `size_bytes` from one buffer to another, by one thread and by as many as this process may use."""
    usable = psutil.virtual_memory().available // 4
    size_bytes = max(MIB, min(size_bytes, usable) // MIB * MIB)
    # Written before they are timed: the first touch of a page costs several times the copy.
    source = np.full(size_bytes, 1, dtype=np.uint8)
    target = np.full(size_bytes, 2, dtype=np.uint8)
    curves = []
    for threads in sorted({1, usable_cores()}):
        edges = [size_bytes * part // threads // 4096 * 4096 for part in range(threads)] + [size_bytes]
        pairs = [(target[low:high], source[low:high]) for low, high in itertools.pairwise(edges)]
        with ThreadPoolExecutor(threads) as pool:
            _copy_all(pool, pairs)
            rates = [size_bytes / _copy_all(pool, pairs) for _ in _budgeted(repetitions, _COPY_BUDGET_S)]
        curves.append(CopyCurve(threads=threads, bytes_per_s=rates, median_bytes_per_s=statistics.median(rates)))
    return curves


def _copy_all(pool: ThreadPoolExecutor, pairs: list[tuple[np.ndarray, np.ndarray]]) -> float:
    begin = time.perf_counter()
    for finished in [pool.submit(np.copyto, target, source) for target, source in pairs]:
        finished.result()
    return time.perf_counter() - begin


def _budgeted(repetitions: int, budget_s: float) -> Iterator[int]:
    """Count repetitions; after `budget_s` stop at three, so that a slow machine costs bounded time."""
    begin = time.perf_counter()
    for repetition in range(repetitions):
        if repetition >= 3 and time.perf_counter() - begin > budget_s:
            return
        yield repetition


def measure_device_copies(size_bytes: int) -> tuple[str | None, dict[str, float]]:
    """Copy between the first CUDA device and host memory, both ways, pinned and pageable.

    Returns the device's name and the four medians, named as in CeilingsRecord; (None, {}) where CUDA does not start.
    """
    try:
        import torch
    except (ImportError, OSError):
        # A broken torch is no reason to lose the disk's numbers; a CUDA run's bound then asks for a new measurement.
        return None, {}
    if not torch.cuda.is_available():
        return None, {}
    on_device = torch.ones(size_bytes, dtype=torch.uint8, device="cuda")
    facts = {}
    for kind, pinned in (("pinned", True), ("pageable", False)):
        on_host = torch.ones(size_bytes, dtype=torch.uint8, pin_memory=pinned)
        for name, target, source in (
            ("device_to_host", on_host, on_device),
            ("host_to_device", on_device, on_host),
        ):
            rates = []
            for _ in _budgeted(6, _COPY_BUDGET_S):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                target.copy_(source, non_blocking=True)
                torch.cuda.synchronize()
                rates.append(size_bytes / (time.perf_counter() - begin))
            # The first copy of a pair pays for set-up.
            facts[f"{name}_{kind}_bytes_per_s"] = statistics.median(rates[1:])
    return torch.cuda.get_device_name(), facts
