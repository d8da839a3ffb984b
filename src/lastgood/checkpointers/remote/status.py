"""What the remote tier of one rank has done, in one small file beside the slots. It holds no keys.

It says which checkpoint was being sent when a process ended, so that the next one goes on with it, and tells people
(`lastgood inspect`) how far the remote place is behind.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from lastgood.errors import MismatchError, StorageError
from lastgood.files import PRIVATE, read_bounded, storage_error, storage_errors, write_atomically
from lastgood.storage import SlotInfo
from lastgood.storage import format as fmt
from lastgood.text import is_whole

__all__ = ["REMOTE_FILE", "RemoteStatus", "Which", "read_status", "write_status"]

_log = logging.getLogger("lastgood")

REMOTE_FILE = "remote.json"
_FORMAT = "lastgood-remote"
_MAX_BYTES = 1 << 16
_MOST_TEXT = 2000
_U64_MAX = (1 << 64) - 1
_MOST_S = 1e12


class Which(NamedTuple):
    """A checkpoint of this directory, and when it was durable here, in seconds since 1970."""

    incarnation: int
    step: int
    sequence: int
    at_s: float

    @classmethod
    def of(cls, info: SlotInfo, at_s: float) -> Which:
        """The one that a slot holds."""
        return cls(info.incarnation, info.step, info.sequence, at_s)

    def names(self, info: SlotInfo) -> bool:
        """Whether it is that one."""
        return (self.incarnation, self.step, self.sequence) == (info.incarnation, info.step, info.sequence)


@dataclass
class RemoteStatus:
    """Counts are those of all incarnations that wrote here."""

    place: str = ""
    job_id: str = ""
    sending: Which | None = None
    """Being sent, or was when the process ended."""
    committed: Which | None = None
    """The newest that is there."""
    sent: int = 0
    replaced: int = 0
    failed: int = 0
    sent_bytes: int = 0
    kept_bytes: int = 0
    """That were there already, and not sent again."""
    last_error: str = ""
    """Of the newest one that failed; "" once one has arrived."""

    def lag(self, newest: Which | None) -> tuple[int, float] | None:
        """Steps and seconds from the newest one there to the `newest` here; None if none is there, or none is here."""
        if newest is None or self.committed is None:
            return None
        steps, seconds = newest.step - self.committed.step, newest.at_s - self.committed.at_s
        return max(0, steps), round(max(0.0, seconds), 3)


def read_status(directory: Path) -> RemoteStatus | None:
    """What a rank's directory says; None if nothing does (or nothing that can be read: a warning says why)."""
    path = directory / REMOTE_FILE
    try:
        described = fmt.unseal_json(read_bounded(path, _MAX_BYTES, too_large=fmt.RecordError))
        if described.pop("format", None) != _FORMAT:
            raise fmt.RecordError(f"not a {_FORMAT} document")
        del described["version"]
        return _status(described)
    except FileNotFoundError:
        return None
    except OSError as error:
        _log.warning("%s; what was sent from here is not known", storage_error(error, path, "reading"))
    except fmt.OtherVersionError as error:
        _log.warning("%s", MismatchError(f"{path}: {error}; what was sent from here is not known"))
    except StorageError as error:
        _log.warning("%s; what was sent from here is not known", error)
    except (fmt.RecordError, KeyError, TypeError, ValueError) as error:
        _log.warning("%s is damaged (%s): what was sent from here is not known", path, error)
    return None


def write_status(directory: Path, status: RemoteStatus, mode: int = PRIVATE) -> None:
    """Replace it. Raises StorageError."""
    path = directory / REMOTE_FILE
    described = {
        "format": _FORMAT,
        "version": fmt.FORMAT_VERSION,
        **asdict(status),
        "last_error": status.last_error[:_MOST_TEXT].encode(errors="backslashreplace").decode(),
    }
    with storage_errors(path, "writing"):
        write_atomically(path, fmt.seal_json(described), mode=mode)


def _status(described: Mapping[str, Any]) -> RemoteStatus:
    found: dict[str, Any] = {}
    for field in fields(RemoteStatus):
        value = described[field.name]
        if field.name in ("sending", "committed"):
            value = None if value is None else _which(value)
        elif isinstance(field.default, str):
            value = str(value)
        elif not is_whole(value, 0, _U64_MAX):
            raise fmt.RecordError(f"{field.name} is {value!r:.40}")
        found[field.name] = value
    return RemoteStatus(**found)


def _which(value: Any) -> Which:
    incarnation, step, sequence, at_s = value
    numbers = all(is_whole(number, 0, _U64_MAX) for number in (incarnation, step, sequence))
    if not numbers or isinstance(at_s, bool) or not isinstance(at_s, (int, float)) or not 0 <= at_s < _MOST_S:
        raise fmt.RecordError(f"{value!r:.80} names no checkpoint")
    return Which(incarnation, step, sequence, float(at_s))
