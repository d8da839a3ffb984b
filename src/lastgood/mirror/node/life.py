"""One incarnation of a training, told to the shadow in this process: its beginning, its iterations, its end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from lastgood._lazy import torch
from lastgood.errors import CheckpointError, WaitTimeout
from lastgood.gradients.conductor.conductor import Conductor, ConductorSettings
from lastgood.gradients.layout.entries import Entry, Side
from lastgood.gradients.link.any_link import Identity
from lastgood.gradients.link.data_link import DataSettings
from lastgood.gradients.protocol.messages import Complete, Step
from lastgood.gradients.shadow.core import ShadowCore
from lastgood.gradients.trainer.parameters import PARAMETER, BucketCopy
from lastgood.gradients.trainer.rank_record import side_layout
from lastgood.mirror.node.layout import NodeLayout
from lastgood.mirror.node.link import Ear, LocalLink, local_link_maker
from lastgood.mirror.node.receiver import MirrorReceiver
from lastgood.mirror.node.weights import named_weights

__all__ = ["Life", "Start", "bucket_state"]

_log = logging.getLogger("lastgood.mirror")

_FOR_EVER_S = 1e9
"""There is no other shadow that could go on without this one."""
_NO_SOCKETS = DataSettings(1 << 20, 1 << 16, 1.0, 1.0)
_TICK_S = 0.02


@dataclass(frozen=True)
class Start:
    """What an incarnation begins with."""

    iteration: int
    """Updates before it."""
    adopt: bool
    """Whether the shadow stands there; otherwise `tensors` is all of the state."""
    tensors: Mapping[tuple[int, str], torch.Tensor]
    """By (layout index, key of `Entry`): parameters and the optimizer's state, each in memory order, contiguous."""


class Life:
    """Made by `Follower` for one incarnation of the shadow, which is fenced for it already."""

    def __init__(
        self,
        core: ShadowCore,
        ear: Ear,
        layout: NodeLayout,
        incarnation: int,
        start: Start,
        *,
        spill_every: int,
        wait_s: float,
        on_complete: Callable[[Complete], None],
    ) -> None:
        self._core = core
        self._layout = layout
        self.incarnation = incarnation
        self._start = start
        self._spill_every = spill_every
        self._wait_s = wait_s
        self._saves = 0
        self._told: int | None = None
        """The newest iteration of which all is said that it needs to be given back, or passed over."""
        self._side_layout: dict[str, Any] | None = side_layout(layout.gradients, 0)
        job = core.body.state.job
        assert job is not None
        self._conductor = Conductor(
            Identity(job, incarnation, 0, layout.gradients, start.iteration if start.adopt else None),
            start.iteration,
            ("mirror",),
            b"",
            ConductorSettings(wait_s, _FOR_EVER_S, _NO_SOCKETS),
            lambda _: True,
            on_complete,
            local_link_maker(core, ear),
        )
        self.link = cast(LocalLink, self._conductor.links[0])

    def begin(self) -> None:
        """Declare the layout, and give the shadow what it lacks. Raises CheckpointError, WaitTimeout."""
        deadline = time.monotonic() + self._wait_s
        self._conductor.start()
        self._conductor.wait_connected(self._wait_s)
        while wanted := self._conductor.wanted_seeds(1 << 62, lambda _: 0):
            for shadow, bucket in wanted:
                self._conductor.seed(shadow, self._seed(bucket))
            self._conductor.wait_seeded(max(_TICK_S, deadline - time.monotonic()))
            if time.monotonic() > deadline:
                raise WaitTimeout(f"waited {self._wait_s:g} s for buckets {wanted} to take their first values")
        self._conductor.wait_whole(max(_TICK_S, deadline - time.monotonic()))

    def _seed(self, bucket: int) -> BucketCopy:
        if self._start.adopt:
            raise CheckpointError(f"bucket {bucket} lost its value, and nobody can give it again")
        entries, blocks = [], []
        for index, key, tensor in bucket_state(self._layout, bucket, self._start.tensors):
            dtype = str(tensor.dtype).removeprefix("torch.")
            entries.append(
                Entry(parameter=index, key=key, dtype=dtype, shape=tuple(tensor.shape), nbytes=tensor.nbytes)
            )
            blocks.append(tensor.reshape(-1).view(torch.uint8))
        memory = torch.cat(blocks) if blocks else torch.empty(0, dtype=torch.uint8)
        return BucketCopy(bucket, self._start.iteration, tuple(entries), memory)

    # -- iterations ------------------------------------------------------------------------------------------------

    @property
    def receiver(self) -> MirrorReceiver:
        """Where gradients go."""
        receiver = self._core.body.receiver
        assert isinstance(receiver, MirrorReceiver)
        return receiver

    @property
    def fault(self) -> str | None:
        """Why nothing more is followed in this incarnation; None if all is well."""
        if self._conductor.fenced is not None or self._core.body.state.incarnation != self.incarnation:
            return "a restore has begun: what comes now belongs to an incarnation that is over"
        if self.link.fault is not None:
            return self.link.fault
        if self._conductor.wanted_seeds(1, lambda _: 1):
            return "an update could not be applied here; the log says why"
        return None

    def gradients(self, iteration: int) -> list[torch.Tensor]:
        """All gradients of an iteration that is held, by layout index."""
        memory = self._core.body.memory
        assert memory is not None
        found: dict[int, torch.Tensor] = {}
        for bucket in memory.owned:
            indices = self._layout.gradients.buckets[bucket].parameters
            found |= dict(zip(indices, memory.gradients(bucket, iteration), strict=True))
        return [found[index] for index in range(len(found))]

    def weights(self, iteration: int, frozen: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
        """A copy of the parameters after an iteration, as `named_weights` has them.

        None if the shadow does not stand there. Raises WaitTimeout.
        """
        body = self._core.body
        with body.stopped():
            if self.fault is not None or body.memory is None or not body.state.held.stands_at(iteration):
                return None
            held = {
                entry.parameter: tensor.clone()
                for bucket in body.memory.owned
                for entry, tensor in body.memory.value(bucket).tensors()
                if entry.key == PARAMETER
            }
        return named_weights(self._layout, held, frozen)

    def step(self, iteration: int, rule: dict[str, Any] | None, absent: tuple[int, ...], *, saved: bool = True) -> None:
        """All gradients of an iteration are held, and this is its update; `saved`: its side record follows."""
        self._saves += saved
        due = bool(saved and self._spill_every and self._saves % self._spill_every == 0)
        self._conductor.step(
            Step(
                iteration=iteration,
                rule=rule,
                saved=saved,
                step=iteration if saved else None,
                absent=absent,
                spill=due,
            )
        )
        if not saved:
            self._told = iteration

    def side(self, iteration: int, record: bytes) -> None:
        """What else belongs to the state after an iteration: from here on it can be given back."""
        side = Side(rank=0, iteration=iteration, step=iteration, layout=self._side_layout, nbytes=len(record))
        self._side_layout = None
        self._conductor.side(side, memoryview(record), None)
        self._told = iteration

    def wait_idle(self, timeout_s: float) -> bool:
        """Return once the shadow holds all that was said, and has applied what it may; False if that takes longer.

        Also once there is a `fault`: nothing more is done then. What is said goes through the link's thread, gradients
        through the one that takes the receiver's events, updates through the worker: each may be late.
        """
        deadline = time.monotonic() + timeout_s
        done = threading.Event()
        self.link.call(done.set)
        if not done.wait(timeout_s):
            return False
        change = self._core.body.change
        with change:
            return change.wait_for(
                lambda: self._is_settled() or self.fault is not None, max(0.0, deadline - time.monotonic())
            )

    def _is_settled(self) -> bool:
        """With the body's lock."""
        held, told = self._core.body.state.held, self._told
        if told is not None and held.completed < told and told not in held.known.given_up:
            return False
        return held.applied >= held.target()

    def close(self) -> None:
        """End it; what the shadow holds stays."""
        self._conductor.close()


def bucket_state(
    layout: NodeLayout, bucket: int, tensors: Mapping[tuple[int, str], torch.Tensor]
) -> Iterator[tuple[int, str, torch.Tensor]]:
    """What of a state (as `Start` has it) is a bucket's: layout index, key and tensor, in the order of seeds."""
    for index in layout.gradients.buckets[bucket].parameters:
        keys = sorted(key for one, key in tensors if one == index and key != PARAMETER)
        for key in (PARAMETER, *keys):
            yield index, key, tensors[index, key]
