"""Reads hostile files one after another, and prints how much memory each took at most: a JSON list of [name, bytes].

Run as a program, in a process of its own: `reader_memory.py FOLDER`, with a folder for each case.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from typer.testing import CliRunner

from lastgood import PCcheck
from lastgood.checkpointers.export.formats import ExportFormat
from lastgood.checkpointers.export.whole_job import export_job
from lastgood.checkpointers.slots.contents import read_tree
from lastgood.cli import app
from lastgood.errors import LastgoodError
from lastgood.storage import SlotView
from lastgood.storage.standalone_slot import look_at_standalone_slot


def _memory(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def _taken(read: Callable[[], object]) -> int:
    """The most memory that a call has beyond what there was before it."""
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = _memory("VmRSS")
    with contextlib.suppress(LastgoodError):
        read()
    return _memory("VmHWM") - before


def _command(*arguments: object) -> None:
    done = CliRunner().invoke(app, [*map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, (LastgoodError, SystemExit)):
        raise done.exception


def _single(path: Path) -> None:
    read_tree(SlotView(path.parent), look_at_standalone_slot(path), 4)


def readers(directory: Path) -> dict[str, Callable[[], object]]:
    """Every decoder of slots, on this directory."""
    out = directory.parent / f"{directory.name}.out"
    if (directory / "rank-00000").is_dir():
        first = directory / "rank-00000"
        return {
            "restore of one of two": lambda: PCcheck(first, rank=0, world_size=2, control="off").restore({"w": {}}),
            "export of a job": lambda: export_job(directory, out, ExportFormat.PT),
            "verify": lambda: _command("verify", directory),
            "inspect": lambda: _command("inspect", directory, "--layout"),
        }
    found = {
        f"export to {to}": lambda to=to: _command("export", directory, out, "--to", to, "--force")
        for to in ("safetensors", "pt", *["dcp"] * (directory.name in ("plain", "expanded")))
    }
    return {
        "restore": lambda: PCcheck(directory).restore({"w": {}}),
        "restore of a tensor": lambda: PCcheck(directory).restore({"w": torch.zeros(4)}),
        "a store that opens": lambda: PCcheck(directory).start({"w": torch.zeros(4)}),
        "a file that stands alone": lambda: _single(directory / "slot-0000.lgs"),
        "verify": lambda: _command("verify", directory),
        "inspect": lambda: _command("inspect", directory, "--layout"),
        **found,
    }


def main(folder: Path) -> None:
    """Measure each case of the folder; the one called "plain" is read first, so that all code is loaded."""
    for read in readers(folder / "plain").values():
        _taken(read)
    cases = sorted(path for path in folder.iterdir() if path.is_dir() and path.suffix != ".out")
    taken = [(f"{case.name}: {name}", _taken(read)) for case in cases for name, read in readers(case).items()]
    sys.stdout.write(json.dumps(taken))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
