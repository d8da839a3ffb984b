"""Files that a reader sees whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from lastgood.errors import StorageError

__all__ = ["write_atomically"]


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` under a temporary name beside `path`, flush it, and rename it into place.

    A kill at any moment leaves the old file or the new one. Raises StorageError, naming the file and the bytes needed.
    """
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files that only their owner can read; results are for everyone.
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise StorageError(f"{path}: cannot write {len(data)} bytes: {error.strerror or error}") from error
        raise
