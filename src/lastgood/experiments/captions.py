"""The sentences under a figure. With them a picture that was cut out of its page still says what it shows."""

from __future__ import annotations

import re

import pandas as pd

from lastgood.units import MIB, format_bytes, format_rate, format_seconds

__all__ = ["throughput_caption"]

_NUMBER_AND_UNIT = re.compile(r"(\d) ((?:[KMGT]?i?B(?:/s)?|s|ms|us|min|cores|threads?)\b)")


def throughput_caption(frame: pd.DataFrame) -> str:
    """Machine, scale, repetitions, threads, state, iteration time, how to read the bars, the bound and the revision."""
    sentences = [_machine(frame), _set_up(frame), _reading(frame), _bound(frame), _revision(frame)]
    text = " ".join(sentence for sentence in sentences if sentence)
    # A number and its unit stay on one line.
    return _NUMBER_AND_UNIT.sub("\\1\N{NO-BREAK SPACE}\\2", text)


def _machine(frame: pd.DataFrame) -> str:
    first = frame.iloc[0]
    processor = str(first["gpu"]) if first["device"] == "cuda" else f"{first['cpu']}, {int(first['cores'])} cores"
    scale = str(first["scale"])
    warning = " (compare shapes and ratios, not absolute numbers, with a paper's)" if scale == "laptop" else ""
    disk = f"{first['scratch_filesystem']} on {first['scratch_device']}"
    return f"Machine {_joined(frame['machine'])} ({processor}; {disk}), scale {scale}{warning}."


def _set_up(frame: pd.DataFrame) -> str:
    threads = _joined(frame["threads"])
    parts = [
        _repetitions(frame),
        f"{threads} thread{'' if threads == '1' else 's'}",
        f"{_joined_range(frame['measured_steps'])} iterations after {_joined_range(frame['warmup_steps'])} of warm-up",
        f"state {_bytes_range(frame['state_bytes'])}",
    ]
    iteration_s = frame["iteration_s"].dropna()
    if len(iteration_s):
        parts.append(f"{format_seconds(float(iteration_s.median()))} per iteration without checkpoints")
    return f"{'; '.join(parts)}."


def _repetitions(frame: pd.DataFrame) -> str:
    counts = frame.groupby(["system", "interval_steps"]).size()
    text = _joined_range(counts)
    if text == "1":
        return "One run each, no repetition"
    return f"{text} repetitions: bar (and number under it) median, whisker range, circles single runs"


def _reading(frame: pd.DataFrame) -> str:
    if set(frame["system"]) == {"none"}:
        return ""
    return (
        "Solid bar: durable throughput, which counts the time until the last checkpoint is flushed to the disk "
        "(fdatasync, or direct I/O and flush)."
    )


def _bound(frame: pd.DataFrame) -> str:
    if frame["bound_iterations_per_s"].isna().all():
        return "No bound: no run without checkpoints."
    disk = format_rate(float(frame["persist_ceiling_bytes_per_s"].median()))
    copy = format_rate(float(frame["copy_ceiling_bytes_per_s"].median()))
    day = str(frame["ceilings_measured_at"].iloc[0])[:10]
    return f"Bound: what the ceilings measured on {day} allow (disk write {disk}, copy {copy})."


def _revision(frame: pd.DataFrame) -> str:
    revisions = set()
    for revision, dirty in zip(frame["git_revision"], frame["git_dirty"], strict=True):
        name = "unknown" if pd.isna(revision) else str(revision)[:10]
        revisions.add(f"{name} + uncommitted changes" if str(dirty) == "True" else name)
    return f"Revision{'' if len(revisions) == 1 else 's (MIXED)'} {', '.join(sorted(revisions))}."


def _joined(column: pd.Series) -> str:
    return ", ".join(str(value) for value in sorted(set(column)))


def _joined_range(column: pd.Series) -> str:
    low, high = int(column.min()), int(column.max())
    return str(low) if low == high else f"{low} to {high}"


def _bytes_range(column: pd.Series) -> str:
    """One size where all are alike to a MiB: systems may differ by the few bytes of a schedule's state."""
    low, high = float(column.min()), float(column.max())
    return format_bytes(high) if high - low < MIB else f"{format_bytes(low)} to {format_bytes(high)}"
