"""A shadow in a process that is forked from a warm server, so that a test can kill many of them.

The server imports this module once (`multiprocessing`'s forkserver), torch and its optimizers with it.
"""

from __future__ import annotations

import socket
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from lastgood.gradients.shadow.service import ShadowService
from lastgood.gradients.shadow.settings import ShadowSettings
from lastgood.processes import die_with_parent

_START_S = 240.0

torch.set_num_threads(1)
for _make in (torch.optim.SGD, torch.optim.AdamW):
    _parameter = torch.zeros(1, requires_grad=True)
    _parameter.grad = torch.zeros(1)
    _make([_parameter], lr=0.0).step()


def serve(settings: ShadowSettings, token: bytes, port: int, ready: Any) -> None:
    """What `lastgood shadow serve` does, until it is killed."""
    die_with_parent()
    listener = socket.create_server(("127.0.0.1", port), backlog=128)
    service = ShadowService(settings, token, listener)
    ready.send(listener.getsockname()[1])
    ready.close()
    service.run()


class ForkedShadow:
    """One of a set of two, in a process of its own; `kill` is SIGKILL."""

    def __init__(self, number: int, token: bytes, spills: Path | None, knobs: dict[str, Any], port: int = 0) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self.number = number
        self._ready, there = context.Pipe(duplex=False)
        settings = ShadowSettings(number, 2, spill_directory=spills, **knobs)
        self.process = context.Process(target=serve, args=(settings, token, port, there), daemon=True)
        self.process.start()
        there.close()

    def wait_ready(self) -> ForkedShadow:
        """Return when it listens, at `port`."""
        with self._ready:
            assert self._ready.poll(_START_S), f"waited {_START_S} s for shadow {self.number} to listen"
            self.port: int = self._ready.recv()
        return self

    def kill(self) -> None:
        """End it, and all that it held in memory."""
        self.process.kill()
        self.process.join(60)
        assert not self.process.is_alive()
