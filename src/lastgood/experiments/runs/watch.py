"""Watches the machines of a run while its blocks are timed: one process on each looks, and all hear what it saw."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lastgood.experiments.machine.disturbance import Look, disturbance_between, disturbed_by, look
from lastgood.experiments.machine.facts import boot_id, usable_cores
from lastgood.experiments.records.blocks import Disturbance
from lastgood.experiments.runs.part import Part

__all__ = ["Found", "Seen", "Watch", "merge_seen", "what_disturbed", "worst_of"]

_CALM_S = 0.1
"""For so long others must have had at most a tenth of a core for a machine to be calm again after a disturbance."""
_CALM_SHARE = 0.1
_MORE_IS_WORSE = ("others_cpu_s", "steal_s", "others_disk_bytes", "throttled", "device_others")
_LESS_IS_WORSE = ("cpu_hz", "device_clock_hz")


@dataclass(frozen=True)
class Seen:
    """What one process saw of its machine: two looks."""

    host: str
    kernel: str
    """Boot id: nodes of a testbed share one, and with it cores and disks."""
    processes: str
    """The namespace whose processes it sees: a node of a testbed sees its own only."""
    cores: int
    before: Look
    after: Look


@dataclass(frozen=True)
class Found:
    """What others did to one machine between two looks."""

    host: str
    disturbance: Disturbance
    elapsed_s: float
    cores: int


class Watch:
    """Looks at the machines of a run. All its processes call each method together, outside of what is timed.

    `folder` is the run's own, on the disk that checkpoints go to.
    """

    def __init__(self, part: Part, folder: Path, *, device: bool) -> None:
        self._part, self._folder, self._device = part, folder, device
        self._roots = part.processes_to_watch(folder)

    def look(self) -> Look | None:
        """None if another process looks at this machine."""
        return None if self._roots is None else look(self._roots, self._folder, device=self._device)

    def between(self, before: Look | None, after: Look | None) -> list[Found]:
        """What others did to each machine, the first rank's first; the same on all processes."""
        own = None
        if before is not None and after is not None:
            processes = str(Path("/proc/self/ns/pid").readlink())
            own = Seen(socket.gethostname(), boot_id(), processes, usable_cores(), before, after)
        return merge_seen(one for one in self._part.gather(own) if one is not None)

    def wait_until_calm(self, until_s: float) -> bool:
        """Sleep until others have paused everywhere: a block that begins in a pause is likely to end in it.

        False if it is later than `until_s` (of `time.perf_counter()` of the first rank) by then.
        """
        before = self.look()
        while self._part.follow(_at_s(before) < until_s):
            time.sleep(_CALM_S)
            after = self.look()
            found = self.between(before, after)
            if all(one.disturbance.others_cpu_s <= _CALM_SHARE * one.elapsed_s for one in found):
                return self._part.follow(_at_s(after) < until_s)
            before = after
        return False


def _at_s(one: Look | None) -> float:
    return 0.0 if one is None else one.at_s


def merge_seen(seen: Iterable[Seen]) -> list[Found]:
    """One for each machine. What the processes of all its nodes did is the run's own; of each view one counts. Pure.

    Who sees the kernel's threads sees the processes of all nodes as well, so that the others' views add nothing.
    """
    machines: dict[str, dict[str, Seen]] = {}
    for one in seen:
        machines.setdefault(one.kernel, {}).setdefault(one.processes, one)
    found = []
    for every in machines.values():
        views = {name: one for name, one in every.items() if one.before.sees_kernel} or every
        first = next(iter(views.values()))
        before = _with_own(first.before, [one.before for one in views.values()])
        after = _with_own(first.after, [one.after for one in views.values()])
        found.append(Found(first.host, disturbance_between(before, after), after.at_s - before.at_s, first.cores))
    return found


def _with_own(first: Look, looks: Sequence[Look]) -> Look:
    return replace(
        first,
        own_cpu_s=sum(one.own_cpu_s for one in looks),
        own_disk_bytes=sum(one.own_disk_bytes for one in looks),
    )


def what_disturbed(found: Sequence[Found], disk_bytes_per_s: float | None) -> str | None:
    """What disturbed a block, in words, with the machine's name if it is one of several; None if nothing did.

    `disk_bytes_per_s` is what the disk takes at best.
    """
    for one in found:
        reason = disturbed_by(one.disturbance, one.elapsed_s, disk_bytes_per_s, one.cores)
        if reason is not None:
            return reason if len(found) == 1 else f"{one.host}: {reason}"
    return None


def worst_of(found: Sequence[Found]) -> Disturbance:
    """Of each number the worst of any machine: the most, but of clocks the least."""
    if len(found) == 1:
        return found[0].disturbance

    def values(name: str) -> list[Any]:
        each = [getattr(one.disturbance, name) for one in found]
        return [value for value in each if value is not None]

    pressures = values("pressure_s")
    return Disturbance(
        pressure_s={name: max(one[name] for one in pressures) for name in pressures[0]} if pressures else None,
        **{name: max(values(name), default=None) for name in _MORE_IS_WORSE},
        **{name: min(values(name), default=None) for name in _LESS_IS_WORSE},
    )
