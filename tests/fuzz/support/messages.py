"""Decoders of what other processes send: messages of agreement, peers, shadows and rings, frames and records."""

from __future__ import annotations

import contextlib
import json
import random
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from lastgood import _native
from lastgood.errors import LastgoodError
from lastgood.wire import frames
from lastgood.wire.records import DType, Record, RecordKind, pack_header
from tests.fuzz.support.hostile import changed_bytes, json_of
from tests.fuzz.support.registry import Prepared, decoder
from tests.fuzz.support.text_files import text_of, tree_or_bits

JOB = "ab" * 16
TIMEOUT_S = 5.0


def framed(thing: Any) -> bytes:
    """A message's frame; a chunk's for {"chunk": [sequence, offset, text]}. All checksums hold."""
    if isinstance(thing, dict) and list(thing) == ["chunk"]:
        with contextlib.suppress(ValueError, TypeError, AttributeError, UnicodeError):
            sequence, offset, text = thing["chunk"]
            content = text.encode()
            checksum = frames.chunk_checksum(memoryview(content), sequence, offset)
            return frames._HEADER.pack(b"LGM1", frames.Kind.CHUNK, checksum, offset, len(content)) + content
    body = text_of(thing)
    return frames._HEADER.pack(b"LGM1", frames.Kind.MESSAGE, _native.crc32c(body), 0, len(body)) + body


def parsed(thing: Any) -> dict[str, Any]:
    """A message as its reader gets it."""
    content = framed(thing)
    header = frames.parse_header(content[: frames.HEADER_BYTES], "it", "a message", 1 << 26)
    return frames.parse_message(frames.check_message(header, "it", "x"), content[frames.HEADER_BYTES :], "it")


def changed_talk(rng: random.Random, talk: Any) -> Any:
    """One or two of several messages changed, left out, doubled or in another order."""
    talk = json.loads(json.dumps(talk))
    at = rng.randrange(len(talk))
    kind = rng.randrange(10)
    if kind == 0:
        rng.shuffle(talk)
    elif kind == 1:
        del talk[at]
    elif kind == 2:
        talk[at:at] = [talk[rng.randrange(len(talk))]]
    else:
        talk[at] = [talk[at][0], tree_or_bits(rng, talk[at][1])]
    return talk


@contextlib.contextmanager
def no_threads() -> Iterator[None]:
    """What would start a thread of its own is driven by hand here."""
    start = threading.Thread.start
    threading.Thread.start = lambda self: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname(), timeout=TIMEOUT_S)
        far, _ = server.accept()
    return near, far


# -- frames ------------------------------------------------------------------------------------------------------------


def changed_frame(rng: random.Random, thing: Any) -> Any:
    return changed_bytes(rng, framed(thing)) if rng.random() < 0.6 else tree_or_bits(rng, thing)


@decoder("wire frame", lambda: [{"kind": "ping", "missing": ""}, {"a": [1, {"b": None}]}], change=changed_frame)
def _frame(thing: Any, folder: Path) -> Prepared:
    content = thing if isinstance(thing, bytes) else framed(thing)
    near, far = tcp_pair()

    def read() -> None:
        with near, far:
            near.sendall(content)
            near.shutdown(socket.SHUT_WR)
            frames.Wire(far, "it", TIMEOUT_S).receive_message("a message")

    return len(content), read


# -- agreement ---------------------------------------------------------------------------------------------------------


def _report(rank: int) -> dict[str, Any]:
    from lastgood.checkpointers.agreement.decide import Held, Report
    from lastgood.checkpointers.agreement.messages import said_report

    held = (Held(1, 20, True, "loss", 1), Held(1, 10))
    report = Report(rank, 2, f"h{rank}", "/checkpoints", JOB, (1, 20), held, ("slot-0002",), (1, 10))
    return {"kind": "join", **said_report(report)}


def _ranks_talk() -> list[Any]:
    joined = [[0, _report(0)], [1, _report(1)]]
    read = [[rank, {"kind": "read", "round": 1, "ok": True}] for rank in (0, 1)]
    refused = [[1, {"kind": "read", "round": 1, "ok": False, "why": "damaged"}]]
    running: list[Any] = [
        [0, {"kind": "committed", "step": 30}],
        [1, {"kind": "committed", "step": 30}],
        [1, {"kind": "void", "step": 40, "fate": "skipped", "why": "full"}],
        [0, {"kind": "verdict", "of": [1, 10], "ok": False, "why": "loss", "taken_back": False}],
        [0, {"kind": "ping"}],
        [2, {"kind": "resume", "rank": 1, "life": "LIFE", "open": [40, 50]}],
        [1, {"kind": "leave", "why": ""}],
    ]
    return [joined, joined + read + running, joined + refused]


@decoder("messages to the coordinator", lambda: _ranks_talk(), change=changed_talk)
def _coordinator(thing: Any, folder: Path) -> Prepared:
    from lastgood.checkpointers.agreement.channel import Channel
    from lastgood.checkpointers.agreement.coordinator import Coordinator, _Guest

    total = sum(len(framed(message)) for _, message in thing)

    def read() -> None:
        with no_threads():
            coordinator = Coordinator(socket.create_server(("127.0.0.1", 0)), b"t" * 32, 2, 60.0)
        pairs = [tcp_pair() for _ in range(3)]
        guests = [
            _Guest(Channel(far, f"rank {rank}", proved=True), time.monotonic()) for rank, (_, far) in enumerate(pairs)
        ]
        try:
            for guest in guests:
                coordinator._guests.add(guest)
                coordinator._selector.register(guest.channel, 1, guest)
            for rank, message in thing:
                guest = guests[rank if type(rank) is int and 0 <= rank < 3 else 0]
                if guest not in coordinator._guests:
                    continue
                pairs[guests.index(guest)][0].sendall(
                    framed(message).replace(b'"LIFE"', b'"%s"' % coordinator._incarnation_id.encode())
                )
                try:
                    for heard in guest.channel.receive():
                        if heard.get("kind") == "resume" and heard.get("life") == "LIFE":
                            heard["life"] = coordinator._incarnation_id
                        coordinator._hear(guest, heard)
                        coordinator._look_around()
                except LastgoodError as error:
                    coordinator._drop(guest, str(error))
            return coordinator._phase != "joining"
        finally:
            for guest in guests:
                guest.channel.close()
            for near, _ in pairs:
                near.close()
            for end in (coordinator._gate, coordinator._wake, coordinator._woken):
                end.close()
            coordinator._selector.close()

    return total, read


def _told_talk() -> list[Any]:
    offer = {"kind": "read", "round": 1, "life": "l", "job_id": JOB, "incarnation": 2, "choice": [1, 10]}
    offer |= {"common": [[1, 10], [1, 5]], "bad": [[1, 5, "loss"]], "reached": 20}
    return [
        [
            [0, {"kind": "ping", "missing": "rank 1 did not come", "waiting": ""}],
            [0, offer],
            [0, {"kind": "go"}],
            [0, {"kind": "fate", "step": 30, "fate": "global", "why": ""}],
            [0, {"kind": "verdict", "of": [1, 10], "ok": True, "why": "", "taken_back": True}],
            [0, {"kind": "resumed"}],
            [0, {"kind": "refused", "error": "CheckpointError", "why": "busy", "final": False}],
        ],
        [[0, {"kind": "refused", "error": "MismatchError", "why": "another job", "final": True}]],
    ]


@decoder("messages to a rank", _told_talk, change=changed_talk)
def _member(thing: Any, folder: Path) -> Prepared:
    from lastgood.checkpointers.agreement.address import Address
    from lastgood.checkpointers.agreement.decide import Report
    from lastgood.checkpointers.agreement.member import Member

    def read() -> None:
        with no_threads():
            member = Member(
                Address("127.0.0.1", 1, b"t" * 32),
                Report(0, 2, "h", "/c", JOB),
                60.0,
                lambda decided: None,
                lambda identity, ok, reason, back: None,
            )
        channel: Any = type("Channel", (), {"other": "it"})()
        try:
            for _, message in thing:
                with contextlib.suppress(LastgoodError):
                    member._hear(channel, parsed(message))
            member.trouble()
            return member._phase != "joining" or member._error is not None
        finally:
            member._wake.close()
            member._woken.close()

    return sum(len(framed(message)) for _, message in thing), read


# -- peers of Gemini's -------------------------------------------------------------------------------------------------


def _peer_talk() -> list[Any]:
    begin = {"op": "begin", "owner": 1, "sequence": 3, "step": 10, "nbytes": 12, "meta_bytes": 4, "part_bytes": 8}
    sent = [[0, {**begin, "parts": 2}], [0, {"chunk": [3, 0, "hello wo"]}], [0, {"chunk": [3, 8, "rld!"]}]]
    rest: list[Any] = [
        [0, {"op": "commit"}],
        [0, {"op": "list", "owner": 1}],
        [0, {"op": "read", "owner": 1, "sequence": 3}],
        [0, {"op": "check", "owner": 1, "sequence": 3}],
        [0, {"op": "forget", "owner": 1, "after": 5}],
        [0, {"op": "probe"}],
        [0, {"chunk": [0, 0, "x" * 100]}],
        [0, {"op": "stop"}],
    ]
    return [sent + rest, sent, rest]


@decoder("requests to a peer", _peer_talk, change=changed_talk, native=True)
def _peer(thing: Any, folder: Path) -> Prepared:
    from lastgood.checkpointers.gemini import peer as peers
    from lastgood.checkpointers.gemini.address_file import Address

    content = b"".join(framed(message) for _, message in thing)

    def read() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        served = peers.Peer(listener, Address(folder / "a", "h", 1, b"t" * 32, 1), 16 << 20, TIMEOUT_S)
        near, far = tcp_pair()
        connection = peers.Connection(served, far, "it")
        try:
            near.sendall(content)
            near.shutdown(socket.SHUT_WR)
            while not connection.wire.ended() and not served.ending.is_set():
                connection._answer(connection.wire.receive_frame("a request"))
        finally:
            connection._end_landing()
            connection.wire.close()
            near.close()
            served._gate.close()

    return len(content), read


def _peer_answers() -> list[Any]:
    held = {"sequence": 3, "step": 10, "nbytes": 12, "meta_bytes": 4}
    chunks = [[0, {"chunk": [3, 0, "hello wo"]}], [0, {"chunk": [3, 8, "rld!"]}]]
    return [
        [[0, {"ok": True, "checkpoints": [held]}], [0, {"ok": True, **held}], *chunks],
        [[0, {"ok": False, "why": "no"}]],
    ]


@decoder("answers of a peer", _peer_answers, change=changed_talk)
def _peer_link(thing: Any, folder: Path) -> Prepared:
    from lastgood.checkpointers.gemini.peer_client import PeerLink

    content = b"".join(framed(message) for _, message in thing)

    def read() -> None:
        near, far = tcp_pair()
        link = PeerLink.__new__(PeerLink)
        link.address = "it"  # type: ignore[assignment]
        link._wire = frames.Wire(far, "it", TIMEOUT_S)
        try:
            near.sendall(content)
            near.shutdown(socket.SHUT_WR)
            for one in link.held(1)[:2]:
                if one.nbytes < 1 << 20:
                    link.read(1, one, memoryview(bytearray(one.nbytes)))
        except LastgoodError as error:
            if "refused: no" not in str(error):
                raise
        finally:
            link.close()
            near.close()

    return len(content), read


# -- shadows -----------------------------------------------------------------------------------------------------------


def _layout() -> Any:
    from lastgood.gradients.layout.layout import plan_layout

    group = {"runs": [[0, 3]], "amsgrad": False, "maximize": False, "nesterov": False, "lanes": [8, 4]}
    optimizer = {"kind": "adamw", "implementation": "foreach", "arithmetic": "fma", "groups": [group], "threads": 1}
    named = [("a", (4, 2), "float32"), ("b", (3,), "float32"), ("c", (2,), "bfloat16")]
    return plan_layout(named, {**optimizer, "torch": "2.9"}, ranks=2, shadows=1, bucket_bytes=16)


def _shadow_messages() -> list[Any]:
    import torch

    from lastgood.optim.spec import OptimizerSpec

    layout = _layout().to_data()
    parameters = [torch.zeros(4, 2), torch.zeros(3), torch.zeros(2)]
    layout["optimizer"] = OptimizerSpec.of(torch.optim.AdamW(parameters), parameters).to_data()
    saved = {"kind": "saved", "epoch": 1, "iteration": 2, "step": 20}
    entry = {"kind": "entry", "parameter": 0, "key": "parameter", "dtype": "float32", "shape": [4, 2], "nbytes": 32}
    return [
        {"kind": "hello", "role": "control", "job": JOB, "epoch": 1, "rank": 0, "layout": "cd" * 32},
        {"kind": "declare", "layout": layout, "adopt": None},
        {
            "kind": "step",
            "iteration": 2,
            "rule": {"groups": []},
            "saved": True,
            "step": 20,
            "absent": [1],
            "spill": True,
            "keep": saved,
        },
        {"kind": "complete", "iteration": 3, "lost": [0], "floor": 1, "spoiled": [2]},
        {"kind": "seed", "bucket": 0, "iteration": 2, "entries": [entry]},
        {"kind": "verify", "iteration": 2, "bucket": 0, "checksum": 5},
        {"kind": "absent", "iteration": 2, "parameters": [1], "updated": True},
        {"kind": "side", "rank": 0, "iteration": 2, "step": 20, "layout": {"tree": ["d", []]}, "nbytes": 64},
        {"kind": "torn", "iteration": 2, "buckets": [0], "why": "lost"},
        {"kind": "fetch", "epoch": 1, "iteration": 2, "made": 1, "source": "memory"},
        {
            "kind": "status",
            "shadow": 0,
            "shadows": 1,
            "job": JOB,
            "epoch": 1,
            "layout": "cd" * 32,
            "whole": True,
            "applied": 2,
            "have": 3,
            "memory": [saved],
            "durable": [saved],
            "refused": {"job": 1},
        },
        {"kind": "tensors", "iteration": 2, "entries": [entry]},
        {
            "kind": "welcome",
            "shadow": 0,
            "shadows": 1,
            "job": JOB,
            "epoch": 1,
            "layout": None,
            "gradient_slots": 3,
            "unseeded": [0],
        },
    ]


@decoder("messages of shadows", _shadow_messages, change=tree_or_bits, share=2.0)
def _shadow_message(thing: Any, folder: Path) -> Prepared:
    from lastgood.gradients.layout.layout import GradientLayout
    from lastgood.gradients.protocol import client as asking
    from lastgood.gradients.protocol import messages
    from lastgood.optim.rule import UpdateRule
    from lastgood.optim.spec import OptimizerSpec

    def read() -> None:
        found = messages.parse_message(parsed(thing), "it")
        if isinstance(found, messages.Declare):
            layout = GradientLayout.from_data(found.layout, "it")
            assert layout.digest and layout.bytes_of(0) >= 0 and len(layout.side_ranks_of(0)) >= 0
            OptimizerSpec.from_data(layout.optimizer)
        elif isinstance(found, messages.Step) and found.rule is not None:
            UpdateRule.from_data(found.rule)
        elif isinstance(found, messages.Status):
            asking.check_set([found], ["it"])
            asking.choose([found])
            assert asking.describe(found)
        elif isinstance(found, messages.Complete):
            found.promises(2)

    return len(framed(thing)), read


def _side() -> Any:
    import torch

    from lastgood.state import flatten

    flat = flatten(
        {"rng": torch.arange(8), "loader": {"epoch": 3, "name": "x"}, "half": torch.ones(3, dtype=torch.bfloat16)}
    )
    blocks = b"".join(bytes(block.numpy().tobytes()).ljust(-(-len(block) // 64) * 64, b"\0") for block in flat.blocks)
    return [{"layout": json.loads(flat.layout.to_json()), "blocks": blocks.hex()}]


@decoder("side record", lambda: _side(), native=True)
def _side_record(thing: Any, folder: Path) -> Prepared:
    from lastgood.gradients.trainer.rank_record import LENGTH_BYTES, open_side
    from lastgood.state import flatten

    text = json_of(thing.get("layout") if isinstance(thing, dict) else thing)
    try:
        blocks = bytes.fromhex(thing["blocks"])
    except (TypeError, KeyError, ValueError):
        blocks = b""
    record = bytearray(len(text).to_bytes(LENGTH_BYTES, "little") + text + blocks)

    def read() -> None:
        found = open_side(record, "here")
        # Flattened once more, it must be a state; its text would need torch to print each dtype, which it cannot.
        assert flatten(found).layout.to_json()

    return len(record), read


# -- rings and records -------------------------------------------------------------------------------------------------


def _ring_hello() -> dict[str, Any]:
    from lastgood.wire.ring_link import Hello

    return Hello(job=JOB, layout="cd" * 32, epoch=1, ranks=2, rank=0, host="h").content()


def _record(**changes: Any) -> bytes:
    payload = changes.pop("payload", bytes(range(16)))
    fields = {"kind": RecordKind.GRADIENT, "job": 0x1122334455667788, "epoch": 5, "rank": 0, "iteration": 3, "flags": 1}
    fields |= {
        "bucket": 1,
        "dtype": DType.float32,
        "offset": 0,
        "length": len(payload),
        "checksum": _native.crc32c(payload),
    }
    return pack_header(Record(**{**fields, **changes})) + payload


def _records() -> list[Any]:
    end = _record(kind=RecordKind.END, payload=b"", bucket=0, checksum=0, flags=0)
    return [[_record(), end], [_record(iteration=4), _record(bucket=4, dtype=DType.float64, offset=8), end]]


def changed_records(rng: random.Random, records: Any) -> Any:
    """Fields of headers set to extremes under a checksum that holds, payloads cut, records in another order."""
    records = [bytearray(record) for record in records]
    for _ in range(rng.randint(1, 3)):
        record = rng.choice(records)
        kind = rng.randrange(6)
        if kind <= 3 and len(record) >= 64:
            header = bytearray(changed_bytes(rng, bytes(record[:60]), fields=True)[:60].ljust(60, b"\0"))
            if kind <= 1:
                header[:4], header[56:60], header[37:40] = b"LGR1", bytes(4), bytes(3)
            record[:64] = header + _native.crc32c(bytes(header)).to_bytes(4, "little")
        elif kind == 4:
            rng.shuffle(records)
        else:
            del record[rng.randrange(len(record) + 1) :]
    return [bytes(record) for record in records]


@decoder("record's header", _records, change=changed_records)
def _header(thing: Any, folder: Path) -> Prepared:
    from lastgood.wire.records import HEADER_BYTES, parse_header

    content = b"".join(thing)

    def read() -> None:
        for record in thing:
            parse_header(record[:HEADER_BYTES], "it")

    return len(content), read


@decoder("records to the native receiver", _records, change=changed_records, native=True)
def _receiver(thing: Any, folder: Path) -> Prepared:
    from lastgood._native import Receiver

    sys.path.append(str(Path(__file__).parents[2] / "native" / "support"))  # as pytest does for the tests there
    from record_stream import EPOCH, JOB, Slots, connect  # type: ignore[import-not-found]

    content = b"".join(thing)

    def read() -> None:
        slots = Slots([(1, 16, int(DType.float32)), (4, 24, int(DType.float64))], 3)
        receiver = Receiver(JOB, EPOCH, slots.buckets, slots.addresses, owner=slots)
        near, number = connect(receiver, 0)
        with near:
            with contextlib.suppress(OSError):
                near.sendall(content)
                near.shutdown(socket.SHUT_WR)
            deadline = time.monotonic() + TIMEOUT_S
            while time.monotonic() < deadline:
                events = receiver.poll(0.2)
                if any(event.kind == "closed" and event.connection == number for event in events):
                    break
                receiver.advance(2)
            receiver.begin(EPOCH + 1, keep=True)
        assert receiver.close(TIMEOUT_S)

    return len(content), read


def _ring_talk() -> list[Any]:
    return [[_ring_hello(), *_records()[0]], [_ring_hello(), *_records()[1]]]


def changed_ring(rng: random.Random, talk: Any) -> Any:
    return [tree_or_bits(rng, talk[0]), *talk[1:]] if rng.random() < 0.4 else [talk[0], *changed_records(rng, talk[1:])]


@decoder("link of a ring, as a switch reads it", _ring_talk, change=changed_ring)
def _switch(thing: Any, folder: Path) -> Prepared:
    from lastgood.gradients.switch.parser import LinkParser

    content = framed(thing[0]) + b"".join(thing[1:])
    pieces = [content[at : at + 37] for at in range(0, len(content), 37)]

    def read() -> None:
        parser = LinkParser("it", lambda hello: None, lambda record, data: None)
        for piece in pieces:
            parser.feed(memoryview(piece))

    return len(content), read


@decoder("hello of a ring", lambda: [_ring_hello()], change=tree_or_bits)
def _ring(thing: Any, folder: Path) -> Prepared:
    from lastgood.wire.ring_link import parse_hello

    return len(framed(thing)), lambda: parse_hello(parsed(thing), "it")


# -- launch ------------------------------------------------------------------------------------------------------------


def _board_talk() -> list[Any]:
    hello = {"world": 2, "port": 4711, "slurm_job": None}
    return [
        [
            [0, {**hello, "rank": 0}],
            [1, {**hello, "rank": 1}],
            [0, {"started": 77}],
            [1, {"started": 78}],
            [0, {"ended": 0, "tail": "done"}],
            [1, {"fault": "no program"}],
        ]
    ]


def _hello_heard(message: Any) -> Any:
    """What the launch learns from a hello whose sender knows the token."""
    from lastgood.cluster.launch.lifelines import _hear_hello
    from lastgood.cluster.launch.order import launch_proof

    handshake = _hear_hello("127.0.0.1:1", "t" * 32)
    said: Any = next(handshake)
    ours = "ab" * 32
    if isinstance(message, dict):
        shown = launch_proof("t" * 32, "rank", ours, json.loads(said)["nonce"])
        message = {"nonce": ours, "proof": shown, **message}
    try:
        next(handshake)
        handshake.send(text_of(message).replace(b"\n", b" "))
        next(handshake)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits for more")


@decoder("messages to the launch board", _board_talk, change=changed_talk)
def _board(thing: Any, folder: Path) -> Prepared:
    from lastgood.cluster.launch.lifelines import Board
    from lastgood.wire.gate import Guest

    def read() -> bool:
        board = Board("t" * 32, ["a", "b"])
        ends: dict[int, socket.socket] = {}
        try:
            for number, message in thing:
                rank = 1 if number == 1 else 0
                if rank not in ends:
                    with contextlib.suppress(LastgoodError):
                        heard = _hello_heard(message)
                        ends[rank], far = tcp_pair()
                        far.setblocking(False)
                        board._welcome(Guest(far, "127.0.0.1:1", heard, b""))
                    continue
                for line in [line for line in board._lines if line.rank == rank]:
                    with contextlib.suppress(OSError):  # the board has closed it: its reading finds that
                        ends[rank].sendall(text_of(message).replace(b"\n", b" ") + b"\n")
                    select.select([line.connection], [], [], TIMEOUT_S)
                    try:
                        board._read(line)
                    except (LastgoodError, KeyError) as error:  # as Board._guarded does
                        board._drop(line, str(error))
            return board.all_over and not board.missing
        finally:
            for end in ends.values():
                end.close()
            board.close()

    return sum(len(text_of(message)) for _, message in thing), read


@decoder(
    "messages of a launch",
    lambda: [[[0, {"go": {"address": "127.0.0.1", "port": 4711}}], [0, {"stop": True}]]],
    change=changed_talk,
)
def _launch(thing: Any, folder: Path) -> Prepared:
    from lastgood.cluster.launch import wrapper as rank_main

    content = b"".join(text_of(message).replace(b"\n", b" ") + b"\n" for _, message in thing)

    def read() -> None:
        near, far = socket.socketpair()
        lifeline = rank_main._Lifeline.__new__(rank_main._Lifeline)
        lifeline._buffer, lifeline.socket = bytearray(), far
        far.setblocking(False)

        class Watch:
            def wait(self, deadline: float) -> tuple[str | None, dict[str, Any] | None]:
                said = lifeline.receive()
                return ("gone", None) if not said else (None, said[0])

        with near, far:
            with contextlib.suppress(BlockingIOError):
                near.setblocking(False)
                near.sendall(content)
            near.shutdown(socket.SHUT_WR)
            go = rank_main._wait_for_go(Watch(), time.monotonic() + TIMEOUT_S)  # type: ignore[arg-type]
            return go is not None and bool(str(go["address"]) and int(go["port"]))

    return len(content), read


@decoder(
    "requests to measure a network",
    lambda: [{"kind": "stream", "session": "s" * 32, "direction": "send", "message_bytes": 4096, "seconds": 0.1}],
    change=tree_or_bits,
)
def _measuring(thing: Any, folder: Path) -> Prepared:
    from lastgood.experiments.ceilings.network_peer import PeerServer
    from lastgood.wire.gate import Guest

    content = framed(thing)[:8192]

    def read() -> None:
        server = PeerServer("127.0.0.1", 0, "t" * 32)
        near, far = tcp_pair()
        server._slots.acquire()
        with near, far, server._gate:
            near.sendall(content)
            near.shutdown(socket.SHUT_WR)
            try:
                server._answer(Guest(far, "it", 2, b""))
            except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
                raise LastgoodError("one request less") from error  # each ends its own connection
            except LastgoodError as error:
                if "this session is over" not in str(error):  # it was read, then
                    raise

    return len(content), read


@decoder("digests of other ranks", lambda: [{"[0, 1]": "ab" * 32}], change=tree_or_bits)
def _replicas(thing: Any, folder: Path) -> Prepared:
    from lastgood.checkpointers.ranks.replicated import _digests_of

    return len(text_of(thing)), partial(_digests_of, text_of(thing), 1)
