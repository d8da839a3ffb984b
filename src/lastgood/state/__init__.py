"""States of a training: flattening to bytes and back, to the bit; random generators; digests."""

from lastgood.state.apply import apply_tree, check_tree, holds_its_values, load_tree
from lastgood.state.build import stateful_paths, unflatten
from lastgood.state.checked import Checked
from lastgood.state.digest import state_digest
from lastgood.state.flatten import FlatState, flatten, is_stateful
from lastgood.state.layout import Layout
from lastgood.state.new_world import NewWorld
from lastgood.state.rng import RngState, generators_kept, seed_everything
from lastgood.state.trial import try_layout

__all__ = [
    "Checked",
    "FlatState",
    "Layout",
    "NewWorld",
    "RngState",
    "apply_tree",
    "check_tree",
    "flatten",
    "generators_kept",
    "holds_its_values",
    "is_stateful",
    "load_tree",
    "seed_everything",
    "state_digest",
    "stateful_paths",
    "try_layout",
    "unflatten",
]
