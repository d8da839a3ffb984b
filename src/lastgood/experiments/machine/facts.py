"""What the machine is: its label, its memory and disks, and the facts that a run record keeps. Needs no torch."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lastgood.experiments.records.base import WhereRun
from lastgood.mounts import mount_of, nearest_folder

__all__ = [
    "CudaDevice",
    "boot_id",
    "checkout_root",
    "cpu_model",
    "cuda_devices",
    "free_bytes",
    "git_state",
    "machine_label",
    "memory_bytes",
    "package_versions",
    "usable_cores",
    "where_run",
]

_PACKAGES = ("lastgood", "torch", "torchvision", "transformers", "numpy", "pydantic", "snakemake")
_CGROUP_MEMORY = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_CGROUP_CPU = Path("/sys/fs/cgroup/cpu.max")
_LABEL_LENGTH = 64


# -- processor and memory ------------------------------------------------------------------------------------------


def boot_id() -> str:
    """The kernel's identity: one for all that shares processors, disks and locks."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def cpu_model() -> str:
    """The processor's name as the kernel gives it, or the architecture if it gives none."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.machine() or "unknown"


def usable_cores() -> int:
    """Cores that this process may use: its CPU affinity, and the container's CPU quota if there is one."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = _CGROUP_CPU.read_text(encoding="ascii").split()
        if quota != "max":
            cores = min(cores, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):
        pass
    return cores


def memory_bytes() -> int:
    """Memory that this process may use: the machine's, or the container's limit if that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _CGROUP_MEMORY:
        try:
            total = min(total, int(path.read_text(encoding="ascii")))
        except (OSError, ValueError):
            continue
    return total


# -- CUDA devices --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CudaDevice:
    """A GPU; `memory_bytes` is None if only its name could be read."""

    name: str
    memory_bytes: int | None


@lru_cache(maxsize=1)
def cuda_devices() -> tuple[CudaDevice, ...]:
    """The GPUs that CUDA would show this process, found without torch: nvidia-smi, then the driver, then /proc."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in {"", "-1"}:
        return ()
    return _from_nvidia_smi() or _from_libcuda() or _from_proc()


def _from_nvidia_smi() -> tuple[CudaDevice, ...]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    query = [program, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    found = []
    for line in answer.splitlines():
        name, _, mebibytes = line.rpartition(",")
        if name:
            amount = mebibytes.strip()
            found.append(CudaDevice(name.strip(), int(amount) << 20 if amount.isdigit() else None))
    return tuple(found)


def _from_libcuda() -> tuple[CudaDevice, ...]:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count = ctypes.c_int()
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    found = []
    for index in range(count.value):
        device = ctypes.c_int()
        name = ctypes.create_string_buffer(128)
        total = ctypes.c_size_t()
        if cuda.cuDeviceGet(ctypes.byref(device), index) == 0 and cuda.cuDeviceGetName(name, 128, device) == 0:
            known = cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device) == 0
            found.append(CudaDevice(name.value.decode(errors="replace"), total.value if known else None))
    return tuple(found)


def _from_proc() -> tuple[CudaDevice, ...]:
    found = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        try:
            model = re.search(r"^Model:\s*(.+)$", path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
        except OSError:
            continue
        found.append(CudaDevice(model[1].strip() if model else "NVIDIA GPU", None))
    return tuple(found)


# -- label ---------------------------------------------------------------------------------------------------------


def machine_label() -> str:
    """A readable name for machines like this one, such as ``amd-epyc-2c`` or ``intel-xeon-8480-16c-h100-80gb-hbm3``.

    It is the first folder of every record's path, so records of different machines never mix.
    """
    parts = [_slug(cpu_model(), r"\((r|tm)\)|\bcpu\b|@.*|\b\d+-core\b|\bprocessor\b"), f"{usable_cores()}c"]
    devices = cuda_devices()
    if devices:
        gpu = _slug(devices[0].name, r"\bnvidia\b|\bgeforce\b|\btesla\b")
        parts.append(gpu if len(devices) == 1 else f"{len(devices)}x-{gpu}")
    return "-".join(part for part in parts if part)[:_LABEL_LENGTH].strip("-.")


def _slug(text: str, noise: str) -> str:
    kept = re.sub(noise, " ", text.lower())
    return re.sub(r"[^a-z0-9.]+", "-", kept).strip("-.")


# -- disks ---------------------------------------------------------------------------------------------------------


def free_bytes(path: Path) -> int:
    """Bytes that this user may still write to the filesystem of `path`."""
    return shutil.disk_usage(nearest_folder(path)).free


# -- software ------------------------------------------------------------------------------------------------------


def checkout_root() -> Path | None:
    """The checkout that this package runs from (the folder with its Snakefile), or None for an installed copy."""
    root = Path(__file__).resolve().parents[4]
    return root if (root / "Snakefile").is_file() and (root / "evaluation").is_dir() else None


def git_state(root: Path | None) -> tuple[str | None, bool | None]:
    """Revision of the checkout at `root`, and whether tracked files differ from it; (None, None) outside of git."""
    if root is None or not (root / ".git").exists():
        return None, None
    revision = _git(root, "rev-parse", "HEAD")
    if revision is None:
        return None, None
    changes = _git(root, "status", "--porcelain", "--untracked-files=no")
    return revision.strip(), None if changes is None else bool(changes.strip())


def _git(root: Path, *arguments: str) -> str | None:
    # Without optional locks, so that a read-only checkout and a git command beside this one are left alone.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
            env=environment,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that a measurement depends on; those not installed are left out."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def where_run(scratch: Path) -> WhereRun:
    """The machine and the software of a run that keeps its checkpoints below `scratch`."""
    mount = mount_of(scratch)
    revision, dirty = git_state(checkout_root())
    devices = cuda_devices()
    return WhereRun(
        cpu=cpu_model(),
        cores=usable_cores(),
        memory_bytes=memory_bytes(),
        gpu=devices[0].name if devices else None,
        kernel=platform.release(),
        scratch_path=str(scratch.absolute()),
        scratch_filesystem=mount.filesystem,
        scratch_device=mount.device,
        versions=package_versions(),
        git_revision=revision,
        git_dirty=dirty,
        slurm_job=os.environ.get("SLURM_JOB_ID"),
        slurm_node=os.environ.get("SLURMD_NODENAME"),
    )
