"""What a restore would make of a directory's checkpoints, for somebody who has no state to restore into.

A restore, an export and `lastgood verify` read a checkpoint through the same checks (`layout_in`, `RankParts`); here
they are made without the rest. What is left to a restore is the comparison with the state that it is given.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from lastgood.checkpointers.ranks.parts import parts_of
from lastgood.checkpointers.slots.contents import layout_in, named_tensors, read_meta
from lastgood.errors import CorruptCheckpoint, NoGoodCheckpoint
from lastgood.gradients.shadow.spill_store import is_spill, spill_in
from lastgood.storage import SlotInfo, SlotView

__all__ = ["check_content", "step_to_restore"]


def check_content(view: SlotView, info: SlotInfo, entry: str | None = None) -> None:
    """Raise what a restore of this checkpoint would raise for what it holds: CheckpointError, of any kind.

    Its data are not read, only its meta data: a layout (with one `entry` alone, if that is given), or what a shadow of
    Checkmate's spilled.
    """
    meta = read_meta(view, info)
    if is_spill(meta):
        spill_in(meta, info)
        return
    layout = layout_in(meta, info)
    if entry is not None and [key for key, _ in layout.tree[1]] != [["s", entry]]:
        raise CorruptCheckpoint(f"{info.path}: step {info.step}: does not hold {entry!r} alone")
    if any(tensor.owner is not None for tensor in named_tensors(layout)):
        parts_of(view, info).check_rank(info.record.rank)


def step_to_restore(view: SlotView, whole: Collection[Path]) -> int:
    """The step that a restore takes, of the checkpoints in the slot files `whole`, which were checked.

    Counts of failed restarts are left out: only a training knows its limit. Raises NoGoodCheckpoint if all were
    judged bad, and what a restore raises where the directory itself is refused: MismatchError, StorageError.
    """
    book = view.book()
    refused = []
    for info in view.committed():
        if info.path not in whole:
            continue
        if not book.is_bad(info.sequence):
            return info.step
        refused.append(f"step {info.step} is judged bad ({book.verdicts[info.sequence].reason or 'no reason'})")
    raise NoGoodCheckpoint(f"{view.directory}: {'; '.join(refused) or 'no checkpoint'}; name a step")
