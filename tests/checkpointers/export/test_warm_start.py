"""A checkpoint read without the training that made it, and parts of it in another training's objects."""

from __future__ import annotations

import pytest
import torch

import lastgood
from lastgood import PCcheck, load_parts, read_checkpoint
from lastgood.checkpointers.export.warm_start import Loaded
from lastgood.errors import ConfigError, MismatchError, NoCheckpoint, NoGoodCheckpoint
from lastgood.state import state_digest
from tests.suggestions.following import advice, follows, refusal


def network(*, out: int = 2) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, out))


class Named(torch.nn.Module):
    """The same layers under other names."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.ModuleDict({"first": torch.nn.Linear(3, 4), "norm": torch.nn.BatchNorm1d(4)})
        self.head = torch.nn.Linear(4, 5)


@pytest.fixture
def saved(tmp_path):
    """A directory with steps 1 and 2, and the model of step 2."""
    torch.manual_seed(1)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    checkpointer = PCcheck(tmp_path / "old", interval_steps=1)
    checkpointer.attach(model=model, optimizer=optimizer, counts={"seen": 7})
    for _ in range(2):
        model(torch.rand(5, 3)).square().sum().backward()
        optimizer.step()
        checkpointer.step()
        checkpointer.drain()
    checkpointer.close()
    return tmp_path / "old", model, optimizer


def test_a_checkpoint_is_read_without_live_objects(saved):
    directory, model, optimizer = saved
    step, tree = read_checkpoint(directory)
    assert step == 2 and tree["counts"] == {"seen": 7} and tree["progress"]["step"] == 2
    assert state_digest({"m": tree["model"]}) == state_digest({"m": model.state_dict()})
    assert state_digest({"o": tree["optimizer"]["state"]}) == state_digest({"o": optimizer.state_dict()["state"]})
    assert read_checkpoint(directory, 1)[0] == 1
    with pytest.raises(NoCheckpoint, match=r"no checkpoint of step 9; steps \[2, 1\]"):
        read_checkpoint(directory, 9)
    judge = PCcheck(directory, interval_steps=0)
    judge.attach(model=network(), optimizer=torch.optim.Adam(network().parameters()), counts={}, unattached="allow")
    for bad in (2, 1):
        judge.verdict(bad, ok=False)
        if bad == 2:
            assert read_checkpoint(directory)[0] == 1
    with pytest.raises(NoGoodCheckpoint, match="all checkpoints are judged bad"):
        read_checkpoint(directory)
    judge.close()


def test_parts_come_into_other_objects(saved):
    directory, model, _ = saved
    fresh = network()
    done = PCcheck(directory).load({"model": torch.compile(fresh), "more": torch.zeros(2)}, parts=["model"])
    assert (done.step, done.missing, done.left_over) == (2, [], [])
    assert state_digest({"m": fresh.state_dict()}) == state_digest({"m": model.state_dict()})
    counts = {"seen": 0}
    assert load_parts(directory, {"counts": counts}) == Loaded(2, ["counts"])
    assert counts == {"seen": 7}


@pytest.mark.parametrize(
    "rename",
    [
        {"0.": "body.first.", "1.": "body.norm.", "2.": "head."},
        lambda name: None if name.startswith("2.") else name.replace("0.", "body.first.").replace("1.", "body.norm."),
    ],
    ids=["beginnings", "function"],
)
def test_entries_are_renamed_and_the_rest_is_listed(saved, rename):
    directory, model, _ = saved
    other = Named()
    head = other.head.weight.detach().clone()
    done = load_parts(directory, {"model": other}, rename=rename, strict=False)
    assert torch.equal(other.body["first"].weight, model[0].weight)
    assert torch.equal(other.body["norm"].running_mean, model[1].running_mean)
    assert torch.equal(other.head.weight, head)
    assert done.missing == ["model.head.weight", "model.head.bias"]
    assert [text.split(" ")[0] for text in done.left_over] == ["model.2.weight", "model.2.bias"]
    assert "model.body.norm.num_batches_tracked" in done.loaded


@follows("rename=... gives entries other names, and strict=False takes what fits")
def test_what_does_not_fit_changes_nothing(saved):
    directory, _, _ = saved
    wider = network(out=9)
    before = state_digest({"m": wider.state_dict()})
    message = refusal(lambda: load_parts(directory, {"model": wider}))
    assert "model.2.weight torch.float32 (2, 4), here torch.float32 (9, 4)" in message
    assert state_digest({"m": wider.state_dict()}) == before
    word, _, value = advice(message, r"strict=\w+").partition("=")
    assert load_parts(directory, {"model": wider}, **{word: eval(value)}).missing == ["model.2.weight", "model.2.bias"]
    with pytest.raises(MismatchError, match=r"the checkpoint lacks \['head'\] and holds nothing"):
        load_parts(directory, {"head": torch.zeros(2)})
    assert load_parts(directory, {"head": torch.zeros(2)}, strict=False).missing == ["head"]
    with pytest.raises(ConfigError, match=r"parts=\['optimiser'\] are not in the state that was given"):
        load_parts(directory, {"model": wider}, parts=["optimiser"])
    # The weights fit, the optimizer is another one: neither is loaded.
    fresh = network()
    before = state_digest({"m": fresh.state_dict()})
    with pytest.raises(MismatchError, match="another optimizer's"):
        load_parts(directory, {"model": fresh, "optimizer": torch.optim.SGD(fresh.parameters())})
    assert state_digest({"m": fresh.state_dict()}) == before


def test_they_are_public():
    assert lastgood.read_checkpoint is read_checkpoint and lastgood.load_parts is load_parts
