"""What is known of checkpoints beyond their bytes: which were judged bad, and how often restarts from one failed.

One small file beside the slots. It names checkpoints by their sequence, which is never given twice.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lastgood.errors import MismatchError, StorageError
from lastgood.files import PRIVATE, read_bounded, storage_error, storage_errors, write_atomically
from lastgood.storage import format as fmt
from lastgood.text import is_whole

__all__ = ["VERDICT_FILE", "Measured", "Restarts", "Verdict", "VerdictBook"]

log = logging.getLogger("lastgood.storage")

VERDICT_FILE = "verdicts.json"
_FORMAT = "lastgood-verdicts"
_MAX_BYTES = 1 << 20
_MAX_ENTRIES = 1024
"""Of the newest sequences; far more than there are slots."""
_MAX_REASON_BYTES = 500
"""As it is written: JSON takes up to 12 bytes for one character."""


@dataclass(frozen=True)
class Verdict:
    """Whether a checkpoint may be restored, and why not."""

    step: int
    ok: bool
    reason: str = ""


class Restarts(NamedTuple):
    """Lives that began at a checkpoint of `step` (-1: a file of an older version does not say) and got no further."""

    step: int
    incarnations: int


class Measured(NamedTuple):
    """What a checkpoint of `step` is worth: the value of its user's metric of this name."""

    step: int
    name: str
    value: float


class VerdictBook:
    """The verdicts and restart counts of one directory. Read at once; written atomically by the lock's holder.

    If none are `kept` (among objects) it knows of nothing, and refuses to be written.
    """

    def __init__(self, directory: Path, mode: int = PRIVATE, *, kept: bool = True) -> None:
        self.path = directory / VERDICT_FILE
        self._mode = mode
        self._kept = kept
        self.verdicts: dict[int, Verdict] = {}
        self.restarts: dict[int, Restarts] = {}
        """By sequence: incarnations that began there, since training last got further than ever before."""
        self.metrics: dict[int, Measured] = {}
        """By sequence: of checkpoints that there are, if the best ones are kept."""
        self.reached = -1
        """The highest step that had a checkpoint when a restart was last counted: an incarnation that writes it again,
        coming from an older one, has not got on."""
        if kept:
            self._read()

    def is_bad(self, sequence: int) -> bool:
        """Whether the last verdict on this checkpoint was a bad one."""
        verdict = self.verdicts.get(sequence)
        return verdict is not None and not verdict.ok

    def judge(self, sequence: int, verdict: Verdict) -> None:
        """Set a verdict and make it durable. Raises StorageError; it holds in memory then."""
        reason = _cut(verdict.reason)
        self._write({**self.verdicts, sequence: Verdict(verdict.step, verdict.ok, reason)}, self.restarts)

    def take_back(self, sequence: int, reason: str) -> bool:
        """Forget a bad verdict, if it is the one that was given for this reason; returns whether it was.

        Durable at return. Raises StorageError; it holds in memory then.
        """
        verdict = self.verdicts.get(sequence)
        if verdict is None or verdict.ok or verdict.reason != _cut(reason):
            return False
        self._write({**self.verdicts, sequence: Verdict(verdict.step, True)}, self.restarts)
        return True

    def measure(self, metrics: dict[int, Measured]) -> None:
        """Set what is known of checkpoints' metrics, durably. Raises StorageError; it holds in memory then."""
        self.metrics = metrics
        self._write(self.verdicts, self.restarts)

    def failed_restarts(self, sequence: int, step: int) -> int:
        """How many incarnations began at this checkpoint, or at another one of its step, and got no further."""
        return max(
            (one.incarnations for number, one in self.restarts.items() if number == sequence or one.step == step),
            default=0,
        )

    def count_restart(self, sequence: int, step: int, reached: int) -> int:
        """One more incarnation begins at this checkpoint: returns how many there were before it. Durable at return.

        `reached` is the highest step that any incarnation of this job had a checkpoint of.
        """
        before = self.failed_restarts(sequence, step)
        self.reached = max(self.reached, reached)
        self._write(self.verdicts, {**self.restarts, sequence: Restarts(step, before + 1)})
        return before

    def forget_restarts(self, reached: int) -> None:
        """Training got on, to a checkpoint of step `reached`: none failed it. Writes only if something was counted."""
        if self.restarts:
            self.reached = max(self.reached, reached)
            self._write(self.verdicts, {})

    @property
    def highest_sequence(self) -> int:
        """Highest sequence named here; -1 if none is."""
        return max([*self.verdicts, *self.restarts], default=-1)

    def _read(self) -> None:
        try:
            described = fmt.unseal_json(read_bounded(self.path, _MAX_BYTES, too_large=fmt.RecordError))
            if described.get("format") != _FORMAT:
                raise fmt.RecordError(f"format {described.get('format')!r} instead of {_FORMAT!r}")
            verdicts = {
                _number(entry, "sequence"): Verdict(_number(entry, "step"), bool(entry["ok"]), str(entry["reason"]))
                for entry in described["verdicts"]
            }
            restarts = {
                _number(entry, "sequence"): Restarts(_number(entry, "step", -1), _number(entry, "count"))
                for entry in described["restarts"]
            }
            metrics = {
                _number(entry, "sequence"): Measured(
                    _number(entry, "step"), str(entry["name"]), _finite(entry["value"])
                )
                for entry in described.get("metrics", [])
            }
            reached = _number(described, "reached", -1)
            self.verdicts, self.restarts, self.reached, self.metrics = verdicts, restarts, reached, metrics
        except FileNotFoundError:
            return
        except fmt.OtherVersionError as error:
            raise MismatchError(f"{self.path}: {error}") from error
        except (OSError, StorageError) as error:
            # Complete checkpoints are worth more than what is known of them.
            why = storage_error(error, self.path, "reading") if isinstance(error, OSError) else error
            log.warning("%s; no verdict on any checkpoint is known", why)
        except (fmt.RecordError, KeyError, TypeError, ValueError) as error:
            log.warning("%s is damaged (%s): no verdict on any checkpoint is known", self.path, error)

    def _write(self, verdicts: dict[int, Verdict], restarts: dict[int, Restarts]) -> None:
        # What is known holds in this process even if the disk refuses to take it; the next write tries again.
        self.verdicts, self.restarts = verdicts, restarts = _newest(verdicts), _newest(restarts)
        if not self._kept:
            raise StorageError(f"{self.path.parent}: verdicts are kept on the disk of the training, not there")
        described: dict[str, Any] = {
            "format": _FORMAT,
            "version": fmt.FORMAT_VERSION,
            "verdicts": [
                {"sequence": sequence, "step": verdict.step, "ok": verdict.ok, "reason": verdict.reason}
                for sequence, verdict in sorted(verdicts.items())
            ],
            "restarts": [
                {"sequence": sequence, "step": one.step, "count": one.incarnations}
                for sequence, one in sorted(restarts.items())
            ],
            "reached": self.reached,
        }
        if self.metrics:  # else as ever
            described["metrics"] = [
                {"sequence": sequence, "step": one.step, "name": one.name, "value": one.value}
                for sequence, one in sorted(_newest(self.metrics).items())
            ]
        with storage_errors(self.path, "writing"):
            write_atomically(self.path, fmt.seal_json(described), mode=self._mode)


def _number(entry: dict[str, Any], key: str, absent: int | None = None) -> int:
    """A whole number from 0 on; `absent`, if that is one, may stand there or be left out."""
    number: int = entry[key] if absent is None else entry.get(key, absent)
    if not is_whole(number, 0 if absent is None else absent, (1 << 64) - 1):
        raise fmt.RecordError(f"{key} {str(number)[:40]} is no whole number of 64 bits")
    return number


def _finite(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise fmt.RecordError(f"{str(value)[:40]} is no finite number")
    return float(value)


def _cut(reason: str) -> str:
    # A path in it may hold half of a surrogate pair, which no reader of the file takes.
    reason = reason[:_MAX_REASON_BYTES].encode(errors="backslashreplace").decode()
    while len(json.dumps(reason)) - 2 > _MAX_REASON_BYTES:
        reason = reason[: len(reason) * 3 // 4]
    return reason


def _newest(entries: dict[int, Any]) -> dict[int, Any]:
    kept: Collection[int] = sorted(entries)[-_MAX_ENTRIES:]
    return {sequence: entries[sequence] for sequence in kept}
