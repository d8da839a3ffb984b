"""A run on one time axis, as a Chrome trace: training, stalls, and what became of each checkpoint. Needs no torch.

The file is the JSON object format of Chrome's trace events ("Trace Event Format", complete events), which Perfetto and
chrome://tracing open. Spans of one track never overlap in part: they follow each other or lie in each other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lastgood.checkpointers.events import CheckpointEvent
from lastgood.files import write_result

__all__ = ["Timeline", "trace_events", "write_timeline"]

_TRACKS_PER_LANE = 3
_FIRST_LANE = 10
_TRAINING, _SAVES, _UPDATES, _DEVICE = 1, 2, 3, 4


@dataclass(frozen=True)
class Timeline:
    """The measured steps of a run and their checkpoints; all times are `time.perf_counter()` seconds of the trainer.

    On CUDA, steps and waits are the device's, moved to that clock; saves and checkpoints are the process's own.
    """

    first_step: int
    """The number of the first measured step."""
    steps: list[tuple[float, float, float]]
    """Start, update and end of each."""
    saves: list[tuple[int, float, float]]
    """Step, begin and end of each call of save()."""
    update_waits: list[tuple[float, float]]
    """When the process waited in before_update()."""
    device_waits: list[tuple[float, float]]
    """When the stream of a CUDA device waited in an optimizer's place."""
    checkpoints: list[CheckpointEvent]
    drains: list[tuple[float, float]]
    """When training waited until nothing was in progress any more."""


def trace_events(title: str, timeline: Timeline) -> list[dict[str, Any]]:
    """Chrome's trace events; times in microseconds from the earliest moment on.

    A step is a span with two parts, ``forward and backward`` and ``update``. A checkpoint is a span from its request to
    its end; its copy, and what storage did for it, have a track each. If checkpoints overlap they get lanes.
    """
    spans = [*_training(timeline), *_checkpoints(timeline.checkpoints)]
    zero = min((begin for _, _, begin, _, _ in spans), default=0.0)
    tracks = {_TRAINING: "training", _SAVES: "stalls: save", _UPDATES: "stalls: before update"}
    if timeline.device_waits:
        tracks[_DEVICE] = "stalls: on the device"
    for track in sorted({span[0] for span in spans if span[0] >= _FIRST_LANE}):
        lane, kind = divmod(track - _FIRST_LANE, _TRACKS_PER_LANE)
        tracks[track] = f"{('checkpoint', 'copy', 'storage')[kind]} {lane + 1}"
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": title}}]
    for track, name in tracks.items():
        events.append({"ph": "M", "pid": 1, "tid": track, "name": "thread_name", "args": {"name": name}})
        events.append({"ph": "M", "pid": 1, "tid": track, "name": "thread_sort_index", "args": {"sort_index": track}})
    for track, name, begin, end, more in spans:
        # Whole nanoseconds, both ends rounded alike, so that what lies in another span still does.
        start_ns = round((begin - zero) * 1e9)
        length_ns = max(0, round((end - zero) * 1e9) - start_ns)
        event = {"ph": "X", "pid": 1, "tid": track, "name": name, "ts": start_ns / 1e3, "dur": length_ns / 1e3}
        events.append({**event, "args": more} if more else event)
    return events


def write_timeline(path: Path, title: str, timeline: Timeline) -> None:
    """Write the trace, complete or not at all. Raises StorageError."""
    document = {"displayTimeUnit": "ms", "traceEvents": trace_events(title, timeline)}
    write_result(path, (json.dumps(document, allow_nan=False) + "\n").encode())


_Span = tuple[int, str, float, float, dict[str, Any]]
"""Track, name, begin, end, and what a viewer shows beside it."""


def _training(timeline: Timeline) -> Iterator[_Span]:
    saves = {step: (begin, end) for step, begin, end in timeline.saves}
    for number, (start, update, end) in enumerate(timeline.steps, timeline.first_step):
        begin, saved = saves.get(number, (end, end))
        # A step's last part is its save; on CUDA the process is ahead of its device, and there is nothing to cut off.
        updated = begin if update <= begin and saved <= end else end
        yield _TRAINING, f"step {number}", start, end, {}
        yield _TRAINING, "forward and backward", start, update, {}
        yield _TRAINING, "update", update, updated, {}
    for begin, end in timeline.drains:
        yield _TRAINING, "drain", begin, end, {}
    for _, begin, end in timeline.saves:
        yield _SAVES, "save", begin, end, {}
    for begin, end in timeline.update_waits:
        yield _UPDATES, "wait for a copy", begin, end, {}
    for begin, end in timeline.device_waits:
        yield _DEVICE, "wait for a copy", begin, end, {}


def _checkpoints(checkpoints: Sequence[CheckpointEvent]) -> Iterator[_Span]:
    free_from: list[float] = []
    """Of each lane."""
    for event in sorted(checkpoints, key=lambda event: event.requested_s):
        end = event.finished_s
        if end is None:
            continue  # a run refuses to end with one in progress
        lane = next((lane for lane, free in enumerate(free_from) if free <= event.requested_s), len(free_from))
        free_from[lane : lane + 1] = [end]
        track = _FIRST_LANE + _TRACKS_PER_LANE * lane
        more: dict[str, Any] = {"outcome": event.outcome.value, "bytes_written": event.bytes_written}
        if event.error is not None:
            more["error"] = event.error
        yield track, f"checkpoint of step {event.step}", event.requested_s, end, more
        begun = event.requested_s
        for name, phase_begin, phase_end in event.phases:
            if name == "wait":
                begun = phase_end
                yield track, "wait", phase_begin, phase_end, {}
            else:
                yield track + 2, name, phase_begin, phase_end, {}
        if event.copied_s is not None:
            yield track + 1, "copy", begun, event.copied_s, {}
            if not any(name != "wait" for name, _, _ in event.phases):
                yield track + 2, "write and flush", min(event.copied_s, end), end, {}
