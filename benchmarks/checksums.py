"""What checksums cost: complete checkpoints by the slot store, with CRC32C and with none, in one run."""

from __future__ import annotations

import argparse
from pathlib import Path

from harness import Comparison, Report, cannot, command_line, interleaved, main, say, sizes
from stores import CHUNK_BYTES, WRITER_THREADS, StoreSide, whole_units

from lastgood import _native
from lastgood.errors import CorruptCheckpoint
from lastgood.units import GIB, MIB, format_bytes

GOAL = 0.97
ROUND_BYTES = GIB
VARIANTS = {"with": "", "without": "none"}


def measure(options: argparse.Namespace, folder: Path) -> Report:
    report = Report(
        settings={
            "chunk_bytes": CHUNK_BYTES,
            "writer_threads": WRITER_THREADS,
            "crc32c": _native.crc32c_implementation(),
            "sizes": [whole_units(size) for size in options.sizes],
        }
    )
    for size in report.settings["sizes"]:
        say(format_bytes(size))
        loops = max(1, round((4 * size if options.quick else ROUND_BYTES) / size))
        side = StoreSide(folder / f"store-{size}", size)
        try:
            _refuse_false_variants(side)
            found: dict[str, list[float]] = {name: [] for name in VARIANTS}
            for _, name in interleaved(list(VARIANTS), options.rounds, options.seed):
                _choose(side, name)
                found[name].append(size * loops / sum(side.save() for _ in range(loops)) / 1e6)
        finally:
            side.close()
        what = f"persist {format_bytes(size)}"
        report.comparisons.append(Comparison(what, "MB/s", "with", found["with"], "without", found["without"], GOAL))
        report.results[f"store_{size}"] = {"megabytes_per_s": found, "loops": loops}
    return report


def _choose(side: StoreSide, name: str) -> None:
    side.store.crc32c_variant = VARIANTS[name]


def _refuse_false_variants(side: StoreSide) -> None:
    """See that one variant sums and the other does not, by what a reader says of the slots."""
    for name in VARIANTS:
        _choose(side, name)
        side.save()
        try:
            side.store.verify(side.store.committed()[0])
            verifies = True
        except CorruptCheckpoint:
            verifies = False
        if verifies != (name == "with"):
            cannot(f"a slot written {name} checksums is found {'whole' if verifies else 'corrupt'}")


if __name__ == "__main__":
    parser = command_line(__doc__, rounds=15)
    parser.add_argument("--sizes", type=sizes, help="bytes of a checkpoint (default: 96MiB,960MiB; --quick: 32MiB)")
    parsed = parser.parse_known_args()[0]
    parser.set_defaults(sizes=[32 * MIB] if parsed.quick else [96 * MIB, 960 * MIB])
    main(parser, measure, __file__)
