"""What a job of several ranks knows of one rank's checkpoints: which of them every rank holds.

A rank's own commit record says that its part is complete. A checkpoint counts once all ranks have committed theirs; the
newest that did is named by one small sealed file beside the slots, and only then may older slots be used again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from lastgood.errors import MismatchError, StorageError
from lastgood.files import PRIVATE, read_bounded, storage_error, storage_errors, write_atomically
from lastgood.storage import format as fmt
from lastgood.text import is_whole

__all__ = ["GLOBAL_FILE", "GlobalCommit", "read_global_commit", "retained_sequences", "write_global_commit"]

log = logging.getLogger("lastgood.storage")

GLOBAL_FILE = "global.json"
_FORMAT = "lastgood-global"
_MAX_BYTES = 4096


class GlobalCommit(NamedTuple):
    """The newest checkpoint that all ranks are known to hold; `sequence` is that of this directory."""

    incarnation: int
    step: int
    sequence: int


class _Whole(Protocol):
    @property
    def sequence(self) -> int:
        """Place in the order of the directory's checkpoints."""


def read_global_commit(directory: Path) -> GlobalCommit | None:
    """The global commit of a rank's directory; None if there is none, or none that can be read (a warning says why).

    Raises MismatchError for another format version.
    """
    path = directory / GLOBAL_FILE
    try:
        described = fmt.unseal_json(read_bounded(path, _MAX_BYTES, too_large=fmt.RecordError))
        commit = GlobalCommit(*(described[key] for key in GlobalCommit._fields))
        if described.get("format") != _FORMAT or not all(is_whole(number, 0, (1 << 64) - 1) for number in commit):
            raise fmt.RecordError(f"not a {_FORMAT} document")
    except FileNotFoundError:
        return None
    except fmt.OtherVersionError as error:
        raise MismatchError(f"{path}: {error}") from error
    except OSError as error:
        log.warning("%s; which checkpoints all ranks hold is not known", storage_error(error, path, "reading"))
    except StorageError as error:
        log.warning("%s; which checkpoints all ranks hold is not known", error)
    except (fmt.RecordError, KeyError, TypeError, ValueError) as error:
        log.warning("%s is damaged (%s): which checkpoints all ranks hold is not known", path, error)
    else:
        return commit
    return None


def write_global_commit(directory: Path, job: fmt.Job, commit: GlobalCommit, mode: int = PRIVATE) -> None:
    """Replace the global commit; durable at return. Raises StorageError."""
    path = directory / GLOBAL_FILE
    described = {
        "format": _FORMAT,
        "version": fmt.FORMAT_VERSION,
        "job_id": job.job_id.hex(),
        "world_size": job.world_size,
        **commit._asdict(),
    }
    with storage_errors(path, "writing"):
        write_atomically(path, fmt.seal_json(described), mode=mode)


def retained_sequences(
    whole: Sequence[_Whole],
    is_bad: Callable[[int], bool],
    keep: int,
    everywhere: Collection[int] | None = None,
    origin: int | None = None,
) -> set[int]:
    """Sequences of the checkpoints that stay, of those that are complete here (newest first).

    Of a job of one rank (`everywhere` is None): the newest good one, the one with the sequence `origin` (an incarnation
    that has not got on yet began there), and the newest others, `keep` in all. Of several: the same among those that
    all ranks are known to hold, whose sequences are `everywhere`; and beside them all newer ones, since the other ranks
    may have gone on to them already.
    """
    counted = [one for one in whole if everywhere is None or one.sequence in everywhere]
    good = [one for one in counted if not is_bad(one.sequence)][:1]
    others = sorted((one for one in counted if one not in good), key=lambda one: one.sequence != origin)
    stay = {one.sequence for one in (good + others)[:keep]}
    if everywhere is not None:
        newest = max(everywhere, default=-1)
        stay |= {one.sequence for one in whole if one.sequence > newest}
    return stay
