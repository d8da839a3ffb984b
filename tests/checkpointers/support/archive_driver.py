"""Writes checkpoints and archives every second one for ever; prints each step once it is offered. Made to be killed.

Run as: archive_driver.py DIRECTORY ARCHIVE
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from lastgood.checkpointers.export.archive import Archive
from tests.checkpointers.support.stored_helpers import open_store, put


def state_of(step: int) -> dict:
    generator = torch.Generator().manual_seed(step)
    return {"step": step, "x": torch.randn(150_000, generator=generator), "y": torch.randn(500, generator=generator)}


def main(directory: Path, archive_directory: Path) -> None:
    torch.set_num_threads(1)
    archive = Archive(archive_directory, 2)
    with open_store(directory) as store:
        step = max((info.step for info in store.committed()), default=0)
        while True:
            step += 1
            archive.offer(store, put(store, step, state_of(step)))
            archive.drain(60)
            sys.stdout.write(f"{step}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
