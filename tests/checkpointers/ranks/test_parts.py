"""Parts of several ranks whose layouts, under right checksums, do not belong together."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lastgood import PCcheck
from lastgood.checkpointers.export.formats import ExportFormat, load_exported
from lastgood.checkpointers.export.whole_job import export_job
from lastgood.checkpointers.ranks.boxes import Overlap
from lastgood.checkpointers.ranks.directories import whole_checkpoints
from lastgood.checkpointers.ranks.parts import RankParts
from lastgood.checkpointers.ranks.reshard import restore_ranks
from lastgood.errors import CheckpointError, CorruptCheckpoint, MismatchError
from tests.storage.support.craft import dense, entries, part, put_ranks

N = 1000
HUGE = 1 << 38


def half(rank, dtype="float32", whole=2 * N, first=None, n=N):
    first = rank * n if first is None else first
    return part(dense([n], dtype), [whole], [[[first, n]]])


def spread(first, second, sizes=(4 * N, 4 * N)):
    """A job of two ranks that hold these parts of w."""
    return [(entries(w=node), [b"A" * size]) for node, size in zip((first, second), sizes, strict=True)]


APART = {
    "wider": spread(half(0), half(1, "float64"), (4 * N, 8 * N)),
    "narrower": spread(half(0, "float64"), half(1), (8 * N, 4 * N)),
    "of one width": spread(half(0), half(1, "int32")),
    "of another whole": spread(half(0), half(1, whole=4 * N)),
    "of other dimensions": spread(half(0), part(dense([N, 1]), [2 * N, 1], [[[N, N]], [[0, 1]]])),
    "that overlap": spread(half(0), half(1, first=N - 1)),
    "that leave a gap": spread(half(0), half(1, whole=2 * N, first=N, n=N - 1), (4 * N, 4 * N - 4)),
    "one of them in one piece": spread(half(0), dense([N])),
    "one of them an array": spread(half(0), ["A", 0, 0, "<f4", [N]]),
    "of a whole that no file holds": spread(half(0, whole=HUGE), half(1, whole=HUGE)),
    "that repeat what they have": [
        (entries(w=part(["T", 0, 0, "float32", [HUGE], [0]], [2 * HUGE], [[[rank * HUGE, HUGE]]])), [b"A" * 4])
        for rank in (0, 1)
    ],
}


@pytest.mark.parametrize("name", APART)
def test_parts_that_do_not_belong_together_are_refused_before_anything_is_read(tmp_path, name):
    job = put_ranks(tmp_path / "job", APART[name])
    for to in (ExportFormat.SAFETENSORS, ExportFormat.PT):
        with pytest.raises(CheckpointError):
            export_job(job, tmp_path / "out", to)
    buffer = torch.zeros(6 * N)
    with pytest.raises(CheckpointError):
        restore_ranks(job, {"w": buffer[: 2 * N]}, (0, 1), 1)
    assert not buffer.any()


@pytest.mark.parametrize("name", ["wider", "of one width", "of another whole"])
def test_two_ranks_that_mean_different_tensors_are_both_named(tmp_path, name):
    job = put_ranks(tmp_path / "job", APART[name])
    with pytest.raises(MismatchError, match=r"w is .* on rank 0 and .* on rank 1"):
        export_job(job, tmp_path / "out", ExportFormat.PT)


def left(to=1, dtype="float32", shape=(N,)):
    return ["R", to, dtype, list(shape), dense(shape)[-1]]


LEFT = {
    "wider": (left(), dense([N], "float64"), 8 * N),
    "of one width": (left(), dense([N], "int32"), 4 * N),
    "longer": (left(shape=(2 * N,)), dense([N]), 4 * N),
    "huge": (left(shape=(HUGE,)), ["T", 0, 0, "float32", [HUGE], [0]], 4),
    "an array": (left(), ["A", 0, 0, "<f4", [N]], 4 * N),
    "a part": (left(), half(0, n=N), 4 * N),
    "a value": (left(), ["i", 1], 4),
    "left again": (left(), left(to=0), 4),
    "of itself": (left(to=0), dense([N]), 4 * N),
    "of nobody": (left(to=7), dense([N]), 4 * N),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_was_left_to_a_rank_that_holds_something_else_is_refused(tmp_path, name):
    mine, theirs, size = LEFT[name]
    job = put_ranks(tmp_path / "job", [(entries(w=mine), []), (entries(w=theirs), [b"A" * size])])
    buffer = torch.zeros(4 * N)
    live = buffer[: min(mine[3][0], 2 * N)]
    checkpointer = PCcheck(job / "rank-00000", rank=0, world_size=2, control="off")
    with pytest.raises(CheckpointError):
        checkpointer.restore({"w": live})
    assert not buffer.any()
    with pytest.raises(CheckpointError):
        export_job(job, tmp_path / "out", ExportFormat.PT)


def test_strides_alone_take_no_memory(tmp_path):
    """Of a tensor that the state has no memory for yet."""
    far = ["d", [[["s", "x"], ["R", 1, "float32", [2], [HUGE]]]]]
    near = ["d", [[["s", "x"], dense([2])]]]
    job = put_ranks(tmp_path / "job", [(entries(w=far), []), (entries(w=near), [b"A" * 8])])
    with pytest.raises(CorruptCheckpoint, match="all parts together"):
        PCcheck(job / "rank-00000", rank=0, world_size=2, control="off").restore({"w": {}})


def test_what_was_left_to_another_rank_comes_from_that_rank(tmp_path):
    """Other ranks may use the name for something else: they are not asked."""
    other = np.full(N, 7, dtype="<f4").tobytes()
    right = np.full(N, 3, dtype="<f4").tobytes()
    parts = [(entries(w=left(to=2)), []), (entries(w=dense([N])), [other]), (entries(w=dense([N])), [right])]
    job = put_ranks(tmp_path / "job", parts)
    w = torch.zeros(N)
    assert PCcheck(job / "rank-00000", rank=0, world_size=3, control="off").restore({"w": w}) == 1
    assert (w == 3).all()


def test_sound_parts_are_one_tensor(tmp_path):
    parts = [(entries(w=half(rank)), [np.full(N, rank + 1, dtype="<f4").tobytes()]) for rank in (0, 1)]
    job = put_ranks(tmp_path / "job", parts)
    export_job(job, tmp_path / "out", ExportFormat.PT)
    expected = torch.tensor([1.0, 2.0]).repeat_interleave(N)
    assert torch.equal(load_exported(tmp_path / "out")["w"], expected)
    w = torch.zeros(2 * N)
    assert restore_ranks(job, {"w": w}, (0, 1), 1) == 1
    assert torch.equal(w, expected)


def test_two_names_of_one_place_are_two_tensors_if_they_are_parts_of_different_wholes(tmp_path):
    parts = [
        (entries(a=half(rank), b=part(dense([N]), [N], [[[0, N]]])), [np.full(N, rank, dtype="<f4").tobytes()])
        for rank in (0, 1)
    ]
    job = put_ranks(tmp_path / "job", parts)
    export_job(job, tmp_path / "out", ExportFormat.PT)
    found = load_exported(tmp_path / "out")
    assert (found["a"].shape, found["b"].shape) == ((2 * N,), (N,))


@pytest.fixture
def reader(tmp_path):
    tree = entries(w=dense([10, 10]), v=dense([4], block=1))
    job = put_ranks(tmp_path / "job", [(tree, [bytes(400), bytes(16)])])
    (checkpoint,) = whole_checkpoints(job)
    parts = RankParts(checkpoint)
    with parts.reader(1) as opened:
        yield opened, parts.named[0]


@pytest.mark.parametrize(
    ("box", "target"),
    [
        (Overlap((0, 0), (0, 0), (10, 11)), torch.zeros(20, 20)),
        (Overlap((1, 0), (0, 0), (10, 10)), torch.zeros(20, 20)),
        (Overlap((-1, 0), (0, 0), (1, 1)), torch.zeros(20, 20)),
        (Overlap((0, 0), (5, 0), (10, 10)), torch.zeros(10, 10)),
        (Overlap((0, 0), (0, -1), (1, 1)), torch.zeros(10, 10)),
        (Overlap((0,), (0,), (10,)), torch.zeros(10, 10)),
        (Overlap((0, 0), (0, 0), (10, 10)), torch.zeros(10, 10, dtype=torch.float64)),
        (Overlap((0, 0), (0, 0), (10, 10)), torch.zeros(10, 10, dtype=torch.int32)),
    ],
)
def test_a_box_is_inside_of_both_and_of_one_dtype(reader, box, target):
    with pytest.raises(CorruptCheckpoint):
        reader[0].want(0, reader[1]["w"], box, target)


def test_blocks_and_spans_are_those_of_the_checkpoint(reader):
    opened, named = reader
    for number in (-1, 2):
        with pytest.raises(CorruptCheckpoint):
            opened.blocks(0, {number})
    for first, nbytes in ((-4, 4), (0, 20), (16, 4), (0, -1)):
        with pytest.raises(CorruptCheckpoint):
            opened.span(0, named["v"], first, nbytes)


def test_parts_of_very_many_runs_are_compared_in_one_pass(tmp_path):
    """Pairs of runs would be 10^9."""
    n = 1 << 15
    parts = [
        (entries(w=part(dense([n], "uint8"), [2 * n], [[[2 * at + rank, 1] for at in range(n)]])), [bytes([rank]) * n])
        for rank in (0, 1)
    ]
    job = put_ranks(tmp_path / "job", parts)
    (checkpoint,) = whole_checkpoints(job)
    RankParts(checkpoint).check_together()
