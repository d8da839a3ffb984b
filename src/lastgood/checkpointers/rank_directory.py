"""The directories of a job's ranks, by name."""

from __future__ import annotations

import re
from pathlib import Path

from lastgood.files import storage_errors

__all__ = ["job_of", "rank_directories", "rank_directory"]

_NAME = re.compile(r"rank-(\d{5,7})")


def rank_directory(job: Path | str, rank: int) -> Path:
    """Where a rank keeps its checkpoints, in the directory of its job."""
    return Path(job, f"rank-{rank:05d}")


def job_of(directory: Path | str) -> Path | None:
    """The job that a rank's directory belongs to, by its name; None for any other directory."""
    directory = Path(directory)
    return directory.parent if _NAME.fullmatch(directory.name) else None


def rank_directories(job: Path | str) -> dict[int, Path]:
    """The ranks' directories that are here, by rank; none if `job` is no directory of several ranks.

    Raises StorageError if it cannot be read.
    """
    folder = Path(job)
    with storage_errors(folder, "reading the directory"):
        if not folder.is_dir():
            return {}
        found = [(_NAME.fullmatch(path.name), path) for path in folder.iterdir() if path.is_dir()]
    return dict(sorted((int(match[1]), path) for match, path in found if match))
