"""The mirror node's side of agents: where they knock, what the node asks, and what it learns."""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any, Final

from lastgood._lazy import torch
from lastgood.errors import CorruptCheckpoint, StateError
from lastgood.mirror.agent.messages import (
    AGENT_GREETING,
    Ask,
    Cannot,
    Greeting,
    StateHead,
    Weights,
    parse_message,
)
from lastgood.state import Layout, unflatten
from lastgood.units import format_bytes
from lastgood.wire.frames import Kind, Wire, available_memory_bytes, chunk_checksum, keep_alive, peer_handshake
from lastgood.wire.gate import PROOF_S, Gate, Guest

__all__ = ["AgentCame", "AgentDoor", "AgentEvent", "AgentWent", "NoState", "StateArrived", "WeightsSeen"]

_log = logging.getLogger("lastgood.mirror")
_LOOK_S: Final = 0.1
_MOST_EVENTS: Final = 10_000
_END_S: Final = 5.0


@dataclass(frozen=True)
class AgentCame:
    """An agent is connected, and has taken the place of any other."""

    name: str
    digest_every: int
    """Steps between two `WeightsSeen`; 0: there will be none."""


@dataclass(frozen=True)
class AgentWent:
    """The agent is gone."""

    name: str
    why: str


@dataclass(frozen=True)
class WeightsSeen:
    """The digest of the trainer's weights (`messages.weights_digest`) after `step` updates."""

    step: int
    digest: str


@dataclass(frozen=True)
class StateArrived:
    """What was asked for: a full state after `step` updates, as plain containers and tensors on the CPU.

    An object with a state_dict is there as what that returned.
    """

    step: int
    state: dict[str, Any]


@dataclass(frozen=True)
class NoState:
    """The agent has none to give, or the one that it sent could not be taken."""

    why: str


AgentEvent = AgentCame | AgentWent | WeightsSeen | StateArrived | NoState


class AgentDoor:
    """Takes the one agent of a training at `listener`, and holds what it says until it is polled.

    `most_bytes` bounds a state, `timeout_s` each exchange. All methods are for any thread.
    """

    def __init__(self, listener: socket.socket, token: bytes, *, most_bytes: int, timeout_s: float = 60.0) -> None:
        self._most_bytes, self._timeout_s = most_bytes, timeout_s
        self._events: queue.Queue[AgentEvent] = queue.Queue(_MOST_EVENTS)
        self._ask: Ask | None = None
        self._number = 0
        self._lock = threading.Lock()
        self._current: Wire | None = None
        self._ending = threading.Event()
        self._gate = Gate(
            listener,
            lambda other: peer_handshake(other, token, AGENT_GREETING),
            "a mirror node's port for agents",
            _log.warning,
            proof_s=min(PROOF_S, timeout_s),
        )
        self._thread = threading.Thread(target=self._listen, name="lastgood-agent-door", daemon=True)
        self._thread.start()

    def __enter__(self) -> AgentDoor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def connected(self) -> bool:
        """Whether an agent is there."""
        return self._current is not None

    @property
    def asking(self) -> bool:
        """Whether a question is open."""
        return self._ask is not None

    def ask(self, why: str) -> None:
        """Ask for a full state: the agent that is there, or the next one. A question that is open stays so."""
        with self._lock:
            if self._ask is None:
                self._number += 1
                self._ask = Ask(number=self._number, why=why[:4000])

    def poll(self, timeout_s: float = 0.0) -> AgentEvent | None:
        """The oldest event that nobody has got yet; None if none comes within `timeout_s`."""
        try:
            return self._events.get(timeout=timeout_s) if timeout_s > 0 else self._events.get_nowait()
        except queue.Empty:
            return None

    def close(self) -> None:
        """Take no more agents, and end the one that is there. Safe to call twice."""
        self._ending.set()
        current = self._current
        if current is not None:
            current.abort()
        self._thread.join(_END_S)

    # -- its threads ---------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        with self._gate:
            while not self._ending.is_set():
                try:
                    guests = self._gate.step(_LOOK_S)
                except OSError as error:
                    _log.warning("agents cannot come any more: %s", error)
                    return
                for guest in guests:
                    self._gate.serve_in_thread(guest, self._serve)

    def _serve(self, guest: Guest[int]) -> None:
        keep_alive(guest.connection)
        wire = Wire(guest.connection, f"the agent at {guest.other}", self._timeout_s)
        greeting = parse_message(wire.receive_message("a greeting"), wire.other)
        if not isinstance(greeting, Greeting):
            raise CorruptCheckpoint(f"{wire.other} began with a message of kind {greeting.kind}")
        name = f"process {greeting.process} on {greeting.host} ({guest.other})"
        with self._lock:
            earlier, self._current = self._current, wire
        if earlier is not None:
            earlier.abort()
        self._tell(AgentCame(name, greeting.digest_every))
        why = ""
        try:
            self._talk(wire)
        except Exception as error:
            why = str(error) or repr(error)
            raise
        finally:
            with self._lock:
                if self._current is wire:
                    self._current = None
            self._tell(AgentWent(name, why))

    def _talk(self, wire: Wire) -> None:
        told = 0
        while not self._ending.is_set():
            ask = self._ask
            if ask is not None and ask.number != told:
                wire.send_message(**ask.model_dump())
                told = ask.number
            if not wire.wait_readable(_LOOK_S):
                continue
            if wire.ended():
                return
            message = parse_message(wire.receive_message("a message"), wire.other)
            if isinstance(message, Weights):
                self._tell(WeightsSeen(message.step, message.digest))
            elif isinstance(message, Cannot):
                self._answered(message.number, NoState(message.why), wire)
            elif isinstance(message, StateHead):
                self._take(wire, message, told)
            else:
                raise CorruptCheckpoint(f"{wire.other} sent a message of kind {message.kind}")

    def _take(self, wire: Wire, head: StateHead, told: int) -> None:
        ask = self._ask
        if ask is None or head.number != ask.number or head.number != told:
            raise CorruptCheckpoint(f"{wire.other} sent a state that nobody asked for")
        total, available = head.stream_bytes + head.layout_bytes, available_memory_bytes()
        if total > self._most_bytes or total > available:
            limit = min(self._most_bytes, available)
            why = f"a state of {format_bytes(total)}, and {format_bytes(limit)} are the most that is taken here"
            self._answered(head.number, NoState(why), wire)
            raise StateError(f"{wire.other}: {why}")
        began = time.monotonic()
        memory = torch.empty(total, dtype=torch.uint8)
        view = memory.numpy().data.cast("B")
        offset = 0
        while offset < total:
            frame = wire.receive_frame(f"byte {offset} of a state")
            if frame.kind is not Kind.CHUNK or frame.offset != offset or not 0 < frame.length <= total - offset:
                raise CorruptCheckpoint(f"{wire.other} sent something else than byte {offset} of its state")
            chunk = view[offset : offset + frame.length]
            wire.read_into(chunk, f"byte {offset} of a state")
            if chunk_checksum(chunk, head.number, offset) != frame.checksum:
                raise CorruptCheckpoint(f"{wire.other}: the state's bytes from {offset} on have another checksum")
            offset += frame.length
        layout = Layout.from_json(view[head.stream_bytes :].tobytes(), wire.other, total)
        if layout.stream_bytes != head.stream_bytes:
            raise CorruptCheckpoint(f"{wire.other}: {head.stream_bytes} bytes, and the layout needs other ones")
        blocks = [memory[at : at + count] for at, count in zip(layout.block_offsets(), layout.block_bytes, strict=True)]
        state = unflatten(layout, blocks, wire.other)
        _log.info("the state of step %d came in %.1f s", head.step, time.monotonic() - began)
        self._answered(head.number, StateArrived(head.step, state), wire)

    def _answered(self, number: int, event: AgentEvent, wire: Wire) -> None:
        with self._lock:
            if self._ask is None or self._ask.number != number:
                raise CorruptCheckpoint(f"{wire.other} answered a question that nobody asked")
            self._ask = None
        self._tell(event)

    def _tell(self, event: AgentEvent) -> None:
        """Digests that nobody fetches are dropped, and so is what follows thousands of events."""
        try:
            self._events.put_nowait(event)
        except queue.Full:
            _log.warning("nobody asks what agents say: an event is lost")
