"""Traces of clusters whose machines come and go: one file format, its reader, and what counts as a failure.

A trace file is text. ``#`` starts a comment; one line ``period_s SECONDS`` says how far apart the samples are; all else
are run lengths ``COUNTxGPUS``, any number in a line: so many samples in a row with so many GPUs::

    # a cluster that lost two virtual machines of four GPUs, and got one back
    period_s 63
    10x56 3x48
    5x52

A failure is what PCcheck's artefact counts (ASPLOS 2025, figure 9): between neighbouring samples, the change in the
number of GPUs, up or down, by whole virtual machines of four; either way training starts again. Needs no torch.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

from lastgood.errors import ConfigError
from lastgood.files import write_result
from lastgood.text import read_bytes

__all__ = ["GPUS_PER_MACHINE", "MAX_GPUS", "MAX_SAMPLES", "SpotTrace", "Stretch", "load_trace", "parse_trace"]

GPUS_PER_MACHINE = 4
"""GPUs of one virtual machine; the artefact's divisor."""
MAX_SAMPLES = 1_000_000
MAX_GPUS = 1_000_000
_MAX_FILE_BYTES = 16 * 1024 * 1024
_MAX_PERIOD_S = 7 * 24 * 3600.0
_RUN = re.compile(r"([0-9]{1,9})x([0-9]{1,9})")
_SHOWN = 40


@dataclass(frozen=True)
class Stretch:
    """A part of a trace, pressed into a window of real time."""

    start_s: float
    """Where it begins in the trace."""
    length_s: float
    """How long it is in the trace."""
    window_s: float
    """How long it is after pressing."""
    failures_s: tuple[float, ...]
    """When failures happen, in seconds of the window, ascending; each above 0 and below `window_s`."""

    @property
    def factor(self) -> float:
        """Trace seconds in a second of the window."""
        return self.length_s / self.window_s


@dataclass(frozen=True)
class SpotTrace:
    """GPUs of a cluster at equal distances of time. Raises ConfigError for values outside the limits."""

    period_s: float
    """Seconds between samples."""
    gpus: tuple[int, ...]
    """GPUs at each sample."""
    comments: tuple[str, ...] = ()
    """What the file says about itself, without the ``#``."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.period_s) and 0 < self.period_s <= _MAX_PERIOD_S):
            raise ConfigError(f"period_s {self.period_s!r}; allowed: above 0, at most {_MAX_PERIOD_S:.0f} seconds")
        if not 2 <= len(self.gpus) <= MAX_SAMPLES:
            raise ConfigError(f"{len(self.gpus)} samples; a trace has 2 to {MAX_SAMPLES}")
        if min(self.gpus) < 0 or max(self.gpus) > MAX_GPUS:
            raise ConfigError(f"{min(self.gpus)} to {max(self.gpus)} GPUs; allowed: 0 to {MAX_GPUS}")

    @property
    def duration_s(self) -> float:
        """Seconds that the samples stand for: T of the formula."""
        return len(self.gpus) * self.period_s

    @property
    def failures(self) -> int:
        """F of the formula: the sum of the machines that changed between neighbouring samples."""
        return sum(self._machines_changed())

    @property
    def digest(self) -> str:
        """SHA-256 over period and samples; comments and line breaks do not count."""
        return hashlib.sha256(self._body().encode()).hexdigest()

    def failure_times_s(self) -> tuple[float, ...]:
        """The second of each failure, ascending.

        A sample only says that machines were lost since the one before it, so several are spread evenly over the
        period between the two; a single one lies at the later sample.
        """
        times: list[float] = []
        for number, machines in enumerate(self._machines_changed(), start=1):
            times += [(number - 1 + place / machines) * self.period_s for place in range(1, machines + 1)]
        return tuple(times)

    def stretch(self, window_s: float, max_failures: int) -> Stretch:
        """The part of the trace to live through in `window_s` seconds, with at most `max_failures` failures.

        It is as long as the trace takes for `max_failures` failures in the mean (the whole trace, if that has no more).
        Of those which hold the most failures it is the one in which they lie furthest apart, since pressing leaves
        nothing to measure between two of a burst. Positions keep their proportions. Raises ConfigError for a window
        that is not above 0, or no failure allowed.
        """
        if not (math.isfinite(window_s) and window_s > 0) or max_failures < 1:
            raise ConfigError(f"a window of {window_s} s with up to {max_failures} failures; both must be above 0")
        times = self.failure_times_s()
        samples = len(self.gpus)
        length = samples if len(times) <= max_failures else max(2, samples * max_failures // len(times))
        best: tuple[int, float] = (-1, 0.0)
        found = Stretch(0.0, length * self.period_s, window_s, ())
        first = last = 0
        for start in range(samples - length + 1):
            # A failure on an edge would kill what has not begun, or what is over.
            start_s, end_s = start * self.period_s, (start + length) * self.period_s
            while first < len(times) and times[first] <= start_s:
                first += 1
            while last < len(times) and times[last] < end_s:
                last += 1
            inside = times[first:last]
            if len(inside) > max_failures:
                continue
            gap_s = min(after - before for before, after in pairwise((start_s, *inside, end_s)))
            if (len(inside), gap_s) > best:
                best = (len(inside), gap_s)
                scaled = tuple((time - start_s) / (end_s - start_s) * window_s for time in inside)
                found = Stretch(start_s, end_s - start_s, window_s, scaled)
        return found

    def text(self) -> str:
        """The file's text; `parse_trace` of it gives an equal trace."""
        return "".join(f"# {line}".rstrip() + "\n" for line in self.comments) + self._body()

    def write(self, path: Path) -> None:
        """Write the file, complete or not at all."""
        write_result(path, self.text().encode())

    def _machines_changed(self) -> list[int]:
        return [abs(after - before) // GPUS_PER_MACHINE for before, after in pairwise(self.gpus)]

    def _body(self) -> str:
        runs = [f"{len(list(same))}x{count}" for count, same in groupby(self.gpus)]
        lines = [" ".join(runs[place : place + 12]) for place in range(0, len(runs), 12)]
        return "\n".join([f"period_s {self.period_s!r}", *lines]) + "\n"


def load_trace(path: Path) -> SpotTrace:
    """Read a trace file. Raises ConfigError, naming the file, the line, and what is allowed there."""
    try:
        text = read_bytes(path, _MAX_FILE_BYTES).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: cannot be read as a trace: {error}") from error
    return parse_trace(text, str(path))


def parse_trace(text: str, name: str) -> SpotTrace:
    """Read the text of a trace; `name` is for messages. Raises ConfigError, naming the line."""
    period_s: float | None = None
    gpus: list[int] = []
    comments: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        where = f"{name}, line {number}"
        content, hash_sign, comment = line.partition("#")
        if hash_sign and not content.strip():
            comments.append(comment.removeprefix(" ").rstrip())
        words = content.split()
        if words[:1] == ["period_s"]:
            if period_s is not None:
                raise ConfigError(f"{where}: period_s is given twice; give it once")
            period_s = _period_s(words[1:], where)
            continue
        for word in words:
            gpus += _samples(word, where, MAX_SAMPLES - len(gpus))
    if period_s is None:
        raise ConfigError(f"{name}: no line `period_s SECONDS`, the time between samples; add one")
    try:
        return SpotTrace(period_s, tuple(gpus), tuple(comments))
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def _period_s(words: Sequence[str], where: str) -> float:
    try:
        period_s = float(words[0]) if len(words) == 1 else math.nan
    except ValueError:
        period_s = math.nan
    if not 0 < period_s <= _MAX_PERIOD_S:
        shown = " ".join(words)[:_SHOWN]
        raise ConfigError(f"{where}: period_s {shown!r}; allowed: one number above 0, at most {_MAX_PERIOD_S:.0f}")
    return period_s


def _samples(word: str, where: str, room: int) -> list[int]:
    match = _RUN.fullmatch(word)
    if match is None:
        raise ConfigError(f"{where}: {word[:_SHOWN]!r} is not COUNTxGPUS, two whole numbers from 0, for instance 10x56")
    count, gpus = int(match[1]), int(match[2])
    if count < 1:
        raise ConfigError(f"{where}: {word!r}: a count of 0; leave the entry out")
    if gpus > MAX_GPUS:
        raise ConfigError(f"{where}: {word!r}: more than {MAX_GPUS} GPUs")
    if count > room:
        raise ConfigError(f"{where}: {word!r}: the trace is longer than {MAX_SAMPLES} samples; take a longer period_s")
    return [gpus] * count
