"""What stages in processes of their own hand to each other: the same as in one process, or an error that says so."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from lastgood.errors import CorruptCheckpoint, HostError, StorageError, WaitTimeout
from lastgood.mirror.conversation.places import Buckets, Expect, Incarnation, Learned, LostStep, StepOpen
from lastgood.mirror.extract.slots import Filled, Gone
from lastgood.mirror.handover.extracted import pack_extracted, unpack_extracted
from lastgood.mirror.handover.parsed import pack_parsed, unpack_parsed
from lastgood.mirror.handover.pipe import EXTRACTED, PARSED, PipeReader, PipeWriter
from lastgood.mirror.streams.messages import Parsed
from lastgood.mirror.streams.native import NativeGlooParser
from tests.mirror.support.frames import Captured, Messages, batches
from tests.mirror.support.gloo_wire import Line, random_script

MOST = 64 << 20
NEVER = threading.Event()


def parsed_of(seed: int, size: int) -> list[tuple[Parsed, bytes]]:
    """Each batch of a conversation with losses as its parser gives it, and packed while it is valid."""
    draw = random.Random(seed)
    frames = [one for one in Line(random_script(seed, 30), seed).frames() if draw.random() > 0.05]
    frames = [Captured(one.content, at) for at, one in enumerate(frames)]
    parser, found = NativeGlooParser(), []
    for batch in [*batches(frames, size), None]:
        given = parser.finish() if batch is None else parser.feed(batch)
        content = {
            key: ctypes.string_at(int(row["address"]), int(row["nbytes"])) for key, row in enumerate(given.pieces)
        }
        found.append((given, b"".join(pack_parsed(given, {"parse": parser.counters()}))))
        again, counters = unpack_parsed(found[-1][1], "a ring")
        assert counters == {"parse": parser.counters()}
        assert {
            key: ctypes.string_at(int(row["address"]), int(row["nbytes"])) for key, row in enumerate(again.pieces)
        } == (content)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_messages_come_as_their_parser_made_them(seed: int) -> None:
    collected = Messages()
    for given, message in parsed_of(seed, 16):
        again, _ = unpack_parsed(message, "a ring")
        for name in ("opened", "closed", "resynced", "refused"):
            assert getattr(again, name) == getattr(given, name)
        for name in ("heads", "lost"):
            assert getattr(again, name).tolist() == getattr(given, name).tolist()
        fields = ["flow", "message", "offset", "nbytes"]
        assert again.pieces[fields].tolist() == given.pieces[fields].tolist()
        collected.add(again)
    assert any(message.complete and message.content for message in collected.all.values())


def test_pieces_outside_of_their_message_are_refused() -> None:
    message = next(message for given, message in parsed_of(0, 16) if len(given.pieces) > 1)
    given, _ = unpack_parsed(message, "a ring")
    (size,) = np.frombuffer(message, "<u4", 1)
    first = 4 + int(size) + given.heads.nbytes
    for field, value in (("address", 1 << 40), ("nbytes", 1 << 40), ("address", (1 << 64) - 1), ("nbytes", 100_000)):
        pieces = np.frombuffer(message, given.pieces.dtype, len(given.pieces), first).copy()
        pieces[field][-1] = value
        broken = message[:first] + pieces.tobytes() + message[first + pieces.nbytes :]
        with pytest.raises(CorruptCheckpoint, match="outside"):
            unpack_parsed(broken, "a ring")
    for short in (message[:-1], message + b"x", message[:3], b""):
        with pytest.raises(CorruptCheckpoint):
            unpack_parsed(short, "a ring")


def events() -> list[object]:
    gradient = Expect(7, "gradient", 12, "float32", 3, 1)
    weights = Expect(8, "parameters", 5, "uint8", -1, None, ("a", "b"))
    return [
        Incarnation(2, True),
        Learned(3, (("10.0.0.1", 0), ("10.0.0.2", 1))),
        Buckets(1, ((2, 0), (1,)), True),
        StepOpen(3),
        gradient,
        Filled(gradient, np.arange(12, dtype=np.uint8)),
        Gone(gradient, "lost"),
        Filled(weights, np.arange(5, dtype=np.uint8)),
        LostStep(4, "a hole", "buffers"),
    ]


def plain(found: Sequence[object]) -> list[object]:
    return [(one.expected, one.memory.tobytes()) if isinstance(one, Filled) else one for one in found]


def test_events_come_as_they_were_extracted() -> None:
    message = b"".join(pack_extracted(events(), {"extract": {"placed": 17}}))  # type: ignore[arg-type]
    turn, counters = unpack_extracted(message, "a ring")
    assert plain(turn.events) == plain(events()) and not turn.last
    assert counters == {"extract": {"placed": 17}}
    turn.events[5].memory[0] = 1  # type: ignore[union-attr]  # it may be written to
    assert unpack_extracted(b"".join(pack_extracted([], {}, last=True)), "a ring")[0].last
    for broken in (message[:-1], message + b"x", message.replace(b'"nbytes":12', b'"nbytes":99'), message[:2]):
        with pytest.raises(CorruptCheckpoint):
            unpack_extracted(broken, "a ring")


def test_messages_of_any_size_go_through_a_pipe_that_is_smaller(tmp_path: Path) -> None:
    draw = random.Random(1)
    sent = [draw.randbytes(size) for size in (1, 100, 128 << 10, (128 << 10) + 1, 5 << 20, 7, 3 << 20)]
    with (
        closing(PipeWriter(tmp_path / "ring", 2 << 20, PARSED)) as writer,
        closing(PipeReader(tmp_path / "ring", PARSED, most_bytes=MOST)) as reader,
    ):

        def write() -> None:
            for one in sent:
                writer.send([one[:10], one[10:]], NEVER)
            writer.end(NEVER)

        thread = threading.Thread(target=write)
        thread.start()
        found = []
        while (message := reader.read(20.0)) is not None:
            found.append(message)
        thread.join(20)
        assert not thread.is_alive()
        assert found == sent and not reader.writer_died


def test_what_is_wrong_with_a_pipe_is_said(tmp_path: Path) -> None:
    path = tmp_path / "ring"
    with pytest.raises(HostError, match=r"start `lastgood mirror extract --out"):
        PipeReader(path, EXTRACTED, most_bytes=MOST)
    with closing(PipeWriter(path, 2 << 20, PARSED, patience_s=0.2)) as writer:
        with pytest.raises(StorageError, match="not filled by `lastgood mirror extract`"):
            PipeReader(path, EXTRACTED, most_bytes=MOST)
        with pytest.raises(WaitTimeout):
            writer.send([bytes(4 << 20)], NEVER)
    with closing(PipeWriter(path, 2 << 20, PARSED)) as writer:
        writer.send([bytes(1 << 20)], NEVER)
        with (
            closing(PipeReader(path, PARSED, most_bytes=1000)) as reader,
            pytest.raises(CorruptCheckpoint, match="more than"),
        ):
            reader.read(1.0)
    writer = PipeWriter(path, 2 << 20, PARSED)
    with closing(PipeReader(path, PARSED, most_bytes=9)) as reader:
        assert reader.read(0.01) == b""
        writer.close()
        assert reader.read(5.0) is None and reader.writer_died


def test_a_writer_does_not_wait_for_a_reader_that_has_taken_all_and_left(tmp_path: Path) -> None:
    with closing(PipeWriter(tmp_path / "ring", 2 << 20, EXTRACTED, patience_s=1000.0)) as writer:
        writer.send([b"the last one"], NEVER)  # before anybody reads
        with closing(PipeReader(tmp_path / "ring", EXTRACTED, most_bytes=MOST)) as reader:
            assert reader.read(10.0) == b"the last one"
        ended = threading.Thread(target=writer.end, args=(NEVER,), daemon=True)
        ended.start()
        ended.join(20.0)
        assert not ended.is_alive()
