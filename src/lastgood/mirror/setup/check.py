"""Whether a testbed's mirror shows all that its watched nodes send and get."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial

from lastgood.cluster.testbed.monitor import Monitor
from lastgood.cluster.testbed.net import in_namespace, namespace_of
from lastgood.cluster.testbed.testbed import Testbed
from lastgood.errors import ConfigError
from lastgood.mirror.capture.interface import InterfaceSource
from lastgood.mirror.setup.marks import WAYS, Way, new_key, read_marks, send_marks
from lastgood.units import MIB

__all__ = ["CheckRow", "check_mirror"]

_RING_BYTES = 8 * MIB
_SETTLE_S = 0.1
"""After the last mark that was missing: one that comes twice comes at once."""


@dataclass(frozen=True)
class CheckRow:
    """One direction of a watched node: marks that were sent, seen, seen again, cut; and what was dropped before."""

    watched: str
    way: Way
    interface: str
    marks: int
    seen: int
    repeated: int
    cut: int
    misplaced: int
    """Seen on another link than the one for this direction."""
    dropped: int
    link_dropped: int

    @property
    def good(self) -> bool:
        """Whether each mark came once, in full, where it should."""
        return self.seen == self.marks and not self.repeated and not self.cut and not self.misplaced


def check_mirror(bed: Testbed, monitor: Monitor, *, count: int = 100, timeout_s: float = 10.0) -> list[CheckRow]:
    """Send `count` marked frames each way, between every watched node and the machine itself, and count the copies.

    Raises HostError if the mirror is not complete, ConfigError for a count that is none.
    """
    if not 1 <= count <= 100_000:
        raise ConfigError(f"--count {count}: 1 to 100000")
    before = {(one.watched, one.way): one for one in bed.count_mirrored(monitor.node)}
    found = {}
    space = namespace_of(bed.name, monitor.node)
    for watched in monitor.watched:
        with ExitStack() as stack:
            sources = [
                stack.enter_context(closing(in_namespace(space, partial(_source, name)))) for name in monitor.interfaces
            ]
            for way in WAYS:
                key = new_key()
                sending = threading.Thread(target=_sender(bed, watched, key, way, count), daemon=True)
                sending.start()
                counts = read_marks(sources, key, count, timeout_s)
                sending.join(timeout_s)
                after = read_marks(sources, key, 1, _SETTLE_S)
                for late, early in zip(after, counts, strict=True):
                    early[way].numbers += late[way].numbers
                    early[way].cut += late[way].cut
                found[watched, way] = counts
    rows = []
    for one in bed.count_mirrored(monitor.node):
        counts = found[one.watched, one.way]
        place = monitor.interfaces.index(one.interface)
        own = counts[place][one.way]
        elsewhere = sum(other[one.way].seen for number, other in enumerate(counts) if number != place)
        start = before[one.watched, one.way]
        rows.append(
            CheckRow(
                watched=one.watched,
                way=one.way,
                interface=one.interface,
                marks=count,
                seen=own.seen,
                repeated=own.repeated,
                cut=own.cut,
                misplaced=elsewhere,
                dropped=one.dropped - start.dropped,
                link_dropped=one.link_dropped - start.link_dropped,
            )
        )
    return rows


def _source(interface: str) -> InterfaceSource:
    return InterfaceSource(interface, ring_bytes=_RING_BYTES)


def _sender(bed: Testbed, watched: str, key: bytes, way: Way, count: int) -> Callable[[], None]:
    """What sends the marks: from the watched node to the machine, or the other way."""
    if way == "received":
        return lambda: send_marks(bed.address(watched), key, way, count)
    inside = in_namespace(namespace_of(bed.name, watched), lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    return lambda: send_marks(bed.host_address, key, way, count, inside)
