"""The native readers of the kernel's blocks and of the ring under ASan, UBSan and TSan, on damaged memory."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parents[3] / "native" / "src"


@pytest.mark.slow
@pytest.mark.parametrize("kinds", ["address,undefined", "thread"])
def test_damaged_memory_is_read_within_its_bounds_and_without_races(tmp_path: Path, kinds: str) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed (Debian: g++)")
    program = tmp_path / "hostile_frames"
    sources = [NATIVE / "capture" / f"{name}.cpp" for name in ("frame_ring", "packet_blocks")]
    sources.append(Path(__file__).parent / "support" / "hostile_frames.cpp")
    options = [f"-fsanitize={kinds}", "-fno-sanitize-recover=all", f"-I{NATIVE}", "-pthread", "-o", str(program)]
    subprocess.run([compiler, "-std=c++17", "-O1", "-g", *options, *map(str, sources)], check=True, timeout=400)
    done = subprocess.run([program], capture_output=True, text=True, timeout=400, check=False)
    assert done.stderr == "" and done.stdout == "done\n" and done.returncode == 0
