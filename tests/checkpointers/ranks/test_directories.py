"""The directories of a job's ranks: which checkpoints count, and what is refused by name. No processes, no DTensors."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lastgood import PCcheck
from lastgood.checkpointers.attach.data_cursor import CountedLoader
from lastgood.checkpointers.export.formats import load_exported
from lastgood.checkpointers.pccheck.system import PCcheckOptions
from lastgood.checkpointers.rank_directory import job_of, rank_directories, rank_directory
from lastgood.checkpointers.ranks.directories import shared_job_id, whole_checkpoints
from lastgood.checkpointers.ranks.reshard import restore_ranks
from lastgood.cli.export import export as export_command
from lastgood.cli.inspect import inspect
from lastgood.errors import CheckpointError, CorruptCheckpoint, MismatchError, NoCheckpoint, NoGoodCheckpoint
from lastgood.state import NewWorld, state_digest
from tests.checkpointers.support.rank_states import a_state, save


def keys(job):
    return [(one.incarnation, one.step) for one in whole_checkpoints(job)]


def comparable(state):
    """All but the generators."""
    return state_digest({name: part for name, part in state.items() if name != "rng"})


def test_names_of_directories(tmp_path):
    assert job_of(rank_directory(tmp_path, 3)) == tmp_path
    assert job_of(tmp_path / "checkpoints") is None
    for name in ("rank-00000", "rank-00001", "rank-1", "rank-x", "other"):
        (tmp_path / name).mkdir()
    assert rank_directories(tmp_path) == {0: tmp_path / "rank-00000", 1: tmp_path / "rank-00001"}
    assert rank_directories(tmp_path / "nothing") == {}


def test_the_newest_step_of_one_life_that_all_hold(tmp_path):
    save(tmp_path, 0, 2, 10, 20)
    save(tmp_path, 1, 2, 10)
    assert keys(tmp_path) == [(1, 10)]
    # Rank 1's second life saves step 20 again: with rank 0's step 20 of the first it is no checkpoint.
    save(tmp_path, 1, 2, 20)
    assert keys(tmp_path) == [(1, 10)]
    save(tmp_path, 0, 2, 20)
    assert keys(tmp_path) == [(2, 20), (1, 10)]


def test_no_common_step_says_what_each_has(tmp_path):
    save(tmp_path, 0, 2, 30)
    save(tmp_path, 1, 2, 20)
    with pytest.raises(NoCheckpoint, match=r"rank 0 steps 30 \(incarnation 1\); rank 1 steps 20 \(incarnation 1\)"):
        whole_checkpoints(tmp_path)
    with pytest.raises(NoCheckpoint, match="rank-00000"):
        whole_checkpoints(tmp_path / "nothing")


def test_missing_and_mixed_directories_are_named(tmp_path):
    save(tmp_path, 0, 3, 10)
    save(tmp_path, 2, 3, 10)
    with pytest.raises(MismatchError, match=r"of 3 ranks, \[1\] are missing; expected at .*rank-00001"):
        whole_checkpoints(tmp_path)
    save(tmp_path, 1, 2, 10)
    with pytest.raises(MismatchError, match=r"mixture of several jobs: .*of 3 ranks.*of 2 ranks"):
        whole_checkpoints(tmp_path)
    shutil.rmtree(rank_directory(tmp_path, 1))
    save(tmp_path, 1, 3, 10, job_id=b"k" * 16)
    with pytest.raises(MismatchError, match="mixture of several jobs"):
        whole_checkpoints(tmp_path)
    shutil.rmtree(rank_directory(tmp_path, 1))
    shutil.copytree(rank_directory(tmp_path, 2), rank_directory(tmp_path, 1))
    with pytest.raises(MismatchError, match="holds the part of rank 2, by its name that of 1"):
        whole_checkpoints(tmp_path)


def test_ranks_share_one_id_and_the_first_makes_it(tmp_path):
    first = shared_job_id(tmp_path / "job")
    assert shared_job_id(tmp_path / "job") == first
    assert len(first) == 16
    assert shared_job_id(tmp_path / "other") != first
    assert [path.name for path in (tmp_path / "job").iterdir()] == ["job-id"]
    (tmp_path / "job" / "job-id").write_text("not hex")
    with pytest.raises(CheckpointError, match="no job id"):
        shared_job_id(tmp_path / "job")


def test_equal_ranks_restore_into_one_and_three(tmp_path):
    for rank in range(2):
        save(tmp_path, rank, 2, 10)
    expected = comparable(a_state())
    drawn = []
    for rank, world in ((0, 1), (0, 3), (1, 3), (2, 3)):
        state = a_state(seed=1)
        pointer = state["model"][0].weight.data_ptr()
        assert restore_ranks(tmp_path, state, (rank, world), 2) == 10
        assert comparable(state) == expected
        assert state["model"][0].weight.data_ptr() == pointer
        drawn.append(torch.rand(1).item())
    torch.manual_seed(1000)
    assert drawn[0] == drawn[1] == torch.rand(1).item()
    torch.manual_seed(1001)
    assert drawn[2] == torch.rand(1).item()
    assert len(set(drawn)) == 3
    restore_ranks(tmp_path, a_state(seed=1), (2, 3), 2)
    assert torch.rand(1).item() == drawn[3], "a new rank's seed depends on job, step and rank alone"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state["plain"].update(count=4), ["plain.count is 3 on rank 0 and 4 on rank 1"]),
        (lambda state: state["plain"]["moving"].add_(1), ["plain.moving differs between ranks 0 and 1"]),
        (lambda state: state["plain"].update(array=np.arange(5) + 1), ["plain.array differs"]),
        (lambda state: state["plain"].update(moving=torch.zeros(4)), ["plain.moving is a tensor", "(3,)", "(4,)"]),
        (lambda state: state["model"][1].running_mean.add_(1), ["model.1.running_mean differs", "resume_buffers"]),
        (lambda state: state.update(more={"x": 1}), ["different parts", "more"]),
    ],
)
def test_what_differs_between_ranks_is_refused_before_anything_changes(tmp_path, change, words):
    save(tmp_path, 0, 2, 10)
    save(tmp_path, 1, 2, 10, change=change)
    state = a_state(seed=1)
    before = comparable(state)
    with pytest.raises(MismatchError) as caught:
        restore_ranks(tmp_path, state, (0, 1), 2)
    for word in words:
        assert word in str(caught.value)
    assert comparable(state) == before


def test_buffers_of_rank_0_where_they_are_asked_for(tmp_path):
    save(tmp_path, 0, 2, 10)
    save(tmp_path, 1, 2, 10, change=lambda state: state["model"][1].running_mean.add_(1))
    state = a_state(seed=1)
    assert restore_ranks(tmp_path, state, (0, 1), 2, buffers="rank0") == 10
    assert comparable(state) == comparable(a_state())


def test_another_model_is_refused_with_both_sides(tmp_path):
    save(tmp_path, 0, 1, 10)
    state = a_state(seed=1)
    state["model"] = torch.nn.Sequential(torch.nn.Linear(41, 30), torch.nn.BatchNorm1d(30))
    with pytest.raises(MismatchError, match=r"model.0.weight: .*\(30, 40\).*\(30, 41\)"):
        restore_ranks(tmp_path, state, (0, 2), 2)


class Keeper:
    """A part that takes what it is given."""

    def __init__(self, first=None):
        self.kept = {} if first is None else {"a": first, "b": first, "later": first[2:]}

    def state_dict(self):
        return self.kept

    def load_state_dict(self, state):
        self.kept = state


def test_two_names_of_one_tensor_are_one_again(tmp_path):
    for rank in range(2):
        save(tmp_path, rank, 2, 10, change=lambda state: state.update(keeper=Keeper(torch.arange(6))))
    state = {**a_state(seed=1), "keeper": Keeper()}
    restore_ranks(tmp_path, state, (0, 1), 2)
    kept = state["keeper"].kept
    assert kept["a"].tolist() == kept["b"].tolist() == list(range(6))
    assert kept["a"].data_ptr() == kept["b"].data_ptr()
    assert kept["later"].tolist() == [2, 3, 4, 5]


def damage(job, rank, step):
    """Flip a byte of the weights."""
    info = next(info for one in whole_checkpoints(job) if one.step == step for info in [one.infos[rank]])
    with info.path.open("r+b") as file:
        file.seek((1 << 20) + 100)
        byte = file.read(1)
        file.seek((1 << 20) + 100)
        file.write(bytes([byte[0] ^ 1]))


def test_a_damaged_part_makes_it_take_the_step_before(tmp_path, caplog):
    for rank in range(2):
        save(tmp_path, rank, 2, 10, 20)
    damage(tmp_path, 1, 20)
    state = a_state(seed=1)
    assert restore_ranks(tmp_path, state, (0, 1), 2) == 10
    assert "checksum" in caplog.text
    assert comparable(state) == comparable(a_state())
    with pytest.raises(CorruptCheckpoint, match=r"step 20 cannot be read on rank 1: .*older step .*\[10\]"):
        restore_ranks(tmp_path, a_state(seed=1), (1, 2), 2)
    damage(tmp_path, 0, 10)
    with pytest.raises(CorruptCheckpoint, match="no checkpoint can be read"):
        restore_ranks(tmp_path, a_state(seed=1), (0, 1), 2)


def test_a_verdict_of_one_rank_counts_for_all(tmp_path):
    save(tmp_path, 0, 2, 10, 20)
    save(tmp_path, 1, 2, 10, 20, bad=[20])
    assert restore_ranks(tmp_path, a_state(seed=1), (0, 1), 2) == 10
    assert restore_ranks(tmp_path, a_state(seed=1), (0, 1), 2, good_only=False) == 20
    assert restore_ranks(tmp_path, a_state(seed=1), (0, 1), 2, 20) == 20
    with pytest.raises(NoCheckpoint, match="step 30"):
        restore_ranks(tmp_path, a_state(seed=1), (0, 1), 2, 30)
    save(tmp_path / "bad", 0, 1, 10, bad=[10])
    with pytest.raises(NoGoodCheckpoint, match="judged bad"):
        restore_ranks(tmp_path / "bad", a_state(seed=1), (0, 2), 2)


# -- the place in the data ---------------------------------------------------------------------------------------------


def dealt(rank, world, batch=2):
    data = TensorDataset(torch.arange(48))
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=True, seed=3)
    return CountedLoader(DataLoader(data, batch_size=batch, sampler=sampler))


def consume(loader, count):
    found = []
    for (batch,) in loader:
        found += batch.tolist()
        loader.trained()
        if len(found) >= 2 * count:
            return found
    return found


@pytest.mark.parametrize(("before", "after", "batches"), [(2, 1, 3), (1, 2, 4), (2, 3, 6), (3, 2, 4)])
def test_an_order_dealt_out_goes_on_behind_what_all_ranks_consumed(before, after, batches):
    loaders = [dealt(rank, before) for rank in range(before)]
    seen = []
    for number, loader in enumerate(loaders):
        torch.manual_seed(number)  # generators of their own, which do not choose the order
        seen += consume(loader, batches)
    states = [loader.state_dict() for loader in loaders]
    rest = []
    for rank in range(after):
        loader = dealt(rank, after)
        loader.load_from_ranks(states, NewWorld(rank, after, before, 5, "00"))
        rest += consume(loader, 1000)
    assert sorted(seen + rest) == list(range(48)), "each sample once"


def test_places_that_no_rank_could_take_are_refused():
    loaders = [dealt(rank, 2) for rank in range(2)]
    consume(loaders[0], 3)
    consume(loaders[1], 2)
    states = [loader.state_dict() for loader in loaders]
    world = NewWorld(0, 1, 2, 5, "00")
    with pytest.raises(MismatchError, match="different places"):
        dealt(0, 1).load_from_ranks(states, world)
    with pytest.raises(MismatchError, match="share evenly"):
        dealt(0, 4).load_from_ranks(states[:1], NewWorld(0, 4, 2, 5, "00"))
    plain = CountedLoader(DataLoader(TensorDataset(torch.arange(48)), batch_size=2, shuffle=True))
    with pytest.raises(MismatchError, match="DistributedSampler"):
        plain.load_from_ranks(states[:1], world)


def test_one_order_for_all_ranks_keeps_its_place():
    def alike():
        torch.manual_seed(4)
        return CountedLoader(DataLoader(TensorDataset(torch.arange(48)), batch_size=2, shuffle=True))

    states, orders = [], []
    for _ in range(2):
        loader = alike()
        orders.append(consume(loader, 5))
        states.append(loader.state_dict())
    assert orders[0] == orders[1]
    fresh = alike()
    torch.manual_seed(77)
    fresh.load_from_ranks(states, NewWorld(2, 3, 2, 5, "00"))
    assert sorted(orders[0] + consume(fresh, 1000)) == list(range(48))


# -- in a user's loop, and from the shell ------------------------------------------------------------------------------


def life(directory, steps, rank=0, world=1, **knobs):
    """One life of a rank: attach, so many steps, close; the step it began at, and its weights at the end."""
    torch.manual_seed(5)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = TensorDataset(torch.arange(48.0))
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, seed=3)
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    checkpointer = PCcheck(
        directory,
        interval_steps=1,
        rank=rank,
        world_size=world,
        chunk_bytes=4096,
        exit_drain_s=5,
        control="off",
        **knobs,
    )
    began = checkpointer.attach(model=model, optimizer=optimizer, data=loader)
    consumed = checkpointer.data.batches
    for _, (batch,) in zip(range(steps), checkpointer.data, strict=False):
        # Of the same sum whatever this rank was dealt, as an all-reduce would make it.
        model(torch.ones(4) + 0 * batch.sum()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.step()
    checkpointer.close()
    return began, consumed, model.weight.detach().clone()


def test_attach_goes_on_from_a_job_of_another_number_of_ranks(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    weights = []
    for rank in range(2):  # at one time in life; a rank that begins beside checkpoints of others is refused
        weights.append(life(rank_directory(old, rank), 2, rank, 2)[2])
        rank_directory(old, rank).rename(tmp_path / str(rank))
    for rank in range(2):
        (tmp_path / str(rank)).rename(rank_directory(old, rank))
    assert torch.equal(*weights)
    began, consumed, weight = life(new, 0, resume_from=str(old))
    assert (began, consumed) == (2, 4), "two ranks took two batches each"
    assert torch.equal(weight, weights[0])
    assert life(new, 3, resume_from=str(old))[:2] == (2, 4)
    # Now the new job has checkpoints of its own.
    began, consumed, _ = life(new, 0, resume_from=str(old))
    assert (began, consumed) == (5, 7)
    assert keys(old)[0][1] == 2, "the old job stays"


def test_knobs_of_several_ranks_leave_other_specs_as_they_were():
    later = {"resume_from", "resume_buffers", "replicated"}
    assert not later & PCcheckOptions().model_dump(mode="json").keys()
    changed = PCcheckOptions(resume_from="/job", resume_buffers="rank0", replicated="ddp", world_size=2)
    found = changed.model_dump(mode="json")
    assert later < found.keys()
    assert PCcheckOptions.model_validate(found) == changed


def test_a_job_that_was_told_to_go_on_does_not_begin_anew(tmp_path):
    with pytest.raises(CheckpointError, match=r"resume_from: .*no directories of ranks"):
        life(tmp_path / "new", 1, resume_from=str(tmp_path / "old"))


def test_another_number_of_ranks_in_one_directory_is_refused(tmp_path):
    life(rank_directory(tmp_path, 0), 1, 0, 2)
    with pytest.raises(MismatchError, match=r"rank 0 of 2.*rank 0 of 3.*resume_from"):
        life(rank_directory(tmp_path, 0), 1, 0, 3)


def test_inspect_lists_ranks_and_export_writes_the_job(tmp_path, capsys):
    save(tmp_path / "job", 0, 2, 10, 20)
    save(tmp_path / "job", 1, 2, 10)
    inspect(tmp_path / "job", False, None, json=True)
    found = json.loads(capsys.readouterr().out)
    steps = [sorted(slot["step"] for slot in rank["slots"] if slot["state"] == "whole") for rank in found["ranks"]]
    assert steps == [[10, 20], [10]]
    assert [one["step"] for one in found["whole"]] == [10]
    inspect(tmp_path / "job", False, None, json=False)
    assert "complete on all ranks: 10 (incarnation 1)" in capsys.readouterr().out
    out = tmp_path / "whole.safetensors"
    export_command(tmp_path / "job", out, to="safetensors", step=None, force=False, threads=2, as_json=True)
    assert json.loads(capsys.readouterr().out)["step"] == 10
    tree = load_exported(out)
    assert sorted(tree["rng"]) == ["rank-00000", "rank-00001"]
    assert state_digest({name: tree[name] for name in ("model", "optimizer", "plain")}) == state_digest(
        {
            name: part.state_dict() if name != "plain" else part
            for name, part in a_state().items()
            if name in ("model", "optimizer", "plain")
        }
    )
    shutil.rmtree(rank_directory(tmp_path / "job", 1))
    with pytest.raises(CheckpointError, match="rank-00001"):
        inspect(tmp_path / "job", False, None, json=True)


class Merges:
    """Goes on from the states of all ranks, if they are what it returned."""

    def state_dict(self):
        return {"count": 1}

    def load_state_dict(self, state):
        self.count = state["count"]

    def load_from_ranks(self, states, world):
        self.count = sum(state["count"] for state in states)


@pytest.mark.parametrize(
    ("saved", "error", "words"),
    [(5, MismatchError, "x: the state holds an object"), ({"a": 1}, MismatchError, "x: the")],
)
def test_a_part_that_merges_ranks_gets_nothing_of_another_kind(saved, error, words, tmp_path):
    model = torch.nn.Linear(2, 2)
    old = PCcheck(tmp_path / "old")
    old.start({"model": model, "x": saved})
    old.save(1)
    old.close()
    fresh = torch.nn.Linear(2, 2)
    before = state_digest({"model": fresh})
    new = PCcheck(tmp_path / "new", rank=0, world_size=2, control="off", resume_from=str(tmp_path / "old"))
    with pytest.raises(error, match=words):
        new.restore({"model": fresh, "x": Merges()})
    assert state_digest({"model": fresh}) == before


def test_what_a_merge_of_ranks_raises_names_the_part(tmp_path):
    class Other(Merges):
        def state_dict(self):
            return {"other": 1}

    old = PCcheck(tmp_path / "old")
    old.start({"model": torch.nn.Linear(2, 2), "x": Other()})
    old.save(1)
    old.close()
    new = PCcheck(tmp_path / "new", rank=0, world_size=2, control="off", resume_from=str(tmp_path / "old"))
    with pytest.raises(CheckpointError, match=r"x: Merges could not be loaded: KeyError: 'count'"):
        new.restore({"model": torch.nn.Linear(2, 2), "x": Merges()})
