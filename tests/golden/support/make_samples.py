"""Makes one small checkpoint directory of each system, archived below data/checkpoints with the digest of its state.

``python -m tests.golden.support.make_samples [SAMPLE...]``; without names, those that are not there yet. Samples are
kept for good: they show that later versions read what earlier ones wrote. Add one under a new name for a new format,
and never remake an old one to please a test.
"""

from __future__ import annotations

import io
import json
import os
import sys
import tarfile
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.golden.support.adapters import checkpointer_class, free_ports, state_digest

DATA = Path(__file__).resolve().parents[1] / "data" / "checkpoints"
SAMPLES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "sync": ("sync", 1, {}),
    "checkfreq": ("checkfreq", 1, {}),
    "dcp": ("dcp", 1, {"mode": "sync"}),
    "gpm": ("gpm", 1, {"chunk_bytes": 4096}),
    "pccheck": ("pccheck", 1, {"max_in_flight": 1, "keep": 1, "chunk_bytes": 4096}),
    "pccheck_2_ranks": ("pccheck", 2, {"max_in_flight": 1, "keep": 1, "chunk_bytes": 4096}),
}
"""Name to system, ranks and options."""
LIMIT_S = 60.0
STEPS = 3


def a_training(seed: int) -> dict[str, Any]:
    """Something with weights, moments, a schedule and plain values."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return {"model": model, "optimizer": optimizer, "schedule": schedule, "plain": {"seen": seed, "tag": f"s{seed}"}}


def train(parts: dict[str, Any]) -> None:
    """One step."""
    parts["model"](torch.ones(2, 4)).square().sum().backward()
    parts["optimizer"].step()
    parts["schedule"].step()
    parts["optimizer"].zero_grad()
    parts["plain"]["seen"] += 10


def in_ranks(sample: str, folder: Path, use: Callable[[Any, dict[str, Any]], int], seed: int) -> list[tuple[int, str]]:
    """Let each rank, a thread, `use` its checkpointer and its training: the steps and the digests of their states.

    Trainings are seeded with `seed` + rank. Raises what a rank raised.
    """
    system, ranks, options = SAMPLES[sample]
    # Made here: torch's generator belongs to the process.
    trainings = [a_training(seed + rank) for rank in range(ranks)]
    control = {"control": f"127.0.0.1:{free_ports()[0]}", "join_timeout_s": LIMIT_S} if ranks > 1 else {}

    def one(rank: int) -> int:
        own = {"rank": rank, "world_size": ranks, **control} if ranks > 1 else {}
        checkpointer = checkpointer_class(system)(folder, interval_steps=1, **options, **own)
        try:
            return use(checkpointer, trainings[rank])
        finally:
            checkpointer.close()

    if ranks == 1:
        steps = [one(0)]
    else:
        secret = mock.patch.dict(os.environ, LASTGOOD_JOB_TOKEN="a text that only these ranks know")
        with secret, ThreadPoolExecutor(ranks) as pool:
            steps = list(pool.map(one, range(ranks), timeout=2 * LIMIT_S))
    return [(step, state_digest(parts)) for step, parts in zip(steps, trainings, strict=True)]


def restored(sample: str, folder: Path) -> list[tuple[int, str]]:
    """By rank, the step and the digest of the state that `attach` gives back to a fresh training."""
    return in_ranks(sample, folder, lambda checkpointer, parts: int(checkpointer.attach(**parts)), 90)


def save_each_step(checkpointer: Any, parts: dict[str, Any]) -> int:
    """Train some steps and save every one."""
    step = int(checkpointer.attach(**parts))
    for _ in range(STEPS):
        train(parts)
        checkpointer.step()
        checkpointer.drain(LIMIT_S)
    return step + STEPS


def make(sample: str) -> None:
    """Train, archive the directory, and note what has to come back."""
    with tempfile.TemporaryDirectory() as made:
        found = in_ranks(sample, Path(made), save_each_step, 0)
        with tarfile.open(DATA / f"{sample}.tar.xz", "w:xz", format=tarfile.PAX_FORMAT) as archive:
            for path in sorted(Path(made).rglob("*")):
                archive.add(path, path.relative_to(made), recursive=False, filter=_plain)
    (DATA / f"{sample}.json").write_text(json.dumps(found) + "\n", encoding="utf-8")


def unpack(sample: str, folder: Path) -> list[tuple[int, str]]:
    """Put the sample's directory into `folder`; by rank, what has to come back."""
    with tarfile.open(fileobj=io.BytesIO((DATA / f"{sample}.tar.xz").read_bytes())) as archive:
        archive.extractall(folder, filter="data")
    return [tuple(rank) for rank in json.loads((DATA / f"{sample}.json").read_text(encoding="utf-8"))]


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    return info


if __name__ == "__main__":
    for name in sys.argv[1:] or [name for name in SAMPLES if not (DATA / f"{name}.json").exists()]:
        make(name)
