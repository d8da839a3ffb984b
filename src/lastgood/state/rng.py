"""The random number generators of a process as one part of a training state."""

from __future__ import annotations

import contextlib
import json
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lastgood._lazy import torch
from lastgood.errors import CorruptCheckpoint, MismatchError
from lastgood.state.checked import Checked
from lastgood.state.digest import state_digest
from lastgood.state.new_world import NewWorld
from lastgood.text import parse_json

__all__ = ["RngState", "generators_kept", "seed_everything"]

_log = logging.getLogger("lastgood")

_USUAL = "MT19937"
"""The kind of numpy's global generator, unless somebody changes it."""


class RngState(Checked):
    """State of the generators of Python, numpy, torch's CPU and every CUDA device, as tensors and plain values.

    A CUDA generator that stands where `torch.manual_seed` put it, and has drawn nothing, is known by the seed of the
    CPU's: it is None, and none at all after the last that is otherwise. So the state is the same before and after a
    process begins to use CUDA, and one that never drew there asks for no device. A seed that was given to CUDA alone
    (`torch.cuda.manual_seed`) is seen only once CUDA is in use: until then torch does not tell it.

    A process that is one rank of several has one device, the current one: only its generator is kept, whatever its
    number, so that ranks that drew alike have equal states, and a rank may go on with another device.
    """

    saved_keys = ("python", "numpy", "torch", "cuda")
    loads_last = True

    def state_dict(self) -> dict[str, Any]:
        """Read every generator, without beginning to use CUDA."""
        version, words, gauss = random.getstate()
        return {
            # Packed into tensors: as a tuple of 625 ints it would be half of a small model's layout.
            # By way of numpy: torch.tensor would make them on the default device, wherever that is.
            "python": {"version": version, "words": torch.from_numpy(np.array(words, dtype=np.int64)), "gauss": gauss},
            "numpy": _numpy_state(),
            "torch": torch.get_rng_state(),
            "cuda": _cuda_states(),
        }

    def check_saved(self, saved: Any, path: str) -> None:
        """Refuse generators of more CUDA devices than this machine has, and another kind of numpy's."""
        if saved["cuda"] and torch.cuda.device_count() < len(saved["cuda"]):
            raise MismatchError(
                f"{path}: the checkpoint holds generators of {len(saved['cuda'])} CUDA devices, this machine has "
                f"{torch.cuda.device_count()}; restore with as many"
            )
        kinds = saved["numpy"]["name"], str(np.random.get_state(legacy=False)["bit_generator"])
        if kinds[0] != kinds[1]:
            raise MismatchError(
                f"{path}: numpy's global generator was a {kinds[0]}, and is a {kinds[1]} now; call "
                f"numpy.random.set_bit_generator(numpy.random.{kinds[0]}()) before attach()"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set every generator. Raises MismatchError as `check_saved` does."""
        self.check_saved(state, "rng")
        cuda = state["cuda"]
        own = len(cuda) == 1 and _is_one_of_several()
        python = state["python"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        _set_numpy(state["numpy"])
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


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Whatever is drawn inside, the generators stand afterwards where they stood before."""
    generators = RngState()
    before = generators.state_dict()
    try:
        yield
    finally:
        if state_digest({"rng": before}) != state_digest({"rng": generators.state_dict()}):
            generators.load_state_dict(before)


def _numpy_state() -> dict[str, Any]:
    """Of numpy's global generator, whose bits may come from any of numpy's kinds."""
    state = np.random.get_state(legacy=False)
    found: dict[str, Any] = {"name": str(state["bit_generator"])}
    if found["name"] == _USUAL:
        found |= {
            "keys": torch.from_numpy(state["state"]["key"].astype(np.int64)),
            "position": int(state["state"]["pos"]),
        }
    else:
        # Numbers of up to 128 bits, and arrays of 64-bit ones.
        bits = {key: value for key, value in state.items() if key not in ("bit_generator", "has_gauss", "gauss")}
        found["bits"] = json.dumps(bits, default=lambda value: value.tolist())
    return found | {"has_gauss": int(state["has_gauss"]), "cached_gauss": float(state["gauss"])}


def _set_numpy(state: Mapping[str, Any]) -> None:
    gauss = {"has_gauss": state["has_gauss"], "gauss": state["cached_gauss"]}
    if state["name"] == _USUAL:
        bits = {"state": {"key": state["keys"].numpy().astype(np.uint32), "pos": state["position"]}}
    else:
        bits = parse_json(state["bits"], "rng: numpy's generator", most_bytes=64 * 1024, error=CorruptCheckpoint)
        bits["state"] = {
            key: np.array(value, dtype=np.uint64) if isinstance(value, list) else value
            for key, value in bits["state"].items()
        }
        if isinstance(bits.get("buffer"), list):
            bits["buffer"] = np.array(bits["buffer"], dtype=np.uint64)
    np.random.set_state({"bit_generator": state["name"], **bits, **gauss})


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
