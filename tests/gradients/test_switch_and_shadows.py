"""Switch mode as a whole: a ring carries the gradients, the switch copies them to real shadows, and they give back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lastgood.gradients.protocol.client import choose
from lastgood.gradients.switch.faults import FaultPlan
from lastgood.gradients.switch.forward import CopySettings
from lastgood.gradients.switch.relay import Switch, SwitchLink
from lastgood.tokens import read_token
from lastgood.wire.records import DType
from lastgood.wire.ring_comm import Place, RingComm
from lastgood.wire.ring_link import listen_ring
from tests.gradients.support.scripted_trainer import Trainer
from tests.gradients.support.shadow_processes import ShadowThread, shadow_threads
from tests.wire.support.ring_helpers import WAIT_S, together


class RingTrainer(Trainer):  # type: ignore[misc]  # the script has no types
    """The scripted trainer, whose ranks reduce by a ring through a switch and send nothing to shadows themselves."""

    def open_ring(self, settings: CopySettings) -> None:
        listeners = [listen_ring("127.0.0.1") for _ in range(self.ranks)]
        ports = [listener.getsockname()[1] for listener in listeners]
        links = [SwitchLink("127.0.0.1:0", f"127.0.0.1:{ports[(rank + 1) % self.ranks]}") for rank in range(self.ranks)]
        self.switch = Switch(links, self.addresses, settings)

        def make(rank: int) -> RingComm:
            return RingComm(
                rank,
                self.ranks,
                listener=listeners[rank],
                next_address=self.switch.addresses[rank],
                token=self.token,
                job=self.job,
                epoch=self.incarnation,
                layout=self.layout.digest,
                timeout_s=WAIT_S,
                segment_bytes=64,
            )

        self.comms = together([lambda rank=rank: make(rank) for rank in range(self.ranks)])  # type: ignore[misc]
        places, start = [], 0
        for one in self.layout.parameters:
            places.append(Place(start, one.nbytes, one.bucket, one.offset))
            start += one.nbytes
        self.plans = [comm.plan(start // 4, DType.float32, places) for comm in self.comms]

    def connect(self, shadow: int, adopt: int | None = None, data: bool = False) -> None:
        super().connect(shadow, adopt, data)

    def send_gradients(self, iteration: int, skip: Any = (), end: bool = True) -> None:
        """Each rank has its own part; what the optimizer gets is the ring's sum."""
        flat = torch.cat([parameter.grad.reshape(-1) for parameter in self.parameters])
        parts = [flat * (rank + 1) for rank in range(self.ranks)]

        def run(comm: RingComm) -> None:
            comm.all_reduce(self.plans[comm.rank], parts[comm.rank].data_ptr(), iteration)
            comm.end(iteration)

        together([lambda comm=comm: run(comm) for comm in self.comms])  # type: ignore[misc]
        at = 0
        for parameter in self.parameters:
            parameter.grad.copy_(parts[0][at : at + parameter.numel()].reshape(parameter.shape))
            at += parameter.numel()

    def close(self) -> None:
        for comm in self.comms:
            comm.close()
        self.switch.close()
        super().close()


@pytest.fixture
def shadows(tmp_path: Path) -> Iterator[list[ShadowThread]]:
    with shadow_threads(tmp_path, 2) as started:
        yield started


def trainer_of(folder: Path, shadows: list[ShadowThread], faults: FaultPlan | None = None) -> RingTrainer:
    token = read_token(folder / "token")
    trainer = RingTrainer([shadow.address for shadow in shadows], token, ranks=3)
    trainer.fence()
    trainer.open_ring(CopySettings(token, timeout_s=WAIT_S, faults=faults))
    trainer.start()
    return trainer


def given_back(trainer: RingTrainer) -> tuple[int, str]:
    other = Trainer(trainer.addresses, trainer.token, ranks=3)
    choice = choose(other.fence(), None)
    other.load(choice)
    other.close()
    return choice.iteration, other.digest()


def test_shadows_behind_a_switch_give_back_the_trainers_to_the_bit(tmp_path: Path, shadows: list[ShadowThread]) -> None:
    trainer = trainer_of(tmp_path, shadows)
    for number in range(6):
        trainer.iterate(skip_update=number == 3)
    digest = trainer.digest()
    assert trainer.switch.counters()["copies"]["sent_bytes"] > 5 * 4 * sum(one.numel() for one in trainer.parameters)
    trainer.close()
    assert given_back(trainer) == (6, digest)


@pytest.mark.parametrize("fault", ["loss", "corrupt", "truncate"])
def test_faults_on_the_way_tear_a_bucket_and_never_the_model(
    tmp_path: Path, shadows: list[ShadowThread], fault: str
) -> None:
    trainer = trainer_of(tmp_path, shadows, FaultPlan(seed=5, **{fault: 0.02}))

    def healed() -> bool:
        """Whether all shadows hold this iteration; torn buckets are seeded as rank 0 would."""
        torn = {
            (one.iteration, bucket)
            for shadow in range(2)
            for one in trainer.of_kind(shadow, "torn")
            for bucket in one.buckets
        } - done
        for iteration, bucket in torn:
            done.add((iteration, bucket))
            trainer.seed(bucket, trainer.iteration, wait=False)
        return all(
            any(one.iteration >= trainer.iteration for one in trainer.of_kind(shadow, "have")) for shadow in range(2)
        )

    done: set[tuple[int, int]] = set()
    for _ in range(12):
        trainer.iterate(complete=False)
        assert wait_until(healed), f"iteration {trainer.iteration}: heard {trainer.heard}"
        trainer.complete()
    assert trainer.switch.counters()["copies"]["faults"] > 0
    digest = trainer.digest()
    trainer.close()
    assert given_back(trainer) == (12, digest)


def wait_until(true: Callable[[], bool], seconds: float = WAIT_S) -> bool:
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
