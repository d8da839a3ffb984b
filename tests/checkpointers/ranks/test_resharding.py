"""Real ranks over gloo: saved by so many, restored by others, to the bit."""

from __future__ import annotations

import shutil

import pytest

from lastgood import PCcheck
from lastgood.checkpointers.export.formats import ExportFormat, export_checkpoint, load_exported
from lastgood.checkpointers.export.whole_job import export_job
from lastgood.checkpointers.rank_directory import rank_directory
from lastgood.checkpointers.ranks.directories import whole_checkpoints
from lastgood.checkpointers.slots.contents import named_tensors, read_layout
from lastgood.errors import MismatchError
from lastgood.storage import SlotView
from tests.checkpointers.support.rank_pool import RankPool
from tests.checkpointers.support.reshard_rank import Training, summed
from tests.suggestions.following import advice, follows, hear


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    made = RankPool(3, tmp_path_factory.mktemp("pool"))
    yield made
    made.end()


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    """A job of so many ranks, saved once for all tests: its directory, DCP's, and what the ranks said."""
    found = {}

    def of(world, kind="fsdp"):
        if (world, kind) not in found:
            folder = tmp_path_factory.mktemp(f"saved-{world}-{kind}")
            job, dcp = folder / "job", folder / "dcp"
            ranks = pool.run(world, "save", job=str(job), kind=kind, dcp_to=str(dcp) if kind == "fsdp" else None)
            assert [rank["outcomes"] for rank in ranks] == [[["durable", None]]] * world
            found[world, kind] = job, dcp, ranks
        return found[world, kind]

    return of


def check(saved_ranks, restored, world):
    for rank, answer in enumerate(restored):
        assert answer["step"] == 2
        assert answer["sums"] == saved_ranks[0]["sums"], f"rank {rank} has other bits"
        assert answer["as_sliced"] == []
        assert answer["losses"] == pytest.approx(saved_ranks[0]["losses"][2:], rel=1e-5)
        if rank < len(saved_ranks):
            assert answer["next"] == saved_ranks[rank]["next"], "its own generator goes on"
    drawn = [answer["next"] for answer in restored]
    assert len(set(drawn)) == world, "no two ranks draw the same numbers"


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (3, 2)])
def test_another_number_of_ranks_gets_the_same_bits(pool, saved, before, after):
    job, dcp, ranks = saved(before)
    restored = pool.run(after, "load", job=str(job), dcp_from=str(dcp))
    check(ranks, restored, after)
    assert all(answer["as_dcp"] == [] for answer in restored)
    assert all(answer["in_place"] for answer in restored)


def test_moments_that_are_there_already_are_read_into(pool, saved):
    job, _, ranks = saved(3)
    check(ranks, pool.run(2, "load", job=str(job), again=True), 2)


def test_one_process_without_any_mesh_takes_and_gives_whole_tensors(pool, saved):
    job, _, ranks = saved(2)
    check(ranks, pool.run(1, "load", job=str(job), kind="plain"), 1)
    job, _, ranks = saved(1, "plain")
    check(ranks, pool.run(3, "load", job=str(job)), 3)


def test_the_losses_are_those_of_the_training_in_one_piece(saved):
    losses = [saved(world)[2][0]["losses"] for world in (1, 2, 3)] + [saved(1, "plain")[2][0]["losses"]]
    for found in losses[:-1]:
        assert found == pytest.approx(losses[-1], rel=1e-5)


def test_as_many_ranks_restore_from_their_own_directories(pool, saved, tmp_path):
    job, _, ranks = saved(2)
    restored = pool.run(2, "own_restore", job=str(job))
    assert [answer["digest"] for answer in restored] == [answer["digest"] for answer in ranks]
    assert [answer["from_own"] for answer in restored] == [True, True]


def test_a_new_job_goes_on_from_an_old_one(pool, saved, tmp_path):
    job, _, ranks = saved(3)
    check(ranks, pool.run(2, "load", job=str(job), own_job=str(tmp_path / "new")), 2)
    assert len(whole_checkpoints(job)) == 1, "the old job stays as it was"


def test_ranks_that_hold_the_same_write_it_once(pool, saved, tmp_path):
    alone = whole_checkpoints(saved(1, "plain")[0])[0].infos[0].meta_offset
    ranks = pool.run(2, "replicated", job=str(tmp_path))
    assert [rank["outcomes"] for rank in ranks] == [["durable", "durable"]] * 2
    assert all(rank["same"] and rank["step"] == 2 for rank in ranks)
    assert all(rank["payload"] < alone for rank in ranks)
    assert ranks[0]["payload"] + ranks[1]["payload"] < 2 * alone
    restored = pool.run(1, "load", job=str(tmp_path), kind="plain")[0]
    assert restored["sums"] == ranks[0]["sums"]
    # Alone a rank's directory is not enough: what the other wrote is not guessed.
    with pytest.raises(MismatchError, match="was written by rank"):
        view = SlotView(rank_directory(tmp_path, 0))
        export_checkpoint(view, view.newest(), tmp_path / "alone.safetensors", ExportFormat.SAFETENSORS)
    shutil.rmtree(rank_directory(tmp_path, 1))
    with pytest.raises(MismatchError, match=r"\[1\] are missing; expected at .*rank-00001"):
        PCcheck(rank_directory(tmp_path, 0), rank=0, world_size=2, control="off").restore(Training(None, 7).state)


def test_an_exchange_waits_for_a_bounded_time(pool):
    answers = pool.run(2, "lonely")
    assert answers[0].startswith("waited 1 s for what 2 ranks hold alike")
    assert answers[1] == ["0 again", "1 again"]


def lives(pool, world, job, **what):
    ranks = pool.run(world, "agreed", job=str(job), **what)
    assert all(outcome == ["durable", None] for rank in ranks for outcome in rank["outcomes"]), ranks
    assert all(rank["sums"] == ranks[0]["sums"] for rank in ranks)
    assert all(rank["restored"] == ranks[0]["restored"] for rank in ranks)
    assert len({rank["began"] for rank in ranks}) == 1
    return ranks[0]


def test_ranks_that_agree_go_on_from_a_job_of_others(pool, tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    first = lives(pool, 2, old, steps=2)
    again = lives(pool, 2, old, steps=0)
    assert (again["began"], again["restored"]) == (2, first["sums"])
    moved = lives(pool, 3, new, steps=1, resume_from=str(old))
    assert (moved["began"], moved["restored"]) == (2, first["sums"])
    last = lives(pool, 3, new, steps=0, resume_from=str(old))
    assert (last["began"], last["restored"]) == (3, moved["sums"])
    earlier = lives(pool, 2, tmp_path / "other", steps=1, resume_from=str(old), resume_step=1)
    assert earlier["began"] == 1
    assert earlier["sums"] == first["sums"], "the step after it is the same again"


def test_ranks_that_agree_take_from_each_other_what_was_written_once(pool, tmp_path):
    first = lives(pool, 2, tmp_path, steps=2, replicated="ddp", kind="plain")
    again = lives(pool, 2, tmp_path, steps=1, replicated="ddp", kind="plain")
    assert (again["began"], again["restored"]) == (2, first["sums"])
    views = whole_checkpoints(tmp_path)[0]
    owners = {tensor.owner for tensor in named_tensors(read_layout(views.views[0], views.infos[0]))}
    assert owners == {None, 1}


def test_an_export_holds_whole_tensors(saved, tmp_path):
    job, _, ranks = saved(3)
    for to in (ExportFormat.SAFETENSORS, ExportFormat.PT):
        out = tmp_path / f"whole.{to.value}"
        done = export_job(job, out, to)
        assert done.step == 2
        tree = load_exported(out)
        assert sorted(tree["rng"]) == ["rank-00000", "rank-00001", "rank-00002"]
        found = {f"model.{name}": value for name, value in tree["model"].items()}
        for number, entry in tree["optimizer"]["state"].items():
            found |= {f"optimizer.{number}.{name}": value for name, value in entry.items()}
        found |= {f"spread.{name}": value for name, value in tree["spread"].items()}
        found["moving"] = tree["plain"]["moving"]
        assert {name: summed(value) for name, value in found.items()} == ranks[0]["sums"]


SHAPES = [[7, 5], [1], [2, 3], [9, 1, 4], [3, 3]]


def test_parts_lie_where_torch_says(pool):
    assert pool.run(3, "places", shapes=SHAPES) == [[]] * 3


def test_a_pending_sum_is_refused(pool):
    (answer,) = pool.ask(1, "refused", what="sum")
    assert answer["error"].startswith("StateError: state.x")
    assert "redistribute" in answer["error"]
    (answer,) = pool.ask(1, "refused", what="other system")
    assert answer["error"].startswith("StateError: state.x: this system cannot keep")


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    made = RankPool(4, tmp_path_factory.mktemp("four"))
    yield made
    made.end()


@pytest.mark.slow
def test_shards_of_tensor_parallel_ranks_under_fsdp(four, tmp_path):
    ranks = four.run(4, "tensor_parallel", job=str(tmp_path))
    assert all(rank["outcomes"] == [["durable", None]] for rank in ranks)
    assert "_StridedShard" in ranks[0]["kinds"]
    for world in (1, 2, 3):
        assert four.run(world, "two_layers_again", job=str(tmp_path)) == [ranks[0]["sums"]] * world


@pytest.mark.slow
def test_a_mesh_of_two_dimensions_writes_each_part_once(four, tmp_path):
    ranks = four.run(4, "two_dimensions", job=str(tmp_path))
    assert all(rank["outcomes"] == ["durable"] and rank["same"] for rank in ranks)
    assert len({rank["weight"] for rank in ranks}) == 1
    # Parameters and two moments: 7 rows of 5 and 7 of the bias, in parts of 4 and 3 rows; each once per replica pair.
    written = sum(rank["payload"] for rank in ranks)
    assert written < 2 * 3 * (7 * 5 + 7) * 4 + 4 * 20 * 64


@pytest.mark.gpu
def test_parts_on_cuda_come_from_parts_on_the_cpu_and_go_back(pool, saved, tmp_path):
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    job, _, ranks = saved(2)
    (answer,) = pool.run(1, "load", job=str(job), device="cuda")
    assert answer["sums"] == ranks[0]["sums"]
    world = 2 if torch.cuda.device_count() >= 2 else 1
    there = pool.run(world, "save", job=str(tmp_path), device="cuda")
    back = pool.run(3, "load", job=str(tmp_path))
    assert all(answer["sums"] == there[0]["sums"] for answer in back)


@follows("make them equal before training (DistributedDataParallel does), or use replicated='none'")
def test_ranks_that_do_not_hold_alike_what_is_said(pool, tmp_path):
    places = [str(rank_directory(tmp_path, rank)) for rank in (0, 1)]
    said = pool.run(2, "start", directories=places, replicated="ddp")
    assert "weight" in said[0] and said[0] == said[1]
    given = eval(f"dict({advice(hear(said[0]), r'use (replicated=.none.)')})")
    assert pool.run(2, "start", directories=places, **given) == ["", ""]
    advice(said[0], r"\(DistributedDataParallel does\)")
    assert pool.run(2, "start", directories=places, replicated="ddp", made_equal=True) == ["", ""]


@follows("and this one is not named as theirs; use {}")
def test_directories_that_the_other_ranks_cannot_find(pool, tmp_path):
    given = {"replicated": "ddp", "made_equal": True}
    said = pool.run(2, "start", directories=[str(tmp_path / f"mine-{rank}") for rank in (0, 1)], **given)
    places = [advice(hear(one), r"; use (\S+)$") for one in said]
    assert pool.run(2, "start", directories=places, **given) == ["", ""]
