"""How fast checkpoints reach the disk and come back, against fio on the same disk in the same run.

Persisting: the slot store, from warm memory to the commit record's flush, against fio's writes with their fsync.
Restoring: the slot store into warm memory, and PCcheck into a living model and optimizer, against fio's reads.
Both sides use direct I/O; fio works on slot files as well: preallocated, written in full before, overwritten.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from fio import fio_bytes_per_s, fio_version
from harness import Comparison, Report, TextTable, cannot, command_line, interleaved, main, say, sizes
from stores import CHUNK_BYTES, READER_THREADS, WRITER_THREADS, StoreSide, whole_units

from lastgood.storage import SlotStore
from lastgood.storage.format import DATA_OFFSET
from lastgood.units import GIB, MIB, format_bytes

GOAL = 0.95
ROUND_BYTES = GIB
"""Small sizes are repeated inside a round: fio's clock has milliseconds only."""


class DiskTraffic:
    """How many bytes this process moved to or from the disk, by the kernel's count; the page cache does not count."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._ratios: list[float] = []

    def watch(self, nbytes: int, action: Callable[[], float]) -> float:
        """Run `action`, which should move `nbytes`, and return what it returns."""
        before = self._count()
        result = action()
        after = self._count()
        if before is not None and after is not None:
            self._ratios.append((after - before) / nbytes)
        return result

    def _count(self) -> int | None:
        try:
            lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
        except OSError:
            return None
        return next((int(line.split()[1]) for line in lines if line.startswith(f"{self._key}:")), None)

    @property
    def lowest(self) -> float | None:
        """Smallest share of the bytes that moved between memory and disk; None where the kernel does not count."""
        return min(self._ratios, default=None)


def measure(options: argparse.Namespace, folder: Path) -> Report:
    version = fio_version()
    report = Report(
        settings={
            "fio": version,
            "fio_layout": "one file, each job its own equal part (offset_increment)",
            "chunk_bytes": CHUNK_BYTES,
            "writer_threads": WRITER_THREADS,
            "reader_threads": READER_THREADS,
            "sizes": [whole_units(size) for size in options.sizes],
        }
    )
    table = TextTable("The page cache is left out", ("what", "direct I/O", "moved to or from the disk"))
    for size in report.settings["sizes"]:
        loops = max(1, round((4 * size if options.quick else ROUND_BYTES) / size))
        label = format_bytes(size)
        say(f"{label}: slot store")
        _store_against_fio(options, folder / f"store-{size}", size, loops, label, report, table)
        say(f"{label}: PCcheck.restore")
        _restore_against_fio(options, folder / f"pccheck-{size}", size, loops, label, report, table)
    report.tables.append(table)
    report.notes.append(
        f"{version}: psync, {CHUNK_BYTES // MIB} MiB, direct=1, end_fsync; its start-up is not counted, its fsync is"
    )
    return report


def _store_against_fio(
    options: argparse.Namespace, folder: Path, size: int, loops: int, label: str, report: Report, table: TextTable
) -> None:
    # Slot files for fio: made by the same code, so with the same extents, and written in full.
    with SlotStore(folder / "fio", slots=2, keep=1, chunk_bytes=CHUNK_BYTES) as other:
        other.reserve(size)
        files = [status.path for status in other.statuses()]
    written, read = DiskTraffic("write_bytes"), DiskTraffic("read_bytes")
    side = StoreSide(folder / "store", size)
    place: dict[str, Any] = {"offset": DATA_OFFSET, "total_bytes": size, "block_bytes": CHUNK_BYTES, "loops": loops}
    turn = 0

    def fio_write() -> float:
        nonlocal turn
        turn += 1  # the store writes its two slots in turn as well
        return fio_bytes_per_s(files[turn % 2], "write", jobs=WRITER_THREADS, **place)

    def fio_read() -> float:
        newest = side.store.committed()[0].path
        return fio_bytes_per_s(newest, "read", jobs=READER_THREADS, **place)

    sides: dict[str, Callable[[], float]] = {
        "store write": lambda: _rate(size, loops, side.save, written),
        "fio write": fio_write,
        "store read": lambda: _rate(size, loops, side.read, read),
        "fio read": fio_read,
    }
    try:
        found = _rounds(options, sides)
    finally:
        side.close()
    for what, name in (("persist", "write"), ("read", "read")):
        comparison = _comparison(f"{what} {label}", "store", found[f"store {name}"], found[f"fio {name}"])
        report.comparisons.append(comparison)
    report.results[f"store_{size}"] = {
        "direct_io": side.store.direct_io,
        "write_bytes_per_payload": written.lowest,
        "read_bytes_per_payload": read.lowest,
        "bytes_per_s": found,
        "loops": loops,
    }
    table.rows.append((f"persist {label}", str(side.store.direct_io), _share(written.lowest)))
    table.rows.append((f"read {label}", str(side.store.direct_io), _share(read.lowest)))


def _restore_against_fio(
    options: argparse.Namespace, folder: Path, size: int, loops: int, label: str, report: Report, table: TextTable
) -> None:
    import torch
    from training_state import LinearTraining

    from lastgood.checkpointers.events import Outcome
    from lastgood.checkpointers.registry import checkpointer_class
    from lastgood.state import flatten, state_digest

    training = LinearTraining(size)
    training.step()
    kind = checkpointer_class("pccheck")
    checkpointer = kind(folder, kind.Options.model_validate({"writer_threads": WRITER_THREADS}))
    checkpointer.start(training.state)
    try:
        checkpointer.save(1)
        checkpointer.drain()
        if checkpointer.events[-1].outcome is not Outcome.DURABLE:
            raise AssertionError(f"the checkpoint to restore is not durable: {checkpointer.events[-1]}")
        if not checkpointer.storage_facts()["direct_io"]:
            cannot(f"{folder}: this file system has no direct I/O")
        digest = state_digest(training.state)
        with torch.no_grad():
            for parameter in training.model.parameters():
                parameter.add_(1)
        checkpointer.restore(training.state)
        if state_digest(training.state) != digest:
            raise AssertionError("PCcheck restored another state than it was given")
        payload = flatten(training.state).layout.payload_bytes
        newest = SlotStore.peek(folder).committed()[0]
        read = DiskTraffic("read_bytes")

        def restore() -> float:
            begin = perf_counter()
            checkpointer.restore(training.state)
            return perf_counter() - begin

        place: dict[str, Any] = {"offset": newest.record.data_offset, "total_bytes": newest.stream_bytes}
        sides: dict[str, Callable[[], float]] = {
            "PCcheck": lambda: _rate(payload, loops, restore, read),
            "fio": lambda: fio_bytes_per_s(
                newest.path, "read", jobs=READER_THREADS, block_bytes=CHUNK_BYTES, loops=loops, **place
            ),
        }
        found = _rounds(options, sides)
    finally:
        checkpointer.close()
    report.comparisons.append(_comparison(f"restore {label}", "PCcheck", found["PCcheck"], found["fio"]))
    report.results[f"restore_{size}"] = {
        "payload_bytes": payload,
        "read_bytes_per_payload": read.lowest,
        "bytes_per_s": found,
        "loops": loops,
    }
    table.rows.append((f"restore {label}", "True", _share(read.lowest)))


def _rate(size: int, loops: int, action: Callable[[], float], traffic: DiskTraffic) -> float:
    return size * loops / sum(traffic.watch(size, action) for _ in range(loops))


def _rounds(options: argparse.Namespace, sides: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _, name in interleaved(list(sides), options.rounds, options.seed):
        found[name].append(sides[name]())
    return found


def _comparison(what: str, ours: str, our_values: list[float], their_values: list[float]) -> Comparison:
    return Comparison(what, "MB/s", ours, [v / 1e6 for v in our_values], "fio", [v / 1e6 for v in their_values], GOAL)


def _share(ratio: float | None) -> str:
    return "unknown (no /proc/self/io)" if ratio is None else f"at least {ratio:.3f} of the bytes"


if __name__ == "__main__":
    parser = command_line(__doc__, rounds=9)
    parser.add_argument("--sizes", type=sizes, help="bytes of a checkpoint (default: 96MiB,960MiB; --quick: 32MiB)")
    parsed = parser.parse_known_args()[0]
    parser.set_defaults(sizes=[32 * MIB] if parsed.quick else [96 * MIB, 960 * MIB])
    main(parser, measure, __file__)
