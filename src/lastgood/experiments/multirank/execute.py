"""One run over several ranks: fresh processes on all hosts measure, others restore, and all of it makes one record.

The parent trains nothing. It holds this machine's turn to measure; on other machines each host's first rank takes that
machine's own (hosts that share this kernel, as a testbed's nodes, share this turn).
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, TypeVar

from lastgood.errors import ConfigError, HostError, LastgoodError, LaunchError
from lastgood.experiments.machine.exclusive import exclusive_machine
from lastgood.experiments.machine.facts import boot_id, where_run
from lastgood.experiments.multirank.capacity import check_room
from lastgood.experiments.multirank.order import RankOrder, kill_moments, killed_path, result_path
from lastgood.experiments.multirank.results import (
    AfterKill,
    MeasuredRank,
    RestoredRank,
    merge_clocks,
    merge_counts,
    merge_kills,
    merge_proofs,
    merge_ranks,
    merge_resources,
    merge_workloads,
)
from lastgood.experiments.records.run import RunRecord
from lastgood.experiments.records.spec import RunSpec
from lastgood.experiments.runs.logs import Logs, fetch_logs, keep_logs_of_failure
from lastgood.experiments.services.place import Place, RankHosts, find_place
from lastgood.experiments.services.registry import services_of
from lastgood.experiments.services.service import run_services
from lastgood.experiments.systems.over_ranks import why_no_deepspeed, why_not_over_ranks, writers_of
from lastgood.text import parse_model, read_bytes

__all__ = ["execute_ranks"]

Report = Callable[[str], None]
Phase = Literal["measure", "live", "restore"]
_Result = TypeVar("_Result", MeasuredRank, AfterKill, RestoredRank)

_PHASE_S: Final = 24 * 3600.0
"""For all ranks of one launch. A rank that hangs is found earlier, by the others' waits for it (`COLLECTIVE_S`)."""
_FETCH_S: Final = 120.0
_MAX_RESULT_BYTES: Final = 64 << 20


def execute_ranks(
    spec: RunSpec, data_dir: Path, scratch: Path, logs: Path, report: Report, given: RankHosts
) -> RunRecord:
    """Measure `spec` on all its ranks and return their one record. See `lastgood.experiments.runs.execute.execute`.

    `data_dir` and `scratch` are folders of the same names on every host. Raises HostError for one that has no room for
    its ranks; LastgoodError of a rank that failed, with its host, its last lines and its log, which is in `logs` then.
    """
    problem = why_no_deepspeed(spec.parallel) or why_not_over_ranks(
        spec.workload, spec.system, spec.parallel, spec.ranks, spec.nodes
    )
    if problem is not None:
        raise ConfigError(f"{spec.title()}: {problem}")
    scratch = scratch.absolute()
    with exclusive_machine(spec, scratch, report) as mine, find_place(spec, given, report) as place:
        check_room(spec, place, scratch, report)
        run = _Run(spec, data_dir.absolute(), mine.folder, place, report)
        try:
            with keep_logs_of_failure(mine.folder, logs, report, run.logs_elsewhere):
                return run.record(mine.started_at, mine.began_s)
        finally:
            run.tidy()


class _Run:
    def __init__(self, spec: RunSpec, data_dir: Path, folder: Path, place: Place, report: Report) -> None:
        self.spec = spec
        self.data_dir = data_dir
        self.folder = folder
        self.place = place
        self.report = report
        self._watched = report
        """Checks the services too; only while they run."""
        self.writers = writers_of(spec.system, spec.parallel)
        self.services = services_of(spec)

    def record(self, started_at: str, began: float) -> RunRecord:
        """All launches, and what they make together."""
        spec = self.spec
        restored: list[RestoredRank] = []
        incarnations: list[list[AfterKill]] = []
        moments = kill_moments(spec)
        with run_services(self.services, self.folder, self.report, self.place) as services:
            self._watched = services.watched(self.report)
            measured = self._launch("measure", MeasuredRank, kill_after_steps=next(iter(moments), None))
            step_s = measured[0].clocks.elapsed_s / measured[0].clocks.measured_steps
            for incarnation in range(1, spec.kills + 1):
                after = moments[incarnation] if incarnation < spec.kills else None
                incarnations.append(
                    self._launch("live", AfterKill, incarnation=incarnation, kill_after_steps=after, step_s=step_s)
                )
            last: Sequence[MeasuredRank | AfterKill] = incarnations[-1] if incarnations else measured
            live = [one.live for one in last if one.live is not None]
            if len(live) == len(measured):
                restored = self._launch("restore", RestoredRank)
        proof, equal = merge_proofs(live, restored) if restored else (None, [])
        return RunRecord(
            spec=spec,
            started_at=started_at,
            wall_s=time.monotonic() - began,
            where=where_run(self.folder.parent),
            workload=merge_workloads([one.workload for one in measured]),
            clocks=merge_clocks([one.clocks for one in measured]),
            resources=merge_resources([one.resources for one in measured]),
            counts=merge_counts([one.counts for one in measured]),
            storage=measured[0].storage,
            proof=proof,
            notes=list(dict.fromkeys(note for one in measured for note in one.notes)),
            ranks=merge_ranks(
                measured,
                restored,
                equal,
                self.writers,
                launcher="local" if self.place.remote is None else self.place.launcher,
                hosts=list(self.place.hosts.names),
                link_bits_per_s=self.place.link_bits_per_s,
            ),
            shadows=measured[0].shadows,
            failures=merge_kills(moments, incarnations),
            pairs=measured[0].pairs,
        )

    def logs_elsewhere(self) -> Mapping[str, Logs | HostError]:
        """Logs of hosts whose ranks do not write to a disk that this machine sees. Slurm's nodes must do that."""
        if self.place.remote is None or self.place.launcher == "srun":
            return {}
        here = {path.name for path in (self.folder / "ranks").glob("*/rank-*.log")}
        apart = [host for rank, host in enumerate(self.place.host_of_rank) if f"rank-{rank:05d}.log" not in here]
        return fetch_logs(self.place.remote, list(dict.fromkeys(apart)), self.folder)

    def tidy(self) -> None:
        """Remove what the run left on hosts that do not share this machine's disk; hosts that fail are reported."""
        if self.place.remote is None:
            return
        left = ["checkpoints", "results", "ranks", *(service.directory for service in self.services)]
        command = ["rm", "-rf", "--", *(str(self.folder / name) for name in left)]
        for host, answer in self.place.remote.run_everywhere(self.place.hosts.names, command, _FETCH_S).items():
            if isinstance(answer, HostError) or answer.rc:
                self.report(f"{host}: {self.folder} may be left there: {answer}")

    def _launch(
        self,
        phase: Phase,
        kind: type[_Result],
        *,
        incarnation: int = 0,
        kill_after_steps: float | None = None,
        step_s: float = 0.0,
    ) -> list[_Result]:
        token = secrets.token_hex(8)
        order = RankOrder(
            spec=self.spec,
            phase=phase,
            incarnation=incarnation,
            kill_after_steps=kill_after_steps,
            step_s=step_s,
            folder=str(self.folder),
            data_dir=str(self.data_dir),
            token=token,
            boot_id=boot_id(),
            parent=os.getpid() if self.place.remote is None else None,
        )
        self._watched(f"{order.name}: starting {self.spec.ranks} ranks on {', '.join(self.place.hosts.names)}")
        program = [sys.executable, "-m", "lastgood.experiments.multirank.process", order.model_dump_json()]
        env = {"OMP_NUM_THREADS": str(self.spec.threads)}
        try:
            self.place.start(program, env, self.folder / "ranks" / order.name, _PHASE_S, self._watched)
        except LaunchError:
            if kill_after_steps is None or not self._was_killed(token):
                raise
        else:
            if kill_after_steps is not None:
                raise LastgoodError(f"{self.spec.title()}: {order.name}: the ranks ended before they were killed")
        return [self._fetch(order.name, rank, host, token, kind) for rank, host in enumerate(self.place.host_of_rank)]

    def _was_killed(self, token: str) -> bool:
        """Whether some rank was killed as its order says; the others then end with it, one way or another."""
        for rank, host in enumerate(self.place.host_of_rank):
            path = killed_path(self.folder, token, rank)
            if path.exists():
                return True
            if self.place.remote is not None and not self.place.remote.run(host, ["ls", str(path)], _FETCH_S).rc:
                return True
        return False

    def _fetch(self, launch: str, rank: int, host: str, token: str, kind: type[_Result]) -> _Result:
        path = result_path(self.folder, launch, rank)
        if path.exists():
            text = read_bytes(path, _MAX_RESULT_BYTES, LastgoodError)
        elif self.place.remote is not None:
            text = self.place.remote.run(host, ["cat", str(path)], _FETCH_S, max_output_bytes=_MAX_RESULT_BYTES).stdout
        else:
            text = b""
        what = f"{host}: rank {rank} left no result at {path}"
        result = parse_model(kind, text, what, most_bytes=_MAX_RESULT_BYTES, error=LastgoodError)
        if (result.token, result.rank) != (token, rank):
            raise LastgoodError(f"{host}: {path} is of rank {result.rank} of another launch")
        return result
