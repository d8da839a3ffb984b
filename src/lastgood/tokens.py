"""Tokens that the processes of one job share: long enough that nobody guesses one, and in a file of its owner's."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from lastgood.errors import ConfigError, StorageError
from lastgood.files import open_new, open_regular, storage_errors, temporary_beside

__all__ = ["LEAST_TOKEN_BYTES", "check_token", "new_token", "read_token"]

LEAST_TOKEN_BYTES = 16
"""Who has seen a proof can try tokens as fast as a machine can: six letters take it a millisecond."""
_MOST_BYTES = 4096


def new_token() -> str:
    """A random one: 64 hexadecimal digits."""
    return secrets.token_hex(32)


def check_token(token: bytes, where: str) -> bytes:
    """`token`, if it is long enough. Raises ConfigError, which says `where` it came from, and nothing of it."""
    if not LEAST_TOKEN_BYTES <= len(token) <= _MOST_BYTES:
        raise ConfigError(
            f"{where}: a token has {LEAST_TOKEN_BYTES} to {_MOST_BYTES} bytes, not {len(token)}; "
            "`openssl rand -hex 32` makes one"
        )
    return token


def read_token(path: Path, *, make: bool = False) -> bytes:
    """The token in a file, without white space around it. With `make`, a new random one if there is no file.

    Raises ConfigError if the file is missing, too short, or open to others; StorageError if it cannot be read.
    """
    if make:
        _make(path)
    try:
        # A user names it, and may have put a link there, as secrets of containers are.
        with os.fdopen(open_regular(path, follow=True), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(_MOST_BYTES + 1).strip()
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: there is no token; copy the other side's file there (`lastgood shadow serve` makes one)"
        ) from None
    except OSError as error:
        raise StorageError(f"{path}: the token cannot be read: {error.strerror or error}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"{path}: other users may read or change this token; chmod 600 {path}")
    return check_token(content, str(path))


def _make(path: Path) -> None:
    """Write a new token, if there is no file, in one step: another process finds it complete, or not at all."""
    draft = temporary_beside(path)
    with storage_errors(path, "writing a token"):
        if path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(open_new(draft), "wb") as file:
            file.write(new_token().encode() + b"\n")
        try:
            with contextlib.suppress(FileExistsError):  # another process was first
                os.link(draft, path)
        finally:
            draft.unlink()
