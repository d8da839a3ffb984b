"""Whether the hosts of a run over several ranks have the memory and the disk for it, asked before any rank is started.

As on one machine (feasible.py) only what is certain to fail is refused: every need is a lower bound.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import Field

from lastgood.checkpointers.registry import checkpointer_class
from lastgood.cluster.hostfile import Hostfile
from lastgood.cluster.ssh.remote import Completed
from lastgood.errors import HostError
from lastgood.experiments.plan.machine_checks import PROCESS_BYTES
from lastgood.experiments.records.base import Spec
from lastgood.experiments.records.spec import RunSpec
from lastgood.experiments.services.place import Place
from lastgood.experiments.systems.over_ranks import writers_of
from lastgood.models import FrozenModel
from lastgood.text import parse_model
from lastgood.units import format_bytes
from lastgood.workloads.registry import workload_options_class

__all__ = ["Need", "Room", "check_needs", "check_room", "judge_room", "needs_of"]

_PROBE_S: Final = 60.0
_MAX_ANSWER_BYTES: Final = 8192

# Runs on a host, under any Python: what is available there, and which kernel and which disk that is.
_PROBE: Final = """
import json, os, sys
folder = os.path.realpath(sys.argv[1])
while not os.path.exists(folder):
    folder = os.path.dirname(folder)
with open("/proc/meminfo") as file:
    memory = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))
for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
    try:
        with open(path) as file:
            memory = min(memory, int(file.read()))
    except (OSError, ValueError):
        pass
with open("/proc/sys/kernel/random/boot_id") as file:
    kernel = file.read().strip()
space = os.statvfs(folder)
found = {"kernel": kernel, "memory_bytes": memory, "folder": folder}
found.update(disk=os.stat(folder).st_dev, disk_bytes=space.f_bavail * space.f_frsize)
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Need:
    """What the ranks of one host take at once, at least."""

    ranks: int
    memory_bytes: int
    disk_bytes: int


class Room(FrozenModel):
    """A host's answer. Hosts with one `kernel` share its memory, and those with one `disk` there also that."""

    kernel: str = Field(max_length=100)
    memory_bytes: int = Field(ge=0)
    folder: str = Field(max_length=4096)
    disk: int
    disk_bytes: int = Field(ge=0)


def check_room(spec: RunSpec, place: Place, scratch: Path, report: Callable[[str], None]) -> None:
    """As `check_needs`, for what a run over several ranks takes."""
    check_needs(spec, needs_of(spec, place.hosts), place, scratch, report)


def check_needs(
    spec: Spec, needs: Mapping[str, Need], place: Place, scratch: Path, report: Callable[[str], None]
) -> None:
    """Refuse a run that some host has no room for. `scratch` is the folder that its checkpoints go below.

    Raises HostError, naming the host, what it needs and what it has; also if a host does not answer. Only of hosts
    whose ranks Slurm starts that is no error but reported: they need not be reached by ssh.
    """
    rooms: dict[str, Room] = {}
    faults = []
    for host, answer in _ask(place, scratch).items():
        try:
            if isinstance(answer, HostError):
                raise answer
            rooms[host] = _read(host, answer)
        except HostError as error:
            faults.append(str(error))
    if faults and place.launcher != "srun":
        raise HostError("; ".join(faults))
    for fault in faults:
        report(f"memory and disk were not checked: {fault}")
    judge_room(spec, needs, rooms)


def needs_of(spec: RunSpec, hosts: Hostfile) -> dict[str, Need]:
    """What `spec` takes of each host, by its name: the processes, training if it is on the CPU, and the system.

    Data-parallel ranks hold the complete state each; any others count with an even share of it.
    """
    workload = workload_options_class(spec.workload).model_validate(spec.workload_options)
    share = 1 if spec.parallel == "ddp" else spec.ranks
    state = workload.state_bytes() // share
    training = state + workload.gradient_bytes() // share if spec.device == "cpu" else 0
    writers = writers_of(spec.system, spec.parallel)
    among = {"machines": spec.ranks, "peers": "own"} if writers == "peers" else {}
    options = checkpointer_class(spec.system).Options.model_validate({**spec.system_options, **among})
    # What ranks hold alike may be written once.
    once = getattr(options, "replicated", "none") != "none"
    needs: dict[str, Need] = {}
    first = True
    for host in hosts.hosts:
        writing = host.slots if writers != "first" else int(first)
        needs[host.name] = Need(
            host.slots,
            host.slots * (PROCESS_BYTES + training) + writing * options.host_bytes(state),
            writing * options.disk_bytes(state // (spec.ranks if once else 1)),
        )
        first = False
    return needs


def judge_room(spec: Spec, needs: Mapping[str, Need], rooms: Mapping[str, Room]) -> None:
    """Compare, all hosts that share a kernel or a disk together. Raises HostError with a sentence for each lack."""
    kernels: dict[str, list[str]] = {}
    disks: dict[tuple[str, int], list[str]] = {}
    for host, room in rooms.items():
        kernels.setdefault(room.kernel, []).append(host)
        disks.setdefault((room.kernel, room.disk), []).append(host)
    problems = []
    for names in kernels.values():
        need = sum(needs[name].memory_bytes for name in names)
        free = min(rooms[name].memory_bytes for name in names)
        if need > free:
            what = f"{format_bytes(need)} of memory for {_ranks(needs, names)}, and {format_bytes(free)} are available"
            problems.append(f"{_named(names)}: {spec.title()} needs at least {what}; lower the slots or the model")
    for names in disks.values():
        need = sum(needs[name].disk_bytes for name in names)
        free = min(rooms[name].disk_bytes for name in names)
        if need > free:
            what = f"{format_bytes(need)} of disk for {_ranks(needs, names)}, and {format_bytes(free)} are free"
            folder = rooms[names[0]].folder
            problems.append(
                f"{_named(names)}: {spec.title()} needs at least {what} in {folder}; choose another scratch"
            )
    if problems:
        raise HostError("\n".join(problems))


def _ask(place: Place, scratch: Path) -> Mapping[str, Completed | HostError]:
    argv = [sys.executable, "-c", _PROBE, str(scratch.absolute())]
    if place.remote is not None:
        return place.remote.run_everywhere(place.hosts.names, argv, _PROBE_S)
    done = subprocess.run(argv, capture_output=True, timeout=_PROBE_S, check=False)
    return {place.hosts.names[0]: Completed(done.returncode, done.stdout, done.stderr)}


def _read(host: str, answer: Completed) -> Room:
    try:
        return parse_model(Room, answer.stdout, host, most_bytes=_MAX_ANSWER_BYTES, error=HostError)
    except HostError:
        said = answer.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise HostError(
            f"{host}: {sys.executable} could not tell its memory and disk (status {answer.rc}): "
            f"{''.join(said)[:200] or answer.text[:200]!r}"
        ) from None


def _ranks(needs: Mapping[str, Need], names: list[str]) -> str:
    count = sum(needs[name].ranks for name in names)
    return f"its {count} ranks" if count > 1 else "its rank"


def _named(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names)} (one machine)"
