"""Measures iterations of one training: alone, mirrored, watched by a mirror node, and saved by other systems.

Trainers are nodes of a testbed of the measurement's own, one rank on each, and one more node watches. Needs root.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lastgood.cluster.testbed.net import namespace_of, program
from lastgood.cluster.testbed.testbed import Testbed, why_no_testbed
from lastgood.errors import ConfigError, LaunchError
from lastgood.experiments.flowcheck.node import MirrorNodeProcess
from lastgood.experiments.flowcheck.steps import read_steps
from lastgood.experiments.flowcheck.trainer import TrainerOrder
from lastgood.experiments.machine.lock import machine_turn
from lastgood.experiments.records.flowcheck import (
    ALONE,
    MIRRORED,
    WATCHED,
    TrainingBlock,
    TrainingResult,
    TrainingSettings,
    Variant,
)
from lastgood.files import read_end

__all__ = ["Ranks", "Trainers", "Way", "measure_training", "trainers_bed"]

Report = Callable[[str], None]
_WATCHED_NODE: Final = "vm1"
_PORT: Final = 29_500
_PATIENCE_S: Final = 300.0
_POLL_S: Final = 0.05


def measure_training(
    settings: TrainingSettings, seed: int, scratch: Path, logs: Path, report: Report
) -> TrainingResult:
    """Blocks of steps of each variant, in a shuffled order in each round. Raises ConfigError if none can be."""
    reason = why_no_testbed()
    if reason is not None:
        raise ConfigError(f"trainers are nodes of a testbed: {reason}")
    variants: list[Variant] = [ALONE, MIRRORED, WATCHED, *settings.systems]
    dice = random.Random(seed)
    blocks: list[TrainingBlock] = []
    folder = scratch.absolute() / f"flowcheck-{os.getpid()}"
    with machine_turn(report), trainers_bed(settings, folder, logs, report) as trainers:
        for round_number in range(settings.rounds):
            order = list(variants)
            dice.shuffle(order)
            for variant in order:
                block = trainers.block(variant, round_number)
                report(f"round {round_number + 1}, {variant}: {1000 * block.median_s:.0f} ms an iteration")
                blocks.append(block)
    return TrainingResult(blocks=blocks)


@contextmanager
def trainers_bed(settings: TrainingSettings, folder: Path, logs: Path, report: Report) -> Iterator[Trainers]:
    """Trainers on a testbed that is gone at the end. `folder` is for checkpoints, and gone as well."""
    report(f"making a testbed of {settings.ranks} trainers and a mirror node")
    name = f"fc{os.getpid()}"
    try:
        with Testbed.up(settings.ranks + 1, name=name, rate=settings.rate, guarded=True) as bed:
            yield Trainers(bed, settings, folder, logs.absolute() / f"flowcheck-{os.getpid()}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Trainers:
    """One rank on each node of a testbed but the last, which watches the first."""

    def __init__(self, bed: Testbed, settings: TrainingSettings, folder: Path, logs: Path) -> None:
        self._bed, self._settings, self._folder, self._logs = bed, settings, folder, logs
        self._nodes = bed.node_names[: settings.ranks]
        self._watcher = bed.node_names[settings.ranks]
        self._runs = self._starts = 0
        logs.mkdir(parents=True, exist_ok=True)

    def block(self, variant: Variant, round_number: int) -> TrainingBlock:
        """Train once, from the start, in one way. Raises LaunchError with the last words of a rank that fails."""
        with self.way(variant) as way:
            order = way.order(self._settings.warmup + self._settings.steps)
            with self.started(order, way.name) as ranks:
                ranks.wait()
            held = None if way.node is None else way.node.wait_held(order.steps)
            mirrored = variant in (MIRRORED, WATCHED)
            copies = sum(one.frames for one in self._bed.count_mirrored(self._watcher)) if mirrored else None
            seconds = [step.seconds for step in read_steps(Path(order.steps_file)).steps]
        return TrainingBlock(
            variant=variant,
            round=round_number,
            iteration_s=seconds[self._settings.warmup :],
            mirrored_frames=copies,
            held_step=held,
        )

    @contextmanager
    def way(self, variant: Variant) -> Iterator[Way]:
        """All that is beside the trainers: a mirror, its node, and a folder, gone at the end."""
        self._runs += 1
        place = self._folder / f"run{self._runs}"
        place.mkdir(parents=True)
        try:
            with ExitStack() as stack:
                if variant in (MIRRORED, WATCHED):
                    self._bed.mirror([_WATCHED_NODE], self._watcher)
                    stack.callback(self._bed.unmirror, self._watcher)
                node = None
                if variant == WATCHED:
                    node = stack.enter_context(
                        MirrorNodeProcess(self._bed, self._watcher, _WATCHED_NODE, self._settings, place, self._logs)
                    )
                system = None if variant in (ALONE, MIRRORED, WATCHED) else variant
                yield Way(f"run{self._runs}-{variant}", place, system, node, self._settings)
        finally:
            shutil.rmtree(place, ignore_errors=True)

    @contextmanager
    def started(self, order: TrainerOrder, name: str) -> Iterator[Ranks]:
        """All ranks; they are killed at the end, if they have not ended."""
        self._starts += 1
        environment = {
            **os.environ,
            "MASTER_ADDR": self._bed.address(self._nodes[0]),
            "MASTER_PORT": str(_PORT + self._starts % 100),
            "WORLD_SIZE": str(len(self._nodes)),
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": str(order.threads),
        }
        text = order.model_dump_json()
        processes: list[subprocess.Popen[bytes]] = []
        paths = [self._logs / f"{name}-{self._starts}-rank{rank}.log" for rank in range(len(self._nodes))]
        ranks = Ranks(processes, paths)
        try:
            for rank, (node, path) in enumerate(zip(self._nodes, paths, strict=True)):
                inside = [program("ip"), "netns", "exec", namespace_of(self._bed.name, node), sys.executable]
                command = [*inside, "-m", "lastgood.experiments.flowcheck.trainer", text]
                own = {**environment, "RANK": str(rank)}
                with path.open("wb") as log:
                    processes.append(subprocess.Popen(command, env=own, stdout=log, stderr=subprocess.STDOUT))
            yield ranks
        finally:
            ranks.kill()


@dataclass(frozen=True)
class Way:
    """One way of training."""

    name: str
    place: Path
    system: str | None
    node: MirrorNodeProcess | None
    settings: TrainingSettings

    def order(self, steps: int, *, restore: bool = False, life: int = 0) -> TrainerOrder:
        """For the ranks of one life."""
        return TrainerOrder(
            shape=self.settings.shape,
            steps=steps,
            threads=self.settings.threads,
            system=self.system,
            directory=str(self.place / "checkpoints"),
            restore=restore,
            node=None if self.node is None or not restore else self.node.address,
            token_file=None if self.node is None else str(self.node.token_file),
            steps_file=str(self.place / f"steps{life}"),
            parent=os.getpid(),
        )


@dataclass(frozen=True)
class Ranks:
    """Processes of one training."""

    processes: Sequence[subprocess.Popen[bytes]]
    logs: Sequence[Path]

    def check(self) -> bool:
        """Whether one is still there. Raises LaunchError with the last words of one that failed."""
        for rank, process in enumerate(self.processes):
            if process.poll():
                words = read_end(self.logs[rank], 2000).decode(errors="replace").strip()
                raise LaunchError(f"rank {rank} of the watched training ended with {process.returncode}: {words}")
        return any(process.poll() is None for process in self.processes)

    def wait(self) -> None:
        """Until all have ended well. Raises LaunchError otherwise."""
        end = time.monotonic() + _PATIENCE_S
        while self.check():
            if time.monotonic() > end:
                raise LaunchError(f"the training did not end within {_PATIENCE_S:g} s; its logs: {self.logs[0].parent}")
            time.sleep(_POLL_S)

    def kill(self) -> None:
        """SIGKILL to all, at the same moment."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
