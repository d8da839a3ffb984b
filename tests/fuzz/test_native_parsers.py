"""The native parsers of mirrored traffic under sanitizers: libFuzzer for as long as is asked, sound inputs by itself.

``LASTGOOD_FUZZ_S`` is for how many seconds libFuzzer looks (600). What it finds stays in ``LASTGOOD_FUZZ_DIR``, if that
is set, and so does what it learned: the next time begins there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.fuzz.support.native_inputs import write_corpus

NATIVE = Path(__file__).resolve().parents[2] / "native"
PARSERS = ("gloo", "icrc", "roce_flow", "roce_parser", "sockets", "tcp")
SOURCES = [
    *(NATIVE / "src" / "mirror" / f"{name}.cpp" for name in PARSERS),
    NATIVE / "src" / "capture" / "packet_blocks.cpp",
    NATIVE / "fuzz" / "parsers.cpp",
]
BUILD_S = 400


def build(compiler: str, kinds: str, out: Path, *more: Path) -> Path:
    options = [f"-fsanitize={kinds}", "-fno-sanitize-recover=all", f"-I{NATIVE / 'src'}", "-o", str(out)]
    sources = [str(path) for path in (*SOURCES, *more)]
    subprocess.run([compiler, "-std=c++17", "-O1", "-g", *options, *sources], check=True, timeout=BUILD_S)
    return out


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sound_traffic_and_pieces_of_it_are_read_within_bounds(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed (Debian: g++)")
    program = build(compiler, "address,undefined", tmp_path / "parsers", NATIVE / "fuzz" / "standalone.cpp")
    count = write_corpus(tmp_path / "corpus")
    inputs = sorted((tmp_path / "corpus").iterdir())
    assert count == len(inputs) > 40
    done = subprocess.run([program, *inputs], capture_output=True, text=True, timeout=300, check=False)
    assert (done.stdout, done.stderr, done.returncode) == (f"read {count} inputs\n", "", 0)


@pytest.mark.fuzz
@pytest.mark.timeout(7200)
def test_libfuzzer_finds_nothing(tmp_path: Path) -> None:
    """No crash, no report of the sanitizers, no input that takes seconds, no memory that follows a length."""
    compiler = shutil.which("clang++")
    if compiler is None:
        pytest.skip("clang++ is not installed (Debian: clang)")
    seconds = int(os.environ.get("LASTGOOD_FUZZ_S", "600"))
    folder = Path(os.environ.get("LASTGOOD_FUZZ_DIR") or tmp_path)
    program = build(compiler, "fuzzer,address,undefined", tmp_path / "parsers")
    write_corpus(folder / "seeds")
    (folder / "learned").mkdir(exist_ok=True)
    limits = ["-max_len=8192", "-timeout=10", "-rss_limit_mb=1024", "-malloc_limit_mb=64"]
    places = [f"-artifact_prefix={folder}/", str(folder / "learned"), str(folder / "seeds")]
    done = subprocess.run(
        [program, f"-max_total_time={seconds}", "-print_final_stats=1", *limits, *places],
        capture_output=True,
        text=True,
        timeout=seconds + 300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    runs = re.search(r"number_of_executed_units:\s*(\d+)", done.stderr)
    assert runs is not None and int(runs[1]) > 100 * seconds, done.stderr[-2000:]
    print(done.stderr[-600:])


@pytest.mark.fuzz
@pytest.mark.timeout(1200)
def test_libfuzzer_would_notice(tmp_path: Path) -> None:
    """A parser that reads one byte too many is found within a minute."""
    compiler = shutil.which("clang++")
    if compiler is None:
        pytest.skip("clang++ is not installed (Debian: clang)")
    broken = tmp_path / "broken"
    shutil.copytree(NATIVE / "src", broken / "src")
    path = broken / "src" / "mirror" / "ip.hpp"
    text = path.read_text()
    sound = "if (size < at + 20) return Left::short_frame;"
    assert sound in text
    path.write_text(text.replace(sound, "if (size + 8 < at + 20) return Left::short_frame;"))
    sources = [str(broken / one.relative_to(NATIVE)) for one in SOURCES[:-1]] + [str(SOURCES[-1])]
    options = ["-fsanitize=fuzzer,address", f"-I{broken / 'src'}", "-o", str(tmp_path / "parsers")]
    subprocess.run([compiler, "-std=c++17", "-O1", "-g", *options, *sources], check=True, timeout=BUILD_S)
    write_corpus(tmp_path / "seeds")
    done = subprocess.run(
        [tmp_path / "parsers", "-max_total_time=60", f"-artifact_prefix={tmp_path}/", str(tmp_path / "seeds")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode != 0 and "AddressSanitizer" in done.stderr, done.stderr[-2000:]
