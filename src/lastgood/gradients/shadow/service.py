"""The gradient storage service: one port, behind which a shadow (core.py) keeps a training's newest state.

Every connection shows that it knows the token, then says what it is: data (its descriptor goes to the native receiver),
control (a rank of the training), or asker (a client: status, fence, restore).
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
from typing import Any, NamedTuple

from lastgood._lazy import torch
from lastgood.errors import CheckpointError, CorruptCheckpoint, LastgoodError, MismatchError
from lastgood.gradients.layout.entries import Saved, Side
from lastgood.gradients.protocol.messages import (
    GREETING,
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    PROVES_FIRST,
    VERSION_ADVICE,
    Absent,
    Complete,
    Declare,
    Fence,
    Fetch,
    FetchSide,
    Hello,
    Message,
    Refused,
    Seed,
    StatusAsked,
    Step,
    Tensors,
    Verify,
    parse_message,
)
from lastgood.gradients.protocol.payload import drain_stream, receive_stream, send_stream
from lastgood.gradients.shadow.core import ShadowCore
from lastgood.gradients.shadow.restore import read_side, reading_tensors
from lastgood.gradients.shadow.settings import ShadowSettings
from lastgood.wire.frames import Wire, keep_alive, message_frame, message_step, peer_handshake
from lastgood.wire.gate import PROOF_S, Gate, Guest, Handshake

__all__ = ["ShadowService"]

_log = logging.getLogger("lastgood.shadow")
_TICK_S = 0.2
_END_S = 10.0
_MAX_CONNECTIONS = 4096
_MAX_KNOWN_ERRORS = 100
_MAX_WAITING = 10_000
"""Messages that wait to go out to one trainer; it takes none any more if there are more."""


class _Opening(NamedTuple):
    """What a connection that knows the token began with: the version that it greeted with, and its hello."""

    version: int
    hello: dict[str, Any]


class _Control:
    """A trainer's control connection: what it is told waits in a queue that a thread of its own empties."""

    def __init__(self, wire: Wire, hello: Hello) -> None:
        self.wire = wire
        self.rank = hello.rank
        self.incarnation = hello.epoch
        self._waiting: queue.Queue[Message | None] = queue.Queue(_MAX_WAITING)
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def tell(self, message: Message) -> None:
        """Send this in its turn. Never waits: a trainer that takes nothing loses its connection."""
        try:
            self._waiting.put_nowait(message)
        except queue.Full:
            _log.warning("%s takes nothing any more", self.wire.other)
            self.wire.abort()

    def close(self) -> None:
        """Send what waits, within the connection's time, and end."""
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(_END_S)
        self.wire.close()

    def _send(self) -> None:
        while (message := self._waiting.get()) is not None:
            try:
                self.wire.send_message(**message.content())
            except CheckpointError:
                self.wire.abort()  # its reader says why
                return


class ShadowService:
    """Listens, and serves until `stop`.

    Args:
        token: what all sides know; at least 16 bytes.
        listener: a bound socket; it listens from now on.
    """

    def __init__(self, settings: ShadowSettings, token: bytes, listener: socket.socket) -> None:
        self.settings = settings
        self.ending = threading.Event()
        self._token = token
        self._controls: list[_Control] = []
        self._controls_lock = threading.Lock()
        self._connections: set[Wire] = set()
        self._known_errors: set[str] = set()
        self.core = self._make_core()
        self._gate = Gate(
            listener,
            self._prove,
            "a shadow's port",
            _log.warning,
            proof_s=min(PROOF_S, settings.timeout_s),
            dropped=lambda cause: self.core.refuse(
                "too many connections" if cause == "full" else "no proof of the token"
            ),
        )

    def _admit(self, hello: Hello) -> None:
        """Check a trainer's hello. Raises MismatchError, saying why it is refused."""
        self.core.admit(hello)

    def _make_core(self) -> ShadowCore:
        """What this service keeps."""
        return ShadowCore(self.settings, self._tell)

    def run(self) -> None:
        """Serve until `stop` is called from another thread or a signal's handler."""
        with self._gate as gate:
            while not self.ending.is_set():
                for guest in gate.step(_TICK_S):
                    self._take(gate, guest)
        for wire in list(self._connections):
            wire.abort()
        self.core.close()

    def warm_up(self) -> None:
        """Import torch, and what its optimizers import when they are first made, before the first trainer waits."""
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0).step()

    def stop(self) -> None:
        """Make `run` return soon."""
        self.ending.set()

    # -- connections -----------------------------------------------------------------------------------------------

    def _prove(self, other: str) -> Handshake[_Opening]:
        """The proof, and a hello that is still to be looked at."""
        try:
            version = yield from peer_handshake(other, self._token, GREETING, oldest=PROVES_FIRST)
        except MismatchError as error:
            self.core.refuse("hello")
            yield message_frame(_refusal(error))
            raise
        return _Opening(version, (yield from message_step(other, "a hello")))

    def _take(self, gate: Gate[_Opening], guest: Guest[_Opening]) -> None:
        if len(self._connections) < _MAX_CONNECTIONS:
            if gate.serve_in_thread(guest, self._serve) is not None:
                return
        else:
            guest.connection.close()
        self.core.refuse("too many connections")

    def _serve(self, guest: Guest[_Opening]) -> None:
        connection = guest.connection
        keep_alive(connection)
        wire = Wire(connection, guest.other, self.settings.timeout_s, MAX_MESSAGE_BYTES)
        self._connections.add(wire)
        try:
            hello = self._open(wire, guest.known)
            if hello.role == "data":
                self._hand_over(wire, connection, hello)
            elif hello.role == "control":
                self._serve_control(wire, hello)
            else:
                self._serve_client(wire, hello)
        except LastgoodError as error:
            _log.info("%s: %s", wire.other, error)
        except Exception as error:  # it ends this connection; what is kept here must outlive it
            self._unexpected(wire.other, error)
        finally:
            self._connections.discard(wire)
            wire.close()

    def _open(self, wire: Wire, opening: _Opening) -> Hello:
        """Look at the hello; the other side is told why it is refused."""
        try:
            if opening.version != PROTOCOL_VERSION:
                raise MismatchError(
                    f"{wire.other} speaks version {opening.version} of the shadows' protocol, this shadow version "
                    f"{PROTOCOL_VERSION}: {VERSION_ADVICE}"
                )
            hello = parse_message(opening.hello, wire.other)
            if not isinstance(hello, Hello):
                raise CorruptCheckpoint(f"{wire.other} began with {hello.kind}")
            if hello.role != "asker":
                self._admit(hello)
        except MismatchError as error:
            self.core.refuse("hello")
            _refuse(wire, error)
            raise
        return hello

    def _hand_over(self, wire: Wire, connection: socket.socket, hello: Hello) -> None:
        try:
            # Nothing comes before the welcome, so whatever goes wrong here can still be said in its place.
            self.core.receive_from(connection.fileno(), hello)
        except LastgoodError as error:
            _refuse(wire, error)
            raise
        except Exception as error:  # it ends this connection; what is kept here must outlive it
            _refuse(wire, self._unexpected(wire.other, error))
            return
        wire.send_message(**self.core.welcome().content())

    def _unexpected(self, other: str, error: Exception) -> CheckpointError:
        """What the other side is told of an error that should not be. It tries again, so each one is logged once."""
        what = repr(error)[:1000]
        if what not in self._known_errors:
            if len(self._known_errors) >= _MAX_KNOWN_ERRORS:
                self._known_errors.clear()
            self._known_errors.add(what)
            _log.error("%s: unexpected; logged once", other, exc_info=error)
        return CheckpointError(f"an error inside the shadow, whose log says more: {what}")

    # -- trainers --------------------------------------------------------------------------------------------------

    def _tell(self, message: Message, everyone: bool) -> None:
        with self._controls_lock:
            for control in self._controls:
                if everyone or control.rank == 0:
                    control.tell(message)

    def _serve_control(self, wire: Wire, hello: Hello) -> None:
        wire.other = f"rank {hello.rank} at {wire.other}"
        control = _Control(wire, hello)
        try:
            with self.core.body.change:  # nothing may be told between what the welcome says and what follows it
                control.tell(self.core.welcome())
                with self._controls_lock:
                    self._controls.append(control)
                if self.core.body.state.declared:
                    self.core.greet(hello.rank, control.tell)
            while self._wait(wire, hello.epoch):
                message = parse_message(wire.receive_message("a message"), wire.other)
                self._obey(control, message)
        except CheckpointError as error:
            if not self._is_over(control):
                control.tell(Refused(why=str(error)[:10_000]))
            raise
        except Exception as error:  # it ends this connection; what is kept here must outlive it
            control.tell(Refused(why=str(self._unexpected(wire.other, error))))
        finally:
            if self._is_over(control):
                self._say_over(control)
            with self._controls_lock:
                if control in self._controls:
                    self._controls.remove(control)
            control.close()

    def _obey(self, control: _Control, message: Message) -> None:
        if isinstance(message, (Step, Absent, Complete, Verify)):
            self.core.hear(control.incarnation, control.rank, message)
        elif isinstance(message, Side):
            self._receive_side(control, message)
        elif isinstance(message, Seed):
            self._receive_seed(control, message)
        elif isinstance(message, Declare):
            self._declare(control, message)
        else:
            raise MismatchError(f"{control.wire.other}: a shadow takes no {message.kind} from a trainer")

    def _declare(self, control: _Control, message: Declare) -> None:
        if control.rank != 0:
            raise MismatchError("rank 0 declares the layout")
        try:
            self.core.declare(control.incarnation, message, control.tell)
        except LastgoodError as error:
            _log.error("the layout is refused: %s", error)
            control.tell(Refused(why=str(error)[:10_000]))
            return
        self.core.greet(control.rank, control.tell)

    def _receive_side(self, control: _Control, message: Side) -> None:
        if message.rank != control.rank:
            raise MismatchError(f"{control.wire.other} sends a side record of rank {message.rank}")
        what = f"the side record of iteration {message.iteration}"
        with self.core.side_room(message) as keep:
            if keep:
                content = bytearray(message.nbytes)
                receive_stream(control.wire, message.iteration, [memoryview(content)], what)
            else:
                drain_stream(control.wire, message.nbytes, what)
            self.core.side(control.incarnation, message, bytes(content) if keep else None)

    def _receive_seed(self, control: _Control, message: Seed) -> None:
        what = f"the seed of bucket {message.bucket} after iteration {message.iteration}"
        try:
            value, views = self.core.begin_seed(control.incarnation, message, control.wire.other)
        except CheckpointError as error:
            control.tell(Refused(why=f"{what}: {error}"))
            drain_stream(control.wire, sum(entry.nbytes for entry in message.entries), what)
            return
        try:
            receive_stream(control.wire, message.iteration, views, what)
            self.core.end_seed(control.incarnation, message, value)
        except BaseException:
            self.core.fail_seed(control.incarnation, message)
            raise

    # -- clients -------------------------------------------------------------------------------------------------------

    def _serve_client(self, wire: Wire, hello: Hello) -> None:
        wire.send_message(**self.core.welcome().content())
        while self._wait(wire):
            message = parse_message(wire.receive_message("a question"), wire.other)
            try:
                self._answer(wire, hello, message)
            except _StreamBegunError as error:
                raise error.reason from error
            except LastgoodError as error:
                _refuse(wire, error)
            except Exception as error:  # the client is told, and may ask again
                _refuse(wire, self._unexpected(wire.other, error))

    def _answer(self, wire: Wire, hello: Hello, message: Message) -> None:
        core = self.core
        if isinstance(message, StatusAsked):
            wire.send_message(**core.status().content())
        elif isinstance(message, Fence):
            core.fence(hello.job, message.epoch)
            self._end_older(message.epoch)
            wire.send_message(**core.status().content())
        elif isinstance(message, Fetch):
            saved = self._find(message)
            with reading_tensors(core.body, message.epoch, saved, message.source) as held, _streaming():
                entries = tuple(entry for entry, _ in held)
                wire.send_message(**Tensors(iteration=message.iteration, entries=entries).content())
                send_stream(wire, message.iteration, [view for _, view in held])
        elif isinstance(message, FetchSide):
            record = read_side(core.body, message.epoch, self._find(message), message.rank, message.source)
            with _streaming():
                wire.send_message(**record.message.content())
                send_stream(wire, message.iteration, [memoryview(record.content)])
        else:
            raise MismatchError(f"a shadow answers no {message.kind}")

    def _find(self, message: Fetch | FetchSide) -> Saved:
        status = self.core.status()
        listed = status.memory if message.source == "memory" else status.durable
        for saved in listed:
            if (saved.epoch, saved.iteration) == (message.made, message.iteration):
                return saved
        held = ", ".join(f"{saved.iteration} of incarnation {saved.epoch}" for saved in listed) or "none"
        raise CheckpointError(
            f"iteration {message.iteration} of incarnation {message.made} cannot be given back from {message.source}; "
            f"what can: {held}"
        )

    def _end_older(self, incarnation: int) -> None:
        with self._controls_lock:
            older = [control for control in self._controls if control.incarnation != incarnation]
        for control in older:
            self._say_over(control)

    def _is_over(self, control: _Control) -> bool:
        return control.incarnation != self.core.body.state.incarnation

    def _say_over(self, control: _Control) -> None:
        """Before the connection ends: rank 0 decides nothing any more once it hears this from one shadow."""
        incarnation = self.core.body.state.incarnation
        control.tell(
            Refused(
                why=f"incarnation {control.incarnation} was fenced off by incarnation {incarnation}", fenced=incarnation
            )
        )

    def _wait(self, wire: Wire, incarnation: int | None = None) -> bool:
        """Until something arrives; False if the other side has closed, its incarnation is over, or the service ends."""
        while not self.ending.is_set() and incarnation in (None, self.core.body.state.incarnation):
            if wire.wait_readable(_TICK_S):
                return not wire.ended()
        return False


class _StreamBegunError(Exception):
    """A failure in the middle of a stream: nothing can be said on that connection any more."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason


@contextlib.contextmanager
def _streaming() -> Any:
    try:
        yield
    except Exception as error:  # whatever it is: a stream that has begun can only be ended, not refused
        raise _StreamBegunError(error) from error


def _refuse(wire: Wire, error: LastgoodError) -> None:
    with contextlib.suppress(CheckpointError):  # it may have gone
        wire.send_message(**_refusal(error))


def _refusal(error: LastgoodError) -> dict[str, Any]:
    # What may be left out is: the other side may be of an older version, which refuses fields that it does not know.
    return Refused(why=str(error)[:10_000]).model_dump(mode="json", exclude_none=True)
