"""An agent in a training and a mirror node's door: states to the bit, digests, and what must not stop training."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

import lastgood
from lastgood.errors import CheckpointError, ConfigError
from lastgood.mirror.agent import trainer as trainer_module
from lastgood.mirror.agent.door import AgentCame, AgentDoor, AgentEvent, AgentWent, NoState, StateArrived, WeightsSeen
from lastgood.mirror.agent.messages import AGENT_GREETING, StateHead, weights_digest
from lastgood.mirror.agent.trainer import MirrorAgent, mirror_agent
from lastgood.state import state_digest
from lastgood.wire.frames import Wire, chunk_checksum, prove_trainer, reach
from lastgood.wire.gate import open_listener

TOKEN = b"a token of a job, long enough"
MOST = 64 << 20
WAIT_S = 20.0
_Event = TypeVar("_Event")


def training() -> dict[str, Any]:
    """A model with buffers and tied weights, an optimizer with a state, a schedule."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 7))
    model[2].bias = model[2].bias
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "seen": 17}


def update(state: dict[str, Any]) -> None:
    loss = state["model"](torch.randn(6, 7)).square().mean()
    state["optimizer"].zero_grad()
    loss.backward()
    state["optimizer"].step()
    state["scheduler"].step()


def plain(state: dict[str, Any]) -> dict[str, Any]:
    return {name: part.state_dict() if hasattr(part, "state_dict") else part for name, part in state.items()}


@pytest.fixture
def door() -> Iterator[AgentDoor]:
    with AgentDoor(open_listener(), TOKEN, most_bytes=MOST, timeout_s=5.0) as found:
        yield found


def port_of(door: AgentDoor) -> int:
    listener: socket.socket = door._gate._listener
    return int(listener.getsockname()[1])


def agent_of(door: AgentDoor, state: dict[str, Any], **options: Any) -> MirrorAgent:
    return MirrorAgent(state, f"127.0.0.1:{port_of(door)}", TOKEN, **{"digest_every": 0, "timeout_s": 5.0, **options})


def expect(door: AgentDoor, kind: type[_Event], between: Callable[[], None] = lambda: None) -> _Event:
    """The next event of this kind; `between` is called while there is none."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        event: AgentEvent | None = door.poll(0.05)
        if isinstance(event, kind):
            return event
        between()
    raise AssertionError(f"no {kind.__name__} in {WAIT_S:g} s")


def test_a_state_is_copied_between_two_steps_and_comes_to_the_bit(door: AgentDoor) -> None:
    state = training()
    update(state)
    door.ask("step 1 is lost")
    steps, digests = [1], {}

    def go_on() -> None:
        steps.append(steps[-1] + 1)
        update(state)
        digests[steps[-1]] = state_digest(plain(state))
        agent.step(steps[-1])

    with agent_of(door, state) as agent:
        assert "process" in expect(door, AgentCame).name
        arrived = expect(door, StateArrived, go_on)
        # Only what was copied then: training has gone on, and goes on.
        go_on()
        assert not door.asking
    assert state_digest(arrived.state) == digests[arrived.step]
    assert arrived.state["seen"] == 17
    fresh = training()
    for name in ("model", "optimizer", "scheduler"):
        fresh[name].load_state_dict(arrived.state[name])
    assert state_digest(plain(fresh)) == digests[arrived.step]


def test_a_question_waits_for_the_next_agent_and_each_gets_one_answer(door: AgentDoor) -> None:
    state = training()
    for number in (1, 2):
        with agent_of(door, state) as agent:
            expect(door, AgentCame)
            door.ask("once more")
            assert expect(door, StateArrived, lambda at=number, to=agent: to.step(at)).step == number  # type: ignore[misc]
        assert "" in expect(door, AgentWent).why
    assert not door.asking
    assert door.poll() is None


def test_digests_of_weights_come_now_and_then(door: AgentDoor) -> None:
    state = training()
    expected = {}
    with agent_of(door, state, digest_every=3) as agent:
        assert expect(door, AgentCame).digest_every == 3
        for step in range(1, 8):
            update(state)
            if step % 3 == 0:
                expected[step] = weights_digest(dict(state["model"].named_parameters()))
            agent.step(step)
            if step % 3 == 0:
                seen = expect(door, WeightsSeen)
                assert (seen.step, seen.digest) == (step, expected[step])
    assert len(set(expected.values())) == 2


def test_what_cannot_be_copied_is_said_and_training_goes_on(door: AgentDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    state = training() | {"function": print}
    with agent_of(door, state) as agent:
        expect(door, AgentCame)
        door.ask("lost")
        assert "function" in expect(door, NoState, lambda: agent.step(1)).why
        assert not door.asking
        del state["function"]
        agent._state.pop("function")
        monkeypatch.setattr(trainer_module, "available_memory_bytes", lambda: 1000)
        door.ask("lost")
        assert "a copy needs" in expect(door, NoState, lambda: agent.step(2)).why
        monkeypatch.undo()
        door.ask("lost")
        assert expect(door, StateArrived, lambda: agent.step(3)).step == 3


def test_a_state_over_the_limit_is_refused_before_any_of_it_is_taken() -> None:
    door = AgentDoor(open_listener(), TOKEN, most_bytes=100, timeout_s=5.0)
    with door, agent_of(door, training()) as agent:
        expect(door, AgentCame)
        door.ask("lost")
        assert "are the most that is taken here" in expect(door, NoState, lambda: agent.step(1)).why


def test_no_node_and_a_wrong_token_cost_training_nothing(door: AgentDoor, tmp_path: Path) -> None:
    state = training()
    alone = MirrorAgent(state, "127.0.0.1:1", TOKEN, timeout_s=1.0)
    wrong = MirrorAgent(state, f"127.0.0.1:{port_of(door)}", b"another token, as long as it", timeout_s=1.0)
    began = time.monotonic()
    for step in range(1, 200):
        alone.step(step)
        wrong.step(step)
    assert time.monotonic() - began < 30, "two waits of a second for each of 199 steps take six minutes"
    door.ask("lost")
    assert not any(isinstance(door.poll(0.2), AgentCame) for _ in range(3))
    alone.close()
    wrong.close()
    alone.close()
    alone.step(201)


def test_a_node_that_reads_nothing_does_not_hold_up_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows the token, asks, and then never reads: the agent's thread waits, the training never does."""
    from lastgood.wire.frames import peer_handshake
    from lastgood.wire.gate import Gate

    monkeypatch.setattr(trainer_module, "_END_S", 0.1)

    asked = threading.Event()
    listener = open_listener()
    ending = threading.Event()

    def serve() -> None:
        with Gate(listener, lambda other: peer_handshake(other, TOKEN, AGENT_GREETING), "test", lambda _: None) as gate:
            kept = []
            while not ending.is_set():
                for guest in gate.step(0.05):
                    wire = Wire(guest.connection, guest.other, 5.0)
                    wire.send_message(kind="ask", number=1, why="to see")
                    kept.append(wire)
                    asked.set()

    port = listener.getsockname()[1]
    thread = threading.Thread(target=serve)
    thread.start()
    state = {"model": torch.nn.Linear(2000, 2000), "more": torch.zeros(16 << 20, dtype=torch.uint8)}
    agent = MirrorAgent(state, f"127.0.0.1:{port}", TOKEN, digest_every=1, timeout_s=30.0)
    try:
        assert asked.wait(WAIT_S)
        longest, end, step = 0.0, time.monotonic() + 1.5, 0
        while time.monotonic() < end:
            step += 1
            began = time.monotonic()
            agent.step(step)
            longest = max(longest, time.monotonic() - began)
            time.sleep(0.01)
        assert longest < 15  # a copy of 32 MB, never a timeout
    finally:
        agent.close()
        ending.set()
        thread.join(WAIT_S)


@pytest.mark.parametrize("fault", ["unasked", "checksum", "place", "layout", "rubbish"])
def test_a_state_that_is_none_ends_that_connection_only(door: AgentDoor, fault: str) -> None:
    wire = Wire(reach("127.0.0.1", port_of(door), 5.0, "the door"), "the door", 5.0)
    prove_trainer(wire, TOKEN, AGENT_GREETING)
    wire.send_message(kind="greeting", host="here", process=1, ranks=1)
    expect(door, AgentCame)
    number = 1
    if fault != "unasked":
        door.ask("lost")
        number = wire.receive_message("a question")["number"]
    layout = b'{"no": "layout"}'
    head = StateHead(number=number, step=1, stream_bytes=64, layout_bytes=len(layout)).model_dump()
    wire.send_message(**(head if fault != "rubbish" else {**head, "stream_bytes": "64"}))
    data = memoryview(bytes(64) + layout)
    offset = 8 if fault == "place" else 0
    checksum = chunk_checksum(data, number, offset) ^ (fault == "checksum")
    with contextlib.suppress(CheckpointError):  # it may be gone already
        wire.send_chunk(data, offset, checksum)
    assert expect(door, AgentWent).why
    wire.close()
    # The next one is served, and the question is still open.
    with agent_of(door, training()) as agent:
        expect(door, AgentCame)
        if fault == "unasked":
            door.ask("lost")
        assert expect(door, StateArrived, lambda: agent.step(5)).step == 5


def test_a_second_agent_takes_the_place_of_the_first(door: AgentDoor) -> None:
    first = agent_of(door, training())
    expect(door, AgentCame)
    second = agent_of(door, training())
    expect(door, AgentCame)
    expect(door, AgentWent)
    assert door.connected
    second.close()
    first.close()


def test_arguments_that_cannot_work_are_refused(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_bytes(TOKEN)
    token.chmod(0o600)
    for changes in ({"node": "vm4"}, {"node": "vm4:0"}, {"node": ":7301"}, {"digest_every": -1}, {"timeout_s": 0}):
        with pytest.raises(ConfigError):
            mirror_agent(training(), **{"node": "vm4:7301", "token_file": token, **changes})  # type: ignore[arg-type]
    token.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        mirror_agent(training(), node="vm4:7301", token_file=token)
    assert lastgood.mirror_agent is mirror_agent
