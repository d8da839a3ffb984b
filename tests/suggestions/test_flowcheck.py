"""What FlowCheck's messages suggest, followed."""

from __future__ import annotations

import pytest
import torch

from lastgood.checkpointers.flowcheck.options import FlowCheckOptions
from lastgood.checkpointers.registry import checkpointer_class
from lastgood.checkpointers.shadows.restore import read_token
from lastgood.cli import _mirror_node, mirror_run
from lastgood.errors import CheckpointError
from lastgood.mirror.job.describe import describe
from lastgood.mirror.job.description import Backend
from lastgood.mirror.job.factory import Training
from lastgood.mirror.node.layout import NodeLayout
from lastgood.mirror.node.stages import conversation_for
from lastgood.tokens import read_token as read_token_file
from tests.suggestions.following import advice, follows, refusal

FlowCheck = checkpointer_class("flowcheck")


@follows('give nodes=["host:port"]', "give token_file=, the one that `lastgood mirror run --token-file` has")
def test_what_flowcheck_needs_of_its_node(tmp_path):
    message = refusal(lambda: read_token(FlowCheckOptions()))
    given = advice(message, r"give (nodes=\[.*?\])").replace("host:port", "127.0.0.1:7300")
    message = refusal(lambda: read_token(eval(f"FlowCheckOptions({given})")))
    read_token_file(tmp_path / "token", make=True)  # as `lastgood mirror run --token-file` does
    given += ", " + advice(message, r"give (token_file=)") + "path"
    assert read_token(eval(f"FlowCheckOptions({given})", {**globals(), "path": str(tmp_path / "token")}))


@follows("is wrapped in DistributedDataParallel already, which has broadcast its weights")
def test_a_model_is_wrapped_after_it_is_attached(tmp_path, monkeypatch):
    class Wrapped(torch.nn.Module):
        """Stands for DDP, which needs a process group."""

    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", Wrapped)
    read_token_file(tmp_path / "token", make=True)
    checkpointer = FlowCheck(tmp_path, nodes=["127.0.0.1:1"], token_file=str(tmp_path / "token"))
    bare = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(bare.parameters(), 0.1)
    message = refusal(lambda: checkpointer.restore({"model": Wrapped(), "optimizer": optimizer}))
    advice(message, r"give the bare model, and wrap it after attach\(\) or restore\(\)")
    with pytest.raises(CheckpointError, match=r"127\.0\.0\.1:1"):  # it got as far as the node, which is not there
        checkpointer.restore({"model": bare, "optimizer": optimizer})


@follows("and no gradient of it is ever reduced (requires_grad=False); leave it out of the optimizer")
def test_a_frozen_parameter_in_the_optimizer():
    model = torch.nn.Linear(2, 2)
    model.bias.requires_grad_(False)

    def layout(parameters):
        return NodeLayout(describe(Training(model, torch.optim.SGD(parameters, 0.1)), ranks=2))

    advice(refusal(lambda: layout(list(model.parameters()))), "leave it out of the optimizer")
    assert len(layout([model.weight]).gradients.parameters) == 1


@follows("name one of --interface, --pcap and --ring")
def test_a_mirror_node_takes_an_interface_or_a_file(tmp_path):
    given = {"job": tmp_path / "job.json", "directory": tmp_path, "watch": ["10.0.0.1"]}
    advice(refusal(lambda: mirror_run.run(**given)), "name one of --interface, --pcap and --ring")
    (tmp_path / "job.json").write_text("{}")
    message = refusal(lambda: mirror_run.run(**given, pcap=tmp_path / "frames.pcap"))
    assert "--pcap" not in message, "it goes on to the job description"


@follows("neither an address, nor a node of the testbed, nor a name that this machine knows")
def test_a_watched_host_is_an_address_or_a_known_name():
    advice(refusal(lambda: _mirror_node.watched_addresses(["no-such-host.invalid"])), "neither an address")
    assert _mirror_node.watched_addresses(["10.0.0.1"]) == ["10.0.0.1"]


@follows(
    "NCCL's traffic itself shows which rank is watched; leave =RANK out",
    "it is HOST, or HOST=RANK with the rank of the process there",
)
def test_a_rank_is_given_where_the_traffic_does_not_show_it():
    model = torch.nn.Linear(2, 2)
    training = Training(model, torch.optim.SGD(model.parameters(), 0.1))
    job = describe(training, ranks=2, backend=Backend(kind="nccl", version="2.28"))
    watch = ["10.0.0.1=1"]
    assert _mirror_node.watched_addresses(watch) == ["10.0.0.1"]
    ranks = _mirror_node.watched_ranks(watch)
    assert ranks == {"10.0.0.1": 1}
    advice(refusal(lambda: conversation_for(job, ["10.0.0.1"], ranks)), "leave =RANK out")
    assert conversation_for(job, ["10.0.0.1"], _mirror_node.watched_ranks(["10.0.0.1"]))
    assert "HOST=RANK" in refusal(lambda: _mirror_node.watched_ranks(["10.0.0.1=first"]))
