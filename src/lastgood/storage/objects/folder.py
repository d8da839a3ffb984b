"""Objects as files of a folder: the semantics of a bucket on a file system, and the oracle of the tests."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lastgood.errors import StorageError
from lastgood.files import (
    TEMPORARY_SUFFIX,
    closed_after,
    local_path,
    make_directory,
    open_new,
    open_regular,
    storage_error,
    sync_directory,
    temporary_beside,
)
from lastgood.storage.objects.client import ObjectExists, ObjectInfo, ObjectMissing, check_key

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["FolderClient"]


class FolderClient:
    """An `ObjectClient` over the files below `root`, which is made if it is not there.

    An object is a file of its own; a temporary one beside it gets its name by a link (`create`) or a rename (`put`).
    `clock` is the server's, in seconds since 1970. A key cannot go on below an object, which a bucket allows.
    """

    def __init__(self, root: Path | str, *, clock: Callable[[], float] = time.time) -> None:
        self.root = local_path(root)
        self._clock = clock
        try:
            make_directory(self.root)
        except OSError as error:
            raise storage_error(error, self.root, "making the folder") from error
        self._refuse_missing()

    @property
    def place(self) -> str:
        """The folder."""
        return str(self.root)

    def where(self, key: str) -> str:
        """The file."""
        return str(self.root / key)

    def create(self, key: str, *content: Buffer) -> None:
        """As `ObjectClient.create`."""
        self._write(key, content, create=True)

    def put(self, key: str, content: Buffer) -> None:
        """As `ObjectClient.put`."""
        self._write(key, (content,), create=False)

    def get(self, key: str, most_bytes: int) -> bytes:
        """As `ObjectClient.get`."""
        with self._opened(key) as (descriptor, size):
            if size > most_bytes:
                raise StorageError(f"{self.where(key)}: has {size} bytes, over the limit of {most_bytes} for it")
            return self._read(key, descriptor, 0, size).tobytes()

    def get_range(self, key: str, begin: int, nbytes: int) -> memoryview:
        """As `ObjectClient.get_range`."""
        with self._opened(key) as (descriptor, _):
            return self._read(key, descriptor, begin, nbytes)

    def head(self, key: str) -> ObjectInfo | None:
        """As `ObjectClient.head`."""
        try:
            with self._opened(key) as (descriptor, size):
                return ObjectInfo(key, size, float(int(os.fstat(descriptor).st_mtime)))
        except ObjectMissing:
            return None

    def list(self, folder: str, after: str = "") -> Iterator[ObjectInfo]:
        """As `ObjectClient.list`."""
        names = sorted(
            path.relative_to(self.root).as_posix()
            for path in self._below(self._path(folder) if folder else self.root)
            if not path.name.endswith(TEMPORARY_SUFFIX)
        )
        for key in names:
            info = self.head(key) if key > after else None
            if info is not None:
                yield info

    def delete(self, keys: Sequence[str]) -> None:
        """As `ObjectClient.delete`. Folders that are left empty stay."""
        folders = set()
        for key in keys:
            path = self._path(key)
            try:
                path.unlink()
            except FileNotFoundError:
                continue
            except OSError as error:
                raise storage_error(error, path, "removing") from error
            folders.add(path.parent)
        for folder in folders:
            with contextlib.suppress(FileNotFoundError):
                sync_directory(folder)

    def close(self) -> None:
        """Nothing is held."""

    def _refuse_missing(self) -> None:
        """What is not there, or not mounted any more, must not look like an empty folder."""
        if not self.root.is_dir():
            raise StorageError(f"{self.root}: is no folder, or is not there any more; is its disk mounted?")

    def _below(self, top: Path) -> Iterator[Path]:
        """All files in a folder, which need not be there. Raises StorageError for what cannot be read."""
        self._refuse_missing()

        def refuse(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):  # removed meanwhile, or never made
                raise storage_error(error, error.filename, "listing") from error

        for folder, _, names in os.walk(top, onerror=refuse):
            yield from (path for path in (Path(folder, name) for name in names) if path.is_file())

    def _path(self, key: str) -> Path:
        return self.root / check_key(key, self.place)

    def _write(self, key: str, content: Sequence[Buffer], *, create: bool) -> None:
        path = self._path(key)
        views = [memoryview(piece).cast("B") for piece in content]
        temporary = temporary_beside(path)
        try:
            make_directory(path.parent)
            with os.fdopen(open_new(temporary), "wb") as file:
                file.writelines(views)
                file.flush()
                now = int(self._clock())
                os.utime(file.fileno(), (now, now))
                os.fsync(file.fileno())
            if create:
                path.hardlink_to(temporary)
                temporary.unlink()
            else:
                temporary.replace(path)
            sync_directory(path.parent)
        except FileExistsError as error:
            raise ObjectExists(f"{path}: is there already") from error
        except OSError as error:
            raise storage_error(error, path, "writing", sum(view.nbytes for view in views)) from error
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int, int]]:
        """Descriptor and size of an object's file."""
        path = self._path(key)
        try:
            descriptor = open_regular(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ObjectMissing(f"{path}: is not there") from error
        except OSError as error:
            raise storage_error(error, path, "opening") from error
        with closed_after(descriptor):
            yield descriptor, os.fstat(descriptor).st_size

    def _read(self, key: str, descriptor: int, begin: int, nbytes: int) -> memoryview:
        content = memoryview(bytearray(nbytes))
        done = 0
        while done < nbytes:
            try:
                got = os.preadv(descriptor, [content[done:]], begin + done)
            except OSError as error:
                raise storage_error(error, self.root / key, "read", nbytes) from error
            if not got:
                raise StorageError(
                    f"{self.where(key)}: ends at byte {begin + done}; {nbytes} bytes from byte {begin} on are needed"
                )
            done += got
        return content
