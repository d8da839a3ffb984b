"""torch DCP as a system: what its own files hold, its modes, and the faults that users met in such systems."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from lastgood.checkpointers.dcp.system import TorchDCP
from lastgood.checkpointers.directories.local import LocalStore
from lastgood.checkpointers.directories.manifest import MANIFEST, manifest_text
from lastgood.checkpointers.directories.named_state import LAYOUT_NAME, stored_tensors
from lastgood.checkpointers.events import Outcome
from lastgood.errors import CheckpointError, CorruptCheckpoint, MismatchError, NoCheckpoint, WaitTimeout
from lastgood.files import temporary_beside
from lastgood.state import flatten, state_digest
from tests.checkpointers.support.small_training import SmallTraining

QUICK_MODES = ["sync", "async_thread"]
MODES = [*QUICK_MODES, pytest.param("async_process", marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def opened():
    made = []

    def make(directory, state, **options):
        checkpointer = TorchDCP(directory, **options)
        made.append(checkpointer)
        checkpointer.start(state)
        return checkpointer

    yield make
    for checkpointer in made:
        checkpointer.close()


def outcomes(checkpointer):
    return [event.outcome for event in checkpointer.events]


def saved_steps(checkpointer, training, count):
    digests = {}
    for _ in range(count):
        training.step()
        digests[training.step_number] = training.digest()
        checkpointer.save(training.step_number)
        checkpointer.drain()
    return digests


def newest(directory):
    return Path(LocalStore(directory, 2).found()[0].where)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("threads", [1, 3])
def test_every_mode_restores_to_the_bit_though_training_went_on(mode, threads, opened, tmp_path):
    training = SmallTraining(200)
    checkpointer = opened(tmp_path, training.state, mode=mode, writer_threads=threads)
    digests = {}
    for _ in range(4):
        training.step()
        digests[training.step_number] = training.digest()
        checkpointer.save(training.step_number)
        training.plain["moving"] += 1
        training.model[1].running_mean.add_(1)
    training.step()
    checkpointer.drain()
    assert outcomes(checkpointer) == [Outcome.DURABLE] * 4, checkpointer.events
    fresh = SmallTraining(200, seed=1)
    assert TorchDCP(tmp_path).restore(fresh.state) == 4
    assert fresh.digest() == digests[4]
    assert fresh.model[3].weight is fresh.model[0].weight
    assert [one.step for one in LocalStore(tmp_path, 2).found()] == [4, 3]
    assert not list(tmp_path.glob("*.lastgood-tmp"))


# -- what the files hold -----------------------------------------------------------------------------------------------


def test_dcp_itself_reads_the_tensors_under_their_names(opened, tmp_path):
    training = SmallTraining()
    opened_here = opened(tmp_path, training.state, mode="sync")
    saved_steps(opened_here, training, 1)
    metadata = FileSystemReader(newest(tmp_path)).read_metadata().state_dict_metadata
    assert "model.0.weight" in metadata
    assert "model.3.weight" not in metadata, "tied weights are written once"
    assert "optimizer.state.0.exp_avg" in metadata
    target = {"model.0.weight": torch.empty(64, 64), "model.1.running_var": torch.empty(64)}
    load(target, checkpoint_id=newest(tmp_path), no_dist=True)
    assert torch.equal(target["model.0.weight"], training.model[0].weight)
    assert torch.equal(target["model.1.running_var"], training.model[1].running_var)


def test_memory_of_every_kind_comes_back_to_the_bit(opened, tmp_path):
    base = torch.arange(24, dtype=torch.float32)
    state = {
        "overlapping": [base[:10], base[5:15]],
        "expanded": torch.tensor([3.0]).expand(4),
        "sliced": torch.arange(20).reshape(4, 5)[:, 1:3],
        "neighbours": list(torch.arange(8, dtype=torch.int16).split(4)),
        "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(7),
        "array": np.arange(5, dtype=">i4"),
        "nan": torch.tensor([0x7FC00001, -0x003FFFFF], dtype=torch.int32).view(torch.float32),
        "bool": torch.tensor([True, False]),
        "complex": torch.randn(3, dtype=torch.complex64),
        "half": torch.randn(3).to(torch.bfloat16),
        "float8": torch.randn(4).to(torch.float8_e4m3fn),
        "lastgood": {"layout": torch.ones(2)},
        "a.b": torch.ones(1),
        "a": {"b": torch.zeros(1)},
        "text": "Ω",
        "bytes": b"\0\xff",
    }
    checkpointer = opened(tmp_path, state, mode="async_thread")
    digest = state_digest(state)
    checkpointer.save(1)
    checkpointer.drain()
    assert outcomes(checkpointer) == [Outcome.DURABLE], checkpointer.events[0].error
    fresh = {
        name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else value for name, value in state.items()
    }
    zeros = torch.zeros(24)
    fresh["overlapping"] = [zeros[:10], zeros[5:15]]
    fresh["expanded"] = torch.zeros(4)
    fresh["neighbours"] = [torch.zeros(4, dtype=torch.int16) for _ in range(2)]
    fresh["lastgood"], fresh["a"] = {"layout": torch.zeros(2)}, {"b": torch.ones(1)}
    fresh["array"] = None
    assert TorchDCP(tmp_path).restore(fresh) == 1
    assert state_digest({**fresh, "expanded": fresh["expanded"][:1].expand(4)}) == digest


def test_no_name_is_given_twice():
    state = {LAYOUT_NAME: torch.ones(1), "lastgood.block.1": torch.ones(1), "x": torch.ones(3).expand(2, 3)}
    names = [tensor.name for tensor in stored_tensors(flatten(state).layout)]
    assert len({*names, LAYOUT_NAME}) == 4


# -- fault 1: an error in one writer is swallowed ----------------------------------------------------------------------


@pytest.mark.parametrize("mode", QUICK_MODES)
@pytest.mark.parametrize("number", [0, 2])
def test_an_error_in_any_writer_thread_fails_the_save(mode, number, opened, tmp_path, monkeypatch):
    training = SmallTraining()
    checkpointer = opened(tmp_path, training.state, mode=mode, writer_threads=3)
    digests = saved_steps(checkpointer, training, 1)
    synced = os.fsync

    def refuse(descriptor):
        if Path(f"/proc/self/fd/{descriptor}").readlink().name == f"__0_{number}.distcp":
            raise OSError(5, "Input/output error")
        synced(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        saved_steps(checkpointer, training, 1)
    assert outcomes(checkpointer) == [Outcome.DURABLE, Outcome.FAILED]
    assert f"__0_{number}.distcp" in checkpointer.events[1].error
    assert "kernel log" in checkpointer.events[1].error
    assert not list(tmp_path.glob("*.lastgood-tmp")), "what the failed save wrote is removed"
    fresh = SmallTraining(seed=1)
    assert TorchDCP(tmp_path).restore(fresh.state) == 1
    assert fresh.digest() == digests[1]
    saved_steps(checkpointer, training, 1)
    assert outcomes(checkpointer)[-1] is Outcome.DURABLE


def test_a_writer_thread_that_dies_without_a_word_fails_the_save(opened, tmp_path, monkeypatch):
    training = SmallTraining()
    checkpointer = opened(tmp_path, training.state, mode="sync", writer_threads=2)
    original = FileSystemWriter._write_data

    def lose_one(writer, planner, files):
        files.get_nowait()
        return original(writer, planner, files)

    monkeypatch.setattr(FileSystemWriter, "_write_data", lose_one)
    saved_steps(checkpointer, training, 1)
    assert outcomes(checkpointer) == [Outcome.FAILED]
    assert "tensors written" in checkpointer.events[0].error


def test_every_file_is_flushed_before_it_is_synced(opened, tmp_path, monkeypatch):
    """DCP of torch 2.11 asks for a sync while the end of the file is still in Python's buffer."""
    training = SmallTraining()
    checkpointer = opened(tmp_path, training.state, mode="sync")
    sizes = {}
    synced = os.fsync

    def note(descriptor):
        sizes[Path(f"/proc/self/fd/{descriptor}").readlink().name] = os.fstat(descriptor).st_size
        synced(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    saved_steps(checkpointer, training, 1)
    for path in newest(tmp_path).iterdir():
        assert sizes[path.name] == path.stat().st_size


# -- faults 2 and 3: mixtures, flipped bits, cut files -----------------------------------------------------------------


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path):
    os.truncate(path, path.stat().st_size - 1)


def empty(path):
    os.truncate(path, 0)


@pytest.mark.parametrize("damage", [flip, cut, empty, os.unlink])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", MANIFEST])
def test_any_damaged_file_is_found_and_the_step_before_is_used(damage, name, opened, tmp_path, caplog):
    training = SmallTraining(8)
    checkpointer = opened(tmp_path, training.state, mode="sync")
    digests = saved_steps(checkpointer, training, 2)
    damage(newest(tmp_path) / name)
    fresh = SmallTraining(8, seed=1)
    assert TorchDCP(tmp_path).restore(fresh.state) == 1
    assert fresh.digest() == digests[1]
    assert name in caplog.text


def test_files_of_two_checkpoints_are_never_mixed(opened, tmp_path):
    training = SmallTraining(8)
    checkpointer = opened(tmp_path, training.state, mode="sync")
    saved_steps(checkpointer, training, 2)
    new, old = (Path(one.where) for one in LocalStore(tmp_path, 2).found())
    (new / "__0_0.distcp").write_bytes((old / "__0_0.distcp").read_bytes())
    assert TorchDCP(tmp_path).restore(SmallTraining(8, seed=1).state) == 1
    (new / "__0_0.distcp").unlink()
    for name in (MANIFEST, ".metadata", "__0_0.distcp"):
        (new / name).write_bytes((old / name).read_bytes())
    with pytest.raises(CorruptCheckpoint, match="not of step 2"):
        TorchDCP(tmp_path).restore(SmallTraining(8, seed=1).state, step=2)


def test_where_nothing_is_whole_a_restore_says_so_and_does_not_begin_anew(opened, tmp_path):
    training = SmallTraining(8)
    checkpointer = opened(tmp_path, training.state, mode="sync")
    saved_steps(checkpointer, training, 2)
    for path in (Path(one.where) for one in LocalStore(tmp_path, 2).found()):
        flip(path / "__0_0.distcp")
    with pytest.raises(CorruptCheckpoint, match=r"no checkpoint can be read.*step-2.*step-1"):
        TorchDCP(tmp_path).restore(SmallTraining(8).state)


class Evil:
    def __reduce__(self):
        return (os.mkdir, (str(Path(os.environ["EVIL_PLACE"])),))


def test_metadata_that_would_run_code_is_refused(opened, tmp_path, monkeypatch, caplog):
    training = SmallTraining(8)
    checkpointer = opened(tmp_path / "job", training.state, mode="sync")
    saved_steps(checkpointer, training, 2)
    monkeypatch.setenv("EVIL_PLACE", str(tmp_path / "made"))
    place = newest(tmp_path / "job")
    content = pickle.dumps(Evil())
    (place / ".metadata").write_bytes(content)
    import lastgood._native as native

    document = json.loads((place / MANIFEST).read_bytes().rpartition(b"}")[0] + b"}")
    files = {name: tuple(value) for name, value in document["files"].items()}
    files[".metadata"] = (len(content), native.crc32c(content))
    (place / MANIFEST).write_bytes(manifest_text(2, files))
    assert TorchDCP(tmp_path / "job").restore(SmallTraining(8, seed=1).state) == 1
    assert not (tmp_path / "made").exists()
    assert "posix.mkdir" in caplog.text


# -- faults 4, 5, 8, 9: staging, memory, shapes, unfinished saves ------------------------------------------------------


def test_values_changed_right_after_save_do_not_leak(opened, tmp_path):
    """A state larger than one write takes, changed while it is written, in every place."""
    state = {"weights": torch.zeros(4 << 20), "plain": {"step": 0}}
    checkpointer = opened(tmp_path, state)
    for step in range(1, 6):
        state["weights"].fill_(step)
        state["plain"]["step"] = step
        checkpointer.save(step)
        state["weights"].fill_(-1)
        state["plain"]["step"] = -1
    checkpointer.drain()
    for step in (4, 5):
        assert TorchDCP(tmp_path).restore(state, step=step) == step
        assert state["plain"]["step"] == step
        assert bool((state["weights"] == step).all())


def test_a_stager_that_dcp_closes_behind_a_save_serves_the_next(opened, tmp_path):
    """torch 2.11 does that."""
    training = SmallTraining()
    checkpointer = opened(tmp_path, training.state)
    for _ in range(2):
        training.step()
        checkpointer.save(training.step_number)
        checkpointer.drain()
        checkpointer._stager.close()
    assert [event.outcome for event in checkpointer.events] == [Outcome.DURABLE] * 2


def test_staging_takes_the_same_memory_save_after_save(opened, tmp_path):
    state = {"weights": torch.zeros(4 << 20), "array": np.zeros(1 << 20)}
    checkpointer = opened(tmp_path, state)
    process = psutil.Process()

    def after(saves):
        for step in range(saves):
            checkpointer.save(step)
        checkpointer.drain()
        gc.collect()
        return process.memory_info().rss

    first = after(4)
    assert after(12) - first < 96 << 20, "16 MiB of weights and 8 MiB of an array for each save would be 288 MiB"


def test_another_dtype_is_refused_and_nothing_is_cast(opened, tmp_path):
    state = {"weights": torch.zeros(4)}
    checkpointer = opened(tmp_path, state)
    checkpointer.save(1)
    checkpointer.drain()
    with pytest.raises(MismatchError, match=r"weights.*float32.*float64"):
        TorchDCP(tmp_path).restore({"weights": torch.zeros(4, dtype=torch.float64)})


def test_a_restore_beside_an_unfinished_save_takes_the_one_before(opened, tmp_path, monkeypatch):
    training = SmallTraining()
    checkpointer = opened(tmp_path, training.state)
    digests = saved_steps(checkpointer, training, 1)
    hold, reached = threading.Event(), threading.Event()
    original = FileSystemWriter.finish

    def wait_and_finish(*arguments):
        reached.set()
        assert hold.wait(120)
        return original(*arguments)

    monkeypatch.setattr(FileSystemWriter, "finish", wait_and_finish)
    training.step()
    checkpointer.save(2)
    assert reached.wait(60)
    assert TorchDCP(tmp_path).latest() == 1
    fresh = SmallTraining(seed=1)
    assert TorchDCP(tmp_path).restore(fresh.state) == 1
    assert fresh.digest() == digests[1]
    with pytest.raises(WaitTimeout, match="step 2"):
        checkpointer.drain(0.05)
    hold.set()
    checkpointer.close()
    assert TorchDCP(tmp_path).latest() == 2, "close() drains"


def test_leftovers_of_a_killed_process_are_removed_and_never_restored(opened, tmp_path):
    left = [tmp_path / f"step-9-{'0123' * 8}.tmp", tmp_path / "checkpoint-00000003-step-9.tmp"]  # of earlier versions
    left += [temporary_beside(tmp_path / "step-9")]
    kept = [tmp_path / "notes.tmp", tmp_path / "step-9-0123.tmp"]
    for path in (*left, *kept):
        path.mkdir()
        (path / "__0_0.distcp").write_bytes(b"half")
    with pytest.raises(NoCheckpoint):
        TorchDCP(tmp_path).restore(SmallTraining(8).state)
    opened(tmp_path, SmallTraining(8).state)
    assert sorted(tmp_path.iterdir()) == sorted([*kept, tmp_path / "lock"]), "what a user put there stays"


def test_a_name_that_cannot_be_made_durable_is_taken_back(opened, tmp_path, monkeypatch):
    training = SmallTraining(8)
    checkpointer = opened(tmp_path, training.state, mode="sync")
    digests = saved_steps(checkpointer, training, 2)
    from lastgood.checkpointers.directories import local as directories

    original = directories.sync_directory

    def refuse(directory):
        if directory == tmp_path:
            raise OSError(5, "Input/output error")
        original(directory)

    with monkeypatch.context() as patch:
        patch.setattr(directories, "sync_directory", refuse)
        saved_steps(checkpointer, training, 1)
    assert outcomes(checkpointer)[-1] is Outcome.FAILED
    fresh = SmallTraining(8, seed=1)
    assert TorchDCP(tmp_path).restore(fresh.state) == 2
    assert fresh.digest() == digests[2]
    assert [one.step for one in LocalStore(tmp_path, 2).found()] == [2, 1]


# -- fault 11: DCP hangs, or its process is dead -----------------------------------------------------------------------


def test_a_save_that_hangs_fails_in_time_and_later_saves_wait_for_nothing(opened, tmp_path, monkeypatch):
    training = SmallTraining()
    checkpointer = opened(tmp_path, training.state, limit_s=0.3)
    hold, reached = threading.Event(), threading.Event()
    original = FileSystemWriter.write_data

    def hang(*arguments):
        reached.set()
        assert hold.wait(120)
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(FileSystemWriter, "write_data", hang)
        training.step()
        checkpointer.save(1)
        checkpointer.drain(60)
        assert reached.wait(60), "it is given up, and still comes to write"
    assert outcomes(checkpointer) == [Outcome.FAILED]
    assert "waited 0 s" in checkpointer.events[0].error
    checkpointer.options = checkpointer.options.model_copy(update={"limit_s": 60.0})  # the disk may need more
    training.step()
    checkpointer.save(2)
    assert "still runs" in checkpointer.events[1].error
    late = checkpointer._late
    hold.set()
    with pytest.raises(CheckpointError, match="given up"):
        raise late.exception(60).failures[0][0]
    saved_steps(checkpointer, training, 1)
    assert outcomes(checkpointer)[-1] is Outcome.DURABLE
    assert not list(tmp_path.glob("*.lastgood-tmp"))


def test_an_end_of_the_process_gives_up_what_hangs(opened, tmp_path, monkeypatch):
    training = SmallTraining(8)
    checkpointer = opened(tmp_path, training.state)
    hold = threading.Event()
    monkeypatch.setattr(FileSystemWriter, "write_data", lambda *arguments: hold.wait(120))
    monkeypatch.setattr(checkpointer, "exit_drain_s", lambda: 0.2)
    training.step()
    checkpointer.save(1)
    checkpointer.end()
    hold.set()
    assert outcomes(checkpointer) == [Outcome.FAILED]
    assert "given up" in checkpointer.events[0].error


def helper_processes():
    return [child for child in multiprocessing.active_children() if child.daemon]


@pytest.mark.slow
def test_a_dead_process_fails_one_save_and_the_next_starts_another(opened, tmp_path):
    training = SmallTraining()
    checkpointer = opened(tmp_path, training.state, mode="async_process")
    digests = saved_steps(checkpointer, training, 1)
    assert outcomes(checkpointer) == [Outcome.DURABLE], checkpointer.events[0].error
    (helper,) = helper_processes()
    os.kill(helper.pid, signal.SIGKILL)
    helper.join(60)
    saved_steps(checkpointer, training, 1)
    assert outcomes(checkpointer)[-1] is Outcome.FAILED
    assert "dead" in checkpointer.events[-1].error or "Broken pipe" in checkpointer.events[-1].error
    fresh = SmallTraining(seed=1)
    assert TorchDCP(tmp_path).restore(fresh.state) == 1
    assert fresh.digest() == digests[1]
    saved_steps(checkpointer, training, 1)
    assert outcomes(checkpointer)[-1] is Outcome.DURABLE, checkpointer.events[-1].error
    checkpointer.close()
    assert helper_processes() == []
    assert not dist.is_initialized()


@pytest.mark.slow
def test_a_process_that_stands_still_fails_in_time_and_is_ended(opened, tmp_path):
    training = SmallTraining()
    checkpointer = opened(tmp_path, training.state, mode="async_process", limit_s=60)
    saved_steps(checkpointer, training, 1)
    (helper,) = helper_processes()
    os.kill(helper.pid, signal.SIGSTOP)
    made = checkpointer.options
    checkpointer.options = checkpointer.options.model_copy(update={"limit_s": 1.0})
    saved_steps(checkpointer, training, 1)
    assert outcomes(checkpointer) == [Outcome.DURABLE, Outcome.FAILED]
    assert "waited 1 s" in checkpointer.events[1].error
    assert not helper.is_alive()
    checkpointer.options = made
    saved_steps(checkpointer, training, 1)
    assert outcomes(checkpointer)[-1] is Outcome.DURABLE, checkpointer.events[-1].error


@pytest.mark.slow
def test_what_fails_in_the_process_is_told_here(opened, tmp_path):
    training = SmallTraining()
    checkpointer = opened(tmp_path / "job", training.state, mode="async_process", writer_threads=2)
    saved_steps(checkpointer, training, 1)
    (helper,) = helper_processes()
    before = psutil.Process(helper.pid).rlimit(psutil.RLIMIT_FSIZE)
    psutil.Process(helper.pid).rlimit(psutil.RLIMIT_FSIZE, (4096, before[1]))
    saved_steps(checkpointer, training, 1)
    psutil.Process(helper.pid).rlimit(psutil.RLIMIT_FSIZE, before)
    assert outcomes(checkpointer)[-1] is Outcome.FAILED
    assert "ulimit -f" in checkpointer.events[-1].error
    assert helper.is_alive()
    saved_steps(checkpointer, training, 1)
    assert outcomes(checkpointer)[-1] is Outcome.DURABLE


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_process_ends_with_a_killed_training(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import multiprocessing, sys, time\n"
        "import torch\n"
        "from lastgood.checkpointers.dcp.system import TorchDCP\n"
        "if __name__ == '__main__':\n"
        "    checkpointer = TorchDCP(sys.argv[1], mode='async_process')\n"
        "    checkpointer.start({'weights': torch.zeros(1000)})\n"
        "    checkpointer.save(1)\n"
        "    checkpointer.drain()\n"
        "    (helper,) = multiprocessing.active_children()\n"
        "    print(checkpointer.events[0].outcome.value, helper.pid, flush=True)\n"
        "    time.sleep(120)\n"
    )
    with subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "job")], stdout=subprocess.PIPE, text=True
    ) as training:
        try:
            outcome, pid = training.stdout.readline().split()
            helper = psutil.Process(int(pid))
            assert outcome == "durable"
        finally:
            training.kill()
    helper.wait(60)
    assert TorchDCP(tmp_path / "job").restore({"weights": torch.ones(1000)}) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["sync", "async_thread", "async_process"])
@pytest.mark.parametrize("pinned", [True, False])
def test_every_mode_on_cuda(mode, pinned, opened, tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    training = SmallTraining(900, device="cuda")
    checkpointer = opened(tmp_path, training.state, mode=mode, pinned=pinned, writer_threads=2)
    digests = {}
    for _ in range(4):
        training.step()
        digests[training.step_number] = training.digest()
        checkpointer.save(training.step_number)
        training.step()
        digests[training.step_number] = training.digest()
    checkpointer.drain()
    assert outcomes(checkpointer) == [Outcome.DURABLE] * 4, checkpointer.events
    fresh = SmallTraining(900, seed=1, device="cuda")
    assert TorchDCP(tmp_path).restore(fresh.state) == 7
    assert fresh.digest() == digests[7]
