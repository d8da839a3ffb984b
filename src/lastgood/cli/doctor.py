"""`lastgood doctor`: can this machine do the work, and if not, what to do."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from lastgood.cli._output import emit_json, emit_table
from lastgood.units import GIB, format_bytes

__all__ = ["doctor"]

Verdict = Literal["ok", "warning", "fault"]

_HARNESS = ("torchvision", "transformers", "snakemake", "pandas", "matplotlib")
_FRAMEWORKS = ("accelerate", "lightning", "deepspeed", "torchtitan")


@dataclass(frozen=True)
class _Finding:
    verdict: Verdict
    what: str
    found: str
    to_do: str = ""


def doctor(
    scratch: Annotated[Path, typer.Option(help="Folder on the disk to measure.")] = Path("scratch"),
    data_dir: Annotated[Path, typer.Option(help="Folder of prepared data.")] = Path("data"),
    uri: Annotated[
        str | None, typer.Option(help="Also try s3://BUCKET/PREFIX, with small objects that are removed again.")
    ] = None,
    region: Annotated[str | None, typer.Option(help="Of the bucket [default: the environment's].")] = None,
    endpoint_url: Annotated[str | None, typer.Option(help="Of a server that is not AWS.")] = None,
    profile: Annotated[str | None, typer.Option(help="Of the files of the AWS command line.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings to stdout as JSON.")] = False,
) -> None:
    """Check Python, packages, the native core, disk, memory, GPU and data; exit 1 if something must be mended."""
    findings = [*_software(), *_systems(), *_machine(scratch), *_surroundings(scratch), *_data(data_dir)]
    if uri is not None:
        findings += _objects(uri, region, endpoint_url, profile)
    if as_json:
        emit_json([asdict(finding) for finding in findings])
    else:
        rows = ((finding.verdict, finding.what, finding.found, finding.to_do) for finding in findings)
        emit_table("Lastgood on this machine", ("", "what", "found", "to do"), rows)
    if any(finding.verdict == "fault" for finding in findings):
        raise typer.Exit(1)


def _software() -> Iterator[_Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < (3, 11):
        yield _Finding("warning", "Python", version, "Snakemake 9 needs 3.11; the library and `lastgood run` work")
    else:
        yield _Finding("ok", "Python", version)
    yield from _packages()
    try:
        from lastgood import _native
    except ImportError as error:
        yield _Finding("fault", "native core", str(error), "run bash install.sh; it needs a C++17 compiler")
    else:
        yield _Finding("ok", "native core", f"checksums by {_native.crc32c_implementation()}")


def _packages() -> Iterator[_Finding]:
    """torch, what figures need (in a checkout, or if it was installed for them), and frameworks that may be there."""
    to_do = "run bash install.sh in the checkout, or pip install 'lastgood[harness]'"
    found = {package: _version(package) for package in ("torch", *_HARNESS)}
    harness = found["snakemake"] is not None or (Path(__file__).parents[3] / "Snakefile").is_file()
    for package, version in found.items():
        if version is not None:
            yield _Finding("ok", package, version)
        elif package == "torch" or harness:
            yield _Finding("fault", package, "missing", to_do)
    if not harness:
        yield _Finding("ok", "harness", "not installed: this is the library alone")
    for package in _FRAMEWORKS:
        version = _version(package)
        if version is not None:
            yield _Finding("ok", package, version)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _systems() -> Iterator[_Finding]:
    from lastgood.checkpointers.registry import checkpointer_names, why_unavailable

    names = checkpointer_names()
    missing = why_unavailable(names)
    yield _Finding("ok", "systems", ", ".join(name for name in names if name not in missing))
    for name, reason in missing.items():
        yield _Finding("warning", f"system {name}", "not available", f"{reason}; figures leave it out")


def _machine(scratch: Path) -> Iterator[_Finding]:
    from lastgood.experiments.machine.facts import (
        cpu_model,
        cuda_devices,
        free_bytes,
        machine_label,
        memory_bytes,
        usable_cores,
    )
    from lastgood.mounts import lies_in_memory, mount_of

    yield _Finding("ok", "machine", f"{machine_label()}: {cpu_model()}, {usable_cores()} cores")
    memory = memory_bytes()
    low = memory < 6 * GIB
    yield _Finding(
        "warning" if low else "ok", "memory", format_bytes(memory), "laptop scale wants 6 GiB" if low else ""
    )
    devices = cuda_devices()
    yield _Finding("ok", "CUDA devices", ", ".join(device.name for device in devices) or "none")
    mount, free = mount_of(scratch), free_bytes(scratch)
    found = f"{scratch.absolute()} on {mount.filesystem}, {format_bytes(free)} free"
    if lies_in_memory(scratch):
        yield _Finding("fault", "scratch", found, "memory is not durable: set scratch to a folder on a disk")
    elif free < 4 * GIB:
        yield _Finding("fault", "scratch", found, "laptop scale wants 4 GiB free")
    else:
        yield _Finding("ok", "scratch", found)
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    yield _Finding(
        "ok" if compiler else "warning", "C++ compiler", compiler or "none", "" if compiler else "needed to build"
    )


def _surroundings(scratch: Path) -> Iterator[_Finding]:
    """What some parts use where it is there; nothing of it is needed by all."""
    yield _Finding("ok", "direct I/O", _direct_io(scratch))
    root = os.geteuid() == 0
    tools = {name: shutil.which(name) is not None for name in ("unshare", "tc", "sbatch", "srun", "sshd")}
    testbed = root and tools["unshare"] and tools["tc"] and tools["sshd"]
    why = "" if testbed else f" ({'not root' if not root else 'unshare, tc or sshd is missing'})"
    yield _Finding("ok", "testbed of namespaces", f"{'possible' if testbed else 'not here'}{why}")
    yield _Finding("ok", "Slurm", "sbatch and srun found" if tools["sbatch"] and tools["srun"] else "none")
    stores = [package for package in ("boto3", "obstore") if _version(package) is not None]
    yield _Finding("ok", "S3", f"{', '.join(stores)} installed" if stores else "neither boto3 nor obstore is installed")
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    noisy = load > cores / 2
    yield _Finding(
        "warning" if noisy else "ok",
        "noise of the machine",
        f"load {load:.1f} on {cores} cores",
        "others compute here: measurements wait for pauses, or are marked as disturbed" if noisy else "",
    )


def _direct_io(scratch: Path) -> str:
    """Whether the file system of a folder, or of the closest one above it, takes O_DIRECT. Leaves nothing there."""
    from lastgood.mounts import nearest_folder

    try:
        os.close(os.open(nearest_folder(scratch), os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600))
    except OSError as error:
        return f"not for {scratch.absolute()} ({error.strerror}): writes go through the page cache, and are flushed"
    return f"works for {scratch.absolute()}"


def _objects(uri: str, region: str | None, endpoint_url: str | None, profile: str | None) -> Iterator[_Finding]:
    """Name, network, permissions and clock: whatever of them is wrong, a request fails and its error says which."""
    from lastgood.errors import LastgoodError
    from lastgood.storage.objects.opening import open_objects
    from lastgood.storage.objects.s3 import S3Options
    from lastgood.storage.objects.trial import try_store

    options = S3Options(region=region, endpoint_url=endpoint_url, profile=profile, retries=1, retry_s=20, request_s=20)
    try:
        client = open_objects(uri, options)
    except LastgoodError as error:
        yield _Finding("fault", f"objects at {uri}", "cannot be used", str(error))
        return
    try:
        for tried in try_store(client):
            if tried.error is None:
                yield _Finding("ok", f"{uri}: {tried.what}", "works")
            else:
                yield _Finding("fault", f"{uri}: {tried.what}", "fails", tried.error)
    finally:
        client.close()


def _data(data_dir: Path) -> Iterator[_Finding]:
    ready = data_dir.is_dir() and any(data_dir.iterdir())
    yield _Finding("ok" if ready else "warning", "data", str(data_dir), "" if ready else "run lastgood data prepare")
