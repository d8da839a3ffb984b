"""Which systems and models run over several ranks, and who writes what. Needs no torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Final, Literal

from lastgood.checkpointers.registry import all_traits, system_traits
from lastgood.checkpointers.traits import RanksWrite
from lastgood.errors import ConfigError
from lastgood.experiments.records.spec import Parallel

__all__ = ["MODELS_OF", "PARTED", "Writers", "why_no_deepspeed", "why_not_over_ranks", "writers_of"]

Writers = RanksWrite | Literal["apart", "together"]
"""As a system declares it (checkpointers/traits.py); ``apart``: each rank's own, in a directory of its own, without an
agreement; ``together``: all ranks one checkpoint of their shards, by the system's `over_shards`."""

PARTED: Final[tuple[Parallel, ...]] = ("zero1", "zero2", "zero3", "pipeline")
"""DeepSpeed's ways: what a rank keeps is a part of its own, in plain tensors."""
_CAUSAL: Final = ("opt", "bloom")
MODELS_OF: Final[Mapping[Parallel, tuple[str, ...] | None]] = {
    "none": None,
    "ddp": None,
    "fsdp2": _CAUSAL,
    **dict.fromkeys(PARTED, _CAUSAL),
}
"""Models that can be trained in a way; None: all."""
_OWN_STATE: Final = ("transformer_xl",)
"""Models with a state of each rank's own: a memory of hidden states. Statistics of BatchNorm are rank 0's, which DDP
gives to all in each forward pass."""


def writers_of(system: str, parallel: Parallel) -> Writers:
    """Who writes. Raises ConfigError for a system that does not run over several ranks."""
    traits = system_traits(system)
    writers = traits.ranks_write
    if writers is None:
        raise ConfigError(_not_over_ranks(system))
    if parallel == "fsdp2" and traits.over_shards is not None:
        return "together"
    return "apart" if writers == "first" and parallel in PARTED else writers


def _not_over_ranks(system: str) -> str:
    known = (name for name, traits in all_traits()[0].items() if traits.ranks_write is not None)
    return f"{system} does not run over several ranks here; known: {', '.join(known)}"


def why_no_deepspeed(parallel: Parallel) -> str | None:
    """Why nothing can be trained in this way here, with what to do; None if it can. Imports nothing."""
    if parallel in PARTED and importlib.util.find_spec("deepspeed") is None:
        return f"{parallel} needs DeepSpeed, which is not installed; pip install 'lastgood[deepspeed]'"
    return None


def why_not_over_ranks(model: str, system: str, parallel: Parallel, ranks: int, nodes: int) -> str | None:
    """Why this cannot be measured over several ranks, with what can instead; None if it can."""
    if system_traits(system).ranks_write is None:
        return _not_over_ranks(system)
    models = MODELS_OF[parallel]
    if models is not None and model not in models:
        return f"{parallel} is for {' and '.join(models)}, not for {model}; ddp is for all models"
    writers = writers_of(system, parallel)
    if writers in ("first", "peers") and parallel == "fsdp2":
        return f"{system} keeps plain tensors, which no rank has under fsdp2; it goes with ddp and DeepSpeed's ways"
    if writers == "shadows" and parallel != "ddp":
        return f"{system} is measured under ddp, not under {parallel}"
    if writers == "first" and model in _OWN_STATE:
        return (
            f"{system} writes rank 0's state, and every rank of {model} has a part of its own; pccheck writes them all"
        )
    if writers == "peers" and (nodes < 2 or ranks != nodes):
        return f"{system} needs two nodes or more, with one rank on each, not {ranks} ranks on {nodes}"
    return None
