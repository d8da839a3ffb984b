"""The ring's layout, against a step-by-step run of a ring whose chunks are the sets of ranks that they sum over."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood.errors import ConfigError
from lastgood.wire.nccl import KNOWN_VERSIONS, OLD_VERSIONS, messages, nccl_broadcast, nccl_layout, simple_slices
from lastgood.wire.ring import Cover, RingLayout, Send, is_final, is_marked, one_channel, sent_chunk, step_count


def counts_of(layout: RingLayout) -> list[int]:
    return [chunk.elements for chunk in layout.chunks()]


# -- the steps -------------------------------------------------------------------------------------------------------


def run_ring(ranks: int) -> list[list[tuple[int, frozenset[int]]]]:
    """For each step, what each rank sends: chunk index and the ranks whose sum it is.

    Written from what a ring does, not from the formula: a rank begins with its predecessor's chunk, then passes on
    whatever it received last, after adding its own part to it while it lacks that.
    """
    held = {(rank, chunk): frozenset({rank}) for rank in range(ranks) for chunk in range(ranks)}
    passing = {rank: (rank - 1) % ranks for rank in range(ranks)}
    steps = []
    for _ in range(2 * ranks - 2):
        sent = [(passing[rank], held[rank, passing[rank]]) for rank in range(ranks)]
        steps.append(sent)
        for rank in range(ranks):
            chunk, summed = sent[(rank - 1) % ranks]
            held[rank, chunk] = summed if rank in summed else summed | {rank}
            passing[rank] = chunk
    assert all(summed == frozenset(range(ranks)) for summed in held.values())
    return steps


@pytest.mark.parametrize("ranks", range(2, 18))
def test_steps_are_those_of_a_ring_that_was_run(ranks: int) -> None:
    steps = run_ring(ranks)
    assert len(steps) == step_count(ranks)
    for step, sent in enumerate(steps):
        for rank, (chunk, summed) in enumerate(sent):
            assert sent_chunk(ranks, rank, step) == chunk
            assert is_final(ranks, step) == (len(summed) == ranks)


@pytest.mark.parametrize("ranks", range(2, 18))
@pytest.mark.parametrize("cover", Cover)
def test_a_cover_marks_each_chunk_once_and_only_whole_sums(ranks: int, cover: Cover) -> None:
    marked = [
        (rank, chunk)
        for step, sent in enumerate(run_ring(ranks))
        for rank, (chunk, summed) in enumerate(sent)
        if is_marked(cover, ranks, rank, step) and len(summed) == ranks
    ]
    everything = [
        (rank, step)
        for rank in range(ranks)
        for step in range(step_count(ranks))
        if is_marked(cover, ranks, rank, step)
    ]
    assert len(everything) == len(marked) == ranks
    assert sorted(chunk for _, chunk in marked) == list(range(ranks))
    by_rank = [sum(1 for rank, _ in marked if rank == one) for one in range(ranks)]
    assert by_rank == ([1] * ranks if cover is Cover.BALANCED else [1, *[0] * (ranks - 2), ranks - 1])


# -- chunks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("elements", "element_bytes", "counts"),
    [
        (1024, 4, [256, 256, 256, 256]),
        (1023, 4, [256, 256, 256, 255]),
        (1001, 4, [252, 252, 252, 245]),
        (10, 4, [4, 4, 2, 0]),
        (1000, 2, [256, 256, 256, 232]),
        (3, 4, [3, 0, 0, 0]),
        (1, 8, [1, 0, 0, 0]),
        (0, 4, []),
        (4 * 524288, 4, [524288] * 4),
        (4 * 524288 + 5, 4, [524288] * 4 + [4, 1, 0, 0]),
        (4 * 524288 - 1, 4, [524288] * 3 + [524287]),
    ],
)
def test_worked_examples_of_nccl_with_four_ranks(elements: int, element_bytes: int, counts: list[int]) -> None:
    assert counts_of(one_channel(elements, element_bytes, 4)) == counts
    assert counts_of(nccl_layout(elements, element_bytes, 4)) == counts


def test_worked_example_of_the_artefact_cover() -> None:
    layout = one_channel(1024, 4, 4)
    rows = [
        (send.rank, send.step, send.chunk.index, send.chunk.start, send.chunk.elements)
        for send in layout.marked(Cover.ARTEFACT)
    ]
    assert sorted(rows) == [(0, 3, 0, 0, 256), (3, 3, 3, 768, 256), (3, 4, 2, 512, 256), (3, 5, 1, 256, 256)]


@settings(max_examples=300, deadline=None)
@given(
    elements=st.one_of(st.integers(0, 40), st.integers(0, 20_000), st.integers(0, 3_000_000)),
    element_bytes=st.sampled_from([1, 2, 4, 8]),
    ranks=st.integers(2, 9),
    channels=st.integers(1, 24),
    version=st.sampled_from(KNOWN_VERSIONS),
    protocol=st.sampled_from(["simple", "ll"]),
    cover=st.sampled_from(Cover),
)
def test_every_layout_covers_every_element_once(
    elements: int, element_bytes: int, ranks: int, channels: int, version: str, protocol: str, cover: Cover
) -> None:
    if version == "2.22":
        protocol = "simple"
    layout = nccl_layout(
        elements, element_bytes, ranks, channels=channels, version=version, protocol=protocol, buffer_bytes=1 << 16
    )
    chunks = list(layout.chunks())
    assert len(chunks) % ranks == 0
    assert len({chunk.channel for chunk in chunks}) <= channels
    position = 0
    in_place = sorted(chunks, key=lambda chunk: (chunk.start, chunk.elements))
    for chunk in in_place:
        assert chunk.start == position
        position += chunk.elements
    assert position == elements
    if version not in OLD_VERSIONS:
        assert [chunk for chunk in chunks if chunk.elements] == [chunk for chunk in in_place if chunk.elements]
    assert max((chunk.elements * element_bytes for chunk in chunks), default=0) <= 1 << 15
    marked = sorted(layout.marked(cover), key=lambda send: send.chunk.start)
    assert [send.chunk for send in marked] == [chunk for chunk in in_place if chunk.elements]
    again = [
        Send(rank, step, chunk)
        for first in range(0, len(chunks), ranks)
        for rank in range(ranks)
        for step in range(step_count(ranks))
        if is_marked(cover, ranks, rank, step) and (chunk := chunks[first + sent_chunk(ranks, rank, step)]).elements
    ]
    assert sorted(again, key=lambda send: send.chunk.start) == marked
    sends = [send for rank in range(ranks) for send in layout.sends(rank)]
    assert len(sends) == len(chunks) * step_count(ranks)
    assert all(send.chunk.index == sent_chunk(ranks, send.rank, send.step) for send in sends)
    of_rank = list(messages(layout, 1, protocol=protocol, buffer_bytes=1 << 16))
    assert len(of_rank) == len(chunks) // ranks * step_count(ranks) * (2 if protocol == "simple" else 1)
    joined = [(first.start, first.elements) for first in of_rank]
    if protocol == "simple":
        halves = list(zip(of_rank[::2], of_rank[1::2], strict=True))
        assert all(first.start + first.elements == second.start for first, second in halves)
        assert all(first.elements >= second.elements >= 0 for first, second in halves)
        joined = [(first.start, first.elements + second.elements) for first, second in halves]
    assert joined == [(send.chunk.start, send.chunk.elements) for send in layout.sends(1)]


# -- several channels ------------------------------------------------------------------------------------------------


def part_counts(*arguments: int, **options: object) -> list[int]:
    return [run.elements for run in nccl_layout(*arguments, **options).ranges]  # type: ignore[arg-type]


def test_cells_of_16_bytes_go_to_channels_evenly() -> None:
    # 1000 fp32 are 250 cells; each of 4 channels may carry 8000 // 4 = 2000 bytes of traffic: 62 cells of 32, rounded
    # down for the first one and up for the others.
    assert part_counts(1000, 4, 4, channels=4, version="2.22.3") == [62 * 4, 63 * 4, 63 * 4, 62 * 4]
    # A channel carries at least 512 bytes of traffic, so 256 bytes of the buffer.
    assert part_counts(100, 4, 4, channels=16, version="2.22.3") == [64, 36]


def test_cells_of_16_kib_go_to_channels_evenly() -> None:
    # 400,000 bytes are 25 cells (the last one is not full): 7 each for the first three channels, 4 for the last one.
    cell = 16384 // 4
    assert part_counts(100_000, 4, 4, channels=4, version="2.30") == [7 * cell, 7 * cell, 7 * cell, 100_000 - 21 * cell]
    assert part_counts(100, 4, 4, channels=16, version="2.30.3") == [100]
    assert part_counts(2 * cell, 4, 4, channels=16, version="2.30.3") == [cell, cell]


@pytest.mark.parametrize(
    ("nbytes", "protocol", "counts"),
    [
        (66_856, "simple", [10_240, 6_474]),
        (41_128, "simple", [6_144, 4_138]),
        (41_128, "ll", [5_632, 4_650]),
        (25_728, "ll", [3_584, 2_848]),
    ],
)
def test_shares_of_two_channels_are_those_of_captured_traffic(nbytes: int, protocol: str, counts: list[int]) -> None:
    assert part_counts(nbytes // 4, 4, 2, channels=2, version="2.28.9", protocol=protocol) == counts


def test_ll_has_cells_of_4_kib_and_chunks_of_32_kib() -> None:
    cell = 4096 // 4
    assert part_counts(3 * cell + 1, 4, 4, channels=16, version="2.30", protocol="ll") == [cell, cell, cell, 1]
    assert counts_of(nccl_layout(4 * 8192, 4, 4, protocol="ll")) == [8192] * 4


# -- NCCL up to 2.19 -------------------------------------------------------------------------------------------------


def starts_of(*arguments: int, **options: object) -> dict[int, list[tuple[int, int]]]:
    layout = nccl_layout(*arguments, **options)  # type: ignore[arg-type]
    starts: dict[int, list[tuple[int, int]]] = {}
    for chunk in layout.chunks():
        starts.setdefault(chunk.channel, []).append((chunk.start, chunk.elements))
    return starts


def test_ll_chunks_of_several_channels_interleave_up_to_2_19() -> None:
    assert starts_of(5000, 4, 2, channels=2, version="2.19.3", protocol="ll") == {
        0: [(0, 2048), (4096, 904)],
        1: [(2048, 2048), (5000, 0)],
    }
    assert starts_of(5000, 4, 2, version="2.18", protocol="ll") == {0: [(0, 3072), (3072, 1928)]}
    assert starts_of(10_000, 4, 2, version="2.10", protocol="ll") == {0: [(0, 5120), (5120, 4880)]}
    # A full loop of two channels and two ranks is 4 chunks of 32 KiB.
    full = 8192
    assert starts_of(4 * full + 10, 4, 2, channels=2, version="2.10", protocol="ll") == {
        0: [(0, full), (2 * full, full), (4 * full, 10), (4 * full + 10, 0)],
        1: [(full, full), (3 * full, full), (4 * full + 10, 0), (4 * full + 10, 0)],
    }


def test_simple_chunks_of_a_channel_lie_together_up_to_2_19() -> None:
    # 4 chunks of 25,000 elements are rounded up to whole 4096 bytes (8 for each of 512 threads).
    chunk = 25 * 1024
    assert starts_of(100_000, 4, 2, channels=2, version="2.19", threads=512) == {
        0: [(0, chunk), (chunk, chunk)],
        1: [(2 * chunk, chunk), (3 * chunk, 100_000 - 3 * chunk)],
    }
    # With 256 threads whole 2048 bytes.
    chunk = 25_088
    assert starts_of(100_000, 4, 2, channels=2, version="2.19", threads=256)[1][0] == (2 * chunk, chunk)


def test_small_calls_use_fewer_channels_then_fewer_threads_up_to_2_19() -> None:
    # Protocol ll with two ranks: 16 bytes for each thread of each channel.
    assert len(starts_of(4096, 4, 2, channels=4, version="2.19", protocol="ll")) == 2
    assert len(starts_of(4095, 4, 2, channels=4, version="2.19", protocol="ll")) == 1
    # One channel with 128 threads: whole 1024 bytes.
    assert starts_of(1000, 4, 2, channels=4, version="2.19", protocol="ll") == {0: [(0, 512), (512, 488)]}
    # Never fewer than 96 threads: 768 bytes.
    assert starts_of(200, 4, 2, channels=4, version="2.19", protocol="ll") == {0: [(0, 192), (192, 8)]}


def test_odd_threads_are_refused() -> None:
    with pytest.raises(ConfigError, match="threads in whole 32, not 40"):
        nccl_layout(100, 4, 4, version="2.19", threads=40)
    with pytest.raises(ConfigError, match="no multiple of 768 bytes"):
        nccl_layout(100_000, 4, 4, version="2.19", threads=96)


# -- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("elements", "element_bytes", "slices"),
    [
        (0, 4, (0, 0)),
        (1, 4, (1, 0)),
        (8192, 4, (8192, 0)),
        (8193, 4, (8192, 1)),
        (16_385, 4, (8208, 8177)),
        (524_288, 4, (262_144, 262_144)),
        (16_385, 2, (16_384, 1)),
    ],
)
def test_a_simple_chunk_is_two_slices(elements: int, element_bytes: int, slices: tuple[int, int]) -> None:
    assert simple_slices(elements, element_bytes) == slices


def test_messages_of_a_rank_come_step_by_step() -> None:
    layout = nccl_layout(40_000, 4, 2)
    rows = [(one.send.step, one.part, one.start, one.elements) for one in messages(layout, 0)]
    assert rows == [(0, 0, 20_000, 10_000), (0, 1, 30_000, 10_000), (1, 0, 0, 10_000), (1, 1, 10_000, 10_000)]
    with pytest.raises(ConfigError, match="ll128"):
        list(messages(layout, 0, protocol="ll128"))


@settings(max_examples=100, deadline=None)
@given(
    nbytes=st.one_of(st.integers(0, 300), st.integers(0, 3_000_000)),
    channels=st.integers(1, 8),
    version=st.sampled_from(KNOWN_VERSIONS),
    protocol=st.sampled_from(["simple", "ll"]),
)
def test_a_broadcast_covers_every_byte_once(nbytes: int, channels: int, version: str, protocol: str) -> None:
    if version == "2.22":
        protocol = "simple"
    chunks = list(nccl_broadcast(nbytes, 4, channels=channels, version=version, protocol=protocol))
    position = 0
    for chunk in sorted(chunks, key=lambda chunk: (chunk.start, chunk.elements)):
        assert chunk.start == position
        position += chunk.elements
    assert position == nbytes
    assert max((chunk.elements for chunk in chunks), default=0) <= (32 << 10 if protocol == "ll" else 512 << 10)


def test_a_broadcast_s_chunk_is_one_step_of_the_buffer() -> None:
    sizes = [chunk.elements for chunk in nccl_broadcast(40_000, 2, protocol="ll")]
    assert sizes == [32_768, 7232]
    assert [chunk.elements for chunk in nccl_broadcast(1 << 20, 2)] == [512 << 10, 512 << 10]
    old = [
        (chunk.channel, chunk.start, chunk.elements) for chunk in nccl_broadcast(1 << 20, 2, channels=2, version="2.19")
    ]
    assert old == [(0, 0, 512 << 10), (1, 512 << 10, 512 << 10)]


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="depends on its version"):
        nccl_layout(100, 4, 4, channels=2)
    with pytest.raises(ConfigError, match=r"NCCL 2\.25\.1 shares .* not known"):
        nccl_layout(100, 4, 4, channels=2, version="2.25.1")
    with pytest.raises(ConfigError, match=r"2\.3"):
        nccl_layout(100, 4, 4, version="2.3")
    with pytest.raises(ConfigError, match=r"2\.20"):
        nccl_layout(100, 4, 4, version="2.20")
    with pytest.raises(ConfigError, match="protocol ll"):
        nccl_layout(100, 4, 4, channels=2, version="2.22", protocol="ll")
    with pytest.raises(ConfigError, match="ll128"):
        nccl_layout(100, 4, 4, protocol="ll128")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((-1, 4, 4), "elements, not -1"),
        ((1 << 51, 4, 4), "elements"),
        ((10, 3, 4), "bytes, not 3"),
        ((10, 4, 1), "2 to"),
        ((10, 4, 1 << 17), "ranks"),
    ],
)
def test_sizes_that_no_ring_has_are_refused(arguments: tuple[int, int, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        one_channel(*arguments)
    with pytest.raises(ConfigError, match=words):
        nccl_layout(*arguments)


def test_odd_chunks_and_channels_are_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of 16"):
        one_channel(10, 4, 4, 100)
    with pytest.raises(ConfigError, match="channels, not 0"):
        nccl_layout(10, 4, 4, channels=0)
    with pytest.raises(ConfigError, match="BUFFSIZE"):
        nccl_layout(10, 4, 4, buffer_bytes=100)
    with pytest.raises(ConfigError, match="BUFFSIZE"):
        list(nccl_broadcast(10, 4, buffer_bytes=100))
