"""What the ranks of a job tell each other through torch.distributed, in systems that do not use the agreement.

Gemini's peers keep the newest two checkpoints of a machine, and ranks are never equally far. So before one is
overwritten, ranks say which all of them have (`RankExchange.tell` in every save), and what is newer somewhere is
forgotten there: no step is kept on one machine alone. A sequence number means the same save of the same incarnation on
all ranks, so that a step of one that ended is never taken for the same step of another.
"""

from __future__ import annotations

import datetime
from typing import Any

from lastgood._lazy import torch
from lastgood.errors import ConfigError

__all__ = ["RankExchange"]


class RankExchange:
    """The ranks of torch.distributed, one on each machine. Made by all of them together.

    `system` is the one that asks, for messages. Raises ConfigError if torch.distributed is not initialised, or has
    other ranks than machines.
    """

    def __init__(self, system: str, machine: int, machines: int, timeout_s: float) -> None:
        group = torch.distributed
        if not (group.is_available() and group.is_initialized()):
            raise ConfigError(
                f"{system}: the exchange between ranks needs torch.distributed; call "
                "torch.distributed.init_process_group() before, with a rank a machine"
            )
        if (group.get_rank(), group.get_world_size()) != (machine, machines):
            raise ConfigError(
                f"{system}: this is rank {group.get_rank()} of {group.get_world_size()}, and machine {machine} of "
                f"{machines}; they must be the same"
            )
        # Messages go over the CPU's network whatever the gradients go over; no device has to wait for them.
        self._group: Any = group.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))
        self._machines = machines

    def tell(self, mine: Any) -> list[Any]:
        """Give all ranks `mine`; returns theirs, by machine. All must call it together.

        Raises RuntimeError, torch's own, if a rank is lost or does not come in time.
        """
        theirs: list[Any] = [None] * self._machines
        torch.distributed.all_gather_object(theirs, mine, group=self._group)
        return theirs
