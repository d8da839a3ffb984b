"""Made-up run records and ceilings, for tests of everything that reads them."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from lastgood.experiments.ceilings.disk import DiskCeilings, DiskPoint
from lastgood.experiments.ceilings.network import LoopbackCeilings, NetworkPoint
from lastgood.experiments.ceilings.record import CeilingsRecord, CopyCurve
from lastgood.experiments.records.base import WhereRun
from lastgood.experiments.records.run import Clocks, Counts, Proof, Resources, RunRecord, WorkloadFacts
from lastgood.experiments.records.spec import RunSpec

MIB = 1 << 20


def make_record(
    system: str = "pccheck",
    interval_steps: int = 10,
    repetition: int = 0,
    *,
    iterations_per_s: float = 5.0,
    measured_steps: int = 40,
    state_bytes: int = 100 * MIB,
    drain_s: float = 0.0,
    proof: bool | None = None,
    **overrides: Any,
) -> RunRecord:
    """A consistent record. `proof`: True and False for one that held and did not, None for a run without one.

    `overrides` replace single fields of the record's parts, wherever a field of that name is: ``workload="bert"``,
    ``git_revision="abc"``, ``stall_save_s=0.5``, ``durable=1``. An unknown name is an error.
    """
    if system == "none":
        interval_steps = 0
    started = measured_steps // interval_steps if interval_steps else 0
    elapsed_s = measured_steps / iterations_per_s
    parts: dict[str, dict[str, Any]] = {
        "spec": {
            "machine": "testbox",
            "scale": "laptop",
            "workload": "vgg16",
            "workload_options": {"batch_size": 2},
            "system": system,
            "system_options": {"max_in_flight": 2, "writer_threads": 2} if system == "pccheck" else {},
            "method": 1,
            "interval_steps": interval_steps,
            "warmup_steps": 3,
            "measured_steps": measured_steps,
            "proof": proof is not None,
            "device": "cpu",
            "threads": 2,
            "seed": repetition,
            "repetition": repetition,
            "data": None,
            "drain_each": False,
            "shadows": 2 if system == "checkmate" else 0,
        },
        "where": {
            "cpu": "Example CPU",
            "cores": 2,
            "memory_bytes": 24 << 30,
            "gpu": None,
            "kernel": "6.1",
            "scratch_path": "/scratch",
            "scratch_filesystem": "ext4",
            "scratch_device": "/dev/sda1",
            "versions": {"python": "3.11", "torch": "2.14.1"},
            "git_revision": "0123456789abcdef0123456789abcdef01234567",
            "git_dirty": False,
        },
        "facts": {
            "parameters": state_bytes // 8,
            "state_bytes": state_bytes,
            "state_tensors": 32,
            "data_name": "digits",
            "data_source": "scikit-learn",
            "data_sha256": "0" * 64,
            "losses": [2.3] * measured_steps,
        },
        "clocks": {
            "measured_steps": measured_steps,
            "elapsed_s": elapsed_s,
            "iterations_per_s": iterations_per_s,
            "durable_iterations_per_s": measured_steps / (elapsed_s + drain_s),
            "step_s": [1 / iterations_per_s] * measured_steps,
            "hide_s": 0.6 / iterations_per_s,
            "stall_save_s": 0.1 * started,
            "stall_update_s": 0.01 * started,
            "persist_s": [0.25] * started,
            "drain_s": drain_s,
        },
        "resources": {
            "peak_rss_bytes": 1 << 30,
            "peak_device_bytes": 0,
            "cpu_s": 2 * elapsed_s,
            "bytes_written": started * state_bytes,
        },
        "counts": {"started": started, "durable": started, "superseded": 0, "failed": 0, "skipped": 0},
        "record": {
            "started_at": "2026-01-02T03:04:05+00:00",
            "wall_s": elapsed_s + 10,
            "storage": {"direct_io": True} if system == "pccheck" else {},
            "notes": [],
        },
    }
    for name, value in overrides.items():
        owners = [part for part in parts.values() if name in part]
        if not owners:
            raise TypeError(f"make_record: no part of a record has a field {name!r}")
        for part in owners:
            part[name] = value
    held = None
    if proof is not None:
        held = Proof(
            step=40,
            restored_step=40,
            digest_live="a" * 32,
            digest_restored=("a" if proof else "b") * 32,
            equal=proof,
            restore_s=0.125,
            next_losses_live=[2.0],
            next_losses_restored=[2.0 if proof else 2.5],
        )
    return RunRecord(
        spec=RunSpec(**parts["spec"]),
        where=WhereRun(**parts["where"]),
        workload=WorkloadFacts(**parts["facts"]),
        clocks=Clocks(**parts["clocks"]),
        resources=Resources(**parts["resources"]),
        counts=Counts(**parts["counts"]),
        proof=held,
        **parts["record"],
    )


def place_record(record: RunRecord, results: Path) -> Path:
    """Write `record` where its spec says, below `results`."""
    path = results / record.spec.record_path()
    record.write(path)
    return path


def make_ceilings(
    *, write_bytes_per_s: float = 1e9, copy_bytes_per_s: float = 1e10, machine: str = "testbox", **overrides: Any
) -> CeilingsRecord:
    """Ceilings with one point on each curve; `overrides` replace fields of CeilingsRecord."""

    def point(rate: float) -> DiskPoint:
        return DiskPoint(jobs=2, block_bytes=4 * MIB, bytes_per_s=[rate] * 3, median_bytes_per_s=rate)

    values: dict[str, Any] = {
        "machine": machine,
        "measured_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "wall_s": 9.0,
        "quick": False,
        "where": WhereRun(
            cpu="Example CPU",
            cores=2,
            memory_bytes=24 << 30,
            gpu=None,
            kernel="6.1",
            scratch_path="/scratch",
            scratch_filesystem="ext4",
            scratch_device="/dev/sda1",
            versions={"python": "3.11"},
            git_revision=None,
            git_dirty=None,
        ),
        "disk": DiskCeilings(
            direct_io=True,
            file_bytes=512 * MIB,
            write=[point(write_bytes_per_s)],
            read=[point(write_bytes_per_s / 2)],
            write_bytes_per_s=write_bytes_per_s,
            write_spread_bytes_per_s=(write_bytes_per_s, write_bytes_per_s),
            read_bytes_per_s=write_bytes_per_s / 2,
            read_spread_bytes_per_s=(write_bytes_per_s / 2, write_bytes_per_s / 2),
            fdatasync_s=[1e-4] * 3,
            median_fdatasync_s=1e-4,
        ),
        "memory_copy": [CopyCurve(threads=2, bytes_per_s=[copy_bytes_per_s] * 3, median_bytes_per_s=copy_bytes_per_s)],
        "memory_copy_bytes_per_s": copy_bytes_per_s,
        "loopback": LoopbackCeilings(
            points=[
                NetworkPoint(
                    direction="send", streams=2, message_bytes=MIB, bytes_per_s=[4e9] * 3, median_bytes_per_s=4e9
                )
            ],
            bytes_per_s=4e9,
            iperf3_bytes_per_s=None,
        ),
    }
    return CeilingsRecord(**{**values, **overrides})
