"""Gives a conversation what passes a port, keeps what it answers, and compares it with the truth."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lastgood.mirror.conversation.places import (
    CONTENT_KINDS,
    IGNORED,
    Buckets,
    Closed,
    Contradiction,
    Conversation,
    Event,
    Expect,
    Incarnation,
    Learned,
    LostStep,
    Place,
)
from lastgood.mirror.streams.messages import Flow
from tests.mirror.support.ddp_life import Label, Life
from tests.mirror.support.gloo_sends import DATA, Sent


def address(rank: int) -> str:
    """Of the host of a rank."""
    return f"10.0.0.{rank + 1}"


class Watcher:
    """Watches some ranks' ports. `wrong` are answers that differ from the truth: (label that was said, truth)."""

    def __init__(
        self,
        conversation: Conversation,
        life: Life,
        watched: Sequence[int],
        *,
        first_flow: int = 0,
        relative: bool = False,
    ) -> None:
        """With `relative`, steps may have other numbers than the truth: all by the same `shift`."""
        self.conversation = conversation
        self.life = life
        self.watched = set(watched)
        self.events: list[Event] = []
        self.expected: dict[int, Expect] = {}
        self.covered: dict[int, set[tuple[int, int]]] = {}
        self.wrong: list[tuple[Label, Label | None]] = []
        self.placed = 0
        self.closed: set[int] = set()
        self._flows: dict[tuple[int, int], int] = {}
        self._first_flow = first_flow
        self.shift: int | None = None if relative else 0
        self._numbers: dict[int, int] = {}
        self._waiting: list[tuple[int, int, Sent]] = []
        self._told: set[int] = set()
        self._holes: set[int] = set()

    # -- what passes -----------------------------------------------------------------------------------------------

    def flow(self, source: int, destination: int, **detail: object) -> int:
        """The flow between two ranks; both directions are opened at once."""
        known = self._flows.get((source, destination))
        if known is None:
            low, high = min(source, destination), max(source, destination)
            for pair in ((low, high), (high, low)):
                number = self._first_flow + len(self._flows)
                port = 4000 + self._first_flow
                ports = (port + low, port + high) if pair == (low, high) else (port + high, port + low)
                here = Flow(number, "gloo", address(pair[0]), ports[0], address(pair[1]), ports[1], detail)
                self.conversation.opened(here)
                self._flows[pair] = number
                self._numbers[number] = -1
            known = self._flows[source, destination]
        return known

    def seen(self, sent: Sent) -> bool:
        """Whether it passes a watched port."""
        return bool({sent.source, sent.destination} & self.watched)

    def batch(
        self,
        sents: Iterable[Sent],
        *,
        gone: Iterable[Sent] = (),
        lost: Iterable[Sent] = (),
        late: bool = False,
    ) -> None:
        """A batch of heads with their payloads. `gone` heads are in holes that were not explained; `lost` payloads."""
        gone, lost = {id(one) for one in gone}, {id(one) for one in lost}
        seen = [one for one in sents if self.seen(one)]
        for one in seen:
            self.flow(one.source, one.destination, **({"from_the_beginning": False} if late else {}))
        # As parsers do: said together with the first head after the hole, and before all heads of the batch.
        holes = set(self._holes)
        for one in seen:
            flow = self.flow(one.source, one.destination)
            if id(one) in gone:
                holes.add(flow)
            elif flow in holes:
                holes.discard(flow)
                self.conversation.resynced(flow, "a hole")
        losses = []
        hole = self._holes
        for one in seen:
            flow = self.flow(one.source, one.destination)
            if id(one) in gone:
                hole.add(flow)
                continue
            self._numbers[flow] += 2 if flow in hole else 1
            hole.discard(flow)
            number = self._numbers[flow]
            self.conversation.head(flow, number, one.slot, one.opcode, one.nbytes)
            if one.opcode == DATA:
                if id(one) in lost:
                    losses.append((flow, number, one))
                else:
                    self._waiting.append((flow, number, one))
        self._listen()
        self._place()
        for flow, number, one in losses:
            self.conversation.lost(flow, number, 0, one.nbytes)
        self._listen()
        self._place()

    def finish(self) -> None:
        """The end."""
        self._place()
        self.conversation.finish()
        self._listen()

    # -- what is answered ------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        for event in self.conversation.take():
            self.events.append(event)
            if isinstance(event, Expect):
                self.expected[event.collective] = event
                self.covered[event.collective] = set()
            elif isinstance(event, Closed):
                self.closed.add(event.collective)

    def _place(self) -> None:
        again = True
        while again:
            again = False
            left = []
            for flow, number, one in self._waiting:
                answer = self.conversation.place(flow, number)
                if answer is None:
                    left.append((flow, number, one))
                elif answer is not IGNORED:
                    assert isinstance(answer, Place)
                    again |= self._put(answer, one)
            self._waiting = left
            self._listen()

    def _put(self, place: Place, one: Sent) -> bool:
        expected = self.expected[place.collective]
        truth = self.life.collectives[one.tag]
        label = truth.label if one.final else None
        if self.shift is None and label is not None and expected.step >= 0:
            self.shift = label[1] - expected.step
        said = (expected.kind, expected.step + (self.shift or 0), expected.bucket)
        same = label is not None and label[:2] == said[:2] and (expected.kind != "gradient" or label[2] == said[2])
        if not same or (place.begin, place.end) != (one.begin, one.end) or expected.nbytes != truth.nbytes:
            self.wrong.append((said, label))
        self.placed += 1
        covered = self.covered[place.collective]
        covered.add((place.begin, place.end))
        if expected.kind in CONTENT_KINDS and self.complete(place.collective) and place.collective not in self._told:
            self._told.add(place.collective)
            self.conversation.content(place.collective, truth.content)
            self._listen()
            return True
        return False

    def complete(self, collective: int) -> bool:
        """Whether all bytes of a collective were placed."""
        at = 0
        for begin, end in sorted(self.covered[collective]):
            if begin > at:
                return False
            at = max(at, end)
        return at >= self.expected[collective].nbytes

    # -- summary ---------------------------------------------------------------------------------------------------

    def lost_steps(self, what: str = "gradients") -> set[int]:
        """Steps that the conversation declared lost."""
        return {one.step for one in self.events if isinstance(one, LostStep) and one.what == what}

    def gaps(self, kind: str) -> set[int]:
        """Steps of which a collective of this kind was closed without all its bytes."""
        return {
            one.step
            for number, one in self.expected.items()
            if one.kind == kind and number in self.closed and not self.complete(number)
        }

    def whole_steps(self) -> set[int]:
        """Steps all of whose buckets were placed completely, and that were not declared lost."""
        counts: dict[int, set[int | None]] = {}
        for number, one in self.expected.items():
            if one.kind == "gradient" and self.complete(number):
                counts.setdefault(one.step, set()).add(one.bucket)
        return {
            step
            for step, found in counts.items()
            if len(found) == len(self.buckets_at(step)) and step not in self.lost_steps()
        }

    def buckets_at(self, step: int) -> tuple[tuple[int, ...], ...]:
        """As the conversation said."""
        return [one for one in self.events if isinstance(one, Buckets) and one.step <= step][-1].buckets

    def of(self, kind: type) -> list[Event]:
        """Events of a kind."""
        return [one for one in self.events if isinstance(one, kind)]

    @property
    def contradictions(self) -> list[str]:
        """What was refused."""
        return [one.text for one in self.events if isinstance(one, Contradiction)]

    @property
    def ranks(self) -> dict[str, int]:
        """As learned last."""
        found = [one for one in self.events if isinstance(one, Learned)]
        return dict(found[-1].ranks) if found else {}

    @property
    def incarnations(self) -> int:
        """How many were begun."""
        return len(self.of(Incarnation))
