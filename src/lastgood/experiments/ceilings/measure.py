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
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import psutil

from lastgood.errors import LastgoodError
from lastgood.experiments.ceilings.disk import DiskPlan, measure_disk
from lastgood.experiments.ceilings.network import NetworkPlan, PeerCeilings, measure_loopback, measure_peer
from lastgood.experiments.ceilings.record import CeilingsRecord, CopyCurve, load_ceilings
from lastgood.experiments.machine.facts import cuda_devices, usable_cores, where_run
from lastgood.experiments.machine.lock import machine_turn
from lastgood.mounts import refuse_memory
from lastgood.units import MIB

__all__ = ["Peer", "cached_or_measured", "measure_ceilings", "measure_device_copies", "measure_memory_copy"]

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

    Returns the record, and whether anything was measured just now. A damaged file at `path` is measured again. A good
    record that only lacks `peer` keeps its other numbers.
    """
    if path.exists() and not force:
        try:
            found = load_ceilings(path)
        except LastgoodError as error:
            report(f"{error}; measuring again")
        else:
            if found.still_good(machine, where_run(scratch), quick):
                if peer is None or any(known.address == peer.address for known in found.peers):
                    return found, False
                with machine_turn(report):
                    measured = _measure_peer(peer, quick, report)
                found = found.model_copy(update={"peers": [*found.peers, measured]})
                found.write(path)
                return found, True
    record = measure_ceilings(scratch, machine, quick=quick, peer=peer, report=report)
    record.write(path)
    return record, True


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
    `peer`; `report` is told each stage, and whom the machine lock waits for. Raises ConfigError if `scratch` is in
    memory, StorageError if it is full or not writable, and LastgoodError if the peer does not answer.
    """
    refuse_memory(scratch)
    with machine_turn(report):
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

    Returns the device's name and the four medians, named as in CeilingsRecord; (None, {}) if CUDA does not start.
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
