"""What others do to the machine while something is timed: CPU time, steal, pressure, disk traffic, clocks and heat.

Everything is a difference of two looks at counters of the kernel. A look takes some milliseconds and is made outside of
what is timed. If the kernel does not report something (a container, no PSI, no frequency driver) it is None. No torch.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from lastgood.experiments.machine.facts import usable_cores
from lastgood.experiments.records.blocks import Disturbance
from lastgood.mounts import nearest_folder

__all__ = ["Look", "disturbance_between", "disturbed_by", "look", "processes_naming"]

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_SECTOR_BYTES = 512
_PROC = Path("/proc")
_KERNEL_THREAD = 0x00200000
"""PF_KTHREAD among a process's flags: what kernel threads do, they mostly do for the run (its writing, its packets)."""
_INTERRUPTS = b"(ksoftirqd/"
"""Kernel threads whose time the machine's counters book as interrupts, which is nobody's."""
_MOST_SHARE = 0.03
"""Of all cores' time, and of what the disk could have taken, that others may have before a block counts as disturbed.
Half of what is told apart (a half width of 3 % of a ratio) would be better; less is not to be had from counters that
count in hundredths of a second."""


@dataclass(frozen=True)
class Look:
    """Counters at one moment."""

    at_s: float
    busy_s: float
    """CPU time of all processes since the machine started; without `sees_kernel`, in user mode only."""
    own_cpu_s: float
    """The same of the processes that were asked for, and of kernel threads."""
    steal_s: float
    pressure_s: dict[str, float] | None
    disk_bytes: int | None
    """Read and written on the disk."""
    own_disk_bytes: int
    throttled: int | None
    device: tuple[int, float] | None
    """Other processes on the CUDA devices, and the highest of their clocks in hertz: idle devices slow down."""
    cpu_hz: float | None = None
    """Mean clock frequency of the cores."""
    sees_kernel: bool = True
    """Whether kernel threads are among the processes that are seen. In a namespace of processes, as in a container or a
    node of a testbed, they are not, and their time, which is in the machine's counters, would be taken for others'."""


def look(roots: Collection[int], scratch: Path, *, device: bool = False) -> Look:
    """Look at the machine. `roots` and all their descendants are this run; `scratch` lies on the disk to watch.

    With `device`, CUDA devices are asked as well, which takes about 50 ms.
    """
    processes = _processes()
    own = _descendants(roots, {pid: one.parent for pid, one in processes.items()})
    # Kernel threads work in kernel mode only: without that, what cannot be told from others' work is in neither sum.
    sees_kernel = any(one.of_kernel for one in processes.values())
    busy_s, steal_s = _cpu(with_kernel=sees_kernel)
    own_cpu_s = sum(one.cpu_s(with_kernel=sees_kernel) for pid, one in processes.items() if one.of_kernel or pid in own)
    own_disk_bytes = sum(_moved_bytes(pid) for pid in own)
    return Look(
        at_s=time.perf_counter(),
        busy_s=busy_s,
        own_cpu_s=own_cpu_s,
        steal_s=steal_s,
        pressure_s=_pressure(),
        disk_bytes=_disk_bytes(scratch),
        own_disk_bytes=own_disk_bytes,
        throttled=_throttled(),
        device=_devices(own) if device else None,
        cpu_hz=_frequency_hz(),
        sees_kernel=sees_kernel,
    )


def processes_naming(text: str) -> frozenset[int]:
    """Processes that have `text` on their command line, as far as this process sees any."""
    wanted = os.fsencode(text)
    found = set()
    for path in _PROC.glob("[0-9]*/cmdline"):
        try:
            if wanted in path.read_bytes():
                found.add(int(path.parent.name))
        except OSError:
            continue  # it has ended
    return frozenset(found)


def disturbance_between(before: Look, after: Look) -> Disturbance:
    """What others did between two looks. Pure."""
    disk = None
    if before.disk_bytes is not None and after.disk_bytes is not None:
        own = after.own_disk_bytes - before.own_disk_bytes
        disk = max(0, after.disk_bytes - before.disk_bytes - own)
    pressure = None
    if before.pressure_s is not None and after.pressure_s is not None:
        pressure = {name: total - before.pressure_s[name] for name, total in after.pressure_s.items()}
    throttled = None
    if before.throttled is not None and after.throttled is not None:
        throttled = after.throttled - before.throttled
    return Disturbance(
        others_cpu_s=max(0.0, after.busy_s - before.busy_s - (after.own_cpu_s - before.own_cpu_s)),
        steal_s=after.steal_s - before.steal_s,
        pressure_s=pressure,
        others_disk_bytes=disk,
        cpu_hz=after.cpu_hz,
        throttled=throttled,
        device_others=after.device[0] if after.device else None,
        device_clock_hz=after.device[1] if after.device else None,
    )


def disturbed_by(
    found: Disturbance, elapsed_s: float, disk_bytes_per_s: float | None, cores: int | None = None
) -> str | None:
    """What makes a block of `elapsed_s` seconds worth less than an undisturbed one, in words; None if nothing does.

    `disk_bytes_per_s` is what the disk takes at best, `cores` how many the machine has (None: this one). Pressure and
    clocks decide nothing: a run that waits for its own disk, or for its own threads, raises them as well.
    """
    room_s = _MOST_SHARE * (cores or usable_cores()) * elapsed_s + 2 / _TICKS_PER_S
    if found.others_cpu_s > room_s:
        return f"other processes took {found.others_cpu_s:.2f} s of CPU time"
    if found.steal_s > room_s:
        return f"other virtual machines took {found.steal_s:.2f} s of CPU time (steal)"
    if found.others_disk_bytes is not None and disk_bytes_per_s is not None:
        room_bytes = _MOST_SHARE * disk_bytes_per_s * elapsed_s + (1 << 20)
        if found.others_disk_bytes > room_bytes:
            return f"other processes moved {found.others_disk_bytes / 1e6:.0f} MB on the disk"
    if found.throttled:
        return f"cores were slowed down for heat {found.throttled} times"
    if found.device_others:
        return f"{found.device_others} other processes were on the GPU"
    return None


def _cpu(*, with_kernel: bool) -> tuple[float, float]:
    """Busy and stolen seconds of all cores. Time in interrupts is nobody's."""
    with (_PROC / "stat").open(encoding="ascii") as lines:
        fields = [int(text) for text in lines.readline().split()[1:]]
    user, nice, system, steal = fields[0], fields[1], fields[2], fields[7]
    return (user + nice + (system if with_kernel else 0)) / _TICKS_PER_S, steal / _TICKS_PER_S


@dataclass(frozen=True)
class _Process:
    """One process's numbers. Of children that have ended and were waited for, their parents have the sum."""

    parent: int
    of_kernel: bool
    user_ticks: int
    system_ticks: int

    def cpu_s(self, *, with_kernel: bool) -> float:
        return (self.user_ticks + (self.system_ticks if with_kernel else 0)) / _TICKS_PER_S


def _processes() -> dict[int, _Process]:
    """All processes that this one sees, but for kernel threads that only serve interrupts."""
    found = {}
    for pid in (int(path.name) for path in _PROC.iterdir() if path.name.isdigit()):
        try:
            # The name in brackets may hold anything; what follows the last bracket is numbers.
            head, _, tail = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")
        except OSError:
            continue  # it has ended
        fields = [int(field) for field in tail.split()[1:15]]
        parent, flags, user, system, user_of_children, system_of_children = (fields[n] for n in (0, 5, 10, 11, 12, 13))
        of_kernel = bool(flags & _KERNEL_THREAD)
        if not (of_kernel and _INTERRUPTS in head):
            found[pid] = _Process(parent, of_kernel, user + user_of_children, system + system_of_children)
    return found


def _descendants(roots: Collection[int], parents: dict[int, int]) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found, waiting = set(roots), list(roots)
    while waiting:
        for child in children.get(waiting.pop(), ()):
            if child not in found:
                found.add(child)
                waiting.append(child)
    return found


def _moved_bytes(pid: int) -> int:
    try:
        text = (_PROC / str(pid) / "io").read_text(encoding="ascii")
    except OSError:
        return 0  # it has ended, or belongs to somebody else
    return sum(int(value) for value in re.findall(r"^(?:read|write)_bytes: (\d+)$", text, re.MULTILINE))


def _pressure() -> dict[str, float] | None:
    found = {}
    for name in ("cpu", "io", "memory"):
        try:
            text = (_PROC / "pressure" / name).read_text(encoding="ascii")
        except OSError:
            return None
        total = re.search(r"^some .*total=(\d+)$", text, re.MULTILINE)
        if total is None:
            return None
        found[name] = int(total[1]) / 1e6
    return found


def _disk_bytes(scratch: Path) -> int | None:
    """None if the folder is on no block device of its own: a network, an overlay, a btrfs volume."""
    number = nearest_folder(scratch).stat().st_dev
    try:
        path = Path("/sys/dev/block", f"{os.major(number)}:{os.minor(number)}", "stat")
        fields = path.read_text(encoding="ascii").split()
    except OSError:
        return None
    return (int(fields[2]) + int(fields[6])) * _SECTOR_BYTES


def _numbers(paths: Iterable[Path]) -> list[int]:
    found = []
    for path in paths:
        try:
            found.append(int(path.read_text(encoding="ascii")))
        except (OSError, ValueError):
            continue
    return found


def _frequency_hz() -> float | None:
    kilohertz = _numbers(Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_cur_freq"))
    return 1000 * sum(kilohertz) / len(kilohertz) if kilohertz else None


def _throttled() -> int | None:
    counts = _numbers(Path("/sys/devices/system/cpu").glob("cpu[0-9]*/thermal_throttle/core_throttle_count"))
    return sum(counts) if counts else None


def _devices(own: Collection[int]) -> tuple[int, float] | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None

    def ask(query: str) -> list[str]:
        argv = [program, query, "--format=csv,noheader,nounits"]
        return subprocess.run(argv, capture_output=True, text=True, timeout=20, check=True).stdout.split()

    try:
        clocks = [float(text) for text in ask("--query-gpu=clocks.sm")]
        users = {int(text) for text in ask("--query-compute-apps=pid")}
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    # Of a container's processes nvidia-smi may show numbers of the host, or none.
    others = [pid for pid in users if Path(f"/proc/{pid}").exists() and pid not in own]
    return (len(others), 1e6 * max(clocks)) if clocks else None
