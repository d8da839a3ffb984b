from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "native" / "src"
SOURCES = ["wire/coverage", "wire/receiver", "wire/receiver_worker", "wire/record", "wire/sender", "wire/windows"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_receiver_and_sender_race_nowhere(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed (Debian: g++)")
    program = tmp_path / "receiver_threads"
    sources = [NATIVE / f"{name}.cpp" for name in [*SOURCES, "storage/crc32c", "storage/os_io"]]
    build = [compiler, "-std=c++17", "-O1", "-g", "-fsanitize=thread", f"-I{NATIVE}", "-pthread", "-o", str(program)]
    subprocess.run(
        [*build, str(Path(__file__).parent / "support" / "receiver_threads.cpp"), *map(str, sources)],
        check=True,
        timeout=400,
    )
    done = subprocess.run([program], capture_output=True, text=True, timeout=400, check=False)
    assert done.stderr == "" and done.stdout == "done\n" and done.returncode == 0
