"""What to type on a switch, so that it mirrors the ports of watched ranks to the port of a mirror node."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from lastgood.errors import ConfigError

__all__ = ["SWITCHES", "SwitchCommands", "switch_commands"]

_PORT = re.compile(r"[A-Za-z][A-Za-z0-9/.:-]{0,63}")
_MOST_SESSION = 66
"""Of the three, the largest number that any allows; fewer may run at a time."""


@dataclass(frozen=True)
class SwitchCommands:
    """Lines for a switch's console: to make a mirror, to look at it (its counters too), and to remove it."""

    make: tuple[str, ...]
    show: tuple[str, ...]
    undo: tuple[str, ...]
    notes: tuple[str, ...]


def _h3c(watched: Sequence[str], to: str, session: int) -> SwitchCommands:
    group = f"mirroring-group {session}"
    return SwitchCommands(
        make=(
            "system-view",
            f"{group} local",
            *(f"{group} mirroring-port {port} both" for port in watched),
            f"{group} monitor-port {to}",
            f"interface {to}",
            " undo stp enable",
            " quit",
        ),
        show=(f"display {group}", f"display counters outbound interface {to}", f"display packet-drop interface {to}"),
        undo=("system-view", f"undo {group}"),
        notes=("H3C Comware 7. A port is in one mirroring group only; the monitor port must carry nothing else.",),
    )


def _cisco(watched: Sequence[str], to: str, session: int) -> SwitchCommands:
    return SwitchCommands(
        make=(
            "configure terminal",
            f"interface {to}",
            "  switchport",
            "  switchport monitor",
            "  no shutdown",
            f"monitor session {session}",
            *(f"  source interface {port} both" for port in watched),
            f"  destination interface {to}",
            "  no shut",
            "end",
        ),
        show=(f"show monitor session {session}", f"show interface {to} counters", f"show queuing interface {to}"),
        undo=(
            "configure terminal",
            f"no monitor session {session}",
            f"interface {to}",
            "  no switchport monitor",
            "end",
        ),
        notes=(
            "Cisco NX-OS. A session is shut until `no shut`. Some line cards cut mirrored frames unless told not to.",
        ),
    )


def _arista(watched: Sequence[str], to: str, session: int) -> SwitchCommands:
    name = f"monitor session flowcheck{session}"
    return SwitchCommands(
        make=(
            "configure",
            *(f"{name} source {port} both" for port in watched),
            f"{name} destination {to}",
            "end",
        ),
        show=(f"show {name}", f"show interfaces {to} counters", f"show interfaces {to} counters queue"),
        undo=("configure", f"no {name}", "end"),
        notes=("Arista EOS. No truncation by default: leave `truncate` out, payloads are needed to the last byte.",),
    )


_WRITERS: Final[dict[str, Callable[[Sequence[str], str, int], SwitchCommands]]] = {
    "h3c": _h3c,
    "cisco": _cisco,
    "arista": _arista,
}
SWITCHES: Final = tuple(_WRITERS)
"""Kinds of switches."""
_ALL_NOTES = (
    "The monitor port must be as fast as all watched ports together, both directions: what does not fit is lost there.",
    "After the vendor's documents, not tried on a switch here: look at what it shows before you rely on it.",
)


def switch_commands(switch: str, watched: Sequence[str], to: str, session: int = 1) -> SwitchCommands:
    """The commands of one kind of switch (one of `SWITCHES`): mirror both directions of ports `watched` to port `to`.

    Ports are named as the switch names them. Raises ConfigError for an unknown kind, no port, a port twice, or a name
    that cannot be a port's.
    """
    writer = _WRITERS.get(switch)
    if writer is None:
        raise ConfigError(f"--switch {switch[:80]}: unknown; known: {', '.join(SWITCHES)}")
    if not watched:
        raise ConfigError("name at least one port of a watched rank with --watch")
    for port in (*watched, to):
        if not _PORT.fullmatch(port):
            raise ConfigError(f"not a port of a switch: {port[:80]!r}; write it as the switch does, as Ethernet1/1")
    if len({*watched, to}) != len(watched) + 1:
        raise ConfigError("each port is named once: a monitor port cannot be watched itself")
    if not 1 <= session <= _MOST_SESSION:
        raise ConfigError(f"--session {session}: 1 to {_MOST_SESSION}")
    made = writer(watched, to, session)
    return SwitchCommands(made.make, made.show, made.undo, (*made.notes, *_ALL_NOTES))
