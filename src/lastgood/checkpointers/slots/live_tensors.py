"""What a training already has for the tensors of a checkpoint: their memory, and how they are spread over ranks."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from lastgood._lazy import torch
from lastgood.checkpointers.slots.contents import NamedTensor, named_tensors
from lastgood.state import flatten, is_stateful
from lastgood.state.compare import plain_names
from lastgood.state.shards import describe_shard, is_sharded

__all__ = ["LiveTensors", "keeps_its_tensors", "parameter_beside"]

_NUMBER = re.compile("[0-9]{1,9}")


def keeps_its_tensors(part: Any) -> bool:
    """Whether what state_dict shows of `part` is its own memory, and load_state_dict only copies into it."""
    return isinstance(part, (torch.nn.Module, torch.optim.Optimizer, torch.Tensor))


def parameter_beside(optimizer: Any, part: str, name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
    """The parameter that a tensor of this name (PART.state.NUMBER.KEY) belongs to, if it has this shape."""
    path = name[len(part) + 1 :].split(".")
    if not isinstance(optimizer, torch.optim.Optimizer) or len(path) != 3 or path[0] != "state":
        return None
    numbered = [item for group in optimizer.param_groups for item in group["params"]]
    # A file's digits may be of any alphabet, and of any length.
    number = int(path[1]) if _NUMBER.fullmatch(path[1]) else len(numbered)
    if number >= len(numbered):
        return None
    parameter: torch.Tensor = numbered[number]
    return parameter if tuple(parameter.shape) == shape else None


def _shows_itself(part: Any) -> bool:
    """Whether what a part holds can be looked at without calling into a user's own object."""
    if isinstance(part, Mapping) and not is_stateful(part):
        return all(map(_shows_itself, part.values()))
    if isinstance(part, (list, tuple)):
        return all(map(_shows_itself, part))
    return keeps_its_tensors(part) or not is_stateful(part)


class LiveTensors:
    """The tensors of a live state by the names that a checkpoint gives them.

    The state_dict of a user's own object is not asked before it is loaded, which may be more than a look; but for one
    in `spread`, the parts of which the checkpoint holds tensors that are spread over ranks: how they are spread now is
    known from nothing else.
    """

    def __init__(self, state: Mapping[str, Any], spread: Collection[str] = ()) -> None:
        self.state = state
        shown = {name: part for name, part in state.items() if name in spread or _shows_itself(part)}
        self.flat = flatten(shown, spread=True)
        self.named = {tensor.name: tensor for tensor in named_tensors(self.flat.layout)}
        shards = [name for name, tensor in self.named.items() if tensor.shard is not None]
        self._spread: dict[str, Any] = dict(zip(shards, self.flat.sharded, strict=True))
        self._plain = dict(zip(plain_names(list(self.named)), self.named.values(), strict=True))

    def known(self, name: str) -> NamedTensor | None:
        """The live tensor that a checkpoint calls so: wrappers (DDP, torch.compile) may put words into names."""
        return self.named.get(name) or self._plain.get(plain_names([name])[0])

    def memory(self, name: str) -> torch.Tensor | None:
        """The live tensor of this name (of a spread one, its part here) if loading only copies into it."""
        tensor = self.known(name)
        if tensor is None or tensor.is_array or not keeps_its_tensors(self.state[tensor.part]):
            return None
        return tensor.over(self.flat.blocks)

    def like(self, tensor: NamedTensor) -> Any:
        """The live DTensor that a checkpoint's tensor belongs to or is to be spread as; None if it is in one piece.

        An optimizer makes its tensors in the first step; before that they are to be spread as their parameter, if they
        have its shape.
        """
        known = self.known(tensor.name)
        if known is not None:
            return self._spread.get(known.name)
        parameter = self.parameter(tensor)
        return parameter if parameter is not None and is_sharded(parameter) else None

    def parameter(self, tensor: NamedTensor) -> torch.Tensor | None:
        """The parameter beside which an optimizer will want this tensor, if it has its shape."""
        return parameter_beside(self.state.get(tensor.part), tensor.part, tensor.name, tensor.whole_shape)

    def fits_in_place(self, tensor: NamedTensor) -> bool:
        """Whether a part that this rank wrote is the part that it wants now."""
        if tensor.owner is not None:
            return False
        like = self.like(tensor)
        if tensor.shard is None or like is None:
            return tensor.shard is None and like is None
        wanted = describe_shard(like, tensor.name)
        return (wanted.shape, wanted.runs) == (tensor.shard.shape, tensor.shard.runs)
