"""A controller inside a training: rank 0 serves it, and tells the others through the store where."""

from __future__ import annotations

import json
import logging
import os
import socket

from lastgood.errors import CorruptCheckpoint, HostError
from lastgood.sparse.control.telemetry import TelemetryClient
from lastgood.sparse.control.telemetry_server import Choosing, TelemetryServer
from lastgood.sparse.ranks import Ranks
from lastgood.text import parse_json
from lastgood.tokens import new_token
from lastgood.wire.gate import LOOPBACK
from lastgood.wire.ring_link import listen_ring

__all__ = ["own_controller"]

_log = logging.getLogger("lastgood")
_MOST_BYTES = 4096


def own_controller(
    ranks: Ranks, choosing: Choosing, timeout_s: float
) -> tuple[TelemetryServer | None, TelemetryClient]:
    """The server, on rank 0, which must be closed after the training, and this rank's client; all ranks call it.

    Raises WaitTimeout, and HostError on all ranks if rank 0 cannot listen.
    """
    said, server = "{}", None
    if ranks.rank == 0:
        host = LOOPBACK if ranks.ranks == 1 else ranks.address or os.environ.get("MASTER_ADDR") or socket.gethostname()
        try:
            listener = listen_ring(host)
        except HostError as error:
            said = json.dumps({"error": f"rank 0: {error}"})
        else:
            token = new_token()
            server = TelemetryServer(listener, token.encode(), choosing, _log.info)
            server.start()
            shown = f"[{host}]" if ":" in host else host
            said = json.dumps({"address": f"{shown}:{listener.getsockname()[1]}", "token": token})
    try:
        told = parse_json(ranks.gather("controller", said, timeout_s)[0], "what rank 0 says", most_bytes=_MOST_BYTES)
        if not isinstance(told, dict) or not all(isinstance(one, str) for one in told.values()):
            raise CorruptCheckpoint("rank 0 says no address of its controller")
        if "error" in told:
            raise HostError(told["error"])
        return server, TelemetryClient(told["address"], told["token"].encode())
    except BaseException:
        if server is not None:
            server.close()
        raise
