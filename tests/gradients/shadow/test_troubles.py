"""Troubles inside a shadow: what it keeps stays true, those who ask are told, and it goes on."""

from __future__ import annotations

import threading
import time

import pytest

from lastgood.errors import CheckpointError, NoCheckpoint, StorageError
from lastgood.gradients.layout.entries import Saved
from lastgood.gradients.protocol.client import ShadowClient, choose
from lastgood.gradients.shadow import body as shadow_body
from lastgood.gradients.shadow.memory import ShadowMemory
from lastgood.gradients.shadow.spill_store import SpillCopy
from lastgood.storage import SlotStore
from lastgood.tokens import read_token
from tests.gradients.support.scripted_trainer import JOB, WAIT_S, Trainer
from tests.gradients.support.shadow_processes import shadow_threads


def trainer_of(folder, shadows, **options):
    trainer = Trainer([one.address for one in shadows], read_token(folder / "token"), ranks=1, **options)
    trainer.fence()
    return trainer


def spill(trainer, keep=None):
    everywhere = range(len(trainer.addresses))
    trainer.iterate(spill=tuple(everywhere), keep=keep)
    for shadow in everywhere:
        (said,) = trainer.wait(
            shadow, lambda one: one.kind == "spilled" and one.iteration == trainer.iteration, "spilled"
        )
        assert said.error is None
    return Saved(epoch=trainer.incarnation, iteration=trainer.iteration, step=10 * trainer.iteration)


def durable(shadow):
    return [saved.iteration for saved in shadow.service.core.status().durable]


def test_a_layout_is_declared_only_once_spills_that_were_left_are_disowned(tmp_path, monkeypatch):
    with shadow_threads(tmp_path, 1, spill_directory=tmp_path) as (shadow,):
        trainer = trainer_of(tmp_path, [shadow])
        trainer.start()
        spill(trainer, spill(trainer))
        trainer.close()
        judge, calls = SlotStore.judge, []

        def full_at_first(*arguments):
            calls.append(arguments)
            if len(calls) == 1:
                raise StorageError("the disk is full")
            judge(*arguments)

        monkeypatch.setattr(SlotStore, "judge", full_at_first)
        other = trainer_of(tmp_path, [shadow])
        other.connect(0, adopt=1, data=False)
        assert "the disk is full" in other.of_kind(0, "refused")[0].why
        assert not shadow.service.core.body.state.declared
        other.connect(0, adopt=1, data=False)
        other.wait(0, lambda one: one.kind == "welcome" and one.layout is not None, "the layout to be taken")
        assert durable(shadow) == [1]
        other.close()
    with shadow_threads(tmp_path, 1, spill_directory=tmp_path) as (shadow,):
        assert durable(shadow) == [1], "nor does it come back with another process"


def test_a_copy_for_a_spill_of_another_life_is_not_gone_on_with(tmp_path):
    with shadow_threads(tmp_path, 1, spill_directory=tmp_path) as (shadow,):
        trainer = trainer_of(tmp_path, [shadow])
        trainer.start()
        worker = shadow.service.core._threads[0]._target.__self__
        worker._copy = SpillCopy(Saved(epoch=trainer.incarnation - 1, iteration=1, step=10))
        saved = spill(trainer)
        assert shadow.service.core.status().durable == (saved,)
        trainer.close()


def test_a_damaged_spill_is_said_once_and_then_the_one_before_is_offered(tmp_path):
    with shadow_threads(tmp_path, 1, spill_directory=tmp_path) as (shadow,):
        trainer = trainer_of(tmp_path, [shadow])
        trainer.start()
        first = spill(trainer)
        digest = trainer.digest()
        spill(trainer, first)
        trainer.close()
    with shadow_threads(tmp_path, 1, spill_directory=tmp_path) as (shadow,):
        newest = shadow.service.core.body.store.durable()[0].info
        with newest.path.open("r+b") as file:
            file.seek(newest.record.data_offset + 5)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 1]))
        other = trainer_of(tmp_path, [shadow])
        choice = choose(other.fence())
        assert choice.iteration == 2
        with pytest.raises(CheckpointError, match="checksum"):
            other.load(choice)
        choice = choose(other.fence())
        assert choice.saved == first
        other.load(choice)
        assert other.digest() == digest
        other.close()


def test_who_fences_is_told_of_a_folder_that_another_process_has(tmp_path):
    with shadow_threads(tmp_path, 1, spill_directory=tmp_path) as (shadow,):
        store = SlotStore(tmp_path / "0", slots=2, keep=1)
        try:
            with pytest.raises(CheckpointError, match=r"refuses: checkpoint directory .* is held by this very process"):
                trainer_of(tmp_path, [shadow])
        finally:
            store.close()


def test_an_unexpected_error_in_the_optimizer_costs_a_bucket_and_not_the_shadow(tmp_path, monkeypatch):
    with shadow_threads(tmp_path, 1) as (shadow,):
        trainer = trainer_of(tmp_path, [shadow])
        trainer.start()
        apply, calls = ShadowMemory.apply, []

        def breaks_once(*arguments):
            calls.append(arguments)
            if len(calls) == 1:
                raise KeyError("a fault of the shadow's own")
            apply(*arguments)

        monkeypatch.setattr(ShadowMemory, "apply", breaks_once)
        trainer.iterate()
        (torn,) = trainer.wait(0, lambda one: one.kind == "torn" and one.iteration == 1, "torn")
        for bucket in torn.buckets:
            trainer.seed(bucket, 1)
        trainer.iterate()
        trainer.wait_applied(2)
        digest = trainer.digest()
        trainer.close()
        other = trainer_of(tmp_path, [shadow])
        choice = choose(other.fence())
        other.load(choice)
        assert (choice.iteration, other.digest()) == (2, digest)
        other.close()


def test_a_restore_that_cannot_be_applied_is_told_at_once(tmp_path, monkeypatch):
    with shadow_threads(tmp_path, 1) as (shadow,):
        trainer = trainer_of(tmp_path, [shadow])
        trainer.start()
        trainer.iterate()
        trainer.wait_applied(1)
        trainer.iterate(complete=False)
        trainer.wait_have(0, 2)
        trainer.close()

        def breaks(*arguments):
            raise RuntimeError("no such instruction")

        monkeypatch.setattr(ShadowMemory, "apply", breaks)
        other = trainer_of(tmp_path, [shadow])
        choice = choose(other.fence())
        assert choice.iteration == 2
        began = time.monotonic()
        with pytest.raises(CheckpointError, match="iteration 2 could not be applied"):
            other.load(choice)
        assert time.monotonic() - began < WAIT_S, "not only when the client's patience has ended"
        other.close()


def test_a_layout_that_no_memory_can_be_had_for_leaves_a_shadow_that_another_one_can_use(tmp_path, monkeypatch):
    with shadow_threads(tmp_path, 1) as (shadow,):
        trainer = trainer_of(tmp_path, [shadow])
        trainer.start()
        trainer.iterate()
        trainer.close()

        def no_memory(*arguments, **options):
            raise RuntimeError("can't allocate memory")

        with monkeypatch.context() as patch:
            patch.setattr(shadow_body, "ShadowMemory", no_memory)
            other = trainer_of(tmp_path, [shadow], bucket_bytes=200)
            other.connect(0, data=False)
            assert "can't allocate memory" in other.of_kind(0, "refused")[0].why
            other.close()
        again = trainer_of(tmp_path, [shadow])
        with pytest.raises(NoCheckpoint):
            choose(again.fence())
        again.start()
        again.iterate()
        again.wait_applied(1)
        again.close()


def test_a_connection_that_no_thread_can_be_had_for_is_refused_and_the_service_goes_on(tmp_path, monkeypatch):
    with shadow_threads(tmp_path, 1) as (shadow,):
        token = read_token(tmp_path / "token")
        start, calls = threading.Thread.start, []

        def none_at_first(thread):
            if thread.name == "guest":
                calls.append(thread)
                if len(calls) <= 70:
                    raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", none_at_first)
        for _ in range(70):
            with pytest.raises(CheckpointError):
                ShadowClient(shadow.address, token, WAIT_S, JOB)
        with ShadowClient(shadow.address, token, WAIT_S, JOB) as client:
            assert client.status().refused == {"too many connections": 70}
