"""Tells others what became of checkpoints, in a thread of its own: training waits for no callback."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from lastgood.checkpointers.events import CheckpointEvent, Outcome
from lastgood.errors import StorageError
from lastgood.files import ReadableBy, make_directory, read_end, storage_errors
from lastgood.text import parse_json

__all__ = ["EVENTS_FILE", "EventsFile", "Tells", "failures_told"]

_log = logging.getLogger("lastgood")

EVENTS_FILE = "events.jsonl"
"""The name of the file of events in a checkpoint directory."""
_LAST_BYTES = 64 << 10
"""Of that file, which status looks at: some hundreds of events."""
_LINE_BYTES = 16 << 10
_POLL_S = 0.1
_END_S = 5.0
"""For callbacks to take the last events, when a checkpointer is closed."""

Told = Callable[[CheckpointEvent], object]


class Tells:
    """What a checkpointer has for those who want to hear of its events."""

    name: ClassVar[str]
    directory: Path
    readable_by: ReadableBy
    events: list[CheckpointEvent]
    _teller: _Teller | None = None

    def on_event(self, callback: Told) -> None:
        """Call `callback` with each checkpoint that is finished from now on: durable, superseded, failed or skipped.

        In a thread beside that of the training, one call after another. What it raises is logged, once. Until `close`,
        which waits for it for a few seconds.
        """
        if self._teller is None:
            self._teller = _Teller(self)
        self._teller.add(callback)

    def write_events(self, path: Path | str | None = None) -> Path:
        """Append a line of JSON for each finished checkpoint to `path`, or to ``events.jsonl`` in the directory.

        Returns the path. Raises StorageError if the file cannot be made.
        """
        file = EventsFile(self.directory / EVENTS_FILE if path is None else Path(path), self.readable_by)
        self.on_event(file)
        return file.path

    def _who_is_told(self) -> list[Told]:
        """The callbacks, in their order."""
        return [] if self._teller is None else list(self._teller.callbacks)

    def _end_telling(self) -> None:
        """Tell what is finished by now, and no more."""
        if self._teller is not None:
            self._teller.end()
            self._teller = None


class EventsFile:
    """A callback that appends what became of each checkpoint to a file, a JSON object a line.

    ``time`` (seconds since 1970), ``step``, ``outcome``, ``seconds`` (from the request on), ``bytes`` (written, as far
    as the system counts them), ``error`` (null: none), ``why`` (the signal that asked for it; null: the interval, or
    the training's own call).
    """

    def __init__(self, path: Path, readable_by: ReadableBy) -> None:
        self.path = path.absolute()
        self._mode = readable_by.file_mode
        with storage_errors(self.path, "making the file of events"):
            make_directory(self.path.parent, readable_by.directory_mode)
            os.close(self._open())

    def __call__(self, event: CheckpointEvent) -> None:
        """Append one line."""
        seconds = None if event.finished_s is None else round(event.finished_s - event.requested_s, 6)
        line = {
            "time": round(time.time(), 3),
            "step": event.step,
            "outcome": event.outcome.value,
            "seconds": seconds,
            "bytes": event.bytes_written,
            "error": event.error,
            "why": event.why or None,
        }
        descriptor = self._open()
        try:
            os.write(descriptor, json.dumps(line).encode() + b"\n")
        finally:
            os.close(descriptor)

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(self.path, flags, self._mode)


def failures_told(directory: Path) -> list[tuple[float, str]]:
    """When checkpoints failed, and why, by the end of the file of events in `directory`, the newest first.

    Empty if there is no such file. A line that is none (cut by a crash, or of another program) is passed over.
    """
    path = directory / EVENTS_FILE
    try:
        lines = read_end(path, _LAST_BYTES).splitlines()
    except (OSError, StorageError):
        return []
    found = []
    for line in reversed(lines):
        try:
            event = parse_json(line, str(path), most_bytes=_LINE_BYTES, error=StorageError)
        except StorageError:
            continue
        if not isinstance(event, dict) or event.get("outcome") != Outcome.FAILED.value:
            continue
        moment, step, error = event.get("time"), event.get("step"), event.get("error")
        if isinstance(moment, float) and type(step) is int and isinstance(error, str):
            # It is shown on a terminal.
            words = "".join(letter if letter.isprintable() else " " for letter in error)
            found.append((moment, f"{path}: step {step} failed: {words}"))
    return found


class _Teller:
    """Looks at a checkpointer's events, which systems finish in threads of their own, and calls who wants to hear."""

    def __init__(self, owner: Any) -> None:
        self._owner = weakref.ref(owner)
        self._process = os.getpid()
        self.callbacks: list[Told] = []
        self._known: list[CheckpointEvent] = [one for one in owner.events if one.outcome is not Outcome.PENDING]
        self._quiet: set[int] = set()
        """Ids of callbacks whose error was logged."""
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lastgood-events", daemon=True)
        self._thread.start()

    def add(self, callback: Told) -> None:
        self.callbacks.append(callback)

    def end(self) -> None:
        """Have the thread look once more, and end."""
        if os.getpid() != self._process:  # a forked child has no thread of it
            return
        self._end.set()
        self._thread.join(_END_S)
        if self._thread.is_alive():
            _log.warning("events of checkpoints: a callback takes longer than %g s; it is waited for no more", _END_S)

    def _run(self) -> None:
        while not self._end.wait(_POLL_S):
            if self._owner() is None:
                return
            self._look()
        self._look()

    def _look(self) -> None:
        owner = self._owner()
        events = [] if owner is None else list(owner.events)
        self._known = [one for one in self._known if any(one is event for event in events)]
        for event in events:
            if event.outcome is not Outcome.PENDING and not any(event is one for one in self._known):
                self._known.append(event)
                self._tell(event)

    def _tell(self, event: CheckpointEvent) -> None:
        for callback in list(self.callbacks):
            try:
                callback(event)
            except Exception as error:  # of somebody else; others want to hear as well
                if id(callback) not in self._quiet:
                    self._quiet.add(id(callback))
                    _log.warning(
                        "step %d: a callback for events of checkpoints failed, which is not told again: %r",
                        event.step,
                        error,
                    )
