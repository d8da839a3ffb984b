"""Where the part of a spread tensor lies, against torch.chunk on the indices themselves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood.errors import CorruptCheckpoint
from lastgood.state import Layout, flatten, unflatten
from lastgood.state.shards import Shard, runs_of
from tests.state.support.shards import SHAPES, cuts, twin


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_runs_are_the_indices_that_torch_chunk_leaves(data):
    shape = data.draw(SHAPES)
    mesh_shape, placements = data.draw(cuts(shape))
    coordinate = tuple(data.draw(st.integers(0, count - 1)) for count in mesh_shape)
    runs = runs_of(shape, mesh_shape, coordinate, placements)
    found = [[index for start, length in dimension for index in range(start, start + length)] for dimension in runs]
    assert found == twin(shape, mesh_shape, coordinate, placements)


def test_a_rank_outside_of_the_mesh_holds_nothing():
    assert runs_of((4, 2), (2,), None, (("S", 0),)) == ((), ())


def a_part(**changes):
    fields = {
        "shape": (7, 5),
        "stride": (5, 1),
        "mesh_shape": (2,),
        "mesh_names": ("dp",),
        "placements": (("S", 0),),
        "runs": (((4, 3),), ((0, 5),)),
    }
    return Shard(**{**fields, **changes})


def test_a_part_comes_back_from_its_node_without_its_mesh():
    part = a_part()
    assert Shard.from_node(part.node(), (3, 5)) == part
    block = torch.arange(15, dtype=torch.float32)
    layout = Layout(["d", [[["s", "x"], ["H", ["T", 0, 0, "float32", [3, 5], [5, 1]], *part.node()]]]], (60,), 0, 2)
    assert torch.equal(unflatten(layout, [block.view(torch.uint8)], "here")["x"], block.view(3, 5))


@pytest.mark.parametrize(
    "changes",
    [
        {"runs": (((4, 4),), ((0, 5),))},
        {"runs": (((3, 2),), ((0, 5),))},
        {"runs": (((4, 3),),)},
        {"runs": (((-1, 3),), ((0, 5),))},
        {"shape": (6, 5)},
    ],
)
def test_a_part_that_cannot_be_is_refused(changes):
    node = ["H", ["T", 0, 0, "float32", [3, 5], [5, 1]], *a_part(**changes).node()]
    layout = Layout(["d", [[["s", "x"], node]]], (60,), 0, 2)
    with pytest.raises(CorruptCheckpoint, match="here"):
        unflatten(layout, [torch.zeros(60, dtype=torch.uint8)], "here")


def test_layouts_without_parts_are_what_they_always_were():
    """Bytes and digest as the first version wrote them: old checkpoints restore, and old digests are equal."""
    tree = ["d", [[["s", "model"], ["m", ["o", [[["s", "w"], ["T", 0, 0, "float32", [2, 3], [3, 1]]]]]]]]]
    layout = Layout(tree, (24,), 1)
    assert layout.to_json() == (
        b'{"layout_version":1,"deferred_blocks":1,"block_bytes":[24],"tree":["d",[[["s","model"],["m",["o",'
        b'[[["s","w"],["T",0,0,"float32",[2,3],[3,1]]]]]]]]]}'
    )
    assert layout.digest().hex() == "162f6410278bfcfd18e469a7354d8fe3db7cd734df2d16dc43c39d94760de3fb"
    flat = flatten({"model": torch.nn.Linear(2, 2)}, spread=True)
    assert flat.layout.version == 1
    assert flat.sharded == ()
