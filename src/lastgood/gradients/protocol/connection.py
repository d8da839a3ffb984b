"""Opens connections to shadows, and takes what they answer."""

from __future__ import annotations

from typing import TypeVar

from lastgood.errors import ConfigError, CorruptCheckpoint, MismatchError
from lastgood.gradients.protocol.messages import (
    GREETING,
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    VERSION_ADVICE,
    Hello,
    Message,
    Refused,
    Welcome,
    parse_message,
)
from lastgood.wire.frames import Wire, keep_alive, prove_trainer, reach

__all__ = ["connect_shadow", "expect"]

_CONNECT_S = 10.0
_OF_VERSION_1 = f"speaks version 1 of the shadows' protocol, this side version {PROTOCOL_VERSION}: {VERSION_ADVICE}"
"""Of what refuses the greeting. From version 2 on a shadow takes that of other versions, and refuses the hello."""
_Answer = TypeVar("_Answer", bound=Message)


def connect_shadow(address: str, token: bytes, hello: Hello, timeout_s: float) -> tuple[Wire, Welcome]:
    """Open a connection of any role.

    Raises ConfigError for what is no HOST:PORT, CheckpointError if nobody listens, WaitTimeout, MismatchError if
    the shadow does not know the token, speaks another version of the protocol, or refuses the hello.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or len(port) > 5 or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"{address!r} is no address of a shadow; it is HOST:PORT")
    shadow = f"the shadow at {address}"
    connection = reach(host.strip("[]"), int(port), min(timeout_s, _CONNECT_S), shadow)
    keep_alive(connection)
    wire = Wire(connection, shadow, timeout_s, MAX_MESSAGE_BYTES)
    try:
        prove_trainer(wire, token, GREETING, unwelcome=_OF_VERSION_1)
        wire.send_message(**hello.content())
        return wire, expect(wire, Welcome, "its welcome")
    except BaseException:
        wire.close()
        raise


def expect(wire: Wire, answer: type[_Answer], what: str) -> _Answer:
    """The next message, which must be of the kind `answer`; `what` says what it is, for errors.

    Raises MismatchError if it is Refused, CorruptCheckpoint if it is any other, WaitTimeout.
    """
    message = parse_message(wire.receive_message(what), wire.other)
    if isinstance(message, Refused):
        raise MismatchError(f"{wire.other} refuses: {message.why}")
    if not isinstance(message, answer):
        raise CorruptCheckpoint(f"{wire.other} answered with {message.kind}, waiting for {what}")
    return message
