"""The random number generators of a process as one part of a training state."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lastgood._lazy import lazy_module
from lastgood.errors import MismatchError
from lastgood.state.world import NewWorld

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_module("torch")

__all__ = ["RngState", "seed_everything"]

_log = logging.getLogger("lastgood")


class RngState:
    """State of the generators of Python, numpy, torch's CPU and every CUDA device, as tensors and plain values."""

    def state_dict(self) -> dict[str, Any]:
        """Read every generator. CUDA generators are read only where CUDA is in use already."""
        version, words, gauss = random.getstate()
        numpy_state = np.random.get_state(legacy=False)
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return {
            # Packed into tensors: as a tuple of 625 ints it would be half of a small model's layout.
            "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
            "numpy": {
                "name": str(numpy_state["bit_generator"]),
                "keys": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
                "position": int(numpy_state["state"]["pos"]),
                "has_gauss": int(numpy_state["has_gauss"]),
                "cached_gauss": float(numpy_state["gauss"]),
            },
            "torch": torch.get_rng_state(),
            "cuda": cuda,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set every generator. Raises MismatchError if the checkpoint has more CUDA devices than this machine."""
        cuda = state["cuda"]
        if cuda and torch.cuda.device_count() < len(cuda):
            raise MismatchError(
                f"rng: the checkpoint holds generators of {len(cuda)} CUDA devices, this machine has "
                f"{torch.cuda.device_count()}; restore where there are as many"
            )
        python, numpy_state = state["python"], state["numpy"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        keys = numpy_state["keys"].numpy().astype(np.uint32)
        np.random.set_state(
            (
                numpy_state["name"],
                keys,
                numpy_state["position"],
                numpy_state["has_gauss"],
                numpy_state["cached_gauss"],
            )
        )
        # A copy: torch reads from the start of the storage, wherever in it the tensor begins.
        torch.set_rng_state(state["torch"].clone())
        if cuda:
            # Before CUDA is in use torch only notes the states for later, and a save until then would miss them.
            torch.cuda.init()
        for device, generator_state in enumerate(cuda):
            torch.cuda.set_rng_state(generator_state, device)

    def load_from_ranks(self, states: Sequence[Mapping[str, Any]], world: NewWorld) -> None:
        """Go on from the generators of all ranks on another number of them: a rank takes those of its own number.

        Two ranks that went on from one generator would draw the same numbers, so a rank that had none is seeded, from
        the job, the step and its number.
        """
        if world.rank < len(states):
            self.load_state_dict(dict(states[world.rank]))
            return
        seed = world.seed("rng")
        _log.info(
            "rng: step %d was saved by %d ranks, and rank %d is new: its generators are seeded with %d",
            world.step,
            len(states),
            world.rank,
            seed,
        )
        seed_everything(seed)


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch (all devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
