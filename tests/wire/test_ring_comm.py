"""The ring all-reduce: sums to the bit in a known order, equal on all ranks; the records on its links; its failures."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood import _native
from lastgood.errors import CheckpointError, ConfigError, CorruptCheckpoint, HostError, MismatchError, WaitTimeout
from lastgood.ports import free_ports
from lastgood.wire import ring_comm
from lastgood.wire.records import FINAL, DType, RecordKind
from lastgood.wire.ring import Cover, one_channel
from lastgood.wire.ring_comm import NO_BUCKET, Divide, Place, RingComm
from lastgood.wire.ring_link import Link, connect_ring, listen_ring
from tests.support.patience import wait_until
from tests.wire.support.ring_helpers import JOB, LAYOUT, TOKEN, WAIT_S, WireTap, make_ring, together

TORCH = {
    DType.float32: torch.float32,
    DType.float64: torch.float64,
    DType.float16: torch.float16,
    DType.bfloat16: torch.bfloat16,
}
CHUNK = 4096


def summed(parts: Sequence[torch.Tensor], divide: Divide, chunk_bytes: int) -> torch.Tensor:
    """What the ring must give, in the ring's own order of additions, by torch."""
    ranks = len(parts)
    result = torch.empty_like(parts[0])
    for chunk in one_channel(parts[0].numel(), parts[0].element_size(), ranks, chunk_bytes).chunks():
        where = slice(chunk.start, chunk.start + chunk.elements)
        own = [part[where] / ranks if divide is Divide.BEFORE else part[where] for part in parts]
        total = own[(chunk.index + 1) % ranks]
        for step in range(2, ranks + 1):
            total = total + own[(chunk.index + step) % ranks]
        result[where] = total / ranks if divide is Divide.AFTER else total
    return result


def parts_of(ranks: int, elements: int, dtype: DType, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(elements, generator=generator, dtype=torch.float64).to(TORCH[dtype]) for _ in range(ranks)]


def reduce_all(ring: list[RingComm], parts: list[torch.Tensor], dtype: DType, divide: Divide, places=(), iteration=1):
    results = [part.clone() for part in parts]

    def run(comm: RingComm) -> None:
        plan = comm.plan(results[comm.rank].numel(), dtype, places, divide)
        comm.all_reduce(plan, results[comm.rank].data_ptr(), iteration)
        comm.end(iteration)

    together([lambda comm=comm: run(comm) for comm in ring])
    return results


# -- sums --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[2, 3, 4])
def ring(request):
    comms = make_ring(request.param, chunk_bytes=CHUNK, segment_bytes=1024)
    yield comms
    for comm in comms:
        comm.close()


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("divide", list(Divide))
@settings(max_examples=6, deadline=None)
@given(
    elements=st.one_of(st.integers(0, 9), st.integers(0, 3000), st.sampled_from([1024, 4096, 4097, 20_001])),
    seed=st.integers(0, 99),
)
def test_sums_have_the_ring_s_own_order_and_are_equal_on_all_ranks(ring, dtype, divide, elements, seed) -> None:
    parts = parts_of(len(ring), elements, dtype, seed)
    expected = summed(parts, divide, CHUNK)
    for result in reduce_all(ring, parts, dtype, divide):
        assert torch.equal(result.view(torch.uint8), expected.view(torch.uint8))


def test_many_megabytes_go_around() -> None:
    comms = make_ring(3)
    parts = parts_of(3, 3_000_001, DType.float32)
    expected = summed(parts, Divide.NO, 2 << 20)
    assert all(torch.equal(result, expected) for result in reduce_all(comms, parts, DType.float32, Divide.NO))
    for comm in comms:
        # Each rank sends 2 (N - 1) / N of the tensor; headers are all that is added.
        assert 1 <= comm.sent_bytes / (3_000_001 * 4 * 4 / 3) < 1.001
        comm.close()


# -- records -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cover", list(Cover))
@pytest.mark.parametrize(("ranks", "elements"), [(2, 5000), (3, 5000), (4, 17), (4, 2)])
def test_marked_records_hold_every_wanted_byte_once_and_whole(cover: Cover, ranks: int, elements: int) -> None:
    taps = {rank: WireTap() for rank in range(ranks)}
    comms = make_ring(ranks, taps, chunk_bytes=CHUNK, segment_bytes=1024, cover=cover)  # type: ignore[arg-type]
    # Two buckets and a hole: what lies in the hole is reduced, and wanted by nobody.
    third = elements // 3 * 4
    places = [Place(0, third, 5, 64), Place(2 * third, elements * 4 - 2 * third, 2, 0)]
    parts = parts_of(ranks, elements, DType.float32)
    results = reduce_all(comms, parts, DType.float32, Divide.BEFORE, places, iteration=7)
    for comm in comms:
        comm.close()
    whole = results[0].numpy().tobytes()
    wanted = {
        (bucket, offset + byte): whole[start + byte]
        for start, nbytes, bucket, offset in (
            (place.start, place.nbytes, place.bucket, place.offset) for place in places
        )
        for byte in range(nbytes)
    }
    seen: dict[tuple[int, int], int] = {}
    for rank, tap in taps.items():
        records = tap.records()
        assert records[-1][0].kind is RecordKind.END
        assert sum(record.kind is RecordKind.END for record, _ in records) == 1
        for record, payload in records:
            assert (record.rank, record.iteration, record.epoch) == (rank, 7, 3)
            assert record.length <= 1024
            if record.flags & FINAL:
                assert record.bucket != NO_BUCKET
                for index, byte in enumerate(payload):
                    assert (record.bucket, record.offset + index) not in seen
                    seen[record.bucket, record.offset + index] = byte
        assert comms[rank].marked_bytes == sum(len(payload) for record, payload in records if record.flags & FINAL)
        assert comms[rank].sent_bytes == sum(64 + len(payload) for _, payload in records)
    assert seen == wanted


def test_neighbouring_parameters_travel_in_one_record() -> None:
    tap = WireTap()
    comms = make_ring(2, {0: tap}, segment_bytes=1 << 16)
    places = [Place(start, 40, 1, 400 + start) for start in range(0, 400, 40)]
    reduce_all(comms, parts_of(2, 100, DType.float32), DType.float32, Divide.NO, places)
    for comm in comms:
        comm.close()
    assert [(record.offset, record.length) for record, _ in tap.records() if record.kind is RecordKind.GRADIENT] == [
        (608, 192),
        (400, 208),
    ]


def test_places_that_overlap_or_lie_outside_are_refused(ring) -> None:
    for places in ([Place(0, 8, 0, 0), Place(4, 8, 0, 8)], [Place(36, 8, 0, 0)], [Place(-4, 8, 0, 0)]):
        with pytest.raises(ConfigError, match="Place"):
            ring[0].plan(10, DType.float32, places)
    with pytest.raises(ValueError, match="cuts an element"):
        comm = ring[0]
        comm.all_reduce(comm.plan(10, DType.float32, [Place(0, 6, 0, 0)]), torch.zeros(10).data_ptr(), 1)


# -- failures ----------------------------------------------------------------------------------------------------------


def wait_for_bytes(comm: RingComm) -> None:
    """Until a call in another thread has sent something."""
    wait_until(lambda: comm.sent_bytes != 0, "bytes that are sent", WAIT_S)


def test_a_rank_that_does_nothing_is_named_after_the_timeout() -> None:
    comms = make_ring(2, timeout_s=1.0)
    data = torch.zeros(1_000_000)
    host = os.uname().nodename
    with pytest.raises(WaitTimeout, match=f"rank 0: waited 1 s for rank 1 on {host} .*iteration 4"):
        comms[0].all_reduce(comms[0].plan(data.numel(), DType.float32, []), data.data_ptr(), 4)
    with pytest.raises(HostError, match="failed before"):
        comms[0].end(4)
    # The other one learns of it at once.
    with pytest.raises(HostError, match=f"rank 1: .*rank 0 on {host}.*closed the connection"):
        comms[1].all_reduce(comms[1].plan(data.numel(), DType.float32, []), data.data_ptr(), 4)
    for comm in comms:
        comm.close()


@pytest.mark.parametrize(
    "other", [{"iteration": 6}, {"bucket": 4}, {"offset": 8}, {"dtype": DType.bfloat16}, {"elements": 90}]
)
def test_ranks_out_of_step_are_told_apart(other: dict[str, int]) -> None:
    comms = make_ring(2)
    own = {"iteration": 5, "bucket": 3, "offset": 0, "dtype": DType.float32, "elements": 100}
    caught: list[BaseException] = []

    def run(rank: int, iteration: int, bucket: int, offset: int, dtype: DType, elements: int) -> None:
        comm = comms[rank]
        data = torch.zeros(100)
        nbytes = elements * torch.empty(0, dtype=TORCH[dtype]).element_size()
        try:
            plan = comm.plan(elements, dtype, [Place(0, nbytes, bucket, offset)])
            comm.all_reduce(plan, data.data_ptr(), iteration)
        except MismatchError as error:
            caught.append(error)
        except HostError:
            pass  # whose neighbour was first to notice

    together([lambda: run(0, **own), lambda: run(1, **{**own, **other})])
    assert caught
    sent, expected = re.findall(r"sent (.*) where (.*) was expected: the ranks do not reduce", str(caught[0]))[0]
    assert sent != expected
    for comm in comms:
        comm.close()


def test_the_end_of_the_next_rank_is_seen_while_waiting_for_the_previous_one() -> None:
    comms = make_ring(3, timeout_s=200.0)
    data = torch.zeros(10)
    caught: list[str] = []

    def wait() -> None:
        with pytest.raises(HostError) as error:
            comms[0].all_reduce(comms[0].plan(10, DType.float32, []), data.data_ptr(), 1)
        caught.append(str(error.value))

    thread = threading.Thread(target=wait)
    thread.start()
    wait_for_bytes(comms[0])
    comms[1].close()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert "rank 0: sending to rank 1 on" in caught[0]
    for comm in comms:
        comm.close()


@pytest.mark.parametrize("damage", ["payload", "header", "garbage"])
def test_damage_on_the_way_is_seen(damage: str) -> None:
    def change(content: bytes) -> bytes:
        changed = bytearray(content)
        if damage == "garbage":
            changed[:64] = b"GET / HTTP/1.1" + bytes(50)
        else:
            changed[64 + 100 if damage == "payload" else 45] ^= 4
        return bytes(changed)

    comms = make_ring(2, {0: WireTap(change)})
    data = [torch.zeros(100), torch.zeros(100)]
    caught: list[BaseException] = []

    def run(rank: int) -> None:
        comm = comms[rank]
        try:
            comm.all_reduce(comm.plan(100, DType.float32, [Place(0, 400, 3, 0)]), data[rank].data_ptr(), 1)
        except CheckpointError as error:
            caught.append(error)
        except HostError:
            pass  # the other one, whose connection ended then

    together([lambda: run(0), lambda: run(1)])
    (error,) = caught
    assert isinstance(error, CorruptCheckpoint)
    assert "rank 1: rank 0 on" in str(error)
    assert {"payload": "damaged payload", "header": "damaged_header", "garbage": "damaged_header"}[damage] in str(error)
    for comm in comms:
        comm.close()


def test_two_threads_at_once_are_refused() -> None:
    comms = make_ring(2)
    data = torch.zeros(10)
    plan = comms[0].plan(10, DType.float32, [])

    def wait() -> None:
        with pytest.raises(HostError):
            comms[0].all_reduce(plan, data.data_ptr(), 1)

    first = threading.Thread(target=wait)
    first.start()
    wait_for_bytes(comms[0])
    with pytest.raises(CheckpointError, match="two threads"):
        comms[0].end(1)
    for comm in comms:
        comm.close()
    first.join(WAIT_S)
    assert not first.is_alive()


def test_close_ends_a_call_of_another_thread() -> None:
    comms = make_ring(2, timeout_s=200.0)
    data = torch.zeros(10)
    plan = comms[0].plan(10, DType.float32, [])
    caught: list[BaseException] = []

    def run() -> None:
        try:
            comms[0].all_reduce(plan, data.data_ptr(), 1)
        except HostError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    wait_for_bytes(comms[0])
    comms[0].close()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert caught
    comms[1].close()


RANK = """
import sys
import numpy as np
from lastgood.wire.records import DType
from lastgood.wire.ring_comm import RingComm
from lastgood.wire.ring_link import Link, connect_ring, listen_ring
rank, ranks, port, following = map(int, sys.argv[1:])
comm = RingComm(rank, ranks, listener=listen_ring("127.0.0.1", port), next_address=f"127.0.0.1:{following}",
                token=b"a token of thirty-two bytes long", job="0123456789abcdef" * 2, epoch=3, layout="ab" * 32,
                timeout_s=120.0)
data = np.empty(1 << 16, np.float32)
plan = comm.plan(data.size, DType.float32, [])
for iteration in range(1, 1_000_000):
    data.fill(rank + 1)
    comm.all_reduce(plan, data.ctypes.data, iteration)
    comm.end(iteration)
    assert data[0] == data[-1] == ranks * (ranks + 1) / 2
    print(iteration, flush=True)
"""


def test_a_killed_rank_is_named_by_its_neighbours() -> None:
    ports = free_ports(3)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), "3", str(ports[rank]), str(ports[(rank + 1) % 3])],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "1\n"
        processes[1].send_signal(signal.SIGKILL)
        said = {rank: processes[rank].communicate(timeout=WAIT_S)[1] for rank in (0, 2)}
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    host = os.uname().nodename
    # Its neighbours see its end, or each other's: who is lost is in at least one of them.
    assert all("HostError: rank" in text for text in said.values())
    assert f"rank 1 on {host}" in said[0] + said[2]


# -- opening -----------------------------------------------------------------------------------------------------------


def pair(*options: dict[str, object]) -> list[BaseException | RingComm]:
    """Both ends of a ring of two, opened with options of their own; their errors are given back."""
    listeners = [listen_ring("127.0.0.1") for _ in options]
    results: list[BaseException | RingComm] = [RuntimeError()] * len(options)

    def make(rank: int) -> None:
        # The one that was refused has left: where it was first, the other one waits for it so long.
        settings: dict[str, object] = {"token": TOKEN, "job": JOB, "epoch": 3, "layout": LAYOUT, "timeout_s": 5.0}
        settings.update({"rank": rank, "ranks": 2}, **options[rank])
        following = f"127.0.0.1:{listeners[(rank + 1) % 2].getsockname()[1]}"
        try:
            results[rank] = RingComm(listener=listeners[rank], next_address=following, **settings)  # type: ignore
        except CheckpointError as error:
            results[rank] = error

    together([lambda rank=rank: make(rank) for rank in range(len(options))])
    for result in results:
        if isinstance(result, RingComm):
            result.close()
    return results


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"token": b"another token of thirty-two byte"}, "does not know this job's token"),
        ({"job": "f" * 32}, "its job is"),
        ({"epoch": 4}, "its epoch is"),
        ({"layout": "cd" * 32}, "its layout is"),
        ({"ranks": 3}, "its ranks is 2, that of rank 1 is 3|its ranks is 3, that of rank 0 is 2"),
        ({"rank": 0}, "it is rank 0, and rank 0 follows rank 1"),
    ],
)
def test_a_rank_that_belongs_elsewhere_is_refused(other: dict[str, object], words: str) -> None:
    results = pair({}, other)
    assert all(isinstance(result, (MismatchError, WaitTimeout)) for result in results)
    texts = "\n".join(str(result) for result in results)
    assert re.search(words, texts), texts


def test_a_rank_that_never_comes_is_waited_for_so_long() -> None:
    listener = listen_ring("127.0.0.1")
    address = f"127.0.0.1:{free_ports()[0]}"
    with pytest.raises(WaitTimeout, match=rf"waited 1 s for rank 1 \({address}\) .*refused"):
        RingComm(
            0, 2, listener=listener, next_address=address, token=TOKEN, job=JOB, epoch=1, layout=LAYOUT, timeout_s=1.0
        )


def test_garbage_before_the_neighbour_does_no_harm() -> None:
    listeners = [listen_ring("127.0.0.1") for _ in range(2)]
    strangers = [socket.create_connection(listener.getsockname()) for listener in listeners for _ in range(2)]
    for stranger in strangers:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 4)

    def make(rank: int) -> RingComm:
        following = f"127.0.0.1:{listeners[1 - rank].getsockname()[1]}"
        return RingComm(
            rank, 2, listener=listeners[rank], next_address=following, token=TOKEN, job=JOB, epoch=1, layout=LAYOUT
        )

    first, second = together([lambda: make(0), lambda: make(1)])
    together([lambda: first.end(1), lambda: second.end(1)])  # the ring goes round
    assert first.sent_bytes == second.sent_bytes > 0
    for closed in (first, second, *strangers):
        closed.close()


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"ranks": 1}, "ranks, not 1"),
        ({"rank": 2}, "rank 2 is not one of 2"),
        ({"chunk_bytes": 100}, "multiple of 16"),
        ({"next_address": "x"}, "not an address"),
    ],
)
def test_what_no_ring_is(other: dict[str, object], words: str) -> None:
    listener = listen_ring("127.0.0.1")
    settings: dict[str, object] = {"rank": 0, "ranks": 2, "next_address": "x:1", "timeout_s": 2.0, **other}
    with pytest.raises(ConfigError, match=words):
        RingComm(listener=listener, token=b"", job=JOB, epoch=1, layout=LAYOUT, **settings)  # type: ignore[arg-type]
    assert listener.fileno() == -1, "it is closed, as in every other case"


def test_connections_end_where_the_ring_cannot_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    links: list[Link] = []

    def connect(*what: Any) -> tuple[Link, Link]:
        found = connect_ring(*what)
        links.extend(found)
        return found

    def too_many_files(*_: object) -> None:
        raise OSError(errno.EMFILE, "dup: too many open files")

    monkeypatch.setattr(ring_comm, "connect_ring", connect)
    monkeypatch.setattr(_native, "Ring", too_many_files)
    with pytest.raises(HostError, match=r"rank \d: its ring cannot begin: .*too many open files"):
        make_ring(2)
    assert len(links) == 4 and all(link.socket.fileno() == -1 for link in links)
