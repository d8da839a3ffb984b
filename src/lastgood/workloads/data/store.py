"""Prepared folders: files and a manifest of their SHA-256 sums, made complete or not at all. Needs no torch.

A prepared folder is filled under a temporary name beside its place and renamed into it, so a reader sees all of it or
none, and two processes that make the same folder at once do no harm: the second finds the first's and drops its own.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic import Field

from lastgood.errors import DataError
from lastgood.models import FrozenModel
from lastgood.text import read_model

__all__ = [
    "MANIFEST",
    "PREPARE",
    "FileSum",
    "Manifest",
    "check_folder",
    "file_sha256",
    "make_folder",
    "prepared_folders",
    "read_manifest",
    "remove_folder",
]

MANIFEST = "manifest.json"
PREPARE = "lastgood data prepare"


class FileSum(FrozenModel):
    """One file of a prepared folder."""

    bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Manifest(FrozenModel):
    """What a prepared folder holds and where it comes from."""

    manifest_version: Literal[1] = 1
    name: str
    source: str
    """Where the data comes from, and in which version."""
    licence: str
    recipe: int = Field(ge=1)
    """Version of the code that made the files: raised when the same source would give other files."""
    files: dict[str, FileSum]

    @property
    def sha256(self) -> str:
        """One sum over all files."""
        listing = "".join(f"{self.files[name].sha256}  {name}\n" for name in sorted(self.files))
        return hashlib.sha256(listing.encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    total = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            total.update(part)
    return total.hexdigest()


def make_folder(
    folder: Path, fill: Callable[[Path], None], *, name: str, source: str, licence: str, recipe: int
) -> Manifest:
    """Return `folder`'s manifest; if the folder is not there, or another recipe's, make it with `fill(empty folder)`.

    Raises:
        DataError: The folder cannot be written.
    """
    if (folder / MANIFEST).is_file():
        try:
            found = read_manifest(folder)
        except DataError:
            found = None
        if found is not None and found.recipe == recipe and found.source == source:
            return found
        remove_folder(folder)
    elif folder.is_dir() and any(folder.iterdir()):
        raise DataError(f"{folder}: holds files that were not prepared by this program; move them away")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    except OSError as error:
        raise DataError(f"{folder}: cannot be made: {error.strerror}; choose a folder with --data-dir") from error
    try:
        fill(building)
        files = {
            path.relative_to(building).as_posix(): FileSum(bytes=path.stat().st_size, sha256=file_sha256(path))
            for path in sorted(building.rglob("*"))
            if path.is_file()
        }
        manifest = Manifest(name=name, source=source, licence=licence, recipe=recipe, files=files)
        (building / MANIFEST).write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")
        building.chmod(0o755)
        for path in building.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        try:
            building.rename(folder)
        except OSError:
            if not (folder / MANIFEST).is_file():
                raise
            manifest = read_manifest(folder)
        return manifest
    except OSError as error:
        raise DataError(f"{folder}: cannot be made: {error.strerror or error}") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Remove a prepared folder, if it is there, so that nobody ever sees a part of it."""
    if not (folder / MANIFEST).is_file():
        return
    try:
        grave = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
        folder.rename(grave)
        shutil.rmtree(grave)
    except OSError as error:
        raise DataError(f"{folder}: cannot be removed: {error.strerror or error}") from error


_MOST_MANIFEST_BYTES = 64 << 20


def read_manifest(folder: Path) -> Manifest:
    """Read a prepared folder's manifest. Raises DataError if it is missing or not one."""
    path = folder / MANIFEST
    if not path.exists():
        raise DataError(f"{folder}: not prepared (no {MANIFEST}); run `{PREPARE}`")
    advice = f"run `{PREPARE} --force`"
    manifest = read_model(Manifest, path, "a manifest", most_bytes=_MOST_MANIFEST_BYTES, advice=advice, error=DataError)
    for name in manifest.files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise DataError(f"{path}: file name {name!r} leads out of the folder; run `{PREPARE} --force`")
    return manifest


def check_folder(folder: Path) -> list[str]:
    """Compare a prepared folder with its manifest. Returns what is wrong, one line each; empty when all is well."""
    try:
        manifest = read_manifest(folder)
    except DataError as error:
        return [str(error)]
    problems = []
    for name, expected in manifest.files.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{path}: missing")
        elif path.stat().st_size != expected.bytes:
            problems.append(f"{path}: {path.stat().st_size} bytes, the manifest says {expected.bytes}")
        elif (found := file_sha256(path)) != expected.sha256:
            problems.append(f"{path}: sha256 {found}, the manifest says {expected.sha256}")
    return problems


def prepared_folders(data_dir: Path) -> list[Path]:
    """Every folder below `data_dir` that has a manifest, sorted; those still being made are left out."""
    found = (path.parent for path in data_dir.glob(f"*/*/{MANIFEST}"))
    return sorted(folder for folder in found if not folder.name.startswith("."))
