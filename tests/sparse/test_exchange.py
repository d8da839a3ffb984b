"""The exchange between ranks: all get the same blocks in rank order, or all get an error that names who and why."""

from __future__ import annotations

import random
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood import _native
from lastgood.errors import CheckpointError, ConfigError, CorruptCheckpoint, MismatchError, WaitTimeout
from lastgood.sparse import chunks, meeting
from lastgood.sparse.blocks import SparseGradient
from lastgood.sparse.chunks import CHUNK_BYTES, Chunk, Kind, cut, pack_header
from lastgood.sparse.coding import encode
from lastgood.sparse.exchange import Exchange
from lastgood.sparse.meeting import Place, about, meet
from lastgood.wire.ring_link import Link
from tests.sparse.support.rings import JOB, TOKEN, WAIT_S, Relay, equal, exchanges, gradient, places, together

LAYERS = [1000, 2000, 70_001]
QUICK_S = 0.6
"""A timeout that is to be over soon."""


def blocks_of(ranks: int, iterations: int) -> dict[tuple[int, int, int], SparseGradient]:
    """By rank, iteration and layer: single elements and blocks, of all types, some complete and some empty."""
    found = {}
    for seed, (rank, iteration, layer) in enumerate(np.ndindex(ranks, iterations, len(LAYERS))):
        width = (1, 16)[seed % 2]
        places_there = -(-LAYERS[layer] // width)
        count = (places_there // 100, 0, places_there, places_there // 3)[seed % 4]
        dtype = (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
        found[rank, iteration, layer] = gradient(LAYERS[layer], count, seed, width, dtype)
    found[0, 1, 1] = SparseGradient(LAYERS[1], 1, np.empty(0, np.uint32), torch.empty(0), finite=False)
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_all_ranks_get_all_blocks_in_rank_order(ranks: int) -> None:
    iterations = 4
    blocks = blocks_of(ranks, iterations)
    with exchanges(ranks, LAYERS) as opened:

        def train(rank: int) -> None:
            order = random.Random(rank)
            for iteration in range(iterations):
                time.sleep(order.random() * 0.02)
                layers = order.sample(range(len(LAYERS)), len(LAYERS))
                futures = {
                    layer: opened[rank].submit(iteration, layer, blocks[rank, iteration, layer]) for layer in layers
                }
                for layer in order.sample(layers, len(layers)):
                    results = futures[layer].result(WAIT_S)
                    assert len(results) == ranks
                    for other, result in enumerate(results):
                        assert equal(result, blocks[other, iteration, layer]), (iteration, layer, other)

        assert together([partial(train, rank) for rank in range(ranks)]) == [None] * ranks
        for exchange in opened:
            facts = exchange.facts()
            assert facts.gathered == iterations * len(LAYERS)
            assert (facts.sent_bytes > 0) == (facts.received_bytes > 0) == (ranks > 1)
            assert facts.gather_s > 0 and facts.link_busy_s >= 0


def test_many_threads_submit_at_once() -> None:
    layers = [5000] * 40
    with exchanges(2, layers) as opened:
        calls = [
            partial(exchange.submit, iteration=0, layer=layer, sparse=gradient(5000, 50, layer))
            for layer in range(len(layers))
            for exchange in opened
        ]
        futures = together(calls)
        assert all(
            equal(one, gradient(5000, 50, at // 2))
            for at, future in enumerate(futures)
            for one in future.result(WAIT_S)
        )


@pytest.mark.parametrize("ranks", [1, 3])
def test_tensors_of_one_layer_go_together(ranks: int) -> None:
    layers = [(1000,), (300, 70_001, 16)]
    sent = {
        rank: [
            gradient(300, 3, rank),
            gradient(70_001, (700, 0, 4000)[rank], rank, (1, 16)[rank % 2], torch.bfloat16),
            SparseGradient(16, 16, np.empty(0, np.uint32), torch.empty(0), finite=rank != 1),
        ]
        for rank in range(ranks)
    }
    with exchanges(ranks, layers) as opened:
        futures = [exchange.submit_group(0, 1, sent[rank]) for rank, exchange in enumerate(opened)]
        for future in futures:
            for rank, group in enumerate(future.result(WAIT_S)):
                assert len(group) == 3 and all(equal(one, other) for one, other in zip(group, sent[rank], strict=True))
        for one in opened:
            with pytest.raises(ConfigError, match=r"layer 0 has \(1000,\) elements, and the gradient \(300,"):
                one.submit_group(1, 0, sent[0])


@pytest.mark.parametrize(
    ("width", "dtype", "most"),
    [(16, torch.float32, 4.4), (1, torch.float32, 5.5), (16, torch.bfloat16, 2.4), (1, torch.float16, 3.5)],
)
def test_bytes_on_the_wire_for_each_value_at_one_percent(width: int, dtype: torch.dtype, most: float) -> None:
    elements, count = 2_000_000, 20_000 // width
    with exchanges(2, [elements]) as opened:
        futures = [exchange.submit(0, 0, gradient(elements, count, 7, width, dtype)) for exchange in opened]
        for future in futures:
            future.result(WAIT_S)
        for exchange in opened:
            assert 2 * count * width < exchange.facts().sent_bytes <= most * count * width


# -- priority ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_early_layer_overtakes_late_ones_on_a_slow_link(ranks: int) -> None:
    """A first layer's block of one chunk, given last, while more than a hundred chunks of others wait."""
    relay = Relay(bytes_per_s=4e6)
    late = 800_000
    layers = [1000, *[late] * 4]
    with exchanges(ranks, layers, {0: relay}) as opened:
        futures = [
            [exchange.submit(5, layer, gradient(late, late // 2, layer, 1)) for layer in (4, 3, 2, 1)]
            for exchange in opened
        ]
        deadline = time.monotonic() + WAIT_S
        while relay.carried < 10 * CHUNK_BYTES and time.monotonic() < deadline:
            time.sleep(0.002)
        before = relay.carried
        urgent = [exchange.submit(5, 0, gradient(1000, 10, 1)) for exchange in opened]
        urgent[1].result(WAIT_S)
        assert relay.carried - before <= 8 * CHUNK_BYTES, "what the kernel, the relay and one record hold"
        assert not any(future.done() for future in futures[1][1:]), "the others are still on their way"
        for each in futures:
            for future in each:
                future.result(WAIT_S)


# -- the beginning -----------------------------------------------------------------------------------------------------


def opened_with(ranks: int, changes: dict[int, dict[str, Any]], options: dict[str, Any] | None = None) -> list[Any]:
    """The errors of ranks of which some open another exchange."""

    def begin(rank: int, place: Place) -> Exchange:
        how: dict[str, Any] = {"layers": LAYERS, "settings": {"compressor": "v16", "compression": 0.99}, "place": place}
        how.update(changes.get(rank, {}))
        if "replaced" in how:
            how["place"] = replace(place, **how.pop("replaced"))
        return Exchange.open(**how, **{"join_timeout_s": WAIT_S, **(options or {})})

    found = together([partial(begin, rank, place) for rank, place in enumerate(places(ranks))])
    together([one.close for one in found if isinstance(one, Exchange)])
    return found


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            {"settings": {"compressor": "topk", "compression": 0.99}},
            "rank 1 on .*: compressor is 'topk' there and 'v16' here",
        ),
        ({"settings": {"compressor": "v16"}}, "rank 1 on .*: compression is not given there and 0.99 here"),
        ({"layers": [1000, 2000, 70_002]}, "rank 1 on .*: elements is 73002 there and 73001 here, layout is"),
        ({"layers": [1000, 70_001, 2000]}, "rank 1 on .*: layout is"),
        ({"layers": [1000]}, "rank 1 on .*: layers is 1 there and 3 here"),
    ],
)
def test_a_rank_that_differs_is_named_on_all_ranks(change: dict[str, Any], why: str) -> None:
    found = opened_with(3, {1: change})
    assert [type(error) for error in found] == [MismatchError] * 3
    for rank in (0, 2):
        with pytest.raises(MismatchError, match=f"^this rank {rank} cannot exchange gradients with {why}"):
            raise found[rank]
    assert "rank 0 on " in str(found[1]) and "rank 2 on " in str(found[1])


def test_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = meeting.about

    def newer(layers: Any, given: Any) -> Any:
        return plain(layers, given) | ({"protocol": 2, "more": 1} if given["compressor"] == "newer" else {})

    monkeypatch.setattr("lastgood.sparse.exchange.about", newer)
    found = opened_with(2, {1: {"settings": {"compressor": "newer"}}})
    assert "rank 1 on " in str(found[0]) and "protocol is 2 there and 1 here; give all ranks" in str(found[0])


@pytest.mark.parametrize(
    ("replaced", "why"),
    [
        ({"job": "cd" * 16}, "its job is |refused this rank: its job is"),
        ({"incarnation": 4}, "its epoch is"),
        ({"token": b"another token of thirty-two bytes"}, "does not know this job's token|does not know the token"),
    ],
)
def test_a_rank_of_another_job_is_refused(replaced: dict[str, Any], why: str) -> None:
    found = opened_with(2, {1: {"replaced": replaced}}, {"join_timeout_s": 2.0})
    assert all(isinstance(error, MismatchError | WaitTimeout) for error in found)
    with pytest.raises(MismatchError, match=why):
        raise next(error for error in found if isinstance(error, MismatchError))


def test_a_rank_that_does_not_come_is_named() -> None:
    place = places(2)[0]
    with pytest.raises(WaitTimeout, match=r"waited 0.6 s for rank 1"):
        Exchange.open(LAYERS, {}, place=place, join_timeout_s=QUICK_S)


def test_what_no_exchange_can_have() -> None:
    for layers in ([], [0], [1 << 33]):
        with pytest.raises(ConfigError, match="layers"):
            Exchange.open(layers, {})
    with pytest.raises(ConfigError, match="waits"):
        Exchange.open([1], {}, timeout_s=0)
    with pytest.raises(ConfigError, match="settings"):
        Exchange.open([1], {"compressor": ["v16"]})  # type: ignore[dict-item]
    with Exchange.open([1000], {}) as alone:
        for iteration, layer, elements in ((0, 1, 1000), (-1, 0, 1000), (1 << 62, 0, 1000), (0, 0, 1001)):
            with pytest.raises(ConfigError, match="layer"):
                alone.submit(iteration, layer, gradient(elements, 1, 0))
        alone.submit(3, 0, gradient(1000, 1, 0))
        with pytest.raises(
            ConfigError, match="iteration 3, layer 0 cannot be exchanged after iteration 3 of that layer"
        ):
            alone.submit(3, 0, gradient(1000, 1, 0))
        with pytest.raises(CorruptCheckpoint, match="do not ascend"):
            alone.submit(4, 0, SparseGradient(1000, 1, np.array([2, 1], np.uint32), torch.ones(2)))


# -- a neighbour that does what none should ----------------------------------------------------------------------------


@dataclass
class Stranger:
    """Rank 1 of two, or of more with rank 0 in front of it: it has shown who it is, and then sends what it likes."""

    previous: Link
    following: Link

    def send(self, *records: bytes | memoryview) -> None:
        self.following.wire.write("a test", *records)


@contextmanager
def beside_a_stranger(timeout_s: float = WAIT_S, ahead: int = 4) -> Iterator[tuple[Exchange, Stranger]]:
    first, second = places(2)
    described = about(LAYERS, {})
    opened, links = together(
        [
            partial(Exchange.open, LAYERS, {}, place=first, timeout_s=timeout_s, join_timeout_s=WAIT_S, ahead=ahead),
            partial(meet, second, described, WAIT_S),
        ]
    )
    try:
        yield opened, Stranger(*links[:2])
    finally:
        for link in links[:2]:
            link.wire.close()
        opened.close()


JOB_NUMBER = int.from_bytes(bytes.fromhex(JOB)[:8], "little")
LIKE = Chunk(Kind.CHUNK, JOB_NUMBER, 3, 1, iteration=0, layer=1)


def block(content: Any = None, like: Chunk = LIKE) -> list[bytes | memoryview]:
    """The records of a block, header and payload in turns."""
    content = encode(gradient(LAYERS[1], 20, 3)) if content is None else content
    return [part for record in cut(memoryview(content), like) for part in record]


def one_chunk(**changes: Any) -> list[bytes]:
    payload = changes.pop("payload", b"12345678")
    fields = {"length": len(payload), "total": len(payload), "checksum": _native.crc32c(payload)}
    return [pack_header(replace(LIKE, **{**fields, **changes})), payload]


def changed(at: int, content: bytes, *, checksum: bool = True) -> list[bytes | memoryview]:
    header = bytearray(block()[0])
    header[at : at + len(content)] = content
    if checksum:
        header[60:] = struct.pack("<I", _native.crc32c(bytes(header[:60])))
    return [bytes(header), *block()[1:]]


def indexed(indices: list[int], elements: int = LAYERS[1]) -> bytes:
    """A block with these numbers as its indices, whatever they are."""
    content = struct.pack("<4sBBBBB7xQQ", b"LGSB", 1, 4, 1, 1, 0, elements, len(indices))
    return content + np.ones(len(indices), "<f4").tobytes() + np.array(indices, "<u4").tobytes()


FAILURE = replace(LIKE, kind=Kind.FAILURE, iteration=0, layer=0)
HOSTILE: dict[str, tuple[list[Any], type[CheckpointError], str]] = {
    "no record": ([b"GET / HTTP/1.1\r\n\r\n" + bytes(64)], CorruptCheckpoint, "no record of a sparse exchange"),
    "another version": (changed(4, b"\2"), CorruptCheckpoint, "version 2; this side speaks version 1"),
    "damaged header": (changed(24, b"\7", checksum=False), CorruptCheckpoint, "header is damaged"),
    "unknown kind": (changed(6, b"\7"), CorruptCheckpoint, "kind 7"),
    "flags": (changed(7, b"\1"), CorruptCheckpoint, "flags 1"),
    "damaged payload": ([block()[0], bytes(len(block()[1]))], CorruptCheckpoint, "its checksum does not hold"),
    "foreign job": (block(like=replace(LIKE, job=77)), MismatchError, "a record of job 000000000000004d"),
    "another incarnation": (block(like=replace(LIKE, incarnation=2)), MismatchError, "incarnation 2; this is job"),
    "a rank that is none": (
        block(like=replace(LIKE, origin=2)),
        CorruptCheckpoint,
        "a record of rank 2, on rank 0 of 2",
    ),
    "this rank's own": (block(like=replace(LIKE, origin=0)), CorruptCheckpoint, "a record of rank 0, on rank 0 of 2"),
    "a layer that is none": (block(like=replace(LIKE, layer=3)), CorruptCheckpoint, "a block of layer 3 of 3"),
    "iteration": (changed(24, struct.pack("<Q", 1 << 62)), CorruptCheckpoint, "which no training reaches"),
    "too long": (one_chunk(total=1 << 40), CorruptCheckpoint, "has 1099511627776 bytes; it can have 8282 at most"),
    "longer than a chunk": (changed(36, struct.pack("<I", 65537)), CorruptCheckpoint, "a chunk of 65537 bytes"),
    "an empty chunk": (one_chunk(payload=b"", total=5), CorruptCheckpoint, "a chunk of 0 bytes at 0"),
    "beyond its block": (one_chunk(offset=1), CorruptCheckpoint, "a chunk of 8 bytes at 1, of a block of 8"),
    "not from its begin": (one_chunk(offset=1, total=10), CorruptCheckpoint, "continues at byte 1 of 10, not at 0"),
    "a hole": (
        [*one_chunk(total=30), *one_chunk(total=30, offset=9)],
        CorruptCheckpoint,
        "continues at byte 9 of 30, not at 8 of 30",
    ),
    "another length": (
        [*one_chunk(total=30), *one_chunk(total=31, offset=8)],
        CorruptCheckpoint,
        "continues at byte 8 of 31, not at 8 of 30",
    ),
    "a chunk twice": ([*one_chunk(total=30)] * 2, CorruptCheckpoint, "continues at byte 0 of 30, not at 8"),
    "a block twice": (block() * 2, CorruptCheckpoint, "iteration 0, layer 1 of rank 1 .* comes a second time"),
    "an older block": (
        block(like=replace(LIKE, iteration=2)) + block(like=replace(LIKE, iteration=1)),
        CorruptCheckpoint,
        "iteration 1, layer 1 of rank 1 .* comes a second time",
    ),
    "no block": (one_chunk(payload=b"12345678"), CorruptCheckpoint, "layer 1 of rank 1 .*: a sparse block of 8 bytes"),
    "of another tensor": (block(indexed([1], 500)), CorruptCheckpoint, "of 500 elements, of a tensor of 2000"),
    "index beyond": (block(indexed([1, 2000])), CorruptCheckpoint, "layer 1 of rank 1 .*: index 2000 of 2000"),
    "unsorted": (block(indexed([5, 4])), CorruptCheckpoint, "indices do not ascend"),
    "ends with a block": ([pack_header(replace(LIKE, kind=Kind.END, length=4))], CorruptCheckpoint, "kind END"),
    "a failure that is none": (
        [pack_header(replace(FAILURE, length=2, checksum=_native.crc32c(b"{}"))), b"{}"],
        CorruptCheckpoint,
        "says of its failure what cannot be read",
    ),
    "a long failure": ([pack_header(replace(FAILURE, length=5000))], CorruptCheckpoint, "FAILURE with 5000 bytes"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_is_no_block_ends_the_exchange(what: str) -> None:
    records, kind, why = HOSTILE[what]
    with beside_a_stranger() as (exchange, stranger):
        future = exchange.submit(0, 0, gradient(LAYERS[0], 5, 1))
        stranger.send(*records)
        with pytest.raises(kind, match=why) as caught:
            future.result(WAIT_S)
        assert "rank 1 on " in str(caught.value)
        with pytest.raises(kind, match=why):
            exchange.submit(1, 0, gradient(LAYERS[0], 5, 1)).result(WAIT_S)
        # The stranger is told, on both connections.
        for link in (stranger.previous, stranger.following):
            told = bytearray()
            while link.wire.wait_readable(WAIT_S) and (data := link.socket.recv(1 << 16)):
                told += data
            assert why.split(" .*")[0][:20] in told.decode(errors="replace")


def test_a_record_against_the_rings_direction() -> None:
    with beside_a_stranger() as (exchange, stranger):
        future = exchange.submit(0, 0, gradient(LAYERS[0], 5, 1))
        stranger.previous.wire.write("a test", *block())
        with pytest.raises(CorruptCheckpoint, match=r"rank 1 on .* against the ring's direction"):
            future.result(WAIT_S)


def test_a_rank_that_is_too_far_ahead_is_named() -> None:
    with beside_a_stranger(ahead=2) as (exchange, stranger):
        exchange.submit(0, 1, gradient(LAYERS[1], 5, 1))
        for iteration in (0, 1, 2):
            stranger.send(*block(like=replace(LIKE, iteration=iteration)))
        future = exchange.submit(0, 0, gradient(LAYERS[0], 5, 1))
        time.sleep(0.05)
        assert not future.done()
        stranger.send(*block(like=replace(LIKE, iteration=3)))
        with pytest.raises(
            MismatchError, match=r"rank 1 on .* is at iteration 3, 3 iterations ahead of rank 0; 2 may be"
        ):
            future.result(WAIT_S)


def test_a_neighbour_that_dies_in_the_middle_of_a_block() -> None:
    with beside_a_stranger() as (exchange, stranger):
        future = exchange.submit(0, 1, gradient(LAYERS[1], 5, 1))
        header, payload = block()[:2]
        stranger.send(header, payload[:30])
        time.sleep(0.05)
        assert not future.done()
        for link in (stranger.previous, stranger.following):
            link.wire.close()
        with pytest.raises(
            CheckpointError, match=r"rank 1 on .*(in the middle of a block|broke|closed the connection)"
        ):
            future.result(WAIT_S)


@pytest.mark.parametrize("part", [0, 30, 94])
def test_a_neighbour_that_falls_silent_in_the_middle_of_a_block(part: int) -> None:
    with beside_a_stranger(QUICK_S) as (exchange, stranger):
        future = exchange.submit(0, 1, gradient(LAYERS[1], 5, 1))
        stranger.send(b"".join(map(bytes, block()))[:part])
        begin = time.monotonic()
        with pytest.raises(WaitTimeout, match=r"waited 0.6 s for iteration 0, layer 1 of rank 1 on .* s ago"):
            future.result(WAIT_S)
        assert QUICK_S * 0.8 < time.monotonic() - begin < QUICK_S + 10


def test_a_neighbour_that_takes_nothing() -> None:
    elements = 4_000_000
    first, second = places(2)
    described = about([elements], {})
    exchange, links = together(
        [
            partial(Exchange.open, [elements], {}, place=first, timeout_s=QUICK_S, join_timeout_s=WAIT_S),
            partial(meet, second, described, WAIT_S),
        ]
    )
    try:
        future = exchange.submit(0, 0, gradient(elements, elements, 1))
        with pytest.raises(WaitTimeout, match=r"waited 0\.\d+ s for (rank 1|iteration 0, layer 0 of rank 1)"):
            future.result(WAIT_S)
        begin = time.monotonic()
        exchange.close()
        assert time.monotonic() - begin < 15, "its last words are not waited for without an end"
    finally:
        for link in links[:2]:
            link.wire.close()
        exchange.close()


# -- failures between ranks --------------------------------------------------------------------------------------------


def errors_of(futures: list[Any]) -> list[Any]:
    wait(futures, WAIT_S)
    return [future.exception(0) for future in futures]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_silent_rank_is_named_on_all_ranks(ranks: int) -> None:
    with exchanges(ranks, LAYERS, timeout_s=QUICK_S) as opened:
        futures = [exchange.submit(0, 0, gradient(1000, 5, 1)) for exchange in opened[:-1]]
        for error in errors_of(futures):
            assert isinstance(error, WaitTimeout)
            assert f"waited 0.6 s for iteration 0, layer 0 of rank {ranks - 1} on " in str(error)
        # Of a layer that nobody else has sent, since what came before the others ended may be complete.
        late = opened[-1].submit(0, 1, gradient(LAYERS[1], 5, 1))
        assert isinstance(late.exception(WAIT_S), WaitTimeout), "the silent rank hears of it as well"


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_rank_that_closes_while_blocks_are_in_progress_fails_all(ranks: int) -> None:
    with exchanges(ranks, LAYERS) as opened:
        futures = [
            exchange.submit(0, layer, gradient(LAYERS[layer], 5, 1)) for exchange in opened[:-1] for layer in (2, 0)
        ]
        own = opened[-1].submit(0, 1, gradient(LAYERS[1], 5, 1))
        opened[-1].close()
        for error in errors_of(futures):
            assert re_named(
                error, f"rank {ranks - 1} on .* ended the exchange: rank .* closed its exchange while iteration 0"
            )
        assert re_named(own.exception(WAIT_S), f"rank {ranks - 1} on .* closed its exchange while iteration 0, layer 1")
        after = opened[-1].submit(1, 0, gradient(1000, 5, 1))
        assert isinstance(after.exception(WAIT_S), CheckpointError)
        opened[-1].close()


def re_named(error: Any, pattern: str) -> bool:
    with pytest.raises(CheckpointError, match=pattern):
        raise error
    return True


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_link_that_is_cut_in_the_middle_of_a_block_fails_all(ranks: int) -> None:
    relay = Relay()
    sent = threading.Event()

    def change(data: bytes) -> bytes | None:
        if relay.carried > 200_000:
            sent.set()
            return None
        return data

    relay.change = change
    elements = 300_000
    with exchanges(ranks, [elements], {0: relay}) as opened:
        blocks = [gradient(elements, elements // 2, rank) for rank in range(ranks)]
        futures = [exchange.submit(0, 0, one) for exchange, one in zip(opened, blocks, strict=True)]
        errors = errors_of(futures)
        assert sent.is_set()
        assert re_named(errors[1], "rank 0 on ")
        for future, error in zip(futures, errors, strict=True):
            if error is None:  # what this rank needs did not come over that link
                assert all(equal(one, blocks[rank]) for rank, one in enumerate(future.result(0)))
        after = [exchange.submit(1, 0, gradient(elements, 5, 1)) for exchange in opened]
        for error in errors_of(after):
            assert re_named(error, "rank [01] on ")


def test_a_rank_that_leaves_after_its_last_block_disturbs_nobody() -> None:
    """Ranks leave as soon as they have all blocks, while a slow link still carries them to others."""
    relay = Relay(bytes_per_s=2e6)
    elements, ranks = 200_000, 4
    with exchanges(ranks, [elements] * 2, {2: relay}) as opened:

        def train(rank: int) -> None:
            sent = [gradient(elements, 20_000, rank), gradient(elements, 10, rank)]
            futures = [opened[rank].submit(0, layer, sent[layer]) for layer in (0, 1)]
            for layer, future in enumerate(futures):
                assert [len(one.indices) for one in future.result(WAIT_S)] == [(20_000, 10)[layer]] * ranks
            opened[rank].close()

        begin = time.monotonic()
        assert together([partial(train, rank) for rank in range(ranks)]) == [None] * ranks
        assert time.monotonic() - begin < 20


def test_a_rank_that_has_left_is_named() -> None:
    with exchanges(3, LAYERS) as opened:
        futures = [exchange.submit(0, 0, gradient(1000, 5, 1)) for exchange in opened]
        for future in futures:
            future.result(WAIT_S)
        opened[1].close()
        late = [opened[rank].submit(1, 0, gradient(1000, 5, 1)) for rank in (0, 2)]
        for error in errors_of(late):
            assert re_named(error, "rank 1 on .* has left the exchange, without its part of iteration 1, layer 0")


def test_close_may_be_called_from_a_result_and_twice() -> None:
    with exchanges(2, LAYERS) as opened:
        closed = threading.Event()
        first = opened[0].submit(0, 0, gradient(1000, 5, 1))
        first.add_done_callback(lambda future: (opened[0].close(), closed.set()))
        opened[1].submit(0, 0, gradient(1000, 5, 1)).result(WAIT_S)
        assert closed.wait(WAIT_S)
        opened[0].close()
        assert re_named(opened[0].submit(1, 0, gradient(1000, 5, 1)).exception(WAIT_S), "closed")


def test_no_thread_and_no_descriptor_is_left() -> None:
    with exchanges(3, LAYERS) as opened:
        for exchange in opened:
            exchange.submit(0, 0, gradient(1000, 5, 1))
        sockets = [link.socket for exchange in opened for link in (exchange._ring._previous, exchange._ring._following)]  # type: ignore[union-attr]
        assert all(one.fileno() >= 0 for one in sockets)
    assert all(one.fileno() < 0 for one in sockets)
    deadline = time.monotonic() + WAIT_S
    while left := [one.name for one in threading.enumerate() if one.name.startswith("lastgood-sparse")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_bytes_that_change_on_the_way_give_errors_and_never_other_blocks(seed: int) -> None:
    rng = random.Random(seed)
    relay = Relay(piece_bytes=4096)
    at = rng.randrange(300_000)
    ready = threading.Event()

    def change(data: bytes) -> bytes | None:
        if not ready.is_set():
            return data
        first, relay_at = 0, relay.carried - begin
        if relay_at <= at < relay_at + len(data):
            first = at - relay_at
            kind = rng.randrange(4)
            if kind == 0:
                return data[:first] + bytes([data[first] ^ 1 << rng.randrange(8)]) + data[first + 1 :]
            if kind == 1:
                return data[:first] + rng.randbytes(rng.randrange(1, 200)) + data[first:]
            if kind == 2:
                return data[:first] + data[first + rng.randrange(1, 200) :]
            return data[:first] + data + data[first:]
        return data

    relay.change = change
    elements = 20_000
    with exchanges(2, [elements] * 4, {0: relay}, timeout_s=3.0) as opened:
        begin = relay.carried
        ready.set()
        sent = {(rank, layer): gradient(elements, 15_000, 10 * rank + layer) for rank in (0, 1) for layer in range(4)}
        futures = {key: opened[key[0]].submit(0, key[1], one) for key, one in sent.items()}
        wait(futures.values(), WAIT_S)
        for (_, layer), future in futures.items():
            if future.exception(0) is None:
                for rank, result in enumerate(future.result(0)):
                    assert equal(result, sent[rank, layer])
            else:
                assert isinstance(future.exception(0), CheckpointError)


def test_a_chunk_holds_what_the_page_says() -> None:
    assert (chunks.HEADER_BYTES, CHUNK_BYTES) == (64, 65536)
    assert TOKEN not in b"".join(map(bytes, block()))
