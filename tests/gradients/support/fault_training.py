"""Two ranks that train under Checkmate in threads of one process, and the same training by plain torch alone.

Only the sum over ranks is the test's own: everything from DDP's hook on is real, on each rank's own connections.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from lastgood.checkpointers.checkmate.system import Checkmate
from lastgood.state import state_digest
from tests.gradients.support.fault_net import Net

RANKS = 2
_MEET_S = 60.0
_here = threading.local()


# -- the training ------------------------------------------------------------------------------------------------------


class Training:
    """One rank's. `data` says which data it sees: what a life sees differs from what the next one does."""

    def __init__(self, kind: str, rank: int, seed: int = 0) -> None:
        self.rank, self.kind = rank, kind
        generator = torch.Generator().manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(9, 13), torch.nn.BatchNorm1d(13), torch.nn.Tanh(), torch.nn.Linear(13, 5)
        )
        self.parameters = list(self.model.parameters())
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
        if kind == "sgd":
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(
                self.parameters, lr=0.05, momentum=0.9, weight_decay=1e-3
            )
        else:
            self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, gamma=0.9)
        self.plain = {"step": 0, "seen": torch.zeros(3, dtype=torch.float64)}
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "plain": self.plain,
        }

    def backward(self, data: int) -> None:
        """Gradients of this rank's own batch."""
        generator = torch.Generator().manual_seed(100_000 * data + 10 * self.plain["step"] + self.rank)
        inputs = torch.randn(4, 9, generator=generator)
        (self.model(inputs) - 1).square().mean().backward()
        self.plain["seen"] += inputs.double().mean()

    def update(self, clip: Callable[..., Any]) -> None:
        """What follows the reduction."""
        if self.kind == "adamw clipped":
            clip(self.parameters, 0.5)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.plain["step"] += 1

    def digest(self) -> str:
        return state_digest(self.state)


class Oracle:
    """Digests of undisturbed runs, by torch alone. A run is a list of (data, first step that sees it)."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, tuple[tuple[int, int], ...]], tuple[list[Training], list[list[str]]]] = {}

    def digests(self, kind: str, run: Sequence[tuple[int, int]], step: int) -> list[str]:
        """Of both ranks, behind a step."""
        key = kind, tuple(run)
        if key not in self._runs:
            ranks = [Training(kind, rank) for rank in range(RANKS)]
            self._runs[key] = ranks, [[one.digest() for one in ranks]]
        ranks, found = self._runs[key]
        while len(found) <= step:
            data = [data for data, first in run if first <= len(found)][-1]
            for one in ranks:
                one.backward(data)
            for parts in zip(*(one.parameters for one in ranks), strict=True):
                gradients = [part.grad for part in parts]
                assert all(gradient is not None for gradient in gradients)
                mean = gradients[0] * (1 / RANKS) + gradients[1] * (1 / RANKS)
                for gradient in gradients:
                    gradient.copy_(mean)
            for one in ranks:
                one.update(torch.nn.utils.clip_grad_norm_)
            found.append([one.digest() for one in ranks])
        return found[step]


# -- ranks in threads --------------------------------------------------------------------------------------------------


class Meeting:
    """Where the ranks of one life wait for each other. `end` lets all of them fail there, as a dead rank does."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(RANKS)
        self._slots: list[Any] = [None] * RANKS

    def tell(self, value: Any) -> list[Any]:
        """What every rank has told, as torch.distributed's all_gather_object."""
        self._slots[_here.rank] = value
        self._barrier.wait(_MEET_S)
        told = list(self._slots)
        self._barrier.wait(_MEET_S)
        return told

    def end(self) -> None:
        self._barrier.abort()


class Reduced:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        self._future.set_result([tensor])

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return self._future


def _all_reduce(tensor: torch.Tensor, group: Any = None, async_op: bool = True) -> Reduced:
    del group, async_op
    told = _here.meeting.tell(tensor)
    total = told[0] + told[1]
    _here.meeting.tell(None)
    tensor.copy_(total)
    return Reduced(tensor)


@contextlib.contextmanager
def ranks_in_threads() -> Iterator[None]:
    """Let Checkmate take threads for ranks."""
    distributed = SimpleNamespace(get_world_size=lambda group: RANKS, all_reduce=_all_reduce)
    world = mock.Mock(side_effect=lambda: (_here.rank, RANKS))
    exchange = mock.Mock(side_effect=lambda *_: _here.meeting)
    restore = "lastgood.checkpointers.shadows.restore"
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch(f"{restore}.world_of_torch", world))
        stack.enter_context(mock.patch(f"{restore}.RankExchange", exchange))
        stack.enter_context(mock.patch("lastgood.gradients.tap.bucket.torch", SimpleNamespace(distributed=distributed)))
        yield


def on_all_ranks(work: Callable[[int], Any], meeting: Meeting) -> list[Any]:
    """Results of `work` on every rank, or the exception that it ended with."""
    results: list[Any] = [None] * RANKS

    def run(rank: int) -> None:
        _here.rank, _here.meeting = rank, meeting
        try:
            results[rank] = work(rank)
        except BaseException as error:
            results[rank] = error
            meeting.end()

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for rank, thread in enumerate(threads):
        thread.join(2 * _MEET_S)
        assert not thread.is_alive(), f"waited {2 * _MEET_S} s for rank {rank}"
    return results


class Bucket:
    """What DDP hands to its hook."""

    def __init__(self, index: int, parameters: list[torch.Tensor]) -> None:
        self._index, self._parameters = index, parameters
        self._buffer = torch.cat([parameter.grad.reshape(-1) for parameter in parameters if parameter.grad is not None])

    def index(self) -> int:
        return self._index

    def parameters(self) -> list[torch.Tensor]:
        return self._parameters

    def buffer(self) -> torch.Tensor:
        return self._buffer


def reduce_gradients(training: Training, checkpointer: Checkmate) -> None:
    """As DDP does behind a backward pass: the last parameters first, in two buckets, through the hook."""
    backward = training.parameters[::-1]
    for index, parameters in enumerate((backward[:3], backward[3:])):
        result = checkpointer.tap.reduce(Bucket(index, parameters)).wait()
        at = 0
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.copy_(result[at : at + parameter.numel()].reshape(parameter.shape))
            at += parameter.numel()


class Life:
    """The training's ranks from a start or restore until they are killed."""

    def __init__(self, kind: str, data: int, knobs: list[dict[str, Any]], directory: Any) -> None:
        self.data = data
        self.trainings = [Training(kind, rank) for rank in range(RANKS)]
        self.checkpointers = [Checkmate(directory, **knobs[rank]) for rank in range(RANKS)]
        for checkpointer in self.checkpointers:
            checkpointer.events_kept = None
        self.meeting = Meeting()
        self.step = 0
        self.killed = threading.Event()
        self.over = threading.Event()
        self.results: list[Any] = []
        self.lost: tuple[int, ...] = ()
        """Shadows without which it went on, as rank 0's last word says."""
        self.complete = 0
        """What rank 0 had last said to be complete."""
        self.floor = 0
        """Behind which step the newest seed was, as far as ranks had heard, or had sent one."""
        self._crashed: set[int | None] = set()
        self._thread: threading.Thread | None = None

    def start(self, restore: bool) -> None:
        """Begin, behind a restore or with step 0. Raises what the ranks raise."""

        def begin(rank: int) -> int:
            training, checkpointer = self.trainings[rank], self.checkpointers[rank]
            assert checkpointer.tap is not None
            restored = checkpointer.restore(training.state) if restore else 0
            checkpointer.start(training.state)
            return restored

        raise_first(results := on_all_ranks(begin, self.meeting))
        self.step = results[0]

    def train(self, steps: int, pace_s: float, save_every: int = 1) -> None:
        """Train in the background up to a step, or until killed, and let all saves settle."""

        def run(rank: int) -> None:
            training, checkpointer = self.trainings[rank], self.checkpointers[rank]
            while training.plain["step"] < steps and not self.killed.is_set():
                training.backward(self.data)
                reduce_gradients(training, checkpointer)
                training.update(checkpointer.clip_grad_norm_)
                if training.plain["step"] % save_every == 0 or training.plain["step"] == steps:
                    checkpointer.save(training.plain["step"])
                if rank == 0:
                    self.step = training.plain["step"]
                time.sleep(pace_s)

        def main() -> None:
            self.results = on_all_ranks(run, self.meeting)
            self.over.set()

        self._thread = threading.Thread(target=main, daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Return when all ranks have ended; they were killed, or have nothing more to do."""
        if self._thread is not None:
            self._thread.join(3 * _MEET_S)
            assert self.over.is_set()

    def durable(self, since_s: float) -> int:
        """The newest step, saved behind a moment, that any rank was told to be durable."""
        return max(
            (
                event.step
                for checkpointer in self.checkpointers
                for event in list(checkpointer.events)
                if event.outcome.value == "durable" and event.requested_s > since_s
            ),
            default=0,
        )

    def spilled(self) -> int:
        """The newest iteration that rank 0 knows to be spilled by all shadows."""
        life = self.checkpointers[0]._incarnation
        if life is None:
            return 0
        spilled = life.conductor.spilled
        return 0 if spilled is None else spilled.iteration

    def crash(self, net: Net, rank: int | None) -> None:
        """Cut one rank or all of them off for good, and note what was said until then."""
        life = self.checkpointers[0]._incarnation
        assert life is not None
        self._note_floor()
        with life.conductor._changed:
            if not self._crashed & {0, None}:
                self.lost, self.complete = life.conductor._state.lost, life.conductor._state.complete
            self._crashed.add(rank)
            net.crash(rank)
        self._note_floor()

    def _note_floor(self) -> None:
        for checkpointer in self.checkpointers:
            life = checkpointer._incarnation
            if life is not None:
                with life.conductor._changed:
                    state = life.conductor._state
                    sent = [one for known in state.shadows for one in known.on_the_way.values()]
                    self.floor = max([self.floor, state.floor, *sent])

    def facts(self) -> dict[str, Any]:
        return dict(self.checkpointers[0].storage_facts())

    def bury(self) -> None:
        """End the threads of ranks that were killed; nothing that they say gets anywhere."""
        for checkpointer in self.checkpointers:
            checkpointer._end_life()
            checkpointer.close()


def raise_first(results: list[Any]) -> None:
    """The error that the others only followed from, if there is one."""
    errors = [one for one in results if isinstance(one, BaseException)]
    for error in sorted(errors, key=lambda one: isinstance(one, threading.BrokenBarrierError)):
        raise error


def restore_afresh(kind: str, knobs: dict[str, Any], directory: Any) -> tuple[int, list[str]]:
    """What a new process would do: the step and the digests of all ranks. A failure changes nothing."""
    trainings = [Training(kind, rank, seed=1) for rank in range(RANKS)]
    before = [training.digest() for training in trainings]
    results = on_all_ranks(lambda rank: Checkmate(directory, **knobs).restore(trainings[rank].state), Meeting())
    if any(isinstance(one, BaseException) for one in results):
        assert [training.digest() for training in trainings] == before, "a failed restore changed the state"
        raise_first(results)
    assert len(set(results)) == 1, f"ranks restored steps {results}"
    return results[0], [training.digest() for training in trainings]
