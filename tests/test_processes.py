"""A standard output that libraries do not write to."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

from lastgood.processes import keep_stdout

ROOT = Path(__file__).parents[1]

# As NCCL writes what NCCL_DEBUG asks for: by C's stdio, in the middle of a line and after the last one.
PROGRAM = """
import ctypes, os, sys
from lastgood.processes import keep_stdout
print("before")
keep_stdout()
libc = ctypes.CDLL(None)
sys.stdout.write("half of ")
sys.stdout.flush()
libc.puts(b"NCCL version 2.28.9+cuda13.0")
libc.fflush(None)
os.write(1, b"NCCL INFO comm 0x1 rank 0\\n")
print("an answer")
keep_stdout()  # a second time changes nothing
libc.puts(b"Destroy COMPLETE")
libc.fflush(None)
"""


def test_what_libraries_write_is_not_between_a_programs_answers():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "before\nhalf of an answer\n"), done.stderr
    assert done.stderr.splitlines() == ["NCCL version 2.28.9+cuda13.0", "NCCL INFO comm 0x1 rank 0", "Destroy COMPLETE"]


def test_a_stdout_that_is_not_the_processs_stays(monkeypatch):
    for given in (io.StringIO(), None):
        monkeypatch.setattr(sys, "stdout", given)
        keep_stdout()
        assert sys.stdout is given


def test_ranks_of_nccl_that_answer_on_stdout_keep_it():
    programs = [*(ROOT / "tests").glob("**/*rank*.py"), *(ROOT / "benchmarks").glob("*rank*.py")]
    programs.append(ROOT / "tests/checkpointers/copies/test_on_cuda.py")  # its rank is a text in it
    own = [path for path in programs if "nccl" in (text := path.read_text()) and "print(" in text]
    assert len(own) >= 6
    assert [path.name for path in own if "keep_stdout()" not in path.read_text()] == []
