"""Checkmate's switch mode: this rank's place in the ring, and what does not go together with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lastgood.checkpointers.checkmate.options import CheckmateOptions
from lastgood.errors import ConfigError
from lastgood.gradients.layout.layout import GradientLayout
from lastgood.gradients.tap.ring import RingTap
from lastgood.gradients.trainer.parameters import TrackedParameters
from lastgood.wire.records import DType
from lastgood.wire.ring import Cover
from lastgood.wire.ring_comm import RingComm
from lastgood.wire.ring_link import listen_ring, parse_address

if TYPE_CHECKING:
    from lastgood.gradients.tap.ring_hook import RingReducer

__all__ = ["check_ring", "open_ring"]


def check_ring(options: CheckmateOptions, tracked: TrackedParameters, tap: RingTap, ranks: int) -> None:
    """Raises ConfigError, the same on all ranks, for what the ring cannot reduce, and for addresses that it lacks."""
    if ranks < 2:
        raise ConfigError('checkmate: tap="ring" needs two ranks or more; a single one has nothing to reduce')
    for name, addresses in (("ring_listen", options.ring_listen), ("ring_next", options.ring_next)):
        if len(addresses) != ranks:
            raise ConfigError(
                f"checkmate: {name} has {len(addresses)} addresses, and there are {ranks} ranks; give one for each, in "
                "their order (docs/checkmate-switch.md)"
            )
    if tap.reduced_ranks != ranks:
        raise ConfigError(
            f"checkmate: DistributedDataParallel reduces over {tap.reduced_ranks} ranks, and the ring has {ranks}; "
            'with tap="ring" its process group is all ranks'
        )
    kinds = {(one.device.type, str(one.dtype).removeprefix("torch.")) for one in tracked.parameters}
    for device, dtype in sorted(kinds):
        if device != "cpu" or dtype not in DType.__members__:
            raise ConfigError(
                f"checkmate: the ring reduces {', '.join(DType.__members__)} on the CPU, and this training has "
                f'{dtype} on {device}; use tap="bucket"'
            )


def open_ring(
    options: CheckmateOptions,
    tracked: TrackedParameters,
    layout: GradientLayout,
    token: bytes,
    job: str,
    incarnation: int,
    rank: int,
) -> RingReducer:
    """Connect to both neighbours, through the switch. All ranks call it within `ring_timeout_s`.

    Raises HostError if this rank cannot listen, WaitTimeout if a neighbour does not come, MismatchError if it
    belongs elsewhere.
    """
    from lastgood.gradients.tap.ring_hook import RingReducer

    comm = RingComm(
        rank,
        layout.ranks,
        listener=listen_ring(*parse_address(options.ring_listen[rank])),
        next_address=options.ring_next[rank],
        token=token,
        job=job,
        epoch=incarnation,
        layout=layout.digest,
        timeout_s=options.ring_timeout_s,
        cover=Cover(options.cover),
    )
    return RingReducer(comm, layout, tracked.parameters)
