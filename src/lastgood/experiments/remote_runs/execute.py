"""Starts an S3 server and the ranks of a run of remote checkpoints, and makes one record of what they did."""

from __future__ import annotations

import os
import random
import shutil
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from lastgood.checkpointers.rank_directory import rank_directory
from lastgood.cluster.hostfile import Host, Hostfile
from lastgood.errors import LastgoodError
from lastgood.experiments.dcp_runs.server import OWN_BUCKET, RunningServer, own_server
from lastgood.experiments.machine.exclusive import exclusive_machine
from lastgood.experiments.machine.facts import where_run
from lastgood.experiments.machine.page_cache import forget_cached_pages
from lastgood.experiments.records.remote import WAYS, ComingBack, RemoteRecord, RemoteSpec, Way
from lastgood.experiments.remote_runs.order import RemoteOrder, RemoteResult, Task
from lastgood.experiments.runs.logs import keep_logs_of_failure
from lastgood.experiments.services.place import Place
from lastgood.text import read_model
from lastgood.units import MIB

__all__ = ["execute_remote"]

Report = Callable[[str], None]
_TASK_S: Final = 4 * 3600.0
_MOST_BYTES: Final = 64 * MIB


def execute_remote(spec: RemoteSpec, _data_dir: Path, scratch: Path, logs: Path, report: Report) -> RemoteRecord:
    """Measure one part in all its ways, and return the record.

    Waits for this machine's turn. Raises ConfigError if the S3 server is not installed; LaunchError, with its last
    lines, for a rank that fails: its log is in `logs` then.
    """
    with exclusive_machine(spec, scratch.absolute(), report) as mine:
        report("starting an S3 server")
        url = f"s3://{OWN_BUCKET}/remote"
        with own_server(mine.folder / "server", url) as server, keep_logs_of_failure(mine.folder, logs, report, dict):
            run = _Run(spec, mine.folder, url, server, report)
            result = run.returns() if spec.part == "return" else run.task(spec.part, 1)
        return RemoteRecord(
            spec=spec,
            started_at=mine.started_at,
            wall_s=time.monotonic() - mine.began_s,
            where=where_run(mine.folder.parent),
            server=server.name,
            state_bytes=result.state_bytes,
            raw_write_bytes_per_s=[written for written, _ in result.raw],
            raw_read_bytes_per_s=[read for _, read in result.raw],
            training=result.training,
            returns=result.returns,
            checkpoints=result.checkpoints,
        )


class _Run:
    def __init__(self, spec: RemoteSpec, folder: Path, url: str, server: RunningServer, report: Report) -> None:
        self._spec = spec
        self._folder = folder
        self._url = url
        self._server = server
        self._report = report
        self._tasks = 0

    def task(
        self,
        task: Task,
        ranks: int,
        checkpoints: str = "checkpoints",
        way: Way | None = None,
        digest: str = "",
    ) -> RemoteResult:
        """One task, in fresh processes."""
        self._tasks += 1
        result = self._folder / f"result-{self._tasks}.json"
        order = RemoteOrder(
            spec=self._spec,
            task=task,
            way=way,
            url=self._url,
            access=self._server.access,
            folder=str(self._folder / checkpoints),
            digest=digest,
            result=str(result),
            parent=os.getpid(),
        )
        here = Place("ssh", Hostfile((Host(socket.gethostname(), ranks),)), remote=None, link_bits_per_s=None)
        program = [sys.executable, "-m", "lastgood.experiments.remote_runs.rank", order.model_dump_json()]
        logs = self._folder / "ranks" / f"{self._tasks}-{task}"
        here.start(program, {"OMP_NUM_THREADS": str(self._spec.threads)}, logs, _TASK_S, self._report)
        what = "the result of a rank"
        return read_model(RemoteResult, result, what, most_bytes=_MOST_BYTES, error=LastgoodError)

    def returns(self) -> RemoteResult:
        """A job leaves checkpoints; then it comes back in each way in turn, in another order each round."""
        spec = self._spec
        left = self.task("leave", spec.ranks, "left")
        found: list[ComingBack] = []
        for number in range(spec.rounds):
            ways = list(WAYS["return"])
            random.Random(f"{spec.seed}/{spec.repetition}/{number}").shuffle(ways)
            for way in ways:
                self._report(f"round {number + 1} of {spec.rounds}: {way}")
                name = f"{way}-{number}"
                self._prepare(way, self._folder / name)
                ranks = spec.other_ranks if way == "other-ranks" else spec.ranks
                found += self.task("return", ranks, name, way, left.digest).returns
                shutil.rmtree(self._folder / name, ignore_errors=True)
        return left.model_copy(update={"returns": found})

    def _prepare(self, way: Way, folder: Path) -> None:
        """What the disk still has of the job, none of it in memory."""
        if way in ("disk", "lost-node"):
            shutil.copytree(self._folder / "left", folder)
            if way == "lost-node":
                shutil.rmtree(rank_directory(folder, self._spec.ranks - 1))
        os.sync()
        for kept in (folder, Path(self._server.watch.folder)):
            if kept.exists():
                forget_cached_pages(kept)
