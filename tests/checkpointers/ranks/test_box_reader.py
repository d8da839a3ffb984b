"""Boxes of stored tensors: the right bytes, from the chunks that hold them and no others."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood.checkpointers.ranks import box_reader as stream_boxes
from lastgood.checkpointers.ranks.box_reader import BoxReader
from lastgood.checkpointers.ranks.boxes import Overlap
from lastgood.checkpointers.ranks.windows import WindowBox
from lastgood.checkpointers.slots.contents import named_tensors, read_layout
from lastgood.errors import CorruptCheckpoint
from lastgood.storage import SlotStore
from tests.checkpointers.support.stored_helpers import CHUNK, hard_tensors, stored_state

STATE = {
    "tall": torch.arange(1000 * 100, dtype=torch.float32).view(1000, 100),
    "turned": torch.arange(60 * 50, dtype=torch.int64).view(60, 50).t(),
    "half": torch.arange(300).view(3, 20, 5).bfloat16(),
    "scalar": torch.tensor(7.5),
    "expanded": torch.arange(4.0).expand(30, 4),
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    directory = tmp_path_factory.mktemp("boxes")
    info = stored_state(directory, STATE)
    view = SlotStore.peek(directory)
    layout = read_layout(view, info)
    return view, info, layout, {tensor.name: tensor for tensor in named_tensors(layout)}


@contextlib.contextmanager
def reader(stored):
    view, info, layout = stored[:3]
    with view.hold(info):
        yield BoxReader([view], [info], [layout], 2)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_box_into_any_place(stored, data):
    window = data.draw(st.sampled_from([64, 1000, 1 << 26]))
    name = data.draw(st.sampled_from(sorted(STATE)))
    whole = STATE[name]
    sizes = [data.draw(st.integers(1, size)) for size in whole.shape]
    begins = [data.draw(st.integers(0, size - part)) for size, part in zip(whole.shape, sizes, strict=True)]
    margins = [data.draw(st.integers(0, 2)) for _ in sizes]
    target = torch.zeros([size + 2 * margin for size, margin in zip(sizes, margins, strict=True)], dtype=whole.dtype)
    box, expected = whole, target.clone()
    place = expected
    for axis, (begin, size, margin) in enumerate(zip(begins, sizes, margins, strict=True)):
        box, place = box.narrow(axis, begin, size), place.narrow(axis, margin, size)
    place.copy_(box)
    kept = stream_boxes._WINDOW_BYTES
    stream_boxes._WINDOW_BYTES = window
    try:
        with reader(stored) as boxes:
            boxes.want(0, stored[3][name], Overlap(tuple(begins), tuple(margins), tuple(sizes)), target)
            boxes.finish()
    finally:
        stream_boxes._WINDOW_BYTES = kept
    assert torch.equal(target, expected)


def test_only_the_chunks_that_are_touched_are_read(stored):
    target = torch.zeros(10, 100)
    with reader(stored) as boxes:
        boxes.want(0, stored[3]["tall"], Overlap((500, 0), (0, 0), (10, 100)), target)
        boxes.finish()
        assert boxes.bytes_read <= 2 * CHUNK
    assert torch.equal(target, STATE["tall"][500:510])
    # Rows far apart: the chunks between them are left out.
    ends = torch.zeros(2, 100)
    with reader(stored) as boxes:
        for row in (0, 999):
            boxes.want(0, stored[3]["tall"], Overlap((row, 0), (min(row, 1), 0), (1, 100)), ends)
        boxes.finish()
        assert boxes.bytes_read <= 4 * CHUNK
    assert torch.equal(ends, STATE["tall"][[0, 999]])


def want_turned(boxes, stored, rows, first=0):
    """Rows of 400 bytes into a target that lies the other way round, so that they go through windows."""
    target = torch.zeros(100, rows).t()
    boxes.want(0, stored[3]["tall"], Overlap((first, 0), (0, 0), (rows, 100)), target)
    return target


def test_boxes_that_lie_close_together_are_read_once(stored):
    with reader(stored) as boxes:
        targets = [want_turned(boxes, stored, 2, first) for first in range(0, 1000, 2)]
        boxes.finish()
        assert boxes.bytes_read <= STATE["tall"].nbytes + 2 * CHUNK
    assert torch.equal(torch.cat(targets), STATE["tall"])


def test_the_next_window_is_read_while_one_is_copied(stored, monkeypatch):
    monkeypatch.setattr(stream_boxes, "_WINDOW_BYTES", 40_000)
    begun = [threading.Event() for _ in range(3)]
    reads, copies = iter(begun), iter(begun[1:])
    read_into, copy = stored[0].read_into, WindowBox.copy
    seen = []

    def reading(*arguments, **options):
        next(reads).set()
        read_into(*arguments, **options)

    def copying(*arguments):
        following = next(copies, None)
        if following is not None:
            seen.append(following.wait(timeout=20))
        copy(*arguments)

    monkeypatch.setattr(stored[0], "read_into", reading)
    monkeypatch.setattr(WindowBox, "copy", copying)
    with reader(stored) as boxes:
        targets = [want_turned(boxes, stored, 100, first) for first in (0, 300, 600)]
        boxes.finish()
    assert seen == [True, True]
    assert all(
        torch.equal(one, STATE["tall"][first : first + 100]) for one, first in zip(targets, (0, 300, 600), strict=True)
    )


def test_a_window_that_cannot_be_read_ends_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(stream_boxes, "_WINDOW_BYTES", 40_000)
    info = stored_state(tmp_path, {"tall": STATE["tall"]})
    view = SlotStore.peek(tmp_path)
    layout = read_layout(view, info)
    with info.path.open("r+b") as file:
        file.seek((1 << 20) + 160_000)
        file.write(b"\xff\xfe")
    known = (view, info, layout, {tensor.name: tensor for tensor in named_tensors(layout)})
    with reader(known) as boxes:
        targets = [want_turned(boxes, known, 100, first) for first in (0, 350, 600)]
        with pytest.raises(CorruptCheckpoint, match="chunk"):
            boxes.finish()
    assert torch.equal(targets[0], STATE["tall"][:100])
    assert not targets[1].any()
    assert not targets[2].any()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lastgood-window")]


def test_one_box_may_be_wanted_twice(stored):
    targets = [torch.zeros(100, 100) for _ in range(3)]
    with reader(stored) as boxes:
        for target in targets:
            boxes.want(0, stored[3]["tall"], Overlap((3, 0), (0, 0), (100, 100)), target)
        boxes.finish()
    assert all(torch.equal(target, STATE["tall"][3:103]) for target in targets)


def test_a_damaged_chunk_is_seen_where_it_is_touched(tmp_path):
    info = stored_state(tmp_path, {"tall": STATE["tall"]})
    view = SlotStore.peek(tmp_path)
    layout = read_layout(view, info)
    (tensor,) = named_tensors(layout)
    with info.path.open("r+b") as file:
        file.seek((1 << 20) + 10 * CHUNK + 5)
        file.write(b"\xff\xfe")
    with reader((view, info, layout)) as boxes:
        target = torch.zeros(10, 100)
        boxes.want(0, tensor, Overlap((0, 0), (0, 0), (10, 100)), target)
        boxes.finish()
        assert torch.equal(target, STATE["tall"][:10])
        boxes.want(0, tensor, Overlap((10 * CHUNK // 400, 0), (0, 0), (10, 100)), target)
        with pytest.raises(CorruptCheckpoint, match="chunk 10 of"):
            boxes.finish()


def test_dense_bytes_are_those_of_the_tensor(tmp_path):
    state = {name: value for name, value in hard_tensors().items() if isinstance(value, torch.Tensor)}
    info = stored_state(tmp_path, state)
    view = SlotStore.peek(tmp_path)
    layout = read_layout(view, info)
    with reader((view, info, layout)) as boxes:
        for tensor in named_tensors(layout):
            if not tensor.nbytes:
                continue
            value = state[tensor.name].contiguous()
            raw = value.as_strided((value.numel(),), (1,)).view(torch.uint8).numpy().tobytes()
            assert boxes.dense_bytes(0, tensor) == raw, tensor.name
