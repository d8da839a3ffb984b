"""The newest checkpoint of a folder as a tree in memory, whoever wrote it, without the model's code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lastgood.checkpointers.export.formats import ExportFormat, load_exported
from lastgood.checkpointers.export.whole_job import export_job
from lastgood.checkpointers.ranks.directories import whole_checkpoints
from lastgood.checkpointers.ranks.opened import open_job
from lastgood.checkpointers.slots.contents import read_blocks, read_layout
from lastgood.checkpointers.torch_files.files import TorchFiles
from lastgood.errors import NoCheckpoint
from lastgood.state import unflatten

__all__ = ["read_newest"]


def read_newest(folder: Path, known: int | None) -> tuple[int, Mapping[str, Any]] | None:
    """Step and state of the newest good checkpoint; None if it is of step `known`, or if there is none.

    Read are what `lastgood export` takes, and the files of systems that use torch.save (sync, CheckFreq). Raises
    CheckpointError for what cannot be read.
    """
    job = open_job(folder)
    try:
        if job.several:
            return _of_ranks(folder, known)
        files = TorchFiles(folder, keep=1)  # nothing is written, so nothing is dropped
        if files.steps():
            return _of_files(files, known)
        view = job.views[0]
        book = view.book()
        info = next((one for one in view.committed() if not book.is_bad(one.sequence)), None)
        if info is None or info.step == known:
            return None
        with view.hold(info):
            layout = read_layout(view, info)
            blocks = [block for _, block in read_blocks(view, info, layout, 4, layout.stream_bytes)]
        return info.step, unflatten(layout, blocks, f"{info.path}: step {info.step}")
    except NoCheckpoint:
        return None


def _of_files(files: TorchFiles, known: int | None) -> tuple[int, Mapping[str, Any]] | None:
    if files.steps()[0] == known:
        return None
    step, tree, _, _ = files.read(None)
    return None if step == known else (step, tree)  # the newest one may be damaged


def _of_ranks(folder: Path, known: int | None) -> tuple[int, Mapping[str, Any]] | None:
    found = next((one for one in whole_checkpoints(folder) if one.bad is None), None)
    if found is None or found.step == known:
        return None
    with TemporaryDirectory(prefix="lastgood-") as scratch:
        out = Path(scratch) / "state.pt"
        done = export_job(folder, out, ExportFormat.PT, found.step)
        return done.step, load_exported(out)
