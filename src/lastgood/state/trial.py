"""Tries whether what is about to be saved could be loaded again, without reading or changing any tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lastgood._lazy import torch
from lastgood.errors import CorruptCheckpoint, MismatchError, StateError
from lastgood.state.build import stateful_paths, unflatten
from lastgood.state.compare import check_tree
from lastgood.state.flatten import FlatState
from lastgood.state.layout import Layout, Node
from lastgood.state.layout_rules import dtype_named

__all__ = ["try_layout"]


def try_layout(state: Mapping[str, Any], flat: FlatState) -> None:
    """Raise StateError if the layout of `flat`, which `flatten(state)` gave, could not be loaded into `state`.

    The layout is written and read as a checkpoint's is, its tree built over tensors without memory, and that compared
    with the live objects as in a restore. What an object's own load_state_dict takes is not tried.
    """
    where = "the state, tried as a checkpoint"
    spread = iter(flat.sharded)

    def leaf(node: Node) -> Any:
        if node[0] == "H":
            return next(spread)  # a part is put back where it was
        _, _, _, dtype, shape, stride = node
        return torch.empty_strided(shape, stride, dtype=dtype_named(dtype), device="meta")

    try:
        layout = Layout.from_json(flat.layout.to_json(), where)
        if layout.digest() != flat.layout.digest():
            raise CorruptCheckpoint(f"{where}: it would be read as another one")
        # Only arrays are made from bytes: those in `flat` are copies.
        check_tree(state, unflatten(layout, flat.blocks, where, leaf), where, stateful_paths(layout))
    except (CorruptCheckpoint, MismatchError, ValueError, RecursionError) as error:
        raise StateError(f"a checkpoint of this state could not be restored: {error}") from error
