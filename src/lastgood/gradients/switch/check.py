"""Whether a switch's links and shadows can be reached, and whether those who answer know the job's token."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from lastgood.errors import CheckpointError, LastgoodError, MismatchError
from lastgood.gradients.protocol.connection import connect_shadow
from lastgood.gradients.protocol.messages import Hello
from lastgood.gradients.switch.relay import SwitchLink
from lastgood.wire.frames import Wire, peer_handshake, prove_trainer
from lastgood.wire.gate import PROOF_S, Gate, Handshake, connect
from lastgood.wire.ring_link import RING_GREETING, listen_ring, parse_address

__all__ = ["Checked", "answer_checks", "check_link", "check_shadow"]

_log = logging.getLogger("lastgood")

_LOOK_S = 0.2


@dataclass(frozen=True)
class Checked:
    """One thing that was tested."""

    what: str
    good: bool
    found: str


def check_link(link: SwitchLink, token: bytes, timeout_s: float) -> Checked:
    """Prove the token to whoever answers behind a link: through the switch if it runs there, else directly.

    A rank answers while it waits for its neighbour, or `answer_checks` in its place; a ring that runs takes no more
    connections.
    """
    what = f"link {link.listen} = {link.target}"
    through = _prove(link.listen, token, timeout_s)
    if through is None:
        return Checked(what, True, "the next rank answers through the switch")
    direct = _prove(link.target, token, timeout_s)
    if direct is None:
        return Checked(what, False, f"the next rank answers, but not through {link.listen}: {through}")
    return Checked(what, False, f"through the switch: {through}; directly: {direct}")


def _prove(address: str, token: bytes, timeout_s: float) -> str | None:
    """What is wrong at an address; None if nothing is."""
    try:
        connection = connect(*parse_address(address), timeout_s)
    except OSError as error:
        return f"nobody takes a connection ({error})"
    wire = Wire(connection, address, timeout_s)
    try:
        prove_trainer(wire, token, RING_GREETING)
    except MismatchError:
        return "who answers does not know this token"
    except CheckpointError as error:
        return str(error)
    finally:
        wire.close()
    return None


def check_shadow(number: int, addresses: Sequence[str], token: bytes, timeout_s: float) -> Checked:
    """Ask a shadow who it is."""
    what = f"shadow {number} at {addresses[number]}"
    try:
        wire, answer = connect_shadow(addresses[number], token, Hello(role="asker"), timeout_s)
    except LastgoodError as error:
        return Checked(what, False, str(error))
    wire.close()
    if (answer.shadow, answer.shadows) != (number, len(addresses)):
        return Checked(
            what, False, f"it is shadow {answer.shadow} of {answer.shadows}; give --shadow in the shadows' order"
        )
    return Checked(what, True, f"incarnation {answer.epoch}, job {answer.job or 'none yet'}")


def answer_checks(address: str, token: bytes, stop: threading.Event, timeout_s: float) -> int:
    """Stand where a rank will listen, and prove the token to those who test the way to it, until `stop`.

    Returns how many did. Raises HostError if this machine cannot listen on `address`.
    """
    good = 0
    listener = listen_ring(*parse_address(address))

    def prove(other: str) -> Handshake[int]:
        return peer_handshake(other, token, RING_GREETING)

    with Gate(listener, prove, "switch: a test", _log.warning, proof_s=min(PROOF_S, timeout_s)) as gate:
        while not stop.is_set():
            for guest in gate.step(_LOOK_S):
                guest.connection.close()
                good += 1
    return good
