"""What the ranks of a job tell each other where each machine has a peer of its own: through torch.distributed.

Peers keep the newest two checkpoints of a machine, and ranks are never equally far. So before one is overwritten, ranks
say which all of them have (`Together.tell` in every save), and what is newer somewhere is forgotten there: no step is
kept on one machine alone. A sequence number means the same save of the same life on all ranks, so that a step of a life
that ended is never taken for the same step of another one.
"""

from __future__ import annotations

import datetime
import os
import socket
from typing import TYPE_CHECKING, Any

from lastgood._lazy import lazy_module
from lastgood.errors import ConfigError

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_module("torch")

__all__ = ["Together", "address_for_peers"]

_LOOPBACK = "127.0.0.1"


def address_for_peers(host: str) -> str:
    """Where this machine's peer listens: `host`, or for loopback the own address of the way to MASTER_ADDR.

    Raises ConfigError where there is no such way.
    """
    master = os.environ.get("MASTER_ADDR", "")
    if host != _LOOPBACK or not master:
        return host
    try:
        # Connecting a datagram socket sends nothing; it asks the kernel for the route.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((master, 9))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"gemini: this machine has no IPv4 route to MASTER_ADDR={master}: {error}; give host=, the address "
            "at which the other machines reach it"
        ) from error


class Together:
    """The ranks of torch.distributed, one on each machine. Made by all of them together.

    Raises ConfigError where it is not initialised, or has other ranks than machines.
    """

    def __init__(self, machine: int, machines: int, timeout_s: float) -> None:
        group = torch.distributed
        if not (group.is_available() and group.is_initialized()):
            raise ConfigError('gemini: peers="own" needs torch.distributed, initialised before, with a rank a machine')
        if (group.get_rank(), group.get_world_size()) != (machine, machines):
            raise ConfigError(
                f"gemini: this is rank {group.get_rank()} of {group.get_world_size()}, and machine {machine} of "
                f'{machines}; with peers="own" they must be the same'
            )
        # Words go over the CPU's network whatever the gradients go over; no device has to wait for them.
        self._group: Any = group.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))
        self._machines = machines

    def tell(self, mine: Any) -> list[Any]:
        """Give all ranks `mine`; returns theirs, by machine. All must call it together.

        Raises RuntimeError, torch's own, where a rank is lost or does not come in time.
        """
        theirs: list[Any] = [None] * self._machines
        torch.distributed.all_gather_object(theirs, mine, group=self._group)
        return theirs
