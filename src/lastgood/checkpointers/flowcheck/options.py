"""Options of FlowCheck."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, field_validator

from lastgood.checkpointers.base import DEFAULT_TIMEOUT_S
from lastgood.checkpointers.options import BaseOptions

__all__ = ["FlowCheckOptions"]


class FlowCheckOptions(BaseOptions):
    """Options of FlowCheck. They say whom to ask; nothing here is needed while the training runs."""

    path_options: ClassVar[tuple[str, ...]] = ("token_file",)
    system: ClassVar[str] = "flowcheck"
    wants: ClassVar[str] = 'give nodes=["host:port"]; `lastgood mirror run` starts one (docs/flowcheck.md)'
    wants_token: ClassVar[str] = "give token_file=, the one that `lastgood mirror run --token-file` has"
    one_side: ClassVar[bool] = True

    nodes: tuple[str, ...] = ()
    """``host:port`` of the mirror node (`lastgood mirror run`)."""
    token_file: str | None = None
    """The file with the secret that the node shares with those who restore."""
    timeout_s: float = Field(default=30.0, gt=0, le=DEFAULT_TIMEOUT_S)
    """A node that does not answer for so long counts as stuck."""
    patience_s: float = Field(default=10.0, gt=0, le=DEFAULT_TIMEOUT_S)
    """How long `drain` waits for a node that holds nothing new: the last step of a model with buffers is held only if
    another forward pass follows."""

    @field_validator("nodes")
    @classmethod
    def _one(cls, nodes: tuple[str, ...]) -> tuple[str, ...]:
        for address in nodes:
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 65536:
                raise ValueError(f"{address!r} is no HOST:PORT")
        if len(nodes) > 1:
            raise ValueError("a training has one mirror node; each of several would hold all of the state")
        return nodes

    @property
    def shadows(self) -> tuple[str, ...]:
        """The node answers as a shadow does, which holds all."""
        return self.nodes

    def disk_bytes(self, state_bytes: int) -> int:
        """Nothing goes to a disk here; the node spills to its own."""
        del state_bytes
        return 0
