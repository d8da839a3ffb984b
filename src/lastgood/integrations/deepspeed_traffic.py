"""Tells Gemini when DeepSpeed is on the network: every collective and every message between stages goes one way."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Final

from lastgood._lazy import torch
from lastgood.checkpointers.gemini.traffic import Traffic
from lastgood.errors import ConfigError

__all__ = ["mark_communication"]

_OPERATIONS: Final = (
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_reduce",
    "all_reduce_coalesced",
    "broadcast",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "send",
)


def mark_communication(traffic: Traffic) -> None:
    """Mark in `traffic` what DeepSpeed's communication backend of this process does from now on.

    An operation that waits for another rank counts from its call on: that this rank waits, and is not yet sent to,
    cannot be seen here. On CUDA a mark ends when the device has come past the operation. Call it once, after DeepSpeed
    is initialised. Raises ConfigError if it is not, or its backend has another interface.
    """
    module = sys.modules.get("deepspeed.comm.comm")
    backend = getattr(module, "cdb", None)
    lacking = [name for name in _OPERATIONS if not hasattr(backend, name)]
    if lacking:
        raise ConfigError(
            f"DeepSpeed's communication backend {type(backend).__name__} has no {', '.join(lacking)}: call this after "
            "deepspeed.initialize; docs/deepspeed.md names the versions that this Lastgood knows"
        )
    for name in _OPERATIONS:
        setattr(backend, name, _marked(getattr(backend, name), traffic))


def _marked(operation: Callable[..., Any], traffic: Traffic) -> Callable[..., Any]:
    @functools.wraps(operation)
    def marked(*args: Any, **kwargs: Any) -> Any:
        traffic.begin()
        try:
            work = operation(*args, **kwargs)
        except BaseException:
            traffic.end()
            raise
        if hasattr(work, "get_future"):
            work.get_future().then(lambda _: _end(traffic))
        else:
            _end(traffic)
        return work

    return marked


def _end(traffic: Traffic) -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        event = torch.cuda.Event(blocking=True)
        event.record()
        traffic.end_after(event)
    else:
        traffic.end()
