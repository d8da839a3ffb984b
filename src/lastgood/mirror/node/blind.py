"""From when on a mirror node cannot tell states, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["LATE", "Blind", "other_weights"]

LATE: Final = "the capture began in the middle of an incarnation of the training"


@dataclass(frozen=True)
class Blind:
    """The node cannot tell states from some step on."""

    since: int | None
    """The first iteration that it cannot tell; None: it never knew any of this incarnation."""
    why: str

    def __str__(self) -> str:
        """For people."""
        return f"blind since step {'?' if self.since is None else self.since}, because {self.why}"


def other_weights(step: int) -> str:
    """Why it is blind if the training's agent tells another digest."""
    return (
        f"the training's weights after step {step} are not those that its packets lead to here (its agent tells "
        "another digest): nothing from that step on is given back"
    )
