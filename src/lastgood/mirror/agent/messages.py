"""What an agent in a training and a mirror node say to each other, over the frames of `lastgood.wire.frames`.

The agent connects and proves that it knows the token; then it greets. The node asks; the agent answers with the head of
a state and its chunks (the stream of `lastgood.state.layout`, then the layout), or why it cannot. Digests of weights
come unasked. Chunks carry the number of the question as their sequence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import Field, TypeAdapter, ValidationError

from lastgood._lazy import torch
from lastgood.errors import CorruptCheckpoint
from lastgood.models import FrozenModel
from lastgood.state import state_digest

__all__ = [
    "AGENT_GREETING",
    "CHUNK_BYTES",
    "MAX_LAYOUT_BYTES",
    "Ask",
    "Cannot",
    "Greeting",
    "Message",
    "StateHead",
    "Weights",
    "bare_name",
    "parse_message",
    "weights_digest",
]

AGENT_GREETING: Final = b"lastgood agent 1\n"
CHUNK_BYTES: Final = 4 << 20
MAX_LAYOUT_BYTES: Final = 1 << 30
_WRAPPERS: Final = ("module.", "_orig_mod.")
_Words = Annotated[str, Field(max_length=4000)]
_Step = Annotated[int, Field(ge=0, lt=1 << 62)]
_Number = Annotated[int, Field(ge=1, lt=1 << 62)]
_Bytes = Annotated[int, Field(ge=0, lt=1 << 50)]


class Greeting(FrozenModel):
    """Of the agent: who it is."""

    kind: Literal["greeting"] = "greeting"
    host: _Words
    process: int = Field(ge=0)
    ranks: int = Field(ge=1)
    digest_every: int = Field(default=0, ge=0, lt=1 << 62)
    """Steps between two digests of weights; 0: there will be none."""


class Ask(FrozenModel):
    """Of the node: a full state, please."""

    kind: Literal["ask"] = "ask"
    number: _Number
    why: _Words


class StateHead(FrozenModel):
    """Of the agent: a state follows, in chunks."""

    kind: Literal["state"] = "state"
    number: _Number
    step: _Step
    """Updates that are done in it."""
    stream_bytes: _Bytes
    layout_bytes: Annotated[int, Field(ge=2, le=MAX_LAYOUT_BYTES)]


class Cannot(FrozenModel):
    """Of the agent: no state, and why."""

    kind: Literal["cannot"] = "cannot"
    number: _Number
    why: _Words


class Weights(FrozenModel):
    """Of the agent: the digest of all parameters after a step."""

    kind: Literal["weights"] = "weights"
    step: _Step
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


Message = Greeting | Ask | StateHead | Cannot | Weights
_ADAPTER: Final[TypeAdapter[Message]] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])


def parse_message(content: Mapping[str, Any], other: str) -> Message:
    """Check a message that `other` sent. Raises CorruptCheckpoint for whatever is none."""
    try:
        return _ADAPTER.validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CorruptCheckpoint(f"{other} sent no message of this protocol: {where}: {first['msg']}") from error


def weights_digest(parameters: Mapping[str, torch.Tensor]) -> str:
    """SHA-256, as hex, over names, dtypes, shapes and contents of a model's parameters, frozen ones too.

    Names are those of `named_parameters()` of the module that DistributedDataParallel wraps, without those of modules
    that only wrap.
    """
    return state_digest({bare_name(name): one for name, one in parameters.items()})


def bare_name(name: str) -> str:
    """A parameter's name without those of modules that only wrap."""
    while name.startswith(_WRAPPERS):
        name = name.partition(".")[2]
    return name
