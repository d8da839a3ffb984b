"""A generated ring all-reduce whose mirrored packets are lost, parsed, and put together: what can be recovered of it.

Packets are RoCEv2 as NCCL's protocol Simple has them. They go through the mirror node's own parser; NCCL's layout says
where a message belongs. Nothing is timed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lastgood.mirror.capture.frames import FrameBatch
from lastgood.mirror.generate.life import Collective
from lastgood.mirror.generate.output import batches
from lastgood.mirror.generate.traffic import RingTraffic, Wire, reduced
from lastgood.mirror.streams.messages import Parsed
from lastgood.mirror.streams.roce import RoceParser
from lastgood.wire.nccl import messages, nccl_layout
from lastgood.wire.ring import is_final

__all__ = ["Iteration", "LossyMirror", "ring_iterations"]

_FLOAT_BYTES: Final = 4
_RANK_QUEUES: Final = 64
_FIRST_QUEUE: Final = 0x100


@dataclass(frozen=True)
class Iteration:
    """All frames of one all-reduce at the watched ports, and what it gives."""

    batch: FrameBatch
    truth: npt.NDArray[np.uint8]


def ring_iterations(
    ranks: int, watched: Sequence[int], gradient_bytes: int, payload_bytes: int, count: int, seed: int
) -> Iterator[Iteration]:
    """`count` all-reduces, one after another on the same connections. A batch is the reader's to keep."""
    wire = Wire(mtu=payload_bytes)
    traffic = RingTraffic(ranks, wire, watched, seed, first_queue=_FIRST_QUEUE)
    dice = np.random.default_rng(seed)
    for _ in range(count):
        parts = tuple(dice.standard_normal(gradient_bytes // _FLOAT_BYTES, np.float32) for _ in range(ranks))
        collective = Collective("allreduce", "gradient", parts)
        (batch,) = batches(traffic.frames([collective]), limit=1 << 30)
        yield Iteration(batch, reduced(parts, wire).view(np.uint8))


@dataclass
class _Slot:
    truth: npt.NDArray[np.uint8]
    known: npt.NDArray[np.bool_]
    wrong: bool = False


@dataclass
class LossyMirror:
    """Loses packets of a ring at a rate, and puts together what is left."""

    ranks: int
    gradient_bytes: int
    payload_bytes: int
    rate: float
    seed: int
    _slots: list[_Slot] = field(default_factory=list, init=False)
    _sender_of: dict[int, int] = field(default_factory=dict, init=False)
    _broken: set[int] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self._parser = RoceParser(protocol="simple")
        self._dice = np.random.default_rng(self.seed)
        layout = nccl_layout(self.gradient_bytes // _FLOAT_BYTES, _FLOAT_BYTES, self.ranks, version=Wire().version)
        self._plans = [
            [
                (one.start * _FLOAT_BYTES, is_final(self.ranks, one.send.step))
                for one in messages(layout, rank, protocol="simple")
            ]
            for rank in range(self.ranks)
        ]

    def feed(self, iteration: Iteration, *, lossless: bool = False) -> None:
        """The next iteration. Each frame at each port is lost on its own; without loss the flows are made known."""
        table = iteration.batch.table
        if not lossless:
            table = table[self._dice.random(len(table)) >= self.rate]
        self._slots.append(_Slot(iteration.truth, np.zeros(len(iteration.truth), np.bool_)))
        self._take(self._parser.feed(FrameBatch(iteration.batch.data, table)))

    def finish(self) -> None:
        """No more comes."""
        self._take(self._parser.finish())

    @property
    def recovered(self) -> list[bool]:
        """By iteration: whether every byte was seen."""
        return [bool(slot.known.all()) for slot in self._slots]

    @property
    def differing(self) -> int:
        """Iterations of which a byte was called known that is another one in truth."""
        return sum(slot.wrong for slot in self._slots)

    @property
    def broken_flows(self) -> int:
        """Directions whose parser lost count of messages: what follows in them is not used."""
        return len(self._broken)

    def _take(self, parsed: Parsed) -> None:
        for flow in parsed.opened:
            self._sender_of[flow.index] = _sender(flow.detail)
        self._broken.update(flow for flow, _ in parsed.resynced)
        for flow, _, message, offset, address, nbytes in parsed.pieces.tolist():
            if flow in self._broken:
                continue
            plan = self._plans[self._sender_of[flow]]
            number, place = divmod(message, len(plan))
            begin, final = plan[place]
            if not final:
                continue
            slot = self._slots[number]
            at = slice(begin + offset, begin + offset + nbytes)
            slot.wrong = slot.wrong or ctypes.string_at(address, nbytes) != slot.truth[at].tobytes()
            slot.known[at] = True


def _sender(detail: Mapping[str, Any]) -> int:
    return int((detail["queue_pair"] - _FIRST_QUEUE) // 2 // _RANK_QUEUES)
