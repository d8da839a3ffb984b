"""What every checkpointing system promises, as tests. docs/conformance.md lists them.

Whoever collects these classes gives the fixtures `system` (the class under test), `kills` and `run_program`, and those
of `lastgood.conformance.fixtures`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lastgood.checkpointers.base import Checkpointer
from lastgood.checkpointers.events import Outcome
from lastgood.conformance import killing
from lastgood.conformance.fixtures import Opening, in_time, not_flushed, outcomes, stuck_flushes
from lastgood.conformance.training import SmallTraining
from lastgood.errors import CheckpointError, LastgoodError, LockHeld, MismatchError, NoCheckpoint, StateError
from lastgood.mounts import lies_in_memory

__all__ = [
    "TestBoundedWaits",
    "TestDamage",
    "TestDurable",
    "TestExactness",
    "TestFullDisk",
    "TestKills",
    "TestPaths",
    "TestTwoWriters",
]

_System = type[Checkpointer]
_OTHER_BYTES = bytes(byte ^ 0x55 for byte in range(256))
_LARGE_BYTES = 64 << 10
"""A file of this size holds parts of the state; smaller ones may be logs."""


def _train_and_save(checkpointer: Checkpointer, training: SmallTraining, steps: int) -> dict[int, str]:
    """Train, and save each step to the end; each step's digest."""
    digests = {}
    for _ in range(steps):
        training.step()
        digests[training.step_number] = training.digest()
        checkpointer.save(training.step_number)
        checkpointer.drain()
    return digests


def _first_weights(training: SmallTraining) -> bytes:
    """The first 64 bytes of a weight, by which a file that holds it is found."""
    layer = training.model[0]
    assert isinstance(layer, torch.nn.Linear)
    return layer.weight.detach().numpy().tobytes()[:64]


def _restored(system: _System, directory: Path, width: int = 64) -> tuple[int, str]:
    fresh = SmallTraining(width, seed=1)
    return system(directory).restore(fresh.state), fresh.digest()


@pytest.mark.promise("exactness")
class TestExactness:
    """What comes back is the state at the save, to the bit, and the training goes on as if it had never stopped."""

    @pytest.mark.parametrize("width", [8, 900])
    def test_restores_the_state_at_the_save_though_training_went_on(
        self, system: _System, opened: Opening, tmp_path: Path, device: str, width: int
    ) -> None:
        """`save` returns when all that changes outside of optimizer.step() is copied, and the optimizer waits."""
        training = SmallTraining(width, device=device)
        checkpointer = opened(system, tmp_path, training.state)
        saved = {}
        for _ in range(5):
            training.step()
            saved[training.step_number] = training.digest()
            checkpointer.save(training.step_number)
            # Outside optimizer.step(): these must have been copied when save() returned.
            training.plain["moving"] += 1
            running_mean = training.model[1].running_mean
            assert isinstance(running_mean, torch.Tensor)
            running_mean.add_(1)
            torch.rand(1, device=device)
        training.step()
        checkpointer.drain()
        assert outcomes(checkpointer)[-1] is Outcome.DURABLE
        fresh = SmallTraining(width, seed=1, device=device)
        step = system(tmp_path).restore(fresh.state)
        assert step == 5 == checkpointer.latest() == system(tmp_path).latest()
        assert fresh.digest() == saved[5]

    def test_losses_after_a_restore_are_those_of_the_unbroken_run(
        self, system: _System, opened: Opening, tmp_path: Path, device: str
    ) -> None:
        """Random generators and schedule included."""
        training = SmallTraining(device=device)
        checkpointer = opened(system, tmp_path, training.state)
        for _ in range(3):
            training.step()
        checkpointer.save(3)
        expected = [training.step() for _ in range(4)]
        checkpointer.drain()
        fresh = SmallTraining(seed=1, device=device)
        fresh.step()
        assert system(tmp_path).restore(fresh.state) == 3
        assert [fresh.step() for _ in range(4)] == expected

    def test_keeps_the_checkpoint_before_and_restores_it_by_step(
        self, system: _System, opened: Opening, tmp_path: Path
    ) -> None:
        """Two complete checkpoints are kept by default."""
        training = SmallTraining()
        digests = _train_and_save(opened(system, tmp_path, training.state), training, 4)
        fresh = SmallTraining(seed=1)
        assert system(tmp_path).restore(fresh.state, step=3) == 3
        assert fresh.digest() == digests[3]
        with pytest.raises(NoCheckpoint, match=r"step 99.*4"):
            system(tmp_path).restore(fresh.state, step=99)

    def test_a_new_life_goes_on_in_the_same_directory(self, system: _System, opened: Opening, tmp_path: Path) -> None:
        """And adds its checkpoints to those that are there."""
        training = SmallTraining()
        first = opened(system, tmp_path, training.state)
        for _ in range(2):
            training.step()
            first.save(training.step_number)
        first.close()
        fresh = SmallTraining(seed=1)
        second = system(tmp_path)
        assert second.restore(fresh.state) == 2
        second.start(fresh.state)
        fresh.step()
        digest = fresh.digest()
        second.save(3)
        second.close()
        assert _restored(system, tmp_path) == (3, digest)

    def test_after_a_return_to_an_earlier_step_the_new_life_is_the_newest(
        self, system: _System, opened: Opening, tmp_path: Path
    ) -> None:
        """Though the life that was given up had got further."""
        training = SmallTraining()
        first = opened(system, tmp_path, training.state)
        for _ in range(2):
            for _ in range(5):
                training.step()
            first.save(training.step_number)
            first.drain()
        first.close()
        fresh = SmallTraining(seed=1)
        second = system(tmp_path)
        assert second.restore(fresh.state, step=5) == 5
        second.start(fresh.state)
        fresh.step()
        digest = fresh.digest()
        second.save(6)
        second.close()
        assert _restored(system, tmp_path) == (6, digest), "step 10 belongs to the life that was given up"

    def test_a_restore_waits_for_what_is_under_way(self, system: _System, opened: Opening, tmp_path: Path) -> None:
        """In the process that saves, and after it in others."""
        training = SmallTraining(width=900)
        checkpointer = opened(system, tmp_path, training.state)
        digests = {}
        for _ in range(2):
            training.step()
            digests[training.step_number] = training.digest()
            checkpointer.save(training.step_number)
        assert checkpointer.restore(training.state) == 2
        assert training.digest() == digests[2]
        assert _restored(system, tmp_path, 900) == (2, digests[2])

    def test_an_optimizer_that_joins_after_the_start_is_waited_for_as_well(
        self, system: _System, opened: Opening, tmp_path: Path
    ) -> None:
        """Every optimizer in the state gets the hook that lets it wait for the copy."""
        training = SmallTraining()
        checkpointer = opened(system, tmp_path, training.state)
        second = torch.optim.SGD(training.model.parameters(), lr=0.1)
        training.state["optimizer"] = second
        training.step()
        checkpointer.save(1)
        calls = []
        checkpointer.before_update = lambda: calls.append(1)  # type: ignore[method-assign]  # seen from outside
        second.step()
        assert calls == [1]
        checkpointer.drain()

    def test_starting_twice_is_refused(self, system: _System, opened: Opening, tmp_path: Path) -> None:
        """One object, one training."""
        training = SmallTraining()
        checkpointer = opened(system, tmp_path, training.state)
        with pytest.raises(CheckpointError, match="twice"):
            checkpointer.start(training.state)

    def test_close_twice_and_hooks_are_gone(self, system: _System, opened: Opening, tmp_path: Path) -> None:
        """A closed checkpointer is in nobody's way."""
        training = SmallTraining()
        checkpointer = opened(system, tmp_path, training.state)
        training.step()
        checkpointer.save(1)
        checkpointer.close()
        checkpointer.close()
        training.step()
        with pytest.raises(CheckpointError, match="start"):
            _ = checkpointer.state

    def test_events_tell_the_life_of_a_checkpoint(self, system: _System, opened: Opening, tmp_path: Path) -> None:
        """When it was asked for, copied and finished, and how much was written."""
        training = SmallTraining()
        checkpointer = opened(system, tmp_path, training.state)
        training.step()
        checkpointer.save(1)
        checkpointer.drain()
        (event,) = checkpointer.events
        assert event.step == 1 and event.copied_s is not None and event.finished_s is not None
        assert event.requested_s <= event.copied_s <= event.finished_s
        assert event.bytes_written >= 64 * 64 * 4 * 3


@pytest.mark.promise("kills")
class TestKills:
    """What was reported durable survives SIGKILL at any instant."""

    def test_kill_and_restore_in_a_fresh_process(
        self,
        system: _System,
        tmp_path: Path,
        kills: int,
        run_program: Callable[[list[str], float], tuple[int, str]],
    ) -> None:
        """Again and again in one directory; what comes back is that step's state, and none older than was reported."""
        words = [str(killing.__file__), system.name, str(tmp_path / "job"), str(kills), "7"]
        status, told = run_program(words, 60 + 20.0 * kills)
        assert status == 0, told
        assert told.count("exact") == kills


@pytest.mark.promise("damage")
class TestDamage:
    """A checkpoint that is not what was written is never restored."""

    @pytest.mark.parametrize("how", ["a bit", "the end", "another's part"])
    def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(
        self, system: _System, opened: Opening, tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
    ) -> None:
        """It is told, and the one before is taken."""
        training = SmallTraining()
        checkpointer = opened(system, tmp_path, training.state)
        digests, parts = {}, []
        for _ in range(2):
            training.step()
            digests[training.step_number] = training.digest()
            parts.append(_first_weights(training))
            checkpointer.save(training.step_number)
            checkpointer.drain()
        checkpointer.close()
        holding = [path for path in tmp_path.rglob("*") if path.is_file() and parts[1] in path.read_bytes()]
        assert holding, "no file holds the weights as they are in memory, so none can be damaged on purpose"
        newest = max(holding, key=lambda path: path.stat().st_mtime_ns)
        content = bytearray(newest.read_bytes())
        at = content.find(parts[1])
        if how == "a bit":
            content[at + 5] ^= 0x40
        elif how == "the end":
            del content[at + 32 :]
        else:
            content[at : at + 64] = parts[0]
        newest.write_bytes(content)
        with caplog.at_level(logging.WARNING):
            assert _restored(system, tmp_path) == (1, digests[1])
        assert caplog.text, "a fall-back is told"

    def test_all_damaged_is_an_error_and_not_a_beginning(
        self, system: _System, opened: Opening, tmp_path: Path
    ) -> None:
        """NoCheckpoint would let a training begin again beside its checkpoints."""
        training = SmallTraining()
        checkpointer = opened(system, tmp_path, training.state)
        _train_and_save(checkpointer, training, 2)
        checkpointer.close()
        large = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 16 << 10]
        assert large, "no file holds the state"
        for path in large:
            content = bytearray(path.read_bytes())
            content[2048:] = content[2048:].translate(_OTHER_BYTES)
            path.write_bytes(content)
        with pytest.raises(CheckpointError) as raised:
            system(tmp_path).restore(SmallTraining(seed=1).state)
        assert not isinstance(raised.value, NoCheckpoint), "checkpoints are there, and all of them are damaged"


@pytest.mark.promise("full disk")
class TestFullDisk:
    """A save that the disk refuses fails by itself: it is counted and told, and nothing older is lost."""

    def test_a_refused_save_is_told_and_loses_nothing(
        self,
        system: _System,
        opened: Opening,
        tmp_path: Path,
        file_size_limit: Callable[[int | None], None],
    ) -> None:
        """Either it is durable all the same (all its room was there before), or it failed and says where."""
        training = SmallTraining(256)
        checkpointer = opened(system, tmp_path, training.state)
        digests = _train_and_save(checkpointer, training, 1)
        file_size_limit(4096)
        digests |= _train_and_save(checkpointer, training, 2)
        file_size_limit(None)
        assert len(checkpointer.events) == 3
        for event in checkpointer.events[1:]:
            assert event.outcome in (Outcome.DURABLE, Outcome.FAILED), event
            if event.outcome is Outcome.FAILED:
                assert str(tmp_path) in (event.error or ""), "an error names the file"
        durable = [event.step for event in checkpointer.events if event.outcome is Outcome.DURABLE]
        assert _restored(system, tmp_path, 256) == (durable[-1], digests[durable[-1]])
        digests |= _train_and_save(checkpointer, training, 1)
        assert outcomes(checkpointer)[-1] is Outcome.DURABLE, "with room again, saves are durable again"
        assert _restored(system, tmp_path, 256) == (4, digests[4])


@pytest.mark.promise("two writers")
class TestTwoWriters:
    """Two trainings never write to one directory."""

    def test_a_second_training_is_refused_by_name(self, system: _System, opened: Opening, tmp_path: Path) -> None:
        """While the first one runs; after it has ended the second one may begin."""
        training, other = SmallTraining(), SmallTraining(seed=1)
        first = opened(system, tmp_path, training.state)
        digests = _train_and_save(first, training, 1)
        second = system(tmp_path)
        with pytest.raises(LockHeld, match=str(tmp_path)):
            second.start(other.state)
        second.close()
        digests |= _train_and_save(first, training, 1)
        assert outcomes(first) == [Outcome.DURABLE] * 2, "the first one goes on"
        first.close()
        assert _restored(system, tmp_path) == (2, digests[2])
        third = opened(system, tmp_path, other.state)
        third.close()


@pytest.mark.promise("bounded waits")
class TestBoundedWaits:
    """No call waits without an end."""

    def test_a_disk_that_does_not_answer_ends_no_wait_of_ours(
        self, system: _System, tmp_path: Path, answer_s: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """While a flush hangs, `drain` with a limit returns or raises WaitTimeout; it names what it waited for."""
        training = SmallTraining()
        checkpointer = system(tmp_path)
        checkpointer.start(training.state)
        training.step()
        try:
            with stuck_flushes(monkeypatch):
                saving = _start_saving(checkpointer, 1)
                error = in_time("drain(timeout_s=0.5)", lambda: checkpointer.drain(timeout_s=0.5), answer_s)
                assert error is None or "1" in str(error), "the step is named"
            saving.join(answer_s)
        finally:
            in_time("close()", checkpointer.close, 2 * answer_s)

    def test_after_a_failed_save_nobody_waits_for_it(
        self,
        system: _System,
        tmp_path: Path,
        answer_s: float,
        file_size_limit: Callable[[int | None], None],
    ) -> None:
        """`drain` and `close` return though the save that was asked for will never be durable."""
        training = SmallTraining(256)
        checkpointer = system(tmp_path)
        checkpointer.start(training.state)
        training.step()
        file_size_limit(4096)
        in_time("save()", lambda: checkpointer.save(1), 2 * answer_s)
        error = in_time("drain()", checkpointer.drain, 2 * answer_s)
        file_size_limit(None)
        in_time("close()", checkpointer.close, 2 * answer_s)
        assert error is None
        assert checkpointer.events[0].outcome is not Outcome.PENDING


def _start_saving(checkpointer: Checkpointer, step: int) -> threading.Thread:
    """Ask for a checkpoint, and give `save` a moment: one that writes in `save` itself hangs in the system call."""
    thread = threading.Thread(target=checkpointer.save, args=(step,), name="conformance-save", daemon=True)
    thread.start()
    thread.join(0.5)
    return thread


@pytest.mark.promise("paths")
class TestPaths:
    """Errors name what they are about."""

    @pytest.mark.parametrize("place", ["missing", "empty"])
    def test_nothing_to_restore_is_said_clearly(self, system: _System, tmp_path: Path, place: str) -> None:
        """NoCheckpoint, with the directory."""
        directory = tmp_path / "job"
        if place == "empty":
            directory.mkdir()
        checkpointer = system(directory)
        assert checkpointer.latest() is None
        with pytest.raises(NoCheckpoint, match="job"):
            checkpointer.restore(SmallTraining().state)

    def test_a_state_of_another_shape_is_refused_with_both_sides(
        self, system: _System, opened: Opening, tmp_path: Path
    ) -> None:
        """MismatchError, before anything of the state is changed."""
        training = SmallTraining(width=8)
        checkpointer = opened(system, tmp_path, training.state)
        training.step()
        checkpointer.save(1)
        checkpointer.close()
        other = SmallTraining(width=16)
        before = other.digest()
        with pytest.raises(MismatchError, match=r"\(8, 8\).*\(16, 16\)"):
            system(tmp_path).restore(other.state)
        assert other.digest() == before

    def test_what_cannot_be_stored_is_refused_at_the_start(self, system: _System, tmp_path: Path) -> None:
        """StateError, with the place inside the state."""
        checkpointer = system(tmp_path)
        with pytest.raises(StateError, match=r"state\.bad"):
            checkpointer.start({"bad": lambda: None})
        checkpointer.close()

    def test_a_directory_that_cannot_be_made_is_named(self, system: _System, tmp_path: Path) -> None:
        """The path of a file, say."""
        (tmp_path / "job").write_text("a file")
        checkpointer = system(tmp_path / "job" / "inner")
        training = SmallTraining()
        with pytest.raises(LastgoodError, match="job"):
            checkpointer.start(training.state)
        checkpointer.close()


@pytest.mark.promise("durable")
class TestDurable:
    """Durable means flushed to a disk, and complete there."""

    def test_what_is_called_durable_is_on_the_disk(self, system: _System, opened: Opening, tmp_path: Path) -> None:
        """No page of its large files waits in memory: a power cut takes nothing of it."""
        if lies_in_memory(tmp_path):
            pytest.skip(f"{tmp_path} lies in memory; --basetemp names a folder on a disk")
        training = SmallTraining(256)
        checkpointer = opened(system, tmp_path, training.state)
        training.step()
        checkpointer.save(1)
        checkpointer.drain()
        assert outcomes(checkpointer) == [Outcome.DURABLE]
        sizes = {path: path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()}
        large = [path for path, size in sizes.items() if size >= _LARGE_BYTES]
        assert sum(sizes[path] for path in large) >= 256 * 256 * 4 * 3, "files hold less than the state"
        try:
            waiting = {str(path): nbytes for path in large if (nbytes := not_flushed(path))}
        except OSError as error:
            pytest.skip(f"the kernel does not tell what is flushed: {error}")
        assert waiting == {}, "bytes that a power cut would take, though the checkpoint was called durable"
