from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood.mirror.streams.native import NativeGlooParser
from lastgood.mirror.streams.tcp import TcpSettings
from tests.mirror.support.frames import ACK, RST, SYN, Captured, Messages, read, tcp_frame
from tests.mirror.support.gloo_wire import ENDS, Line, Script, header, random_script, slot
from tests.mirror.support.plain.gloo import GlooParser

PARSERS = [GlooParser, NativeGlooParser]


def sides(found: Messages) -> dict[int, int]:
    """The flow of each side."""
    return {[end[1] for end in ENDS].index(flow.source_port): index for index, flow in found.flows.items()}


def check_all(found: Messages, script: Script) -> None:
    """Everything came, to the byte."""
    flows = sides(found)
    assert len(flows) == 2 and not found.resynced and not found.refused
    for side, flow in flows.items():
        expected = script.messages[side]
        messages = found.of(flow)
        assert [message.number for message in messages] == list(range(len(expected)))
        for message, (opcode, number, payload) in zip(messages, expected, strict=True):
            assert (message.opcode, message.slot, message.nbytes) == (opcode, number, len(payload))
            if opcode < 2:
                assert message.complete and message.content == payload


def check_some(found: Messages, script: Script) -> None:
    """Whatever was given is right: each message is one that was sent, in order, and each byte of it that came."""
    for side, flow in sides(found).items():
        expected = [one for one in script.messages[side] if one[0] == 1]
        at = 0
        for message in found.of(flow):
            if message.opcode != 1:
                continue
            while at < len(expected) and not agrees(message, expected[at]):
                at += 1
            assert at < len(expected), f"a message that nobody sent: {message}"
            at += 1


def agrees(message, sent) -> bool:
    _, number, payload = sent
    return (
        message.slot == number
        and message.nbytes == len(payload)
        and all(
            known != 1 or ours == theirs
            for known, ours, theirs in zip(message.known, message.content, payload, strict=True)
        )
    )


@pytest.mark.parametrize("kind", PARSERS)
@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 90))
def test_reads_all_that_passes(kind, seed, size):
    script = random_script(seed, 12)
    found = read(kind(), Line(script, seed).frames(), size)
    check_all(found, script)
    assert sorted(found.closed) == [0, 1]
    assert {found.flows[index].detail["connector"] for index in found.flows} == {True, False}
    assert found.flows[sides(found)[0]].detail["connector"]


@pytest.mark.parametrize("kind", PARSERS)
@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 90))
def test_repetition_and_disorder_change_nothing(kind, seed, size):
    script = random_script(seed, 12)
    draw = random.Random(seed)
    frames = []
    for at, frame in enumerate(Line(script, seed).frames(close=False)):
        frames.append((at, frame))
        while draw.random() < 0.2:
            frames.append((at + draw.randrange(30), frame))
    frames.sort(key=lambda one: one[0])
    # Only within a side's run of data, up to the next acknowledgement from the other side, may order change.
    check_all(read(kind(), swapped([frame for _, frame in frames], draw), size), script)


def swapped(frames: list[Captured], draw: random.Random) -> list[Captured]:
    frames = list(frames)
    for at in range(4, len(frames) - 4):
        first, second = frames[at], frames[at + 1]
        if first.content[26:38] == second.content[26:38] and draw.random() < 0.4:
            frames[at], frames[at + 1] = second, first
    return frames


@pytest.mark.parametrize("kind", PARSERS)
@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 90), rate=st.sampled_from([0.003, 0.03, 0.2]))
def test_after_loss_what_is_given_is_right(kind, seed, size, rate):
    script = random_script(seed, 30)
    draw = random.Random(seed)
    frames = [frame for frame in Line(script, seed).frames() if draw.random() >= rate]
    found = read(kind(), frames, size)
    check_some(found, script)
    for message in found.all.values():
        assert message.opcode > 1 or 0 not in message.known, "each byte came, or is said to be lost"


@pytest.mark.parametrize("kind", PARSERS)
def test_one_lost_frame_costs_no_more_than_its_bytes(kind):
    """Every header that lies in the hole is predicted, or only announcements and whole messages are missing."""
    script = Script()
    for tag in range(8):
        for number in range(3):
            script.exchange(number % 2, slot(tag), random.Random(100 * tag + number).randbytes(200 + 7 * tag))
    frames = Line(script, seed=5).frames(close=False)
    predicted = 0
    for lost in range(5, len(frames)):
        parser = kind()
        found = read(parser, frames[:lost] + frames[lost + 1 :])
        check_some(found, script)
        predicted += parser.counters().get("predicted_headers", 0)
        lost_bytes = sum(message.known.count(2) for message in found.all.values())
        assert found.resynced or lost_bytes <= 90
        came = sum(message.opcode == 1 for message in found.all.values())
        assert came >= 23 - len(found.resynced)
    assert predicted > 40


@pytest.mark.parametrize("kind", PARSERS)
@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), share=st.floats(0, 1))
def test_a_capture_may_begin_in_the_middle(kind, seed, share):
    script = random_script(seed, 30)
    frames = Line(script, seed).frames()
    found = read(kind(), frames[int(share * len(frames)) :])
    check_some(found, script)
    assert not found.resynced and not found.refused
    for flow in found.flows.values():
        assert share == 0 or flow.detail["from_the_beginning"] is False or int(share * len(frames)) == 0


@pytest.mark.parametrize("kind", PARSERS)
def test_a_capture_of_one_direction_waits_for_a_count_of_later_bytes(kind):
    script = Script()
    for tag in range(40):
        script.exchange(0, slot(tag), bytes([tag]) * 400)
    frames = [one for one in Line(script, seed=1).frames(close=False) if one.content[26:30] == bytes((10, 0, 0, 1))]
    del frames[60]
    parser = kind(TcpSettings(blind_bytes=2000))
    found = read(parser, frames)
    check_some(found, script)
    assert len(found.all) > 70 and parser.counters()["holes"] == 1


def without_sum(frame: bytes) -> bytes:
    """An IPv4 frame whose TCP checksum was left to a card, so that a change is not seen by it."""
    return frame[: 34 + 16] + bytes(2) + frame[34 + 18 :]


@pytest.mark.parametrize("kind", PARSERS)
def test_memory_behind_a_hole_is_bounded(kind):
    script = Script()
    for tag in range(40):
        script.exchange(0, slot(tag), bytes([tag]) * 400)
    frames = [one for one in Line(script, seed=1).frames() if one.content[34 + 13] != ACK or len(one.content) > 54]
    del frames[20]
    for one in frames:  # No acknowledgement moves on.
        assert one.content
    stuck = [
        Captured(without_sum(one.content[: 34 + 8] + bytes(4) + one.content[34 + 12 :]), one.time_ns) if at > 2 else one
        for at, one in enumerate(frames)
    ]
    parser = kind(TcpSettings(keep_bytes=3000))
    found = read(parser, stuck)
    check_some(found, script)
    assert parser.counters()["not_waited_for"] >= 1


@pytest.mark.parametrize("kind", PARSERS)
def test_reused_ports_are_another_connection(kind):
    first, second = random_script(1, 6), random_script(2, 6)
    frames = Line(first, 1).frames(close=False) + Line(second, 2, starts=(5000, 900)).frames()
    found = read(kind(), frames)
    assert sorted(found.closed) == [0, 1, 2, 3]
    for script, flows in ((first, (0, 1)), (second, (2, 3))):
        part = Messages()
        part.flows = {index: found.flows[index] for index in flows}
        part.all = {key: message for key, message in found.all.items() if key[0] in flows}
        check_all(part, script)


@pytest.mark.parametrize("kind", PARSERS)
def test_a_reset_ends_a_connection_and_one_from_far_away_does_not(kind):
    script = random_script(3, 6)
    frames = Line(script, 3).frames(close=False)
    far = tcp_frame(ENDS[0], ENDS[1], 0x60000000, flags=RST)
    found = read(kind(), [*frames[:-3], Captured(far), *frames[-3:]])
    check_all(found, script)
    near = tcp_frame(ENDS[0], ENDS[1], 0xFFFFFF01 + sum(len(t.content) for t in script.turns if t.side == 0), flags=RST)
    parser = kind()
    found = Messages()
    from tests.mirror.support.frames import batches

    for one in batches([*frames, Captured(near)]):
        found.add(parser.feed(one))
    assert sorted(found.closed) == [0, 1], "before the end of the capture"
    found.add(parser.finish())
    assert sorted(found.closed) == [0, 1], "once"


@pytest.mark.parametrize("kind", PARSERS)
def test_a_second_copy_that_differs_is_counted_and_the_first_one_wins(kind):
    script = Script()
    script.exchange(0, slot(1), b"right" * 30)
    frames = Line(script, 1, largest=1000).frames()
    where = next(at for at, one in enumerate(frames) if b"rightright" in one.content)
    wrong = Captured(without_sum(frames[where].content.replace(b"right", b"wrong")))
    parser = kind()
    found = read(parser, [*frames[: where + 1], wrong, *frames[where + 1 :]], 1000)
    check_all(found, script)
    assert parser.counters()["differing_copies"] == 1


@pytest.mark.parametrize("kind", PARSERS)
def test_keep_alives_are_no_data(kind):
    script = Script()
    script.exchange(0, slot(1), b"right" * 30)
    frames = Line(script, 1).frames(close=False)
    sequence = 0xFFFFFF01 + sum(len(turn.content) for turn in script.turns if turn.side == 0)
    parser = kind()
    probe = Captured(tcp_frame(ENDS[0], ENDS[1], sequence - 1, b"\0", acknowledgement=1))
    check_all(read(parser, [*frames, probe, probe]), script)
    assert parser.counters()["keep_alives"] == 2 and not parser.counters().get("differing_copies")


@pytest.mark.parametrize("kind", PARSERS)
@pytest.mark.parametrize(
    ("first", "said"),
    [(b"\x16\x03\x01\x02\x00\x01\x00" + bytes(600), "TLS"), (b"GET / HTTP/1.1\r\n" * 10, "nothing that is known")],
)
def test_strangers_are_named_once_and_left(kind, first, said):
    script = Script()
    script.turns[0].content = first
    for _ in range(5):
        script.turns.append(type(script.turns[0])(1, b"\x17\x03\x03 an answer that is long enough to be looked at" * 3))
    found = read(kind(), Line(script).frames())
    assert not found.all and len(found.refused) == 1 and said in found.refused[0]
    assert "10.0.0.1 port 40001" in found.refused[0]


@pytest.mark.parametrize("kind", PARSERS)
def test_bytes_that_are_no_header_cost_what_lies_before_the_next_one(kind):
    script = Script()
    script.exchange(0, slot(5), b"a" * 100)
    script.turns.append(type(script.turns[0])(0, b"\xff" * 48 + b"stray" * 20))
    script.exchange(0, slot(6), b"b" * 100)
    found = read(kind(), Line(script).frames())
    assert len(found.resynced) == 1
    check_some(found, script)
    assert [message.slot for message in found.of(sides(found)[0]) if message.opcode == 1] == [slot(5), slot(6)]


@pytest.mark.parametrize("kind", PARSERS)
def test_a_length_that_a_message_says_takes_no_memory(kind):
    script = Script()
    script.turns.append(type(script.turns[0])(0, header(1, slot(1), 1 << 47) + b"x" * 100))
    found = Messages()
    parser = kind()
    from tests.mirror.support.frames import batch

    parsed = parser.feed(batch(Line(script).frames(close=False)))
    assert parsed.heads["nbytes"].tolist() == [1 << 47]
    assert found.all == {}
    parsed = parser.finish()
    assert parsed.lost["nbytes"].tolist() == [(1 << 47) - 100]


@pytest.mark.parametrize("kind", PARSERS)
def test_many_connections_take_bounded_memory(kind):
    frames = []
    for port in range(1, 200):
        frames.append(Captured(tcp_frame(("10.0.0.1", port), ("10.0.0.2", 9), 100, flags=SYN)))
    parser = kind(TcpSettings(max_connections=10))
    read(parser, frames)
    assert parser.counters()["given_up_connections"] == 189
