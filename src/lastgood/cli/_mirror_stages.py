"""What the stages of a mirror node share that are processes of their own: rings, cores, signals, counters."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated, Final

import typer

from lastgood.errors import ConfigError

__all__ = [
    "EXTRACTED_RING",
    "MOST_MESSAGE_BYTES",
    "PARSED_RING",
    "RING_S",
    "Core",
    "OutSize",
    "Patience",
    "pin",
    "print_line",
    "stop_by_signal",
]

PARSED_RING: Final = Path("/dev/shm/lastgood-messages")
EXTRACTED_RING: Final = Path("/dev/shm/lastgood-gradients")
RING_S: Final = 60.0
"""How long the stage before may take to make its ring."""
MOST_MESSAGE_BYTES: Final = 4 << 30
"""Between two stages: what 512 frames release, or what is extracted from it."""

Core = Annotated[int | None, typer.Option(help="Run on this processor core only.")]
OutSize = Annotated[str, typer.Option("--out-size", metavar="SIZE", help="Of that ring.")]
Patience = Annotated[float, typer.Option(metavar="S", help="Longest wait for the next stage, if it takes nothing.")]


def pin(core: int) -> None:
    """Run on this core. Raises ConfigError if that cannot be."""
    try:
        os.sched_setaffinity(0, {core})
    except OSError as error:
        raise ConfigError(
            f"--core {core}: {error.strerror}; this process may use {sorted(os.sched_getaffinity(0))}"
        ) from error


def stop_by_signal() -> threading.Event:
    """Set by SIGTERM and Ctrl-C."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop


def print_line(value: object) -> None:
    """A line of JSON to the standard output."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()
