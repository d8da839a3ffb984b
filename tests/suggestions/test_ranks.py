"""Suggestions to ranks that agree, share or have torch's process group, followed to the letter."""

from __future__ import annotations

import re
import socket

import pytest
import torch.distributed as dist

from lastgood import PCcheck
from lastgood.checkpointers.agreement.address import check_control, find_address
from lastgood.checkpointers.ranks.exchange import RankExchange
from lastgood.checkpointers.ranks.replicated import StoreExchange
from lastgood.ports import free_ports
from tests.suggestions.following import advice, follows, refusal


@pytest.fixture
def group():
    """What torch.distributed.init_process_group() makes, with one rank."""

    def init():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    yield init
    if dist.is_initialized():
        dist.destroy_process_group()


@follows("to one random text on all ranks")
def test_ranks_that_have_no_secret(tmp_path, monkeypatch):
    control = f"127.0.0.1:{free_ports()[0]}"
    message = refusal(lambda: find_address(control, 1, 1.0))
    variable, file_variable = re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b", message)
    monkeypatch.setenv(variable, "a random text of some length")
    assert find_address(control, 1, 1.0)[0].host == "127.0.0.1"
    monkeypatch.delenv(variable)
    path = tmp_path / "secret"
    path.write_text("a random text of some length")
    path.chmod(int(advice(message, r"of mode (\d+)"), 8))
    monkeypatch.setenv(file_variable, str(path))
    assert find_address(control, 1, 1.0)[0].host == "127.0.0.1"


@follows("several ranks must agree on their checkpoints")
def test_ranks_that_have_no_way_to_agree(group, tmp_path, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("LASTGOOD_JOB_TOKEN", "a random text of some length")
    message = refusal(lambda: find_address(None, 0, 1.0))
    given = advice(message, r'control="HOST:PORT"').replace("HOST:PORT", f"127.0.0.1:{free_ports()[0]}")
    address, listener = find_address(**eval(f"dict({given})"), rank=0, timeout_s=10.0)
    assert listener is not None and address.port == listener.getsockname()[1]
    listener.close()
    off = eval(f"dict({advice(message, 'control=.off.')})")
    assert check_control(**off) == "off"
    checkpointer = PCcheck(tmp_path, interval_steps=1, rank=0, world_size=2, **off)
    checkpointer.attach(part={"a": 1})
    checkpointer.close()
    group()
    listener = find_address(None, 0, 10.0)[1]
    assert listener is not None
    listener.close()


@follows('use a free port of this host (control="HOST:PORT")')
def test_a_port_that_is_taken(monkeypatch):
    monkeypatch.setenv("LASTGOOD_JOB_TOKEN", "a random text of some length")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        message = refusal(lambda: find_address(f"127.0.0.1:{taken.getsockname()[1]}", 0, 0.1))
        given = advice(message, r'control="HOST:PORT"').replace("HOST:PORT", f"127.0.0.1:{free_ports()[0]}")
        listener = find_address(**eval(f"dict({given})"), rank=0, timeout_s=10.0)[1]
    assert listener is not None
    listener.close()


@follows(
    "call torch.distributed.init_process_group() first",
    "was asked for; give both the same",
    "bytes of groups are too many to compare; use replicated='none'",
)
def test_ranks_that_hold_the_same(group, tmp_path):
    advice(refusal(lambda: StoreExchange(0, 1)), r"torch\.distributed\.init_process_group\(\)")
    group()
    refusal(lambda: StoreExchange(1, 2))
    exchange = StoreExchange(0, 1)
    message = refusal(lambda: exchange.gather(b"x" * (1 << 30)))
    none = eval(f"dict({advice(message, 'replicated=.none.')})")
    checkpointer = PCcheck(tmp_path, interval_steps=1, **none)
    checkpointer.attach(part={"a": 1})
    checkpointer.close()


@follows("the exchange between ranks needs torch.distributed")
def test_machines_of_gemini(group):
    refusal(lambda: RankExchange("gemini", 0, 1, 10.0))
    group()
    refusal(lambda: RankExchange("gemini", 1, 2, 10.0))
    assert RankExchange("gemini", 0, 1, 10.0).tell("a") == ["a"]
