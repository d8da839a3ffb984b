"""Labelled images: the prepared digits, or a user's folder in ImageNet's layout.

Batches hold ``images``, uint8 of shape (batch, 3, size, size), and ``labels``, int64 of shape (batch,). Pixels stay
bytes until they are on the device, as in most pipelines: a quarter of the copy.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import interpolate

from lastgood.errors import ConfigError, DataError
from lastgood.units import MIB
from lastgood.workloads.base import Batch, BatchStream
from lastgood.workloads.data.order import EpochOrder
from lastgood.workloads.data.prepare import prepared_dataset

__all__ = ["open_images"]

_CHUNK = 64
_POOL_BYTES = 256 * MIB
"""Enlarged digits that are kept: all of them up to 386 pixels, fewer above."""
_RESIZE = 256 / 224
"""The shorter side before the centre crop, as a multiple of the crop: ImageNet's usual evaluation crop."""


def open_images(
    data_dir: Path, data_path: Path | None, *, batch_size: int, image_size: int, classes: int, seed: int
) -> tuple[BatchStream, dict[str, str]]:
    """Open the prepared digits, or a folder ``<class>/<image>`` if a path is given. Returns the stream and its facts.

    Raises:
        ConfigError: `classes` is smaller than the number of classes in the data.
        DataError: The data is missing or is not of this layout.
    """
    if data_path is not None:
        return _open_folder(data_path, batch_size, image_size, classes, seed)
    folder, manifest = prepared_dataset("images", data_dir)
    try:
        pixels = np.load(folder / "images.npy", allow_pickle=False)
        labels = np.load(folder / "labels.npy", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: cannot be read: {error}; run `lastgood data prepare --force`") from error
    if pixels.ndim != 3 or pixels.dtype != np.uint8 or labels.shape != pixels.shape[:1]:
        raise DataError(f"{folder}: not images and their labels; run `lastgood data prepare --force`")
    _check_classes(int(labels.max()) + 1, classes, str(folder))
    facts = {"name": manifest.name, "source": manifest.source, "sha256": manifest.sha256}
    return _Digits(pixels, labels, batch_size, image_size, seed), facts


class _Digits(BatchStream):
    """Digits, enlarged once and coloured by batch: every visit of an epoch draws its own ink and paper."""

    def __init__(
        self, pixels: npt.NDArray[np.uint8], labels: npt.NDArray[np.int64], batch_size: int, image_size: int, seed: int
    ) -> None:
        super().__init__()
        kept = max(1, _POOL_BYTES // image_size**2)
        self._grey = _enlarge(torch.from_numpy(pixels[:kept]), image_size)
        self._labels = torch.from_numpy(labels[:kept])
        self._batch_size = batch_size
        self._seed = seed
        self._order = EpochOrder(len(self._labels), seed)

    def batch(self, index: int) -> Batch:
        """Digits and labels; see `BatchStream.batch`."""
        items = torch.tensor(self._order.batch(index, self._batch_size))
        ends = np.random.default_rng((self._seed, 1, index)).integers(0, 256, size=(2, self._batch_size, 3, 1, 1))
        paper, ink = torch.from_numpy(ends.astype(np.int16))
        # In 16 bits, several times faster than a table or floats: 255 * 128 still fits, and rounding towards zero keeps
        # every value between paper and ink.
        slope = torch.div((ink - paper).int() * 128, 255, rounding_mode="trunc").to(torch.int16)
        grey = self._grey[items][:, None].to(torch.int16)
        images = (paper + (grey * slope >> 7)).to(torch.uint8)
        return {"images": images, "labels": self._labels[items]}


def _enlarge(pixels: torch.Tensor, size: int) -> torch.Tensor:
    """Resize (count, height, width) bytes to (count, size, size), a few at a time to bound memory."""
    chunks = [
        interpolate(chunk[:, None].float(), size=(size, size), mode="bilinear", align_corners=False)
        .round_()
        .clamp_(0, 255)
        .to(torch.uint8)[:, 0]
        for chunk in torch.split(pixels, _CHUNK)
    ]
    return torch.cat(chunks)


def _open_folder(
    path: Path, batch_size: int, image_size: int, classes: int, seed: int
) -> tuple[BatchStream, dict[str, str]]:
    from torchvision.datasets import ImageFolder

    layout = "expected an ImageNet-style folder: <class>/<image>.JPEG, one folder per class"
    if not path.is_dir():
        raise DataError(f"{path}: no such folder; {layout}")
    root = path / "train" if (path / "train").is_dir() else path
    try:
        found = ImageFolder(str(root))
    except (FileNotFoundError, OSError) as error:
        raise DataError(f"{root}: {error}; {layout}") from error
    samples = [(Path(name), int(label)) for name, label in found.samples]
    _check_classes(len(found.classes), classes, str(root))
    listing = hashlib.sha256()
    for file, _ in samples:
        listing.update(f"{file.stat().st_size}  {file.relative_to(root).as_posix()}\n".encode())
    facts = {
        "name": f"images/{path.name}",
        "source": f"{root} ({len(samples)} images, {len(found.classes)} classes; the sum is over names and sizes)",
        "sha256": listing.hexdigest(),
    }
    return _Folder(samples, batch_size, image_size, seed), facts


class _Folder(BatchStream):
    """Images decoded by a few threads, one batch ahead of the one that is asked for."""

    def __init__(self, samples: list[tuple[Path, int]], batch_size: int, image_size: int, seed: int) -> None:
        super().__init__()
        self._samples = samples
        self._batch_size = batch_size
        self._image_size = image_size
        self._order = EpochOrder(len(samples), seed)
        self._decoders: ThreadPoolExecutor | None = None
        self._decoding: dict[int, list[Future[torch.Tensor]]] = {}

    def batch(self, index: int) -> Batch:
        """Images and labels; see `BatchStream.batch`."""
        if self._decoders is None:
            # Made at the first batch, not before, so that a process may still fork after the workload is built.
            self._decoders = ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="lastgood-images")
        pending = self._decoding.pop(index, None) or self._submit(self._decoders, index)
        self._decoding = {index + 1: self._decoding.get(index + 1) or self._submit(self._decoders, index + 1)}
        labels = [self._samples[item][1] for item in self._order.batch(index, self._batch_size)]
        return {"images": torch.stack([image.result() for image in pending]), "labels": torch.tensor(labels)}

    def _submit(self, threads: ThreadPoolExecutor, index: int) -> list[Future[torch.Tensor]]:
        items = self._order.batch(index, self._batch_size)
        return [threads.submit(_decode, self._samples[item][0], self._image_size) for item in items]


def _decode(path: Path, size: int) -> torch.Tensor:
    """Read one image as (3, size, size) bytes: shorter side to 256/224 of the size, then the centre."""
    from PIL import Image, UnidentifiedImageError
    from torchvision.transforms.functional import center_crop, pil_to_tensor, resize

    try:
        with Image.open(path) as opened:
            image = resize(opened.convert("RGB"), [round(size * _RESIZE)])
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise DataError(f"{path}: not a readable image: {error}; repair or remove it") from error
    pixels: torch.Tensor = pil_to_tensor(center_crop(image, [size, size]))
    return pixels


def _check_classes(found: int, classes: int, where: str) -> None:
    if found > classes:
        raise ConfigError(f"{where} has {found} classes; the workload's option classes is {classes}: raise it")
