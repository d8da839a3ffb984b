"""Options of Checkmate."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from lastgood.checkpointers.base import DEFAULT_TIMEOUT_S
from lastgood.checkpointers.options import BaseOptions
from lastgood.gradients.layout.layout import BUCKET_BYTES
from lastgood.gradients.layout.spans import Cover
from lastgood.gradients.link.data_link import DataSettings
from lastgood.units import MIB
from lastgood.wire.records import ITEM_BYTES

__all__ = ["CheckmateOptions"]

_DROP_PATIENCE_S = 0.25
_COPIED_BYTES = 4 * MIB
_LONGEST_ITEM = max(ITEM_BYTES.values())


class CheckmateOptions(BaseOptions):
    """Options of Checkmate. `shadows` and `token_file` say where a run happens; nothing starts without them."""

    path_options: ClassVar[tuple[str, ...]] = ("token_file",)
    system: ClassVar[str] = "checkmate"
    wants: ClassVar[str] = (
        'give shadows=["host:port", ...]; `lastgood shadow serve` starts one each (docs/checkmate.md)'
    )
    wants_token: ClassVar[str] = "give token_file=, the one that `lastgood shadow serve --token-file` has"
    one_side: ClassVar[bool] = False

    shadows: tuple[str, ...] = ()
    """``host:port`` of every shadow, in their order (`lastgood shadow serve`)."""
    token_file: str | None = None
    """The file with the secret that trainers and shadows share."""
    policy: Literal["block", "queue", "drop"] = "block"
    """What training does when a shadow is slow. ``block``: wait, at most `patience_s`; ``queue``: let up to
    `queue_bytes` wait in memory, and wait only when that is full; ``drop``: never wait, leave out what finds no room,
    and bring the shadow up to date again from the training's state."""
    queue_bytes: int = Field(default=256 * MIB, ge=MIB)
    """Memory on each rank, for each shadow, for gradients that are copied on their way out."""
    patience_s: float | None = Field(default=None, gt=0, le=DEFAULT_TIMEOUT_S)
    """How long a shadow may lag before the others go on without it; None: 30 s, with ``drop`` 0.25 s."""
    timeout_s: float = Field(default=30.0, gt=0, le=DEFAULT_TIMEOUT_S)
    """A shadow that does not answer for so long counts as stuck."""
    verify_every: int = Field(default=100, ge=0)
    """Iterations between two comparisons of a bucket, in turn, with what its shadow has; 0: never."""
    spill_every: int = Field(default=0, ge=0)
    """Saved steps between two that shadows make durable; 0: never, all is in memory."""
    cover: Cover = "balanced"
    """Which rank sends which part of what all of them hold: equal parts, or as the paper's artefact does."""
    tap: Literal["auto", "bucket", "step", "ring"] = "auto"
    """Where gradients are taken: ``bucket`` in DDP's communication hook, ``step`` at the optimizer's step (FSDP2,
    DeepSpeed, one process); ``auto`` takes the hook if it is registered. ``ring``: the hook reduces by Lastgood's
    own ring, and `lastgood shadow switch` copies its final sends to the shadows; on CPUs only."""
    ring_listen: tuple[str, ...] = ()
    """``host:port`` where each rank listens for the one before it, in the order of ranks; with ``tap="ring"`` only."""
    ring_next: tuple[str, ...] = ()
    """``host:port`` where each rank connects, in the order of ranks: the switch's link to the next one."""
    ring_timeout_s: float = Field(default=60.0, gt=0, le=DEFAULT_TIMEOUT_S)
    """A rank that does nothing for so long while others wait for it in the ring ends the training."""
    bucket_bytes: int = Field(default=BUCKET_BYTES, ge=1)
    """Size of the buckets that are shared out over shadows."""
    seed_bytes_per_step: int = Field(default=64 * MIB, ge=1)
    """So much of the training's state is copied in one step at most for a shadow that wants it, but one bucket at
    least."""

    @field_validator("shadows", "ring_listen", "ring_next")
    @classmethod
    def _addresses(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        for address in addresses:
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 65536:
                raise ValueError(f"{address!r} is no HOST:PORT")
        return addresses

    @field_validator("shadows")
    @classmethod
    def _different(cls, shadows: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(shadows)) != len(shadows):
            raise ValueError("a shadow is named twice")
        return shadows

    @model_validator(mode="after")
    def _ring(self) -> CheckmateOptions:
        if self.tap != "ring" and (self.ring_listen or self.ring_next):
            raise ValueError('ring_listen and ring_next are of no use without tap="ring"')
        return self

    @property
    def behind_s(self) -> float:
        """`patience_s`, resolved."""
        if self.patience_s is not None:
            return self.patience_s
        return _DROP_PATIENCE_S if self.policy == "drop" else 30.0

    def data_settings(self) -> DataSettings:
        """Of data connections. A shadow that lags is given up before a connection to another one is."""
        patience_s = 0.0 if self.policy == "drop" else 2 * self.behind_s
        copied = min(_COPIED_BYTES, self.queue_bytes // 4 // _LONGEST_ITEM * _LONGEST_ITEM)
        return DataSettings(
            self.queue_bytes, copied, patience_s, 4 * max(self.behind_s, self.timeout_s), self.tap == "ring"
        )

    def disk_bytes(self, state_bytes: int) -> int:
        """Nothing goes to a disk here; shadows spill to their own."""
        del state_bytes
        return 0

    def host_bytes(self, state_bytes: int) -> int:
        """Beside the training: queues, and copies of buckets for seeds. Shadows have their own memory."""
        del state_bytes
        return max(1, len(self.shadows)) * self.queue_bytes + self.seed_bytes_per_step
