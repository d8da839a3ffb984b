"""Suggestions to jobs of several ranks that restore, followed to the letter. One process makes their directories."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lastgood import PCcheck
from lastgood.checkpointers.agreement.decide import begin
from lastgood.checkpointers.agreement.messages import Held
from lastgood.checkpointers.gemini.address_file import address_for_peers
from lastgood.checkpointers.gemini.traffic import Traffic
from lastgood.checkpointers.ranks.reshard import restore_ranks
from lastgood.checkpointers.registry import checkpointer_class
from lastgood.state.shards import describe_shard
from tests.checkpointers.support.rank_reports import report
from tests.checkpointers.support.rank_states import a_state, save
from tests.suggestions.following import advice, follows, hear, refusal


@follows("{}: {}; name a step, or restore with good_only=False")
def test_a_step_that_a_rank_judged_bad(tmp_path):
    save(tmp_path, 0, 1, 10, bad=[10])
    message = refusal(lambda: restore_ranks(tmp_path, a_state(seed=1), (0, 2), 2))
    given = eval(f"dict({advice(message, r'good_only=False')})")
    assert restore_ranks(tmp_path, a_state(seed=1), (0, 2), 2, **given) == 10
    advice(message, "name a step")
    assert restore_ranks(tmp_path, a_state(seed=1), (0, 2), 2, 10) == 10


@follows("take rank 0's buffers (resume_buffers='rank0')")
def test_buffers_that_differ(tmp_path):
    def moved(state):
        state["model"][1].running_mean.add_(1)

    save(tmp_path / "job", 0, 2, 10)
    save(tmp_path / "job", 1, 2, 10, change=moved)
    message = refusal(lambda: restore_ranks(tmp_path / "job", a_state(seed=1), (0, 1), 2))
    given = eval(f"dict({advice(message, r'resume_buffers=.rank0.')})")
    again = PCcheck(tmp_path / "new", resume_from=str(tmp_path / "job"), **given)
    assert again.restore(a_state(seed=1)) == 10
    for rank in (0, 1):  # as many ranks as wrote it
        assert restore_ranks(tmp_path / "job", a_state(seed=1), (rank, 2), 2) == 10


@follows('give a new directory and this job with resume_from="..."')
def test_a_part_of_another_number_of_ranks(tmp_path):
    for rank in (0, 1):
        save(tmp_path, rank, 2, 10)
    message = refusal(lambda: PCcheck(tmp_path / "rank-00000").restore(a_state(seed=1)))
    given = advice(message, r'resume_from="\.\.\."').replace("...", str(tmp_path))
    assert PCcheck(tmp_path / "new", **eval(f"dict({given})")).restore(a_state(seed=1)) == 10
    as_before = PCcheck(tmp_path / "rank-00000", rank=0, world_size=2, control="off")
    assert as_before.restore(a_state(seed=1)) == 10


class Counted:
    """A part that decides itself what several ranks make of it."""

    def __init__(self, count):
        self.count = count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Summed(Counted):
    def load_from_ranks(self, states, world):
        self.count = sum(state["count"] for state in states)


@follows("give the part a method load_from_ranks(states, world)")
def test_values_that_differ(tmp_path):
    for rank in (0, 1):
        save(tmp_path, rank, 2, 10, change=lambda state, rank=rank: state.update(own=Counted(rank + 1)))
    message = refusal(lambda: restore_ranks(tmp_path, {**a_state(seed=1), "own": Counted(0)}, (0, 1), 2))
    own = Summed(0)
    assert hasattr(own, advice(message, r"a method (\w+)\(states, world\)"))
    assert restore_ranks(tmp_path, {**a_state(seed=1), "own": own}, (0, 1), 2) == 10
    assert own.count == 3


@follows("{}; name a step, restore with good_only=False, or move the directories of all ranks away")
def test_ranks_that_agree_on_a_bad_step():
    held = [(1, 10)]

    def asked(**wanted):
        bad = [Held(*one, bad="loss") for one in held]
        return begin([report(rank, 2, bad, **wanted) for rank in (0, 1)])

    message = refusal(lambda: asked(good_only=True))
    assert asked(**eval(f"dict({advice(message, r'good_only=False')})"))
    assert asked(step=10, good_only=True)


@follows("{}: ranks restore together, before they start")
def test_a_restore_after_the_start(tmp_path):
    state = {"model": torch.nn.Linear(2, 2)}
    checkpointer = PCcheck(tmp_path / "rank-00000", interval_steps=1)
    checkpointer.attach(**state)
    message = refusal(lambda: checkpointer._begin_together(state, None))
    assert "close() and attach() again on all ranks" in message
    checkpointer.close()
    checkpointer.attach(**state)
    checkpointer.close()


@pytest.fixture
def mesh():
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@follows("a sum over ranks is still to be made; redistribute() it to Replicate or Shard first")
def test_a_sum_that_is_still_to_be_made(mesh):
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    pending = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    message = refusal(lambda: describe_shard(pending, "weight"))
    kinds = advice(message, r"redistribute\(\) it to (\w+ or \w+)").split(" or ")
    for placement in (eval(f"{kinds[0]}()", {"Replicate": Replicate}), eval(f"{kinds[1]}(0)", {"Shard": Shard})):
        describe_shard(pending.redistribute(placements=[placement]), "weight")


@pytest.fixture
def four_of_two_dimensions():
    """A mesh of ranks that are only said to be there: where parts lie needs no message."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield init_device_mesh("cpu", (2, 2))
    dist.destroy_process_group()


@follows("redistribute() it to Replicate, and from there to its placements")
def test_shards_in_an_order_of_their_own(four_of_two_dimensions):
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry

    mesh, placements = four_of_two_dimensions, [Shard(0), Shard(0)]
    usual = distribute_tensor(torch.arange(8.0), mesh, placements)
    order = (ShardOrderEntry(0, (1, 0)),)
    other = DTensorSpec(mesh, usual.placements, usual._spec.tensor_meta, shard_order=order)
    tensor = DTensor(usual._local_tensor, other, requires_grad=False)
    message = refusal(lambda: describe_shard(tensor, "weight"))
    whole = {"Replicate": Replicate}[advice(message, r"redistribute\(\) it to (\w+)")]()
    again = tensor.redistribute(placements=[whole, whole]).redistribute(placements=placements)
    assert describe_shard(again, "weight") == describe_shard(usual, "weight")


@follows("no IPv4 route to MASTER_ADDR={}: {}; give host=")
def test_an_address_of_ipv6(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "::1")
    message = refusal(lambda: address_for_peers("127.0.0.1"))
    given = eval(f"dict({advice(message, r'give (host=)')}'192.0.2.1')")
    assert checkpointer_class("gemini").Options(**given)
    assert address_for_peers(**given) == "192.0.2.1"


@follows("is end() called for each begin()?", "Traffic.end() without begin()")
def test_marks_of_the_trainings_communication():
    traffic = Traffic(3)
    with pytest.raises(RuntimeError) as error:
        traffic.end()
    hear(str(error.value))
    traffic.begin()
    refusal(lambda: traffic.wait_for_gap(0.01, 0.5, 0.05))
    traffic.end()
    traffic.wait_for_gap(0.01, 0.5, 5.0)
