"""Where the coordinator of a job is found: its address and the job's token."""

from __future__ import annotations

import errno
import os
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lastgood._lazy import torch
from lastgood.errors import CheckpointError, ConfigError
from lastgood.tokens import check_token, new_token, read_token
from lastgood.wire.gate import open_listener

__all__ = ["TOKEN_FILE_VARIABLE", "TOKEN_VARIABLE", "Address", "check_control", "find_address"]

TOKEN_VARIABLE = "LASTGOOD_JOB_TOKEN"
TOKEN_FILE_VARIABLE = "LASTGOOD_JOB_TOKEN_FILE"
_POLL_S = 0.1


@dataclass(frozen=True)
class Address:
    """Where the coordinator listens, and the token that proves who is who."""

    host: str
    port: int
    token: bytes = field(repr=False)

    def __str__(self) -> str:
        """Without the token."""
        return f"{self.host}:{self.port}"


def check_control(control: str) -> str:
    """``HOST:PORT`` or "off", as it was given. Raises ValueError, which repeats nothing that may be a token."""
    if control != "off":
        place, slash, _ = control.partition("/")
        if slash:
            raise ValueError(
                "control holds a token, and options are written down; give HOST:PORT, and the token in "
                f"{TOKEN_VARIABLE} or in a file that {TOKEN_FILE_VARIABLE} names"
            )
        host, port = _parts(place)
        if not host or not port.isdecimal() or len(port) > 5 or not 0 < int(port) < 65536:
            raise ValueError(f"control must be HOST:PORT or off, not {control!r}")
    return control


def _parts(control: str) -> tuple[str, str]:
    host, _, port = control.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), port


def _given_token(control: str) -> bytes:
    """Of the environment, or of the file that it names. Raises ConfigError, StorageError."""
    file = os.environ.get(TOKEN_FILE_VARIABLE, "")
    if file:
        return read_token(Path(file))
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise ConfigError(
            f"control={control!r} needs a secret that all ranks of this job share and no other job has: set "
            f"{TOKEN_VARIABLE} to one random text on all ranks, or {TOKEN_FILE_VARIABLE} to a file of mode 600 with it"
        )
    return check_token(token.encode(), TOKEN_VARIABLE)


def find_address(control: str | None, rank: int, timeout_s: float) -> tuple[Address, socket.socket | None]:
    """The coordinator's address, and on rank 0 the socket that listens there.

    With `control` None, rank 0 of torch.distributed takes a free port and tells the others: all ranks must call this.
    Raises ConfigError (no way to find it), CheckpointError (the port is not to be had within `timeout_s`).
    """
    if control is not None:
        try:
            host, port = _parts(check_control(control))
        except ValueError as error:
            raise ConfigError(str(error)) from None
        address = Address(host, int(port), _given_token(control))
        return address, _listen(host, address.port, timeout_s) if rank == 0 else None
    group = torch.distributed
    if not (group.is_available() and group.is_initialized()):
        raise ConfigError(
            "several ranks must agree on their checkpoints: initialise torch.distributed before this, or give "
            'control="HOST:PORT", a free port of rank 0\'s host (control="off": they do not agree)'
        )
    return _told_by_torch(group, timeout_s)


def _told_by_torch(group: Any, timeout_s: float) -> tuple[Address, socket.socket | None]:
    said: list[Any] = [None]
    listener = None
    if group.get_rank() == 0:
        host = os.environ.get("MASTER_ADDR") or socket.gethostname()
        try:
            listener = _listen(host, 0, timeout_s)
            said = [(host, listener.getsockname()[1], new_token())]
        except CheckpointError as error:  # the others wait for an answer, whatever it is
            said = [str(error)]
    group.broadcast_object_list(said, src=0)
    if isinstance(said[0], str):
        raise CheckpointError(said[0])
    host, port, token = said[0]
    return Address(host, port, token.encode()), listener


def _listen(host: str, port: int, timeout_s: float) -> socket.socket:
    """Listen on `host`, or on all addresses if its name is none of this machine's (a translated address, say).

    A port that is in use is asked for again until `timeout_s` is over: the incarnation before may be about to end.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return _bound(host, port)
        except OSError as error:
            if time.monotonic() >= deadline:
                raise CheckpointError(
                    f"rank 0 cannot listen on {host}:{port} for the other ranks: {error}; use a free port of this "
                    'host (control="HOST:PORT")'
                ) from error
        time.sleep(_POLL_S)


def _bound(host: str, port: int) -> socket.socket:
    try:
        return open_listener(host, port)
    except OSError as error:
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            return open_listener("", port)
        raise
