"""Lastgood behind torch.distributed.checkpoint, against torch's own writer and reader and against PCcheck's persist.

One process, one state of random floats, each save into a folder that is not there yet. Both writers flush their files.
A load fills tensors that are warm; cold, the page cache holds nothing of the files (Lastgood reads past it anyway).
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from harness import Comparison, Report, cannot, command_line, interleaved, main, say, sizes
from stores import StoreSide, whole_units

from lastgood.files import open_regular
from lastgood.integrations.dcp import LastgoodReader, LastgoodWriter
from lastgood.storage.files import direct_io_works
from lastgood.units import GIB, MIB, format_bytes

TENSORS = 24
"""Of the state, all of one size: some weights and moments of a model."""
WRITER_THREADS = (1, 4)
WRITE_GOALS = {1: 1.8, 4: 1.25}
PERSIST_GOAL = 0.9
READ_GOAL = 1.5

warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def measure(options: argparse.Namespace, folder: Path) -> Report:
    if not direct_io_works(folder):
        cannot(f"{folder}: this file system has no direct I/O, so the page cache would be measured")
    report = Report(settings={"torch": torch.__version__, "tensors": TENSORS, "sizes": options.sizes})
    for size in options.sizes:
        _compare(options, folder / str(size), whole_units(size), report)
    report.notes.append(
        "both writers flush each file; torch's leaves the folder's names unflushed, Lastgood flushes them"
    )
    report.notes.append("torch's reader compares no checksum of what it reads, Lastgood's each chunk's")
    return report


def _compare(options: argparse.Namespace, folder: Path, size: int, report: Report) -> None:
    label = format_bytes(size)
    say(f"{label}: making the state")
    folder.mkdir()
    generator = torch.Generator().manual_seed(options.seed)
    elements = size // TENSORS // 4
    state = {f"t{number}": torch.randn(elements, generator=generator) for number in range(TENSORS)}
    target = {name: torch.ones_like(tensor) for name, tensor in state.items()}
    nbytes = sum(tensor.nbytes for tensor in state.values())
    store = StoreSide(folder / "store", nbytes)

    def saving(writer: Callable[[Path], Any]) -> Callable[[], float]:
        def save() -> float:
            place = folder / "step-1"
            begin = time.perf_counter()
            dcp.save(dict(state), storage_writer=writer(place))
            elapsed_s = time.perf_counter() - begin
            shutil.rmtree(place)
            return elapsed_s

        return save

    def loading(place: Path, reader: type, *, cold: bool) -> Callable[[], float]:
        def load() -> float:
            for path in place.iterdir():
                _forget(path) if cold else _remember(path)
            begin = time.perf_counter()
            dcp.load(dict(target), storage_reader=reader(place))
            return time.perf_counter() - begin

        return load

    kept = {"torch": folder / "by-torch", "lastgood": folder / "by-lastgood"}
    dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(kept["torch"]))
    dcp.save(dict(state), storage_writer=LastgoodWriter(kept["lastgood"]))
    for place in kept.values():
        for tensor in target.values():
            tensor.zero_()
        dcp.load(dict(target), storage_reader=LastgoodReader(place))
        if not all(torch.equal(tensor, target[name]) for name, tensor in state.items()):
            raise AssertionError(f"{place}: gave back other bytes than were saved")
    sides: dict[str, Callable[[], float]] = {
        "lastgood save": saving(LastgoodWriter),
        **{f"torch save {threads}": saving(_torch_writer(threads)) for threads in WRITER_THREADS},
        "store save": store.save,
    }
    for temperature in ("cold", "warm"):
        cold = temperature == "cold"
        sides[f"lastgood load {temperature}"] = loading(kept["lastgood"], LastgoodReader, cold=cold)
        sides[f"torch load {temperature}"] = loading(kept["torch"], dcp.FileSystemReader, cold=cold)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    cpu_s: dict[str, list[float]] = {name: [] for name in sides}
    for number, name in interleaved(list(sides), options.rounds, options.seed):
        say(f"{label}: round {number + 1} of {options.rounds}: {name}")
        before = time.process_time()
        seconds[name].append(sides[name]())
        cpu_s[name].append(time.process_time() - before)
    store.close()
    rates = {name: [nbytes / MIB / one for one in found] for name, found in seconds.items()}
    pairs = [
        *(
            (f"save {label}, torch {threads}", "lastgood save", f"torch save {threads}", WRITE_GOALS[threads])
            for threads in WRITER_THREADS
        ),
        (f"save {label}, PCcheck's persist", "lastgood save", "store save", PERSIST_GOAL),
        *((f"load {label}, {one}", f"lastgood load {one}", f"torch load {one}", READ_GOAL) for one in ("cold", "warm")),
    ]
    for what, ours, theirs, goal in pairs:
        report.comparisons.append(Comparison(what, "MiB/s", ours, rates[ours], theirs, rates[theirs], goal))
    per_gib = {name: statistics.median(found) * GIB / nbytes for name, found in cpu_s.items()}
    report.results[f"state_{nbytes}"] = {"seconds": seconds, "cpu_s_per_gib": per_gib}


def _torch_writer(threads: int) -> Callable[[Path], Any]:
    return lambda place: dcp.FileSystemWriter(place, thread_count=threads, sync_files=True)


def _forget(path: Path) -> None:
    """Let the page cache drop a file."""
    descriptor = open_regular(path)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _remember(path: Path) -> None:
    with path.open("rb") as file:
        while file.read(8 * MIB):
            pass


if __name__ == "__main__":
    parser = command_line(__doc__, rounds=5)
    parser.add_argument("--sizes", type=sizes, default=[GIB], help="bytes of the state (default: 1GiB)")
    main(parser, measure, __file__)
