"""Gemini's peers on the hosts of a run: one on each, outside the training's processes, for as long as the run lasts.

A training would start a peer that it does not find by itself, on its own host, which would measure no network: after
the run, more peers than these are an error.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from lastgood.errors import LastgoodError
from lastgood.experiments.records.spec import RunSpec
from lastgood.experiments.services.place import Place
from lastgood.experiments.services.service import LOCAL, Seat, Service

__all__ = ["GeminiPeers"]

_SERIAL: Final = 1
_COMMAND_S: Final = 60.0
_IDLE_S: Final = 3600.0
_PEER_S: Final = 30.0


class GeminiPeers(Service):
    """A peer on every host. A run of one process has none: it is not measured over a network.

    Each peer makes its own secret, which its address file has; trainings find these files, and records have no more.
    """

    name = "peer"
    directory = "peers"

    def __init__(self, spec: RunSpec) -> None:
        self._needed = spec.ranks > 1

    def hosts(self, names: Sequence[str]) -> Sequence[str]:
        """All of them."""
        if not self._needed:
            return []
        if list(names) == [LOCAL]:
            raise LastgoodError("peers need hosts of their own; give a hostfile, or several nodes")
        return names

    def command(self, seat: Seat, folder: Path) -> Sequence[str]:
        """In the folder that trainings look for address files in, at the address that other hosts reach."""
        peer = [sys.executable, "-m", "lastgood.checkpointers.gemini.peer", "--foreground"]
        peer += ["--directory", str(_directory(folder)), "--machine", str(seat.number), "--serial", str(_SERIAL)]
        peer += ["--host", seat.address, "--limit-bytes", "0", "--idle-s", str(_IDLE_S), "--timeout-s", str(_PEER_S)]
        return ["sh", "-c", 'mkdir -p -- "$1" && shift && exec "$@"', "sh", str(_directory(folder)), *peer]

    def ready_file(self, number: int, folder: Path) -> Path:
        """Its address file."""
        return _directory(folder) / f"peer-{number}-{_SERIAL:06d}.json"

    def announce(self, ready: Sequence[tuple[Seat, bytes]], folder: Path) -> Mapping[Path, bytes]:
        """The address files, for hosts that do not share a peer's disk."""
        return {self.ready_file(seat.number, folder): content for seat, content in ready}

    def check(self, place: Place | None, folder: Path) -> None:
        """Refuse peers that trainings started."""
        if not self._needed or place is None or place.remote is None:
            return
        for host in place.hosts.names:
            names = place.remote.run(host, ["ls", "--", str(_directory(folder))], _COMMAND_S).text.split()
            found = [re.fullmatch(r"peer-\d+-(\d+)\.json", name) for name in names]
            more = sorted(match[0] for match in found if match and int(match[1]) != _SERIAL)
            if more:
                raise LastgoodError(
                    f"{host}: a peer was lost and another started beside its trainer ({', '.join(more)}); run again"
                )


def _directory(folder: Path) -> Path:
    return folder / "checkpoints"
