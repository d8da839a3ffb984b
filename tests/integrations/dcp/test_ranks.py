"""Several ranks that save and load one state: the same bits as torch's own writer and reader, by any of them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.integrations.rank_asker import Ranks

pytestmark = pytest.mark.timeout(100)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    made = Ranks(tmp_path_factory.mktemp("ranks"), "dcp/dcp_rank.py")
    yield made
    made.end()


@pytest.mark.parametrize(
    ("world", "how"),
    [(2, "sync"), *(pytest.param(*how, marks=pytest.mark.slow) for how in ((3, "thread"), (2, "process")))],
)
def test_what_each_writer_writes_each_reader_reads(ranks, tmp_path, world, how):
    for answer in ranks.run("both_ways", world, place=str(tmp_path), how=how):
        assert answer == {"ours": [], "files": [], "files by torch": [], "torch": []}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["files", "ours", "torch"]


def test_another_number_of_ranks_reads_it_placed_in_another_way(ranks, tmp_path):
    ranks.run("both_ways", 3, place=str(tmp_path))
    placed = {"rows": 1, "columns": 0, "both": None, "small": 1, "empty": 1, "scalar": None}
    for answer in ranks.run("load_into", 2, place=str(tmp_path), names=["ours", "files", "torch"], placed=placed):
        assert answer == {"ours": [], "files": [], "torch": []}


def test_plans_may_be_cached(ranks, tmp_path):
    assert ranks.run("cached_plans", 2, place=str(tmp_path)) == [[[], [], []]] * 2


def test_ranks_may_save_by_themselves(ranks, tmp_path):
    assert ranks.run("without_collectives", 2, place=str(tmp_path)) == [{"together": [], "alone": []}] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone-0", "alone-1", "together"]


def test_models_of_both_fsdps_come_back_to_the_bit(ranks, tmp_path):
    for answer in ranks.run("sharded_models", 2, place=str(tmp_path)):
        assert all(answer.values()), answer
        assert len(answer) == 8


@pytest.mark.parametrize(
    ("mode", "fresh"),
    [("async_thread", 0), ("sync", 2), pytest.param("async_process", 2, marks=pytest.mark.slow)],
)
def test_the_system_dcp_saves_shards_together(ranks, tmp_path, mode, fresh):
    """Into a training that has stepped, and into one whose optimizer has no moments yet."""
    for answer in ranks.run("system_together", 2, place=str(tmp_path), mode=mode, fresh=fresh):
        assert answer == {
            "outcomes": ["durable"] * 3,
            "wrote": True,
            "latest": 3,
            "restored": 3,
            "equal": True,
            "own": True,
            "after": 7,
        }
    names = sorted(path.name for path in (tmp_path / mode).iterdir())
    assert names == ["checkpoint-00000003-step-3", "checkpoint-00000004-step-7"]
    # Torch's own reader knows a tensor by the name that its user knows, complete.
    weights = {"model.0.weight": torch.zeros(5, 7)}
    dcp.load(weights, storage_reader=dcp.FileSystemReader(tmp_path / mode / names[0]), no_dist=True)
    assert weights["model.0.weight"].any(dim=1).all()


def test_a_checkpoint_that_one_rank_cannot_read_is_passed_over_by_all(ranks, tmp_path):
    for answer in ranks.run("system_together", 2, place=str(tmp_path), mode="sync", fresh=1, damage=True):
        assert (answer["restored"], answer["equal"], answer["own"]) == (2, False, True)


@st.composite
def cases(draw):
    """Tensors of any shape and dtype, each cut along an axis or held by all."""
    shapes, placed = {}, {}
    for number in range(draw(st.integers(1, 4))):
        dtype = draw(st.sampled_from(["float32", "float64", "int64", "bool", "complex64", "float16"]))
        name = f"t{number} {dtype}"
        shapes[name] = draw(st.lists(st.integers(0, 6), max_size=3).filter(lambda shape: math.prod(shape) < 100))
        placed[name] = draw(st.sampled_from([None, *range(len(shapes[name]))]))
    return {"shapes": shapes, "placed": placed, "seed": draw(st.integers(0, 9))}


@settings(max_examples=1, deadline=None)
@given(drawn=st.lists(cases(), min_size=3, max_size=3), world=st.integers(2, 4))
def test_any_state_is_read_as_torch_reads_it(ranks, tmp_path_factory, drawn, world):
    for answer in ranks.run("many_ways", world, place=str(tmp_path_factory.mktemp("cases")), cases=drawn):
        assert answer == []
