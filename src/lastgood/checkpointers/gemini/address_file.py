"""Where a peer process is found: its address file."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path

from lastgood.errors import ConfigError, CorruptCheckpoint, StorageError
from lastgood.files import open_new, read_bounded, temporary_beside
from lastgood.text import is_whole, parse_json

__all__ = ["Address", "address_for_peers"]

_MAX_ADDRESS_BYTES = 4096
_MAX_PID = (1 << 31) - 1
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Address:
    """A peer process, as its address file ``peer-MACHINE-SERIAL.json`` describes it. Who can read it may connect."""

    path: Path
    host: str
    port: int
    token: bytes = field(repr=False)
    pid: int

    @classmethod
    def path_of(cls, directory: Path, machine: int, serial: int) -> Path:
        """The address file of the `serial`-th peer of `machine`."""
        return directory / f"peer-{machine}-{serial:06d}.json"

    @classmethod
    def read(cls, path: Path) -> Address:
        """Raises CorruptCheckpoint if the file is no address, FileNotFoundError if there is none (any more)."""
        try:
            text = read_bounded(path, _MAX_ADDRESS_BYTES)
            document = parse_json(text, str(path), most_bytes=_MAX_ADDRESS_BYTES)
            host, port, pid, token = (document[key] for key in ("host", "port", "pid", "token"))
            if not (isinstance(host, str) and is_whole(pid, 1, _MAX_PID) and is_whole(port, 1, 65535)):
                raise ValueError("host, port or pid is none")
            return cls(path, host, port, bytes.fromhex(token), pid)
        except (StorageError, CorruptCheckpoint, ValueError, KeyError, TypeError) as error:
            raise CorruptCheckpoint(f"{path}: not the address of a peer: {error!r}; remove it") from error

    def write(self) -> None:
        """Put the file in its place in one step, readable by this user only."""
        self._draft().replace(self.path)

    def note(self) -> None:
        """Write down the address of another machine's peer, unless it stands there already.

        In a directory that both machines share, that peer watches the file which it wrote itself.
        """
        try:
            known = Address.read(self.path)
        except FileNotFoundError:
            draft = self._draft()
            try:
                # A shared directory may show its files late: never over one that is there after all.
                with contextlib.suppress(FileExistsError):
                    os.link(draft, self.path)
            finally:
                draft.unlink()
            return
        if known != self:
            self.write()

    def _draft(self) -> Path:
        document = {"host": self.host, "port": self.port, "pid": self.pid, "token": self.token.hex()}
        draft = temporary_beside(self.path)
        with os.fdopen(open_new(draft), "wb") as file:
            file.write(json.dumps(document).encode())
        return draft

    @property
    def on_this_machine(self) -> bool:
        """Whether its process id is one of this machine."""
        return self.host == "localhost" or self.host.startswith("127.")

    def __str__(self) -> str:
        return f"peer process {self.pid} at {self.host}:{self.port} ({self.path})"


def address_for_peers(host: str) -> str:
    """Where this machine's peer listens: `host`, or for loopback the own address of the way to MASTER_ADDR.

    Raises ConfigError if there is no such way.
    """
    master = os.environ.get("MASTER_ADDR", "")
    if host != _LOOPBACK or not master:
        return host
    try:
        # Connecting a datagram socket sends nothing; it asks the kernel for the route.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((master, 9))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"gemini: this machine has no IPv4 route to MASTER_ADDR={master}: {error}; give host=, the address "
            "at which the other machines reach it"
        ) from error
