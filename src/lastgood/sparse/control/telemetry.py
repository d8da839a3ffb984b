"""What the ranks of a sparse training tell of each iteration, and what they hear: messages, and the client's side.

A client connects behind the gate's proof, says who it is (`Join`), and then sends what was measured, a few iterations
at a time; each message has one answer, which may bring a setting of the controller. The training's thread only puts
values into a queue that forgets the oldest, so a server that is slow, gone, or sends nonsense costs it nothing: the
client ends that connection, and tries again later.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from pydantic import Field, model_validator

from lastgood.errors import ConfigError, CorruptCheckpoint, LastgoodError, MismatchError
from lastgood.models import FrozenModel
from lastgood.sparse.control.controller import MAX_WORKERS, Report, Setting
from lastgood.text import parse_model
from lastgood.wire.frames import MAX_MESSAGE_BYTES, Wire, keep_alive, prove_trainer, reach
from lastgood.wire.gate import close_in_forks
from lastgood.wire.ring_link import parse_address

__all__ = [
    "MOST_TOLD",
    "TELEMETRY_GREETING",
    "TELEMETRY_VERSION",
    "Join",
    "Measured",
    "Telemetry",
    "TelemetryClient",
    "ask_view",
    "read_join",
    "read_setting",
    "read_told",
]

TELEMETRY_GREETING = b"lastgood tell 1\n"
"""Its digit changes only if the proof or the first message does."""
TELEMETRY_VERSION = 1
"""Of all messages after the proof; each side says its own."""
MOST_TOLD = 32
"""Iterations in one message."""
_MOST_WAITING = 256
"""Iterations that wait for the server; of more the oldest are forgotten."""
_MOST_VIEW_BYTES = 1 << 20
_PACE_S = 0.1
"""Between two messages of one rank."""
_MOST_S = 86_400.0
_log = logging.getLogger("lastgood")


class Measured(Report):
    """What one rank measured in one iteration, beside what the controller needs."""

    apply_s: float = Field(default=0.0, ge=0, le=_MOST_S)
    """Of `compute_s`, for updating the weights."""
    compression: float = Field(default=0.0, ge=0, lt=1)
    """The share of elements that was not sent."""
    energy_kept: float | None = Field(default=None, ge=0, le=1)
    """Of the gradient and the residual together, the share of the squares that was sent; None: not measured now."""
    residual_age_iterations: float | None = Field(default=None, ge=0, le=1e12)
    """How long what is not sent waits in the mean: magnitudes in the residual over those sent in an iteration."""
    not_finite: int = Field(default=0, ge=0, lt=1 << 48)
    """Layers and iterations skipped so far since a gradient was not finite."""


class Join(FrozenModel):
    """Who a client is: one rank of one incarnation of a training."""

    version: int = Field(ge=0, lt=1 << 31)
    job: str = Field(pattern="^[0-9a-f]{32}$")
    """Of the incarnation; rank 0 makes it up."""
    rank: int = Field(ge=0, lt=MAX_WORKERS)
    ranks: int = Field(ge=1, le=MAX_WORKERS)
    host: str = Field(max_length=255)
    elements: int = Field(ge=1, le=1 << 40)
    """Of the gradient."""
    value_bytes: float = Field(gt=0, le=64)
    """Sent for each chosen element, about, indices included."""
    staleness: int = Field(ge=0, le=1)
    compression: float = Field(ge=0, lt=1)
    """That the training began with."""
    least_compression: float = Field(ge=0, lt=1)
    """The engine takes no setting with less."""

    @model_validator(mode="after")
    def _place(self) -> Join:
        if self.rank >= self.ranks:
            raise ValueError(f"rank {self.rank} of {self.ranks}")
        return self


class _Told(FrozenModel):
    """Iterations that were measured."""

    measured: tuple[Measured, ...] = Field(min_length=1, max_length=MOST_TOLD)
    forgotten: int = Field(ge=0, lt=1 << 48)
    """Iterations so far that were measured and could not be told."""


class _Answer(FrozenModel):
    setting: Setting | None


def read_join(content: dict[str, Any], other: str) -> Join:
    """The first message of a client. Raises CorruptCheckpoint; MismatchError for another version."""
    version = content.get("version")
    if isinstance(version, int) and version != TELEMETRY_VERSION:
        raise MismatchError(f"{other} speaks version {version} of telemetry, and this is version {TELEMETRY_VERSION}")
    found: Join = _model(Join, content, f"{other} sent no description of a rank")
    return found


def read_told(content: dict[str, Any], join: Join, other: str) -> tuple[tuple[Measured, ...], int]:
    """What a rank measured, and how many iterations it could not tell. Raises CorruptCheckpoint."""
    told = _model(_Told, content, f"{other} sent no measurements")
    if any(one.worker != join.rank for one in told.measured):
        raise CorruptCheckpoint(f"{other} is rank {join.rank}, and told measurements of another one")
    return told.measured, told.forgotten


def read_setting(content: dict[str, Any], ranks: int, other: str) -> Setting | None:
    """What a server answers. Raises CorruptCheckpoint for what is no setting of so many ranks."""
    if content.get("ok") is not True:
        raise MismatchError(f"{other} refuses: {str(content.get('why'))[:200]}")
    given = {key: value for key, value in content.items() if key != "ok"}
    answer: _Answer = _model(_Answer, given, f"{other} sent no answer")
    setting = answer.setting
    if setting is not None and len(setting.samples) != ranks:
        raise CorruptCheckpoint(f"{other} sent a setting of {len(setting.samples)} ranks, and these are {ranks}")
    return setting


def _model(kind: type[Any], content: dict[str, Any], what: str) -> Any:
    # Through the one strict reader: what JSON holds may still be out of all bounds.
    text = json.dumps(content)
    return parse_model(kind, text, what, most_bytes=2 * MAX_MESSAGE_BYTES, error=CorruptCheckpoint)


# -- the client --------------------------------------------------------------------------------------------------------


class Telemetry(Protocol):
    """What an engine needs of it. No call waits for anybody, or raises."""

    def join(self, join: Join) -> None:
        """Begin, for this rank."""

    def tell(self, measured: Measured) -> None:
        """Of one iteration."""

    def heard(self) -> Sequence[Setting]:
        """Settings that have come since the last call."""

    def close(self) -> None:
        """End."""


class TelemetryClient:
    """Tells a server what this rank measures, in a thread of its own.

    Args:
        address: HOST:PORT of the server.
        token: that both sides know.
        timeout_s: for each message and its answer; a server that takes longer is left.
        again_s: pause before the first and the later attempts to connect again; each is twice the one before.

    Raises ConfigError for what is no address. All else is logged, once for each outage.
    """

    def __init__(
        self, address: str, token: bytes, *, timeout_s: float = 5.0, again_s: tuple[float, float] = (1.0, 30.0)
    ) -> None:
        self._host, self._port = parse_address(address)
        if not timeout_s > 0 or not 0 < again_s[0] <= again_s[1]:
            raise ConfigError(f"telemetry waits for more than {timeout_s:g} s, and pauses for {again_s} s")
        self._name = f"the telemetry server at {address}"
        self._token, self._timeout_s, self._again_s = token, timeout_s, again_s
        self._changed = threading.Condition()
        self._waiting: deque[Measured] = deque()
        self._settings: deque[Setting] = deque(maxlen=_MOST_WAITING)
        self._join: Join | None = None
        self._ending = False
        self._wire: Wire | None = None
        self._thread: threading.Thread | None = None
        self._failed = False
        self.told = 0
        """Iterations that the server has taken."""
        self.forgotten = 0
        """Iterations that it has not, and will not."""

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return self._wire is not None

    def join(self, join: Join) -> None:
        """Begin, for this rank."""
        self._join = join
        self._thread = threading.Thread(target=self._run, name="lastgood-telemetry", daemon=True)
        self._thread.start()

    def tell(self, measured: Measured) -> None:
        """Of one iteration; soon, if somebody is there."""
        with self._changed:
            if len(self._waiting) == _MOST_WAITING:
                self._waiting.popleft()
                self.forgotten += 1
            self._waiting.append(measured)
            self._changed.notify()

    def heard(self) -> list[Setting]:
        """Settings that have come since the last call."""
        found = []
        while self._settings:
            found.append(self._settings.popleft())
        return found

    def close(self) -> None:
        """Tell what waits, if the server takes it at once, and end. Safe to call twice."""
        with self._changed:
            self._ending = True
            self._changed.notify()
        thread = self._thread
        if thread is not None:
            thread.join(1.0)
            wire = self._wire
            if wire is not None:
                wire.abort()
            thread.join(1.0)

    # -- in its thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s = self._again_s[0]
        while not self._ending:
            began = time.monotonic()
            try:
                self._talk()
            except (LastgoodError, OSError) as error:
                if not self._failed and not self._ending:
                    _log.warning("%s; the training continues, and its setting stays as it is", error)
                self._failed = True
            if time.monotonic() - began > self._again_s[1]:
                pause_s = self._again_s[0]  # it had been there for a while
            with self._changed:
                self._changed.wait_for(lambda: self._ending, pause_s)
            pause_s = min(2 * pause_s, self._again_s[1])

    def _talk(self) -> None:
        """One connection, from its beginning to its end."""
        assert self._join is not None
        with reach(self._host, self._port, self._timeout_s, self._name) as connection:
            close_in_forks(connection)
            keep_alive(connection)
            self._wire = wire = Wire(connection, self._name, self._timeout_s)
            try:
                prove_trainer(wire, self._token, TELEMETRY_GREETING)
                wire.send_message(**self._join.model_dump())
                self._hear(wire)
                if self._failed:
                    _log.warning("%s is there again", self._name)
                self._failed = False
                while told := self._next():
                    try:
                        wire.send_message(measured=[one.model_dump() for one in told], forgotten=self.forgotten)
                        self._hear(wire)
                    except BaseException:
                        self.forgotten += len(told)
                        raise
                    self.told += len(told)
            finally:
                self._wire = None

    def _hear(self, wire: Wire) -> None:
        assert self._join is not None
        setting = read_setting(wire.receive_message("an answer"), self._join.ranks, self._name)
        if setting is not None:
            self._settings.append(setting)

    def _next(self) -> list[Measured]:
        """What to tell now; nothing at the end."""
        with self._changed:
            # A training of many iterations a second tells several at once.
            self._changed.wait_for(lambda: self._ending, _PACE_S)
            self._changed.wait_for(lambda: self._ending or self._waiting)
            return [self._waiting.popleft() for _ in range(min(MOST_TOLD, len(self._waiting)))]


def ask_view(address: str, token: bytes, timeout_s: float = 5.0) -> dict[str, Any]:
    """How the training of a server stands, as its `view` has it. Raises WaitTimeout, CheckpointError, MismatchError."""
    host, port = parse_address(address)
    name = f"the telemetry server at {address}"
    with reach(host, port, timeout_s, name) as connection:
        wire = Wire(connection, name, timeout_s, _MOST_VIEW_BYTES)
        prove_trainer(wire, token, TELEMETRY_GREETING)
        wire.send_message(version=TELEMETRY_VERSION, look=True)
        found = wire.receive_message("how the training stands")
    if found.get("ok") is not True or not isinstance(found.get("ranks"), list):
        raise MismatchError(f"{name} refuses: {str(found.get('why'))[:200]}")
    return found
