"""The agent in a training: it copies between two steps when it was asked, and a thread of its own talks to the node.

Nothing that happens to the connection, the node or the copy stops training, or makes it wait for more than a copy in
memory: the training's thread does nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lastgood._lazy import torch
from lastgood.errors import ConfigError, LastgoodError, StateError
from lastgood.mirror.agent.messages import (
    AGENT_GREETING,
    CHUNK_BYTES,
    Ask,
    Cannot,
    Greeting,
    StateHead,
    Weights,
    parse_message,
    weights_digest,
)
from lastgood.state import flatten
from lastgood.tokens import read_token
from lastgood.units import format_bytes
from lastgood.wire.frames import Wire, available_memory_bytes, chunk_checksum, keep_alive, prove_trainer, reach
from lastgood.wire.gate import close_in_forks
from lastgood.world import world_of_torch

__all__ = ["MirrorAgent", "mirror_agent"]

_log = logging.getLogger("lastgood.mirror")
_LOOK_S: Final = 0.1
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0
_END_S: Final = 5.0
_SPARE_BYTES: Final = 64 << 20
"""Of memory, left to the training beside a copy."""


@dataclass(frozen=True)
class _State:
    """A copy of a full state, and the question that it answers."""

    number: int
    step: int
    stream: torch.Tensor
    layout: bytes


@dataclass(frozen=True)
class _Weights:
    """A copy of all parameters."""

    step: int
    parameters: dict[str, torch.Tensor]


def mirror_agent(
    state: Mapping[str, Any],
    *,
    node: str,
    token_file: str | Path,
    digest_every: int = 100,
    timeout_s: float = 60.0,
) -> MirrorAgent:
    """Give the mirror node at `node` (HOST:PORT) a full state when it asks, which it does after a step that it lost.

    Call `step(n)` of what this returns after each update, n being the number of updates done::

        agent = lastgood.mirror_agent({"model": model, "optimizer": optimizer}, node="vm4:7301", token_file="token")
        ...
        agent.step(n)

    Args:
        state: what a restored training needs; a DistributedDataParallel module stands for the one inside. The entry
            ``model`` (else the only module) is the one whose weights are compared.
        node: where the node listens for agents.
        token_file: holds the node's token.
        digest_every: steps between two digests of the weights, 0 for none. Each costs a copy of them. The node compares
            them with its own, and asks for a state if they differ.
        timeout_s: for each exchange with the node, in the agent's own thread.

    Rank 0 of torch.distributed does all of it, the others nothing. Nothing here ever waits for the node, and what fails
    is logged (``lastgood.mirror``). Raises ConfigError for arguments that cannot work.
    """
    return MirrorAgent(state, node, read_token(Path(token_file)), digest_every=digest_every, timeout_s=timeout_s)


class MirrorAgent:
    """See `mirror_agent`. `step` and `close` are for the training's thread."""

    def __init__(
        self, state: Mapping[str, Any], node: str, token: bytes, *, digest_every: int = 100, timeout_s: float = 60.0
    ) -> None:
        host, _, port = node.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ConfigError(f"node={node!r}: not HOST:PORT, as vm4:7301")
        if digest_every < 0 or timeout_s <= 0:
            raise ConfigError("digest_every is a number of steps, or 0 for no digests; timeout_s is above 0")
        self._state = {name: _unwrapped(value) for name, value in state.items()}
        self._model = _model_of(self._state)
        self._digest_every = digest_every
        rank, self._ranks = world_of_torch()
        self._link: _Link | None = None
        if rank == 0:
            told = digest_every if self._model is not None else 0
            self._link = _Link(host.strip("[]"), int(port), token, timeout_s, self._ranks, told)

    def __enter__(self) -> MirrorAgent:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self, step: int) -> None:
        """After an update: `step` is the number of updates done. Copies if the node asked, else does next to nothing.

        Call it when all of the state is that of this step: after ``optimizer.step()`` and ``scheduler.step()``.
        """
        link = self._link
        if link is None or not link.is_free:
            return
        asked = link.asked
        if asked is not None:
            try:
                link.give(self._copied(asked, step))
            except Exception as error:  # whatever it is: training must not end by it
                link.give(Cannot(number=asked, why=f"{error or repr(error)}"[:4000]))
        elif self._digest_every and self._model is not None and step % self._digest_every == 0 and link.is_up:
            with contextlib.suppress(LastgoodError):
                link.give(_Weights(step, self._weights()))

    def close(self) -> None:
        """End the connection; what is on its way gets a few seconds. Safe to call twice."""
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def _copied(self, number: int, step: int) -> _State:
        flat = flatten(self._state)
        layout = flat.layout
        text = layout.to_json()
        _check_memory(layout.stream_bytes + len(text))
        stream = torch.empty(layout.stream_bytes, dtype=torch.uint8)
        end = 0
        for at, count, block in zip(layout.block_offsets(), layout.block_bytes, flat.blocks, strict=True):
            stream[end:at] = 0
            stream[at : at + count].copy_(block)
            end = at + count
        stream[end:] = 0
        return _State(number, step, stream, text)

    def _weights(self) -> dict[str, torch.Tensor]:
        assert self._model is not None
        parameters = dict(self._model.named_parameters())
        _check_memory(sum(one.nbytes for one in parameters.values()))
        return {name: one.detach().to("cpu", copy=True) for name, one in parameters.items()}


def _unwrapped(value: Any) -> Any:
    return value.module if isinstance(value, torch.nn.parallel.DistributedDataParallel) else value


def _model_of(state: Mapping[str, Any]) -> torch.nn.Module | None:
    modules = [value for value in state.values() if isinstance(value, torch.nn.Module)]
    named = state.get("model")
    if isinstance(named, torch.nn.Module):
        return named
    return modules[0] if len(modules) == 1 else None


def _check_memory(nbytes: int) -> None:
    available = available_memory_bytes()
    if nbytes + _SPARE_BYTES > available:
        raise StateError(f"a copy needs {format_bytes(nbytes)}, and {format_bytes(available)} of memory are there")


class _Link:
    """The connection to the node, in a thread of its own that reaches it again whenever it is lost."""

    def __init__(self, host: str, port: int, token: bytes, timeout_s: float, ranks: int, digest_every: int) -> None:
        self._where = f"the mirror node at {host}:{port}"
        self._host, self._port, self._token, self._timeout_s = host, port, token, timeout_s
        self._ranks = ranks
        self._digest_every = digest_every
        self._asked: int | None = None
        self._given: queue.SimpleQueue[_State | _Weights | Cannot] = queue.SimpleQueue()
        self._busy = False
        self._ending = threading.Event()
        self._wire: Wire | None = None
        self._thread = threading.Thread(target=self._run, name="lastgood-mirror-agent", daemon=True)
        self._thread.start()

    @property
    def asked(self) -> int | None:
        """The question that is open."""
        return self._asked

    @property
    def is_up(self) -> bool:
        """Whether the node is connected."""
        return self._wire is not None

    @property
    def is_free(self) -> bool:
        """Whether a copy would be sent next: one is on its way at a time, so there is memory for one only."""
        return not self._busy

    def give(self, thing: _State | _Weights | Cannot) -> None:
        """Send it, if the connection that asked is still there."""
        self._busy = True
        if not isinstance(thing, _Weights):
            self._asked = None
        self._given.put(thing)

    def close(self) -> None:
        self._ending.set()
        self._thread.join(_END_S)
        wire = self._wire
        if self._thread.is_alive() and wire is not None:
            wire.abort()
            self._thread.join(_END_S)

    # -- its thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s, told = _FIRST_PAUSE_S, ""
        while not self._ending.is_set():
            try:
                with self._connected() as wire:
                    pause_s, told = _FIRST_PAUSE_S, ""
                    self._talk(wire)
            except Exception as error:  # the node is not there, or goes: a training goes on without it
                if str(error) != told and not self._ending.is_set():
                    _log.warning("no agent of %s: %s", self._where, error or repr(error))
                    told = str(error)
            self._forget()
            self._ending.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[Wire]:
        connection = reach(self._host, self._port, self._timeout_s, self._where)
        close_in_forks(connection)
        keep_alive(connection)
        wire = Wire(connection, self._where, self._timeout_s)
        try:
            prove_trainer(wire, self._token, AGENT_GREETING)
            greeting = Greeting(
                host=socket.gethostname()[:255],
                process=os.getpid(),
                ranks=self._ranks,
                digest_every=self._digest_every,
            )
            wire.send_message(**greeting.model_dump())
            self._wire = wire
            yield wire
        finally:
            self._wire = None
            wire.close()

    def _talk(self, wire: Wire) -> None:
        while not self._ending.is_set():
            if wire.wait_readable(_LOOK_S):
                message = parse_message(wire.receive_message("a question"), self._where)
                if not isinstance(message, Ask):
                    raise LastgoodError(f"{self._where} sent a message of kind {message.kind}, which only agents send")
                self._asked = message.number
            with contextlib.suppress(queue.Empty):
                self._send(wire, self._given.get_nowait())
                self._busy = False

    def _send(self, wire: Wire, thing: _State | _Weights | Cannot) -> None:
        if isinstance(thing, Cannot):
            _log.warning("%s asked for a state and gets none: %s", self._where, thing.why)
            wire.send_message(**thing.model_dump())
        elif isinstance(thing, _Weights):
            digest = weights_digest(thing.parameters)
            wire.send_message(**Weights(step=thing.step, digest=digest).model_dump())
        else:
            _send_state(wire, thing)

    def _forget(self) -> None:
        """What another connection asked for is nobody's now."""
        self._asked = None
        with contextlib.suppress(queue.Empty):
            while True:
                self._given.get_nowait()
        self._busy = False


def _send_state(wire: Wire, state: _State) -> None:
    began = time.monotonic()
    stream = state.stream.numpy().data.cast("B") if state.stream.numel() else memoryview(b"")
    head = StateHead(number=state.number, step=state.step, stream_bytes=len(stream), layout_bytes=len(state.layout))
    wire.send_message(**head.model_dump())
    offset = 0
    for part in (stream, memoryview(state.layout)):
        for at in range(0, len(part), CHUNK_BYTES):
            chunk = part[at : at + CHUNK_BYTES]
            wire.send_chunk(chunk, offset, chunk_checksum(chunk, state.number, offset))
            offset += len(chunk)
    _log.info("sent the state of step %d, %s in %.1f s", state.step, format_bytes(offset), time.monotonic() - began)
