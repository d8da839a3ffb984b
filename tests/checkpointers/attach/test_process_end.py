"""A process that ends drains for a bounded time, however it ends, and never hangs."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from lastgood import PCcheck
from lastgood.checkpointers.attach import process_end as endings
from tests.checkpointers.support.sigterm import wait_for_nobody_to_have_sigterm
from tests.support.patience import wait_until

SCRIPT = Path(__file__).parents[1] / "support" / "ending_script.py"


def run(directory: Path, how: str, slow_s: float, granted_s: float, *number: int) -> tuple[int, str]:
    """Exit code and stderr."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(directory), how, str(slow_s), str(granted_s), *map(str, map(int, number))],
        capture_output=True,
        text=True,
        timeout=200,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("how", "number", "codes"),
    [
        # Every day pccheck/test_verdicts ends a training by an error.
        pytest.param("return", (), {0}, marks=pytest.mark.slow),
        pytest.param("exception", (), {1}, marks=pytest.mark.slow),
        ("signal", (signal.SIGTERM,), {128 + signal.SIGTERM}),
        pytest.param("signal", (signal.SIGINT,), {1, 128 + signal.SIGINT, -signal.SIGINT}, marks=pytest.mark.slow),
    ],
)
def test_what_is_under_way_is_finished_first(tmp_path, how, number, codes):
    returned, error = run(tmp_path, how, 0.2, 100.0, *number)
    assert returned in codes, error
    assert PCcheck(tmp_path).latest() == 2, error
    assert ("the loop failed" in error) == (how == "exception")


@pytest.mark.slow
def test_a_disk_that_takes_too_long_is_given_up(tmp_path):
    """Each flush takes 3 s, and 1 s is granted: the process ends when its flush returns, not after all of them."""
    returned, error = run(tmp_path, "signal", 3.0, 1.0, signal.SIGTERM)
    assert returned == 143, error
    assert "given up at exit, older checkpoints stay" in error
    assert PCcheck(tmp_path).latest() is None


def test_a_disk_that_does_not_answer_keeps_no_process_from_ending(tmp_path):
    """A flush takes an hour, and 1 s is granted: the process does not wait until it returns."""
    returned, error = run(tmp_path, "hang", 3600.0, 1.0, signal.SIGTERM)
    assert returned == 143, error
    assert "given up at exit, older checkpoints stay" in error
    assert PCcheck(tmp_path).latest() == 1


def end_stuck(directory: Path, how: str, slow_s: float, granted_s: float) -> tuple[int, str]:
    """Send SIGTERM once the main thread is inside its native call; exit code and stderr."""
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(directory), how, str(slow_s), str(granted_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        address = next(line.split()[1] for line in process.stdout if line.startswith("stuck"))
        wait_until(
            lambda: f" {address} " in Path("/proc", str(process.pid), "syscall").read_text(),
            "the script to be stuck",
            100,
        )
        process.terminate()
        _, error = process.communicate(timeout=100)
    finally:
        process.kill()
        process.wait()
    return process.returncode, error


@pytest.mark.slow
def test_a_main_thread_that_is_stuck_does_not_keep_the_process(tmp_path):
    """As in a collective whose other ranks are gone: what is under way becomes durable, then SIGTERM does its work."""
    returned, error = end_stuck(tmp_path, "stuck", 0.5, 60.0)
    assert returned == -signal.SIGTERM, error
    assert "the main thread is inside a native call" in error
    assert PCcheck(tmp_path).latest() == 2, error


@pytest.mark.slow  # every day each by itself
def test_a_disk_that_does_not_answer_beside_a_stuck_main_thread(tmp_path):
    returned, error = end_stuck(tmp_path, "stuck", 3600.0, 1.0)
    assert returned == -signal.SIGTERM, error
    assert PCcheck(tmp_path).latest() is None


def test_a_call_that_keeps_pythons_lock_does_not_keep_the_process(tmp_path):
    returned, error = end_stuck(tmp_path, "stuck-with-gil", 0.5, 2.0)
    assert returned == -signal.SIGTERM, error
    assert "SIGTERM was not answered in 2 s" in error


def test_a_forked_child_ends_alone(tmp_path):
    """A data loader's worker has the handler, but neither the thread nor the descriptor is its own."""
    checkpointer = PCcheck(tmp_path, interval_steps=1)
    wait_for_nobody_to_have_sigterm()
    checkpointer.attach(model=torch.nn.Linear(2, 2))
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(told, b"x")
            while True:
                time.sleep(1)
        except SystemExit as error:
            os._exit(error.code)
    assert os.read(ready, 1) == b"x"
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 143
    assert checkpointer.step() == 1
    checkpointer.close()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    for descriptor in (ready, told):
        os.close(descriptor)


def test_who_takes_sigterm_later_has_it(tmp_path, monkeypatch):
    wait_for_nobody_to_have_sigterm()
    checkpointer = PCcheck(tmp_path, interval_steps=1, exit_drain_s=0.0)  # no patience at all
    checkpointer.attach(model=torch.nn.Linear(2, 2))
    seen = []
    signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        checkpointer.step()
        checkpointer.close()
        assert seen == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL, "it stays"
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_an_answer_to_one_signal_is_none_to_the_next(tmp_path):
    """And whoever catches SystemExit goes on."""
    wait_for_nobody_to_have_sigterm()
    checkpointer = PCcheck(tmp_path, interval_steps=1)
    checkpointer.attach(model=torch.nn.Linear(2, 2))
    for _ in range(3):
        with pytest.raises(SystemExit, match="143"):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)  # the signal ends it
    assert checkpointer.step() == 1
    checkpointer.close()


def test_sigterm_that_is_somebody_elses_stays_so(tmp_path):
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        checkpointer = PCcheck(tmp_path, interval_steps=1)
        checkpointer.attach(model=torch.nn.Linear(2, 2))
        os.kill(os.getpid(), signal.SIGTERM)
        checkpointer.close()
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_sigterm_goes_back_with_the_last_one(tmp_path):
    wait_for_nobody_to_have_sigterm()
    dropped = PCcheck(tmp_path / "dropped", interval_steps=1)
    dropped.attach(model=torch.nn.Linear(2, 2))
    dropped._store.close()
    assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    del dropped
    gc.collect()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    first, second = (PCcheck(tmp_path / name, interval_steps=1) for name in "ab")
    first.attach(model=torch.nn.Linear(2, 2))
    second.attach(model=torch.nn.Linear(2, 2))
    first.close()
    with pytest.raises(SystemExit, match="143"):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)  # the signal ends it
    second.close()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_sigterm_is_nobody_s_once_the_last_one_is_dropped_in_a_thread(tmp_path, monkeypatch):
    """Only the main thread may set handlers."""
    wait_for_nobody_to_have_sigterm()
    held = [PCcheck(tmp_path, interval_steps=1)]
    held[0].attach(model=torch.nn.Linear(2, 2))
    held[0]._store.close()

    def drop():
        held.clear()
        gc.collect()

    thread = threading.Thread(target=drop)
    thread.start()
    thread.join(60)
    assert not endings._live
    told = []
    monkeypatch.setattr(os, "kill", lambda *how: told.append(how))
    endings._leave(signal.SIGTERM, None)  # as a SIGTERM would
    assert told == [(os.getpid(), signal.SIGTERM)]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
