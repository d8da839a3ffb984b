"""The other machine of a measured network: its token, and what it runs meanwhile."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path

from lastgood import tokens
from lastgood.errors import ConfigError, StorageError
from lastgood.units import format_seconds

__all__ = ["TOKEN_VARIABLE", "needed_token", "read_token", "serve_peer"]

TOKEN_VARIABLE = "LASTGOOD_PEER_TOKEN"


def read_token(path: Path | None) -> str | None:
    """The token of the file or the environment: never an argument, which every user of a machine can read."""
    if path is None:
        return os.environ.get(TOKEN_VARIABLE)
    try:
        return tokens.read_token(path).decode()
    except (ConfigError, StorageError, UnicodeDecodeError) as error:
        raise ConfigError(f"--peer-token-file: {error}") from error


def needed_token(path: Path | None, peer: str, serve_option: str) -> str:
    """The same, for measuring `peer`. Raises ConfigError if there is none."""
    token = read_token(path)
    if token is None:
        raise ConfigError(
            f"--peer needs the token that {serve_option} printed on {peer}: in ${TOKEN_VARIABLE}, or in a file "
            "named by --peer-token-file"
        )
    return token


def serve_peer(listen: str, seconds: float, token: str | None, report: Callable[[str], None]) -> None:
    """Answer other machines' measurements for `seconds`; without a token, make one and say which."""
    from lastgood.experiments.ceilings.network_peer import PeerServer, parse_address
    from lastgood.experiments.machine.lock import machine_lock

    if token is None:
        token = secrets.token_hex(16)
        report(f"no token was given, so a new one: on the other machine, export {TOKEN_VARIABLE}={token}")
    host, port = parse_address(listen)
    # Each client takes this machine's turn to measure, so nothing here is timed meanwhile; a busy machine refuses it.
    server = PeerServer(host, port, token, turn=machine_lock, report=report)
    report(f"answering on {host} port {server.port} for {format_seconds(seconds)}; end it with Ctrl-C")
    server.serve(seconds)
