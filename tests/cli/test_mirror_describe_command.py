"""`lastgood mirror describe`: a workload, or the script's own factory, becomes a file that holds no code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from lastgood.mirror.job.description import read_job

SCRIPT = """
import torch

def make():
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3)
"""


def call(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lastgood", "mirror", "describe", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_a_script_s_factory_is_described(tmp_path: Path) -> None:
    (tmp_path / "own_training.py").write_text(SCRIPT)
    told = call(
        tmp_path,
        *("--factory", "own_training:make", "--ranks", "3", "--out", "job.json", "--steps", "20"),
        *("--clip-norm", "1.5", "--hook", "bf16", "--bucket-cap-mb", "2", "--json"),
    )
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout)["steps"] == 20
    job = read_job(tmp_path / "job.json")
    assert (job.ranks, job.ddp.hook, job.ddp.cap, len(job.buffers)) == (3, "bf16", 2 << 20, 3)
    assert job.rules.clip is not None and job.rules.clip.limit == 1.5
    assert [job.rules.rule(step).groups[0].lr for step in (2, 3)] == [0.01, 0.001]
    assert b"own_training" not in (tmp_path / "job.json").read_bytes()


def test_what_is_asked_wrongly_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "own_training.py").write_text(SCRIPT)
    told = call(tmp_path, "--factory", "own_training:no", "--ranks", "3", "--out", "job.json")
    assert told.returncode == 2
    assert told.stderr.count("\n") == 1 and "own_training has no no" in told.stderr
    assert not (tmp_path / "job.json").exists()
