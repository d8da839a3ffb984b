"""Runs over ranks as processes: their spec, and `lastgood run` of it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil

from lastgood.experiments.records.run import RunRecord
from lastgood.experiments.records.spec import RunSpec

COMMAND = [sys.executable, "-c", "from lastgood.cli import main; main()", "run"]
OPT = {
    "batch_size": 1,
    "sequence_length": 16,
    "layers": 2,
    "hidden": 32,
    "heads": 2,
    "feedforward": 64,
    "vocabulary": 512,
}


def spec_of(system: str = "pccheck", **changed: object) -> RunSpec:
    values = {
        "machine": "testbox",
        "scale": "laptop",
        "workload": "blob",
        "workload_options": {"megabytes": 3},
        "system": system,
        # One at a time: of two under way the newer may be durable first, and the older one is dropped then.
        "system_options": {"chunk_bytes": 65536, "max_in_flight": 1} if system == "pccheck" else {},
        "method": 1,
        "interval_steps": 2,
        "warmup_steps": 1,
        "measured_steps": 4,
        "threads": 1,
        "seed": 3,
        "repetition": 0,
        "ranks": 2,
        "parallel": "ddp",
    }
    return RunSpec.model_validate({**values, **changed})


class Job:
    def __init__(self, folder: Path, data_dir: Path) -> None:
        self.out = folder / "r0.json"
        self.scratch = folder / "scratch of runs"
        self.data_dir = data_dir
        self.log = folder / "log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, spec: RunSpec, *more: str) -> subprocess.Popen[bytes]:
        arguments = ["--spec", spec.canonical_json(), "--out", str(self.out), *more]
        arguments += ["--data-dir", str(self.data_dir), "--scratch", str(self.scratch)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([*COMMAND, *arguments], stdout=log, stderr=log)
        return self.process

    def finish(self, spec: RunSpec, *more: str) -> tuple[int, str]:
        code = self.start(spec, *more).wait(700)
        return code, self.log.read_text()

    def ranks(self) -> list[psutil.Process]:
        """The ranks' processes, once all of them are there."""
        assert self.process is not None
        deadline = time.monotonic() + 400
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()
            found = psutil.Process(self.process.pid).children()
            if len(found) == 2 and len(list(self.scratch.glob("run-*/checkpoints/rank-*"))) == 2:
                return sorted(found, key=lambda one: one.environ()["RANK"])
            time.sleep(0.05)
        raise AssertionError(f"no two ranks within 400 s: {self.log.read_text()}")

    @property
    def kept(self) -> Path:
        """Where logs go that outlive a run."""
        return self.out.with_suffix(".logs")

    def left(self) -> list[Path]:
        return list(self.scratch.glob("*")) if self.scratch.exists() else []


def proved(job: Job, spec: RunSpec, *more: str):
    code, output = job.finish(spec, "--check", *more)
    assert code == 0, output
    record = RunRecord.load(job.out)
    assert record.faults() == []
    assert record.spec == spec
    assert record.ranks is not None
    assert [one.rank for one in record.ranks.ranks] == list(range(spec.ranks))
    assert all(one.proof_equal for one in record.ranks.ranks)
    assert record.resources.bytes_written == sum(one.resources.bytes_written for one in record.ranks.ranks)
    assert job.left() == []
    return record
