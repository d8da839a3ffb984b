"""The ceilings: sane numbers, nothing left behind, refusals by name."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from lastgood import locks, mounts
from lastgood.errors import ConfigError, LastgoodError, StorageError
from lastgood.experiments.ceilings import disk as disk_ceilings
from lastgood.experiments.ceilings import measure as module
from lastgood.experiments.ceilings.disk import DiskPlan, measure_disk
from lastgood.experiments.ceilings.measure import cached_or_measured, measure_ceilings, measure_memory_copy
from lastgood.experiments.ceilings.record import load_ceilings
from lastgood.experiments.machine.facts import where_run
from lastgood.locks import FileLock
from tests.experiments.support.records import make_ceilings
from tests.support.patience import wait_until

MIB = 1 << 20
SMALL = DiskPlan(file_bytes=8 * MIB, jobs=(1, 2), block_bytes=(MIB,), repetitions=2, pass_budget_s=0.2, flushes=3)


@pytest.fixture(autouse=True)
def _own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests must neither wait for a measurement on this machine nor hold one up."""
    monkeypatch.setattr(
        "lastgood.experiments.machine.lock.machine_lock", lambda: FileLock(tmp_path / "lock", "the test's turn")
    )
    monkeypatch.setattr(module, "cuda_devices", lambda: ())


def test_a_quick_look_is_sane_and_leaves_nothing(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    stages: list[str] = []
    record = measure_ceilings(scratch, "box", quick=True, report=stages.append)
    assert list(scratch.iterdir()) == []
    assert stages == ["disk", "memory copy", "loopback"]
    assert record.quick
    # Each is of one block (or, of memory, 32 MiB) or more in a part of the whole time.
    slowest = MIB / record.wall_s
    assert slowest < record.persist_bytes_per_s < 1e12
    assert slowest < record.disk.read_bytes_per_s < 1e12
    assert 32 * slowest < record.copy_bytes_per_s("cpu") < 1e12
    assert 0 < record.disk.median_fdatasync_s < record.wall_s
    assert record.persist_bytes_per_s == max(point.median_bytes_per_s for point in record.disk.write)
    assert {(point.jobs, point.block_bytes) for point in record.disk.write} == {
        (jobs, block * MIB) for jobs in (1, 2) for block in (1, 4)
    }
    assert {len(point.bytes_per_s) for point in record.disk.write + record.disk.read} == {2}
    assert slowest < record.loopback.bytes_per_s < 1e12
    assert record.network_bytes_per_s is None
    record.write(tmp_path / "ceilings.json")
    assert load_ceilings(tmp_path / "ceilings.json") == record


def test_no_torch_is_imported_without_a_device(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; import lastgood.experiments.ceilings.measure as c\n"
        "c.cuda_devices = lambda: ()\n"
        "from lastgood.experiments.machine import lock; from lastgood.locks import FileLock\n"
        "lock.machine_lock = lambda: FileLock(Path(sys.argv[1], 'lock'), 'test')\n"
        "c.measure_ceilings(Path(sys.argv[1]), 'box', quick=True); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path], timeout=200, check=True)


def test_where_direct_io_is_refused_buffered_writes_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_open = os.open

    def refuse_direct(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return really_open(path, flags, mode)

    monkeypatch.setattr(disk_ceilings.os, "open", refuse_direct)
    found = measure_disk(tmp_path, SMALL)
    assert not found.direct_io
    assert found.write_bytes_per_s > 0
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_that_takes_the_flag_and_refuses_the_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_ceilings, "direct_io_works", lambda _: False)
    assert not measure_disk(tmp_path, SMALL).direct_io


def open_files(pid: int) -> list[str]:
    links = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            links.append(str(link.readlink()))
    return links


def test_a_killed_measurement_leaves_no_file(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from lastgood.experiments.ceilings.disk import *\n"
        "print('go', flush=True)\n"
        "while True: measure_disk(Path(sys.argv[1]), DiskPlan(file_bytes=16 << 20, jobs=(1,), repetitions=9))"
    )
    child = subprocess.Popen([sys.executable, "-c", program, tmp_path], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    # Killed while its nameless file is open, or this would prove nothing.
    wait_until(
        lambda: any(link.startswith(str(tmp_path)) for link in open_files(child.pid)),
        "a file that the measurement opens",
        60,
    )
    child.send_signal(signal.SIGKILL)
    child.wait(30)
    child.stdout.close()
    assert list(tmp_path.iterdir()) == []


def test_scratch_in_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "lies_in_memory", lambda _: True)
    with pytest.raises(ConfigError, match="memory"):
        measure_ceilings(tmp_path / "scratch", "box", quick=True)
    assert not (tmp_path / "scratch").exists()


def test_a_full_disk_is_refused_with_the_bytes_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_ceilings, "free_bytes", lambda _: 5 * MIB)
    needed = SMALL.file_bytes + 64 * MIB
    with pytest.raises(StorageError, match=f"{tmp_path}: .* needs {needed} bytes .*5242880 are free"):
        measure_disk(tmp_path, SMALL)


def test_a_scratch_that_is_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(StorageError, match="cannot make this folder"):
        measure_disk(path, SMALL)


def test_it_waits_for_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Time passes in its waits alone, or a busy machine's could be over before it has said a word.
    clock = SimpleNamespace(now_s=0.0)
    clock.monotonic = lambda: clock.now_s
    clock.sleep = lambda seconds: setattr(clock, "now_s", clock.now_s + seconds)
    monkeypatch.setattr(locks, "time", clock)
    monkeypatch.setattr("lastgood.experiments.machine.lock.TURN_S", 2.0)
    told: list[str] = []
    with FileLock(tmp_path / "lock", "the test's turn"), pytest.raises(LastgoodError, match="held by"):
        measure_ceilings(tmp_path / "scratch", "box", quick=True, report=told.append)
    assert len(told) == 1
    assert "waiting for the test's turn" in told[0]


def test_memory_copy_by_one_and_by_all() -> None:
    curves = measure_memory_copy(4 * MIB, repetitions=2)
    assert curves[0].threads == 1
    assert all(len(curve.bytes_per_s) == 2 and curve.median_bytes_per_s > 0 for curve in curves)


def test_todays_record_is_kept_and_others_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ceilings.json"
    kept = make_ceilings(machine="box", where=where_run(tmp_path))
    fresh = make_ceilings(machine="box", where=where_run(tmp_path), write_bytes_per_s=5e9)
    monkeypatch.setattr(module, "measure_ceilings", lambda *_, **__: fresh)
    kept.write(path)
    assert cached_or_measured(path, tmp_path, "box") == (kept, False)
    assert cached_or_measured(path, tmp_path, "box", force=True) == (fresh, True)
    yesterday = (datetime.now(timezone.utc) - timedelta(days=1)).isoformat()
    for other in (
        kept.model_copy(update={"measured_at": yesterday}),
        kept.model_copy(update={"machine": "other"}),
        kept.model_copy(update={"quick": True}),
        kept.model_copy(update={"where": where_run(tmp_path).model_copy(update={"cores": 999})}),
    ):
        other.write(path)
        assert cached_or_measured(path, tmp_path, "box") == (fresh, True)
        assert load_ceilings(path) == fresh
    path.write_text("{}")
    assert cached_or_measured(path, tmp_path, "box") == (fresh, True)


def test_a_commit_since_does_not_make_ceilings_stale(tmp_path: Path) -> None:
    where = where_run(tmp_path)
    changed = where.model_copy(update={"git_revision": "f" * 40, "versions": {}})
    assert make_ceilings(machine="box", where=where).still_good("box", changed, quick=False)


def test_a_damaged_record_is_refused_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "ceilings.json"
    path.write_text('{"ceilings_version": 2}')
    with pytest.raises(LastgoodError, match=r"ceilings\.json: not a ceilings record"):
        load_ceilings(path)


def test_a_record_of_an_older_version_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ceilings.json"
    path.write_text(json.dumps({**make_ceilings().model_dump(mode="json"), "ceilings_version": 1}))
    with pytest.raises(LastgoodError, match=r"ceilings\.json: ceilings of version 1, .* version 2 .*remove it"):
        load_ceilings(path)
    fresh = make_ceilings(machine="box", where=where_run(tmp_path))
    monkeypatch.setattr(module, "measure_ceilings", lambda *_, **__: fresh)
    told: list[str] = []
    assert cached_or_measured(path, tmp_path, "box", report=told.append) == (fresh, True)
    assert "version 1" in told[0]


def test_the_ceiling_is_the_best_median_and_its_own_spread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One lucky pass of a pattern must not make the ceiling."""
    # In the order of measuring: writes of one and of two jobs, then reads; the second round goes backwards.
    rates = iter([10.0, 99.0, 5.0, 6.0, 2.0, 11.0, 8.0, 7.0, 12.0, 1.0, 9.0, 4.0])
    monkeypatch.setattr(disk_ceilings._Filled, "one_pass", lambda *_: next(rates))
    plan = DiskPlan(file_bytes=2 * MIB, jobs=(1, 2), block_bytes=(MIB,), repetitions=3, flushes=1)
    found = measure_disk(tmp_path, plan)
    assert [point.bytes_per_s for point in found.write] == [[10.0, 11.0, 12.0], [99.0, 2.0, 1.0]]
    assert [point.bytes_per_s for point in found.read] == [[5.0, 7.0, 9.0], [6.0, 8.0, 4.0]]
    assert (found.write_bytes_per_s, found.write_spread_bytes_per_s) == (11.0, (10.0, 12.0))
    assert (found.read_bytes_per_s, found.read_spread_bytes_per_s) == (7.0, (5.0, 9.0))


def test_the_command(tmp_path: Path) -> None:
    from lastgood.cli import app

    out = tmp_path / "c.json"
    arguments = ["ceilings", "--scratch", tmp_path / "s", "--out", out, "--machine", "box", "--quick"]
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    assert "disk write" in done.stdout
    again = CliRunner().invoke(app, [str(argument) for argument in [*arguments, "--json"]])
    assert json.loads(again.stdout) == json.loads(out.read_text())


@pytest.mark.gpu
def test_device_copies_are_measured_both_ways() -> None:
    name, facts = module.measure_device_copies(64 * MIB)
    assert name
    assert len(facts) == 4
    assert all(rate > 1e8 for rate in facts.values())
    assert facts["device_to_host_pinned_bytes_per_s"] > facts["device_to_host_pageable_bytes_per_s"]


FIO = """#!/bin/sh
echo 'note: a warning'
for word in "$@"; do case $word in --filename=*) file=${word#--filename=} ;; esac; done
[ "$(stat -L -c %s "$file")" = 8388608 ] || exit 1
case "$*" in *--rw=write*) way=write ;; *) way=read ;; esac
printf '{"jobs": [{"%s": {"io_bytes": 6000000, "runtime": 20}}, ' $way
printf '{"%s": {"io_bytes": 2000000, "runtime": 10}}]}' $way
"""
"""It looks at the file that it is given, and answers as fio does."""


@pytest.mark.parametrize(
    ("program", "rate"),
    [(FIO, 8e6 / 0.02), ("#!/bin/sh\nexit 1\n", None), ("#!/bin/sh\necho '{}'\n", None), ("#!/bin/sh\n", None)],
    ids=["answers", "fails", "says nothing of jobs", "says nothing"],
)
def test_fio_is_asked_about_the_same_file(
    program: str, rate: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bin" / "fio"
    path.parent.mkdir()
    path.write_text(program)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")
    found = measure_disk(tmp_path / "scratch", SMALL)
    assert (found.fio_write_bytes_per_s, found.fio_read_bytes_per_s) == (rate, rate)


def test_fio_agrees_with_us(tmp_path: Path) -> None:
    if shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    found = measure_disk(tmp_path / "scratch", DiskPlan(file_bytes=64 * MIB, repetitions=3))
    assert found.fio_write_bytes_per_s is not None and found.fio_read_bytes_per_s is not None
    assert found.write_bytes_per_s / 10 < found.fio_write_bytes_per_s < found.write_bytes_per_s * 10
