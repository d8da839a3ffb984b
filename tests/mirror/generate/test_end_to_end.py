"""Generated RoCEv2 through parser, conversation and extractor: gradients to the bit, and never a wrong one."""

from __future__ import annotations

from typing import Any

import pytest

from lastgood.mirror.conversation.places import Expect, LostStep, StepOpen
from lastgood.mirror.extract.extractor import Extracted, Extractor
from lastgood.mirror.extract.slots import Filled, GradientSlots
from lastgood.mirror.generate.faults import FaultyMirror, MirrorFaults
from lastgood.mirror.generate.life import DdpLife, seeded_life
from lastgood.mirror.generate.output import batches
from lastgood.mirror.generate.traffic import RingTraffic, Wire, truth_arrays
from lastgood.mirror.job.description import Backend, DdpSettings, JobDescription
from lastgood.mirror.node.stages import conversation_for, parser_for
from tests.mirror.support.small_job import small_job

ELEMENTS = (70, 300, 50, 1200)
CAPS = {"first_cap": 1024, "cap": 4096}


def job_of(ranks: int, wire: Wire, elements: tuple[int, ...] = ELEMENTS, **caps: int) -> JobDescription:
    backend = Backend(
        kind="nccl",
        network="roce",
        version=wire.version,
        protocol=wire.protocol,
        channels=wire.channels,
        queue_pairs=wire.queue_pairs,
        split_data=wire.split_data,
    )
    ddp = DdpSettings(**(caps or CAPS))
    return small_job(elements, buffers=False, frozen=False, ranks=ranks, backend=backend, ddp=ddp)


def life_of(ranks: int, seed: int, steps: int = 5) -> DdpLife:
    shapes = [(count,) for count in ELEMENTS]
    return seeded_life(
        seed, ranks=ranks, steps=steps, shapes=shapes, first_cap_bytes=CAPS["first_cap"], cap_bytes=CAPS["cap"]
    )


def follow(
    life: DdpLife,
    wire: Wire,
    watched: list[int],
    faults: MirrorFaults,
    seed: int,
    limit: int = 200,
    job: JobDescription | None = None,
) -> list[Extracted]:
    job = job or job_of(life.ranks, wire)
    traffic = RingTraffic(life.ranks, wire, watched, seed, nak_every=20)
    addresses = [traffic.address(rank) for rank in watched]
    parser = parser_for(job)
    extractor = Extractor(conversation_for(job, addresses), GradientSlots(1 << 24), 1 << 20)
    events: list[Extracted] = []

    def hear(found: list[Extracted]) -> None:
        for event in found:
            if isinstance(event, Filled):
                events.append((event.expected, bytes(event.memory[: event.expected.nbytes])))  # type: ignore[arg-type]
                extractor.slots.free(event.memory)
            else:
                events.append(event)

    frames = FaultyMirror(faults, seed).frames(traffic.frames(life.collectives()))
    for batch in batches(frames, limit=limit):
        hear(extractor.feed(parser.feed(batch)))
    hear(extractor.finish(parser.finish()))
    return events


def gradients(events: list[Any]) -> dict[tuple[int, int | None], bytes]:
    return {
        (expected.step, expected.bucket): content
        for expected, content in (event for event in events if isinstance(event, tuple))
        if expected.kind == "gradient"
    }


def truth(life: DdpLife, wire: Wire) -> dict[tuple[int, int | None], bytes]:
    arrays = truth_arrays(life, wire)
    found = {}
    for name, array in arrays.items():
        if name.startswith("gradient/"):
            _, step, bucket = name.split("/")
            found[int(step), int(bucket)] = array.tobytes()
    return found


WIRES = {
    "ll": Wire("ll", mtu=1024),
    "simple": Wire("simple", mtu=1024),
    "two channels": Wire("ll", "2.30", 2, 1024),
    "old": Wire("ll", "2.19", 2, 1024),
    "queue pairs": Wire("simple", mtu=1024, queue_pairs=2),
    "queue pairs, ll": Wire("ll", mtu=1024, queue_pairs=3),
    "split": Wire("simple", mtu=1024, queue_pairs=2, split_data=True),
    "split, ll": Wire("ll", "2.30", mtu=1024, queue_pairs=2, split_data=True),
}


@pytest.mark.parametrize("limit", [1, 20, 200])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", WIRES)
def test_every_gradient_and_weight_comes_to_the_bit(name: str, ranks: int, limit: int) -> None:
    """However many frames are read at a time: live traffic gives a few."""
    wire, life = WIRES[name], life_of(ranks, 1)
    events = follow(life, wire, [0], MirrorFaults(), 0, limit)
    assert gradients(events) == truth(life, wire)
    (weights,) = [one[1] for one in events if isinstance(one, tuple) and one[0].kind == "parameters"]
    assert weights == b"".join(weight.tobytes() for weight in life.weights)
    assert [event.step for event in events if isinstance(event, StepOpen)] == list(range(5))
    assert not [event for event in events if isinstance(event, LostStep)]
    assert all(isinstance(one, Expect) for one in events if getattr(one, "kind", "") == "gradient")


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", WIRES)
def test_with_losses_no_gradient_is_ever_wrong(name: str, ranks: int) -> None:
    wire = WIRES[name]
    for seed in range(4):
        life = life_of(ranks, seed)
        faults = MirrorFaults((0.002, 0.02)[seed % 2], 1 + seed % 3, 0.01, 0.01, 4, 0.002)
        found = gradients(follow(life, wire, [0], faults, seed))
        right = truth(life, wire)
        assert all(right.get(place) == content for place, content in found.items())


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("protocol", ["ll", "simple"])
def test_a_message_that_is_missing_with_its_head_is_never_taken_for_its_neighbour(protocol: Any, ranks: int) -> None:
    """All steps are one bucket, all messages are of one size, and one packet: nothing but numbers tells them apart."""
    wire, elements = Wire(protocol, mtu=4096), (24, 72)
    caps = {"first_cap": 1 << 20, "cap": 25 << 20}
    job = job_of(ranks, wire, elements, **caps)
    complete = 0
    for seed in range(12):
        life = seeded_life(
            seed,
            ranks=ranks,
            steps=8,
            shapes=[(count,) for count in elements],
            first_cap_bytes=caps["first_cap"],
            cap_bytes=caps["cap"],
        )
        right = truth(life, wire)
        found = gradients(follow(life, wire, [0], MirrorFaults(0.02, 1 + seed % 3), seed, 50, job))
        assert all(right.get(place) == content for place, content in found.items())
        complete += len(found)
    assert complete > 12


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ({"queue_pairs": 2, "channels": 2}, "is not on the wire"),
        ({"queue_pairs": 3, "split_data": True}, "the same size"),
        ({"queue_pairs": 2, "protocol": ""}, "one protocol"),
        ({"queue_pairs": 2, "network": "sockets"}, "over RoCE"),
    ],
)
def test_queue_pairs_that_cannot_be_told_apart_are_refused(backend: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Backend(**{"kind": "nccl", "network": "roce", "version": "2.28", "protocol": "ll", **backend})
