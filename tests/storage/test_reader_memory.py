"""Memory follows what a file has, never what it says: at most four times its size and 64 MiB, in every decoder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.storage.support.craft import dense, entries, part, put, put_ranks

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
HUGE = 1 << 36
WORD = b"A" * 16


@pytest.mark.slow
def test_no_reader_takes_more_memory_than_its_file_accounts_for(tmp_path):
    put(tmp_path / "plain", entries(w=dense([4])), [WORD])
    put(tmp_path / "chunks of 4 GiB", entries(w=dense([4])), [WORD], chunk_bytes=1 << 32)
    put(tmp_path / "chunks of 2 GiB", entries(w=["d", [[["s", "x"], dense([4])]]]), [WORD], chunk_bytes=2 << 30)
    put(tmp_path / "expanded", entries(w=["d", [[["s", "x"], ["T", 0, 0, "float32", [HUGE], [0]]]]]), [WORD])
    put(tmp_path / "repeated", entries(w=["T", 0, 0, "uint8", [1 << 20, 1 << 20], [0, 0]]), [WORD])
    put(tmp_path / "empty and wide", entries(w=["T", -1, 0, "float32", [HUGE, 0], [1, 1]]), [])
    put(tmp_path / "lists", entries(w=["l", [["l", []]] * 300_000]), [])
    whole = part(dense([4]), [HUGE], [[[0, 4]]])
    put_ranks(tmp_path / "whole", [(entries(w=["d", [[["s", "x"], whole]]]), [WORD])] * 2)
    left = ["R", 1, "float32", [HUGE], [1]]
    put_ranks(tmp_path / "left", [(entries(w=["d", [[["s", "x"], left]]]), []), (entries(w=["d", []]), [])])
    again = ["T", 0, 0, "float32", [HUGE], [0]]
    named = [entries(w=["d", [[["s", "x"], node]]]) for node in (left, again)]
    put_ranks(tmp_path / "left and expanded", [(named[0], []), (named[1], [WORD])])
    done = subprocess.run(
        [sys.executable, "-m", "tests.storage.support.reader_memory", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for name, taken in json.loads(done.stdout):
        folder = tmp_path / name.partition(":")[0]
        held = sum(path.stat().st_size for path in folder.rglob("*.lgs"))
        assert taken <= 4 * held + 64 * MIB, f"{name} took {taken / MIB:.0f} MiB for {held / MIB:.1f} MiB"
