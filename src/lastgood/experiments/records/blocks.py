"""A measurement in pairs: blocks of steps with checkpoints and without, and what else the machine did meanwhile.

Blocks alternate inside one training, so that a slow minute of the machine falls on both (randomised multiple
interleaved trials: Abedi and Brecht, ICPE 2017). docs/timing.md explains the design. Needs no torch.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from lastgood.models import FrozenModel

__all__ = ["PAIR_DESIGN", "Block", "BlockKind", "Disturbance", "PairPlan", "Pairs", "without_none_pairs"]

BlockKind = Literal["with", "without"]


PAIR_DESIGN = 2
"""How blocks are measured today. Records of another design never mix with it. 1: the first save after one warm one."""


class PairPlan(FrozenModel):
    """How long a run goes on measuring pairs of blocks."""

    design: int = Field(default=1, ge=1)
    rounds: int = Field(default=3, ge=2, le=10_000)
    """Undisturbed pairs, at least."""
    half_width: float = Field(default=0.03, gt=0, lt=1)
    """Enough is known once half the interval of the ratio is at most this share of the ratio."""
    budget_s: float = Field(default=30.0, gt=0)
    """Seconds of blocks, after which no further pair is begun. The least number of rounds is measured in any case.
    Half as many more, waits for a calm machine included, if disturbed pairs are to be measured again."""

    @model_serializer(mode="wrap")
    def _write(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without the first design, which wrote none: hashes stay."""
        written: dict[str, Any] = write(self)
        return written if self.design != 1 else {name: value for name, value in written.items() if name != "design"}


class Disturbance(FrozenModel):
    """What others did to the machine during a block. None if this machine does not say."""

    others_cpu_s: float
    """CPU seconds of everything but this run's own processes and the kernel's threads. In user mode only if the run was
    in a namespace of processes (a container, a node of a testbed), in which the kernel's threads are not seen."""
    steal_s: float
    """CPU seconds that the hypervisor gave to other machines."""
    pressure_s: dict[str, float] | None = None
    """Seconds in which some task waited for ``cpu``, ``io`` and ``memory``: the run's own waits are among them."""
    others_disk_bytes: int | None = None
    """Bytes read and written on the scratch folder's disk that this run did not ask for."""
    cpu_hz: float | None = None
    """Mean clock frequency of the cores at the block's end."""
    throttled: int | None = None
    """How often cores were slowed down for heat."""
    device_others: int | None = None
    """Other processes on the CUDA devices at the block's end."""
    device_clock_hz: float | None = None
    """The fastest CUDA device's clock at the block's end."""


class Block(FrozenModel):
    """A stretch of steps, all with checkpoints at the spec's interval or all without."""

    round: int
    """Blocks of one round are neighbours, and compared with each other."""
    kind: BlockKind
    began_s: float
    """Seconds after the first block's begin."""
    steps: int
    elapsed_s: float
    """From its begin to the last step's end. A block with checkpoints begins with a save."""
    drain_s: float
    """After that, until nothing was in progress any more."""
    disturbance: Disturbance
    disturbed: str | None
    """What disturbed it, in words; None if nothing did."""

    @property
    def step_s(self) -> float:
        """Seconds of a step, its share of the drain included."""
        return (self.elapsed_s + self.drain_s) / self.steps


class Pairs(FrozenModel):
    """All blocks of a run, in the order in which they were measured."""

    blocks: list[Block]
    ended_by: Literal["interval", "budget"]
    """Whether the ratio was known well enough, or the time was used up."""
    write_bursts_bytes_per_s: list[float] = Field(default_factory=list)
    """What the disk took in short bursts of plain writes between rounds, flush included."""


def without_none_pairs(written: dict[str, Any]) -> dict[str, Any]:
    """A serialized model without its field `pairs` if that is None: it came later, and texts and hashes stay."""
    return written if written.get("pairs") is not None else {k: v for k, v in written.items() if k != "pairs"}
