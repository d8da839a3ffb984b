"""The benchmarks' own arithmetic, and the reference that PCcheck is compared with."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from lastgood.checkpointers.events import Outcome
from lastgood.errors import NoCheckpoint
from lastgood.experiments.formulas.bound import Bound
from lastgood.locks import FileLock
from lastgood.state import flatten
from lastgood.storage.files import direct_io_works


@pytest.fixture
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_ratio_is_that_of_medians() -> None:
    from harness import Comparison

    found = Comparison("x", "MB/s", "a", [1.0, 9.0, 3.0], "b", [2.0, 4.0, 5.0], goal=0.75)
    assert found.ratio == 0.75
    assert found.verdict == "met"
    assert found.round_ratios == [0.5, 2.25, 0.6]
    bound = Comparison("x", "it/s", "a", [1.0, 9.0, 3.0], "bound", [4.0], goal=0.7501)
    assert bound.verdict == "missed"
    assert bound.round_ratios == [0.25, 2.25, 0.75]
    assert Comparison("x", "it/s", "a", [1.0], "b", [4.0]).verdict == "not judged"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_report_names_the_machine_and_not_what_a_measurement_left_of_it(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import harness

    cores = os.sched_getaffinity(0)
    monkeypatch.setattr(harness, "machine_lock", lambda: FileLock(disk / "lock", "the test's turn"))
    monkeypatch.setattr(sys, "argv", ["x", "--directory", str(disk / "scratch"), "--out", str(disk / "out.json")])

    def measure(options: argparse.Namespace, folder: Path) -> harness.Report:
        os.sched_setaffinity(0, {min(cores)})
        return harness.Report()

    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit, match="0"):
            harness.main(harness.command_line("", rounds=1), measure, "x.py")
    finally:
        os.sched_setaffinity(0, cores)
        signal.signal(signal.SIGTERM, before)
    assert json.loads((disk / "out.json").read_text())["where"]["cores"] == len(cores)


def test_two_gpus_tells_no_folder_of_the_machine() -> None:
    import two_gpus

    names = two_gpus.names_of(Path("/tmp/its-own"), Path("/home/me/out"))
    words = [sys.executable, "-m", "pytest", f"{two_gpus.ROOT}/tests/x.py", "/tmp/its-own/x.xml", "/home/me/out/log"]
    told = two_gpus.named(" ".join([*words, str(two_gpus.own_scratch() / "0")]), names)
    assert told == "python -m pytest tests/x.py SCRATCH/x.xml FOLDER/log DISK/0"


def test_each_round_has_every_side_once_in_an_order_of_its_own() -> None:
    from harness import interleaved

    names = ["a", "b", "c"]
    found = list(interleaved(names, 20, seed=3))
    assert found == list(interleaved(names, 20, seed=3))
    assert found != list(interleaved(names, 20, seed=4))
    rounds = [[name for number, name in found if number == wanted] for wanted in range(20)]
    assert all(sorted(order) == names for order in rounds)
    assert len({tuple(order) for order in rounds}) > 2


def test_the_slope_is_that_of_numpy_over_blocks() -> None:
    from memory import fit

    random = np.random.default_rng(0)
    values = 5e6 + 37.0 * np.arange(205) + random.normal(0, 100, 205)
    slope, error = fit(list(values))
    # 205 samples make 12 blocks of 17; the first sample is left out.
    means = values[1:].reshape(12, 17).mean(axis=1)
    (expected, _), covariance = np.polyfit(17 * np.arange(12), means, 1, cov=True)
    assert slope == pytest.approx(expected)
    assert error == pytest.approx(np.sqrt(covariance[0, 0]))
    assert abs(slope - 37) < 3 * error
    assert fit([4096.0] * 40) == (0.0, 0.0)


def test_sizes_are_whole_for_every_number_of_jobs() -> None:
    from stores import CHUNK_BYTES, READER_THREADS, WRITER_THREADS, whole_units

    for size in (1, 96 << 20, 10**8, 10**9):
        found = whole_units(size)
        assert found % (WRITER_THREADS * CHUNK_BYTES) == found % (READER_THREADS * CHUNK_BYTES) == 0
        assert abs(found - size) <= 32 << 20


@pytest.mark.usefixtures("_one_thread")
def test_the_plain_loop_keeps_what_was_there_at_the_save(disk: Path) -> None:
    from plain_loop import PlainLoop, PlainLoopOptions
    from training_state import LinearTraining

    if not direct_io_works(disk):
        pytest.skip(f"{disk} is on a file system without direct I/O")
    training = LinearTraining(1 << 20)
    training.step()
    for life in range(2):  # the second finds the first one's files
        loop = PlainLoop(disk / "plain", PlainLoopOptions(chunk_bytes=128 << 10))
        loop.start(training.state)
        try:
            for step in (1, 2, 3):
                training.step()
                flat = flatten(training.state)
                expected = bytearray(flat.layout.stream_bytes)
                for offset, block in zip(flat.layout.block_offsets(), flat.blocks, strict=True):
                    expected[offset : offset + block.numel()] = block.numpy().tobytes()
                loop.save(10 * life + step)
                training.step()
                loop.drain()
                commit = (disk / "plain" / "plain-commit.bin").read_bytes()
                assert int.from_bytes(commit[:8], "little") == 10 * life + step == loop.latest()
                number = int.from_bytes(commit[8:16], "little")
                assert number == step % 2
                written = (disk / "plain" / f"plain-{number}.bin").read_bytes()
                assert written[: len(expected)] == expected
            assert [event.outcome for event in loop.events] == [Outcome.DURABLE] * 3
            with pytest.raises(NoCheckpoint, match="cannot restore"):
                loop.restore(training.state)
        finally:
            loop.close()


def test_phases_of_a_training_under_a_fault() -> None:
    from checkmate import Phase, phases_of

    ranks = [
        {
            "iterations": [[1.0, 0.0], [2.0, 0.0], [3.5, 0.25], [7.0, 2.5], [8.0, 2.5], [12.0, 9.0]],
            "saves": [[0.9, "durable"], [1.9, "durable"], [3.4, "failed"], [6.9, "durable"], [7.9, "failed"]],
        },
        {"iterations": [[1.0, 0.0], [2.0, 0.5], [3.5, 0.5], [7.0, 1.0], [8.0, 1.0]], "saves": []},
    ]
    assert phases_of(ranks, [("well", -0.5), ("stopped", 3.0), ("back", 5.0)], 10.0) == [
        Phase("well", 3.5, 2, 1.5, 0.5, 2, 0),
        Phase("stopped", 2.0, 1, 1.5, 0.25, 0, 1),
        Phase("back", 5.0, 2, 3.5, 2.25, 1, 1),
    ]
    nothing = phases_of(ranks, [("well", 0.5), ("stopped", 4.0)], 6.5)[1]
    assert (nothing.iterations, nothing.rate, nothing.longest_s) == (0, 0.0, 2.5)


@pytest.mark.parametrize("first_free", [1, 7])
def test_the_interval_is_the_shortest_at_which_the_disk_does_not_bind(first_free: int) -> None:
    from training import _free_interval

    class Made:
        def bound(self, none: object, interval: int, state_bytes: int) -> Bound:
            return Bound(1.0, "disk" if interval < first_free else "copy")

    assert _free_interval([], 1, cast(Any, Made())) == first_free


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ("ddddd", 0),
        ("dffdd", 0),
        ("dfffd", 1),
        ("dffdfdd", 2),
        ("dffdfd", 2),
        ("fdddff", None),
        ("dddf", None),
        ("", 0),
    ],
)
def test_saves_until_all_are_durable_again(outcomes: str, expected: int | None) -> None:
    from checkmate import until_whole

    names = {"d": "durable", "f": "failed"}
    saves = [(float(number), names[letter]) for number, letter in enumerate(outcomes)]
    assert until_whole(saves, healed_s=3.0) == expected


@pytest.mark.parametrize(("file", "width"), [("laptop.yaml", 256), ("gpu.yaml", 4096)])
def test_sizes_come_from_the_configurations_of_the_checkout(
    file: str, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the file names a base that has them."""
    import runs

    class Asked(Exception):
        pass

    def build(name: str, config: Any, *_: object) -> None:
        raise Asked(config.workload_options(name).classifier_width)

    monkeypatch.setattr(runs, "build", build)
    config = Path(__file__).resolve().parents[2] / "config" / file
    places: dict[str, Any] = {"device": "cpu", "threads": torch.get_num_threads(), "data_dir": tmp_path}
    with pytest.raises(Asked, match=str(width)):
        runs.Trainer("vgg16", config=config, **places, folder=tmp_path, knobs={}, seed=0)
