"""Port numbers for a server that another process, or a later moment, will open."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from pathlib import Path

from lastgood.errors import HostError

__all__ = ["free_ports"]

_LOWEST = 10_000
"""Below it are ports of known services."""
_HIGHEST = 65_535
_TRIES = 1000
_SYSTEM = Path("/proc/sys/net/ipv4")


def free_ports(count: int = 1, host: str = "127.0.0.1") -> list[int]:
    """Numbers of ports of `host` that nobody has now, each once.

    They are none that the kernel gives to outgoing connections: such a number could be gone before it is used, since
    any process of the machine may be given it meanwhile. If the kernel may give all of them away, any free ones.

    Raises HostError if there are not as many.
    """
    outgoing, reserved = _outgoing(), _reserved()
    numbers = [
        number for number in range(_LOWEST, _HIGHEST + 1) if number not in outgoing and number not in reserved
    ] or [0]
    chance = random.SystemRandom()  # a seeded program must not draw the same ones as its twin
    found: list[int] = []
    with ExitStack() as held:
        for _ in range(_TRIES):
            if len(found) == count:
                break
            one = held.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
            try:
                one.bind((host, chance.choice(numbers)))
            except OSError:
                continue
            found.append(one.getsockname()[1])
    if len(found) < count:
        raise HostError(
            f"{host}: found {len(found)} of {count} free ports in {_TRIES} tries; is it an address of this machine, "
            "and are its ports from 10000 on in use?"
        )
    return found


def _outgoing() -> range:
    try:
        first, last = map(int, (_SYSTEM / "ip_local_port_range").read_text(encoding="ascii").split())
    except (OSError, ValueError):
        first, last = 32_768, 60_999  # Linux's own
    return range(first, last + 1)


def _reserved() -> set[int]:
    """Ports that the administrator keeps for something."""
    found: set[int] = set()
    try:
        for part in (_SYSTEM / "ip_local_reserved_ports").read_text(encoding="ascii").strip().split(","):
            first, _, last = part.partition("-")
            if first:
                found.update(range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        pass
    return found
