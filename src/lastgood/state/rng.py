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
    """State of the generators of Python, numpy, torch's CPU and every CUDA device, as tensors and plain values.

    A CUDA generator that stands where `torch.manual_seed` put it, and has drawn nothing, is known by the seed of the
    CPU's: it is None, and none at all behind the last that is otherwise. So the state is the same before and after a
    process begins to use CUDA, and one that never drew there asks for no device. A seed that was given to CUDA alone
    (`torch.cuda.manual_seed`) is seen only once CUDA is in use: until then torch does not tell it.

    A process that is one rank of several has one device, the current one: only its generator is kept, whatever its
    number, so that ranks that drew alike have equal states, and a rank may go on with another device.
    """

    def state_dict(self) -> dict[str, Any]:
        """Read every generator, without beginning to use CUDA."""
        version, words, gauss = random.getstate()
        numpy_state = np.random.get_state(legacy=False)
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
            "cuda": _cuda_states(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set every generator. Raises MismatchError if more CUDA devices were drawn on than this machine has."""
        cuda = state["cuda"]
        own = len(cuda) == 1 and _is_one_of_several()
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
        # The seed that came with the CPU's state; torch remembers it for CUDA until CUDA is in use.
        torch.cuda.manual_seed_all(torch.initial_seed())
        if cuda:
            # Before CUDA is in use torch only notes the states for later, and a save until then would miss them.
            torch.cuda.init()
        for device, generator_state in enumerate(cuda):
            if generator_state is not None:
                torch.cuda.set_rng_state(generator_state, "cuda" if own else device)

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


def _cuda_states() -> list[torch.Tensor | None]:
    if not torch.cuda.is_initialized():
        return []
    seed = torch.initial_seed()
    states: list[torch.Tensor | None] = []
    generators: tuple[torch.Generator, ...] = torch.cuda.default_generators
    if _is_one_of_several():
        generators = generators[torch.cuda.current_device() :][:1]
    for generator in generators:
        fresh = torch.Generator(generator.device).manual_seed(seed).get_state()
        state = generator.get_state()
        states.append(None if torch.equal(state, fresh) else state)
    while states and states[-1] is None:
        states.pop()
    return states


def _is_one_of_several() -> bool:
    """Whether this process is a rank among others, and so works on one device only."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch (all devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
