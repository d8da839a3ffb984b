"""Reports and decisions as messages, and back: every field is checked, since they come from another process."""

from __future__ import annotations

import dataclasses
from typing import Any

from lastgood.checkpointers.agreement.channel import whole_number
from lastgood.checkpointers.agreement.decide import Held, Identity, Report, Wanted
from lastgood.errors import CorruptCheckpoint
from lastgood.storage.format import JOB_ID_BYTES, MAX_WORLD_SIZE

__all__ = ["cut", "identity_of", "reached_of", "report_of", "said_report", "short_reason"]

_MOST_TEXT = 300
_MOST_HELD = 160
"""More than a rank can have slots."""
_MOST_DAMAGED = 8
_DAMAGED_LETTERS = 200
_MOST_BESIDE = 1500
_REASON_LETTERS = 80


def cut(value: object, most: int = _MOST_TEXT) -> str:
    """A text of bounded length, of one line, that a message may hold.

    A path in it may hold half of a surrogate pair: a file's name that is no UTF-8, or an entry's of the state.
    """
    text = " ".join(str(value).split()).encode(errors="backslashreplace").decode()
    return text if len(text) <= most else text[: most - 3] + "..."


def short_reason(value: object) -> str:
    """A verdict's reason if one message has many: a message holds 64 KiB, and other letters take up to 12 bytes."""
    return cut(str(value).encode("ascii", "replace").decode(), _REASON_LETTERS)


def said_report(report: Report) -> dict[str, Any]:
    """The report as a message's content."""
    return {
        **dataclasses.asdict(report),
        "held": [
            [one.incarnation, one.step, one.bad, short_reason(one.reason), one.restarts]
            for one in report.held[:_MOST_HELD]
        ],
        "damaged": [cut(text, _DAMAGED_LETTERS) for text in report.damaged[:_MOST_DAMAGED]],
        "host": cut(report.host, 100),
        "directory": cut(report.directory),
        "beside": cut(report.beside, _MOST_BESIDE),
    }


def identity_of(value: object) -> Identity:
    """An incarnation and a step. Raises CorruptCheckpoint."""
    if isinstance(value, (list, tuple)) and len(value) >= 2:
        incarnation, step = value[0], value[1]
        if type(incarnation) is int and type(step) is int and 0 <= incarnation < 1 << 63 and 0 <= step < 1 << 63:
            return incarnation, step
    raise CorruptCheckpoint(f"{value!r:.80} names no checkpoint")


def reached_of(message: dict[str, Any]) -> int:
    """The highest step that was ever reached, or -1. Raises CorruptCheckpoint."""
    return -1 if message.get("reached") == -1 else whole_number(message, "reached")


def report_of(message: dict[str, Any]) -> Report:
    """Read a report. Raises CorruptCheckpoint."""
    try:
        world_size = whole_number(message, "world_size", MAX_WORLD_SIZE + 1)
        job_id = message["job_id"]
        if job_id is not None and len(bytes.fromhex(job_id)) != JOB_ID_BYTES:
            raise ValueError("a job id of another length")
        held = []
        for entry in message["held"][:_MOST_HELD]:
            held.append(Held(*identity_of(entry), bool(entry[2]), short_reason(entry[3]), min(int(entry[4]), 1 << 31)))
        wanted = message["wanted"]
        step = whole_number(wanted, "step") if wanted["step"] is not None else None
        limit = whole_number(wanted, "max_failed_restarts") if wanted["max_failed_restarts"] is not None else None
        return Report(
            rank=whole_number(message, "rank", MAX_WORLD_SIZE),
            world_size=world_size,
            host=cut(message["host"], 100),
            directory=cut(message["directory"]),
            job_id=job_id,
            highest=identity_of(message["highest"]),
            held=tuple(held),
            damaged=tuple(cut(text, _DAMAGED_LETTERS) for text in message["damaged"][:_MOST_DAMAGED]),
            mark=None if message["mark"] is None else identity_of(message["mark"]),
            wanted=Wanted(bool(wanted["restore"]), step, bool(wanted["good_only"]), limit),
            reached=reached_of(message),
            wrote=None if message.get("wrote") is None else identity_of(message["wrote"]),
            beside=cut(message.get("beside", ""), _MOST_BESIDE),
        )
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise CorruptCheckpoint(f"a report that cannot be read: {error!r:.200}") from error
