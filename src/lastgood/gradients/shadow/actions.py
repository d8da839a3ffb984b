"""What a shadow's state asks for: words to trainers and changes of the receiver's windows, and work in memory."""

from __future__ import annotations

from dataclasses import dataclass

from lastgood.gradients.protocol.messages import Message, Step

__all__ = ["Apply", "Check", "Commit", "Copy", "DropSide", "Open", "Output", "Tell", "Window", "Work"]


@dataclass(frozen=True)
class Tell:
    """Say this to rank 0, or to all ranks."""

    message: Message
    everyone: bool = False


@dataclass(frozen=True)
class Window:
    """From now on this bucket receives iteration `first` and those after it; older gradients may be overwritten.

    `ask`: `window_set` is to tell which iterations it holds completely, since newer ones overwrote older ones.
    """

    bucket: int
    first: int
    ask: bool = False


@dataclass(frozen=True)
class Open:
    """This bucket waits for a seed: keep the newest gradients, overwrite older ones, block nobody."""

    bucket: int


@dataclass(frozen=True)
class DropSide:
    """The side records of this iteration are of no use any more."""

    iteration: int


Output = Tell | Window | Open | DropSide


@dataclass(frozen=True)
class Apply:
    """Update a bucket with the gradients of an iteration; the step's `rule` is None if nothing was applied."""

    bucket: int
    iteration: int
    step: Step


@dataclass(frozen=True)
class Commit:
    """Put a bucket's landed seed in the place of its value."""

    bucket: int
    iteration: int


@dataclass(frozen=True)
class Check:
    """Compare a bucket's checksum with the trainer's."""

    bucket: int
    iteration: int
    checksum: int


@dataclass(frozen=True)
class Copy:
    """Copy a bucket for the spill of an iteration."""

    bucket: int
    iteration: int


Work = Apply | Commit | Check | Copy
