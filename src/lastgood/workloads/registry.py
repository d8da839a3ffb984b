"""The workloads by name. Needs no torch until one is built."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lastgood._lazy import torch
from lastgood.errors import ConfigError
from lastgood.names import nearest
from lastgood.workloads.base import Batch, Setting, Workload, WorkloadOptions
from lastgood.workloads.options import (
    BertOptions,
    BlobOptions,
    BloomOptions,
    NetworkOptions,
    OptOptions,
    Resnet18Options,
    Resnet50Options,
    TransformerXLOptions,
    Vgg16Options,
)

__all__ = [
    "DataKind",
    "build_workload",
    "workload_data_kind",
    "workload_module",
    "workload_names",
    "workload_options_class",
]

DataKind = Literal["images", "squad", "wikitext"]


@dataclass(frozen=True)
class _Entry:
    options: type[WorkloadOptions]
    data: DataKind | None
    """None: it makes its own batches."""
    module: str
    """Module whose function `build_<name>` makes the workload; imported only when it is built."""


_WORKLOADS: dict[str, _Entry] = {
    "vgg16": _Entry(Vgg16Options, "images", "lastgood.workloads.vision"),
    "resnet18": _Entry(Resnet18Options, "images", "lastgood.workloads.vision"),
    "resnet50": _Entry(Resnet50Options, "images", "lastgood.workloads.vision"),
    "bert": _Entry(BertOptions, "squad", "lastgood.workloads.span_qa"),
    "transformer_xl": _Entry(TransformerXLOptions, "wikitext", "lastgood.workloads.transformer_xl"),
    "opt": _Entry(OptOptions, "wikitext", "lastgood.workloads.causal"),
    "bloom": _Entry(BloomOptions, "wikitext", "lastgood.workloads.causal"),
    "blob": _Entry(BlobOptions, None, "lastgood.workloads.blob"),
}


def workload_names() -> tuple[str, ...]:
    """Every known name."""
    return tuple(_WORKLOADS)


def workload_options_class(name: str) -> type[WorkloadOptions]:
    """The pydantic model of a workload's options. Raises ConfigError if there is no such workload."""
    return _entry(name).options


def workload_data_kind(name: str) -> DataKind | None:
    """The kind of data that a workload reads, None if it makes its own. Raises ConfigError for an unknown name."""
    return _entry(name).data


def workload_module(name: str) -> str:
    """Module that builds a workload, for those who want it imported early. Raises ConfigError for an unknown name."""
    return _entry(name).module


def build_workload(
    name: str,
    options: WorkloadOptions,
    *,
    data_dir: Path,
    data_path: Path | None,
    seed: int,
    device: str,
) -> Workload:
    """Build a workload, ready to step, its model on `device`.

    Args:
        name: One of `workload_names()`.
        options: An instance of `workload_options_class(name)`.
        data_dir: Folder of the data that `lastgood data prepare` makes; tokenizers are cached there too.
        data_path: A user's own data in the format of the workload's kind (docs/data.md), or None for the prepared one.
        seed: Of weights and of the order of batches; torch's global generators are left seeded with it, so dropout
            follows from it as well.
        device: As torch names it, for instance ``"cpu"`` or ``"cuda"``.

    Raises:
        ConfigError: No such workload, options of another workload, or options that do not fit the data.
        DataError: The data is missing or damaged; the message names the path and what to do.
    """
    entry = _entry(name)
    if not isinstance(options, entry.options):
        raise ConfigError(f"workload {name} takes {entry.options.__name__}, not {type(options).__name__}")
    build = getattr(importlib.import_module(entry.module), f"build_{name}")
    workload: Workload = build(options, Setting(data_dir, data_path, seed, device))
    if isinstance(options, NetworkOptions) and options.precision == "bfloat16":
        workload.loss, workload.precision = _in_bfloat16(workload.loss, device), options.precision
    return workload


def _in_bfloat16(loss: Callable[[Batch], torch.Tensor], device: str) -> Callable[[Batch], torch.Tensor]:
    def cast(batch: Batch) -> torch.Tensor:
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            return loss(batch)

    return cast


def _entry(name: str) -> _Entry:
    try:
        return _WORKLOADS[name]
    except KeyError:
        raise ConfigError(
            f"unknown workload {name!r}{nearest(name, _WORKLOADS)}; known: {', '.join(_WORKLOADS)}"
        ) from None
