"""A checkpoint without the training that made it: read as a tree, or parts of it into another training's objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lastgood._lazy import torch
from lastgood.checkpointers.export.formats import ExportFormat, load_exported
from lastgood.checkpointers.export.whole_job import export_job
from lastgood.checkpointers.ranks.directories import whole_checkpoints
from lastgood.checkpointers.ranks.opened import open_job
from lastgood.checkpointers.slots.contents import read_tree
from lastgood.errors import ConfigError, MismatchError, NoCheckpoint, NoGoodCheckpoint
from lastgood.state import apply_tree
from lastgood.state.compare import plain_names

__all__ = ["Loaded", "Rename", "load_parts", "read_checkpoint"]

_THREADS = 4
_SHOWN = 8

Rename = Mapping[str, str] | Callable[[str], str | None]
"""New names of a module's entries: beginnings and what replaces them, or a function (None leaves an entry out)."""


@dataclass(frozen=True)
class Loaded:
    """What a warm start found."""

    step: int
    loaded: list[str] = field(default_factory=list)
    """Entries that were taken, as ``model.layers.0.weight``."""
    missing: list[str] = field(default_factory=list)
    """Entries of the live objects that the checkpoint lacks, or has in another shape; they are as they were."""
    left_over: list[str] = field(default_factory=list)
    """Entries of the checkpoint that are in no live object, or do not fit."""


def read_checkpoint(directory: Path | str, step: int | None = None) -> tuple[int, dict[str, Any]]:
    """Step and state of a checkpoint in fresh host memory, without the model's code; every byte is checked.

    The newest good one, or that of `step`, of a directory of slots or of a job of several ranks, also while a training
    writes there. Of several ranks tensors are complete, and what differs between ranks has an entry for each of them.

    Raises NoCheckpoint, NoGoodCheckpoint, CorruptCheckpoint, MismatchError, StorageError.
    """
    job = open_job(directory)
    if job.several:
        return _of_ranks(Path(directory), step)
    view = job.views[0]
    found, book = view.committed(), view.book()
    chosen = [info for info in found if (not book.is_bad(info.sequence) if step is None else info.step == step)]
    if not chosen:
        steps = [info.step for info in found]
        if step is None and steps:
            raise NoGoodCheckpoint(f"{directory}: all checkpoints are judged bad; steps {steps}; name one")
        asked = "" if step is None else f" of step {step}"
        raise NoCheckpoint(f"{directory}: no checkpoint{asked}; steps {steps or 'none'}")
    return chosen[0].step, read_tree(view, chosen[0], _THREADS)


def load_parts(
    directory: Path | str,
    state: Mapping[str, Any],
    *,
    parts: Sequence[str] | None = None,
    rename: Rename | None = None,
    strict: bool = True,
    step: int | None = None,
) -> Loaded:
    """Load parts of a checkpoint into live objects, for a training that begins from another one's weights.

    Args:
        directory: of the checkpoints, as for `read_checkpoint`.
        state: live objects by the names that they have in the checkpoint.
        parts: those to load; None: all of `state`.
        rename: what entries of modules are called now.
        strict: whether each entry of the modules, and of the checkpoint's parts, must have its counterpart. If not,
            what has none stays as it is, and is listed.
        step: of the checkpoint; None: the newest good one.

    Raises MismatchError, with nothing changed, for what does not fit; ConfigError for a part that `state` lacks; and
    as `read_checkpoint` does.
    """
    names = list(state if parts is None else parts)
    unknown = [name for name in names if name not in state]
    if unknown:
        raise ConfigError(f"load: parts={unknown} are not in the state that was given, which holds {sorted(state)}")
    found_step, tree = read_checkpoint(directory, step)
    where = f"{directory}, step {found_step}"
    done = Loaded(found_step)
    live: dict[str, Any] = {}
    wanted: dict[str, Any] = {}
    for name in names:
        if name not in tree:
            done.missing.append(name)
            continue
        live[name] = state[name]
        if isinstance(state[name], torch.nn.Module) and isinstance(tree[name], Mapping):
            wanted[name] = _entries(state[name], tree[name], name, rename, done)
        else:
            wanted[name] = tree[name]
            done.loaded.append(name)
    if strict and (done.missing or done.left_over):
        raise MismatchError(
            f"{where}: the checkpoint lacks {_listed(done.missing)} and holds {_listed(done.left_over)} beyond what is "
            "to be loaded; rename=... gives entries other names, and strict=False takes what fits and lists the rest"
        )
    apply_tree(live, wanted, where)
    return done


def _entries(
    module: torch.nn.Module, saved: Mapping[str, Any], part: str, rename: Rename | None, done: Loaded
) -> dict[str, Any]:
    """A complete state of the module: what of `saved` fits, and what is live of all else."""
    current = module.state_dict()
    known = dict(zip(plain_names(list(current)), current, strict=True))
    taken: dict[str, Any] = {}
    for name, value in saved.items():
        new = _renamed(name, rename)
        own = None if new is None else known.get(plain_names([new])[0])
        if own is None:
            done.left_over.append(f"{part}.{name}")
        elif not _fits(current[own], value):
            done.left_over.append(f"{part}.{name} {_shape(value)}, here {_shape(current[own])}")
        else:
            taken[own] = value
    done.loaded.extend(f"{part}.{name}" for name in current if name in taken)
    done.missing.extend(f"{part}.{name}" for name in current if name not in taken)
    return {name: taken.get(name, value) for name, value in current.items()}


def _renamed(name: str, rename: Rename | None) -> str | None:
    if rename is None:
        return name
    if callable(rename):
        return rename(name)
    beginnings = sorted((old for old in rename if name.startswith(old)), key=len)
    return rename[beginnings[-1]] + name[len(beginnings[-1]) :] if beginnings else name


def _fits(live: Any, saved: Any) -> bool:
    if isinstance(live, torch.Tensor) and isinstance(saved, torch.Tensor):
        return live.shape == saved.shape and live.dtype == saved.dtype
    return not isinstance(live, torch.Tensor) and not isinstance(saved, torch.Tensor)


def _shape(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{list(names[:_SHOWN])}{more}" if names else "nothing"


def _of_ranks(directory: Path, step: int | None) -> tuple[int, dict[str, Any]]:
    if not whole_checkpoints(directory):
        raise NoCheckpoint(f"{directory}: no checkpoint that all ranks hold")
    with TemporaryDirectory(prefix="lastgood-") as scratch:
        out = Path(scratch) / "state.pt"
        done = export_job(directory, out, ExportFormat.PT, step)
        return done.step, dict(load_exported(out))
