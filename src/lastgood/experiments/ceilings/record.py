"""The record of what a machine can do at best: disk, memory, network and, with CUDA, device copies."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from lastgood.errors import LastgoodError
from lastgood.experiments.ceilings.disk import DiskCeilings
from lastgood.experiments.ceilings.network import LoopbackCeilings, PeerCeilings
from lastgood.experiments.records.base import MOST_RECORD_BYTES, WhereRun
from lastgood.files import write_result
from lastgood.models import FrozenModel
from lastgood.text import is_whole, parse_json, parse_model, read_bytes

__all__ = ["CEILINGS_VERSION", "CeilingsRecord", "CopyCurve", "load_ceilings"]

CEILINGS_VERSION: Literal[2] = 2
_NEW_IN_VERSION = "it has the network, and the spread of the best disk pattern"


def _moment(text: str) -> str:
    datetime.fromisoformat(text)
    return text


class CopyCurve(FrozenModel):
    """Copies of one kind, one value per repetition."""

    threads: int
    bytes_per_s: list[float]
    """Bytes copied per second (each is read once and written once)."""
    median_bytes_per_s: float


class CeilingsRecord(FrozenModel):
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
    """The CUDA device, if there is one and torch is installed."""
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
        """What this machine sends to its slowest measured peer; None if no peer was measured."""
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
        """Write atomically: a reader sees the complete record or none."""
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
