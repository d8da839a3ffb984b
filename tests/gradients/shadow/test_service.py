"""The service as a whole: real processes, a scripted trainer, and what it gives back after bad days."""

import contextlib
import json
import multiprocessing
import os
import socket
import time

import pytest
import torch

from lastgood.errors import CheckpointError, MismatchError, NoCheckpoint
from lastgood.gradients.layout.entries import Saved
from lastgood.gradients.protocol.client import ShadowClient, ask_all, choose
from lastgood.processes import die_with_parent
from lastgood.tokens import read_token
from tests.gradients.support import scripted_trainer
from tests.gradients.support.scripted_trainer import JOB, WAIT_S, Trainer
from tests.gradients.support.shadow_processes import ShadowProcess, ShadowThread, shadow_processes, shadow_threads


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shadows")


@pytest.fixture(scope="module")
def two(folder):
    """Two shadows for all tests that leave them alive: each test is a training of its own, of the same job."""
    with shadow_processes(folder, 2, "--metrics-port", "0") as started:
        yield started


def addresses_of(processes):
    return [process.address for process in processes]


def trainer_of(tmp_path, processes, **options):
    trainer = Trainer(addresses_of(processes), read_token(tmp_path / "token"), **options)
    trainer.fence()
    trainer.start()
    return trainer


def restored(trainer, step=None):
    """A fresh trainer that has what the shadows gave back, its choice, and the side records."""
    other = Trainer(trainer.addresses, trainer.token, ranks=trainer.ranks)
    choice = choose(other.fence(), step)
    return other, choice, other.load(choice)


def test_what_is_given_back_is_the_trainer_to_the_bit_and_training_goes_on(folder, two):
    trainer = trainer_of(folder, two)
    digests = {}
    for number in range(6):
        trainer.iterate(skip_update=number == 3)
        digests[trainer.iteration] = trainer.digest()
    trainer.close()
    other, choice, sides = restored(trainer)
    assert (choice.source, choice.iteration, choice.step) == ("memory", 6, 60)
    assert other.digest() == digests[6]
    assert [bytes(content) for _, content in sides] == [trainer.side_content(rank, 6) for rank in (0, 1)]
    assert [side.layout for side, _ in sides] == [{"iteration": 6}] * 2
    # On from there, with the shadows' state kept: equal to a training that was never stopped.
    other.start(adopt=6)
    for _ in range(3):
        other.iterate()
        trainer.iteration += 1
        trainer.make_gradients(trainer.iteration)
        trainer.update()
    other.close()
    again, choice, _ = restored(other)
    assert choice.iteration == 9
    assert again.digest() == other.digest() == trainer.digest()
    again.close()


def train_until_killed(folder, addresses):
    die_with_parent()
    torch.set_num_threads(1)
    scripted_trainer.main(folder, addresses)


def trainer_process(folder, addresses):
    """Forked from a server that has torch imported and used nothing of it.

    A fork of this process could make no optimizer's step where a test before has used CUDA.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", scripted_trainer.__name__])  # each first step would import that
    process = context.Process(target=train_until_killed, args=(folder, addresses), daemon=True)
    process.start()
    return process


def test_killed_at_any_moment_it_is_given_back_to_the_bit(folder, two):
    file = folder / "digests.jsonl"
    for life in range(3):
        process = trainer_process(folder, addresses_of(two))
        deadline = time.monotonic() + 4 * WAIT_S  # a process that is still to import torch
        while not file.exists() or len(file.read_text().splitlines()) < 4 + 3 * life:
            assert process.is_alive() and time.monotonic() < deadline
            time.sleep(0.003)
        process.kill()
        process.join(WAIT_S)
        known = dict(json.loads(line) for line in file.read_text().splitlines() if line.endswith("]"))
        trainer = Trainer(addresses_of(two), read_token(folder / "token"))
        choice = choose(trainer.fence())
        sides = trainer.load(choice)
        assert choice.source == "memory"
        # The one under way at the kill may be complete on all shadows, and not yet be written down.
        newest = max(known)
        assert choice.iteration in (newest - 1, newest, newest + 1)
        if choice.iteration in known:
            assert trainer.digest() == known[choice.iteration]
        assert bytes(sides[1][1]) == trainer.side_content(1, choice.iteration)
        trainer.close()
        file.unlink()


def test_a_bucket_with_a_hole_is_reported_the_step_before_stays_and_a_seed_heals_it(folder, two):
    trainer = trainer_of(folder, two)
    trainer.iterate()
    before = trainer.digest()
    trainer.wait_applied(1)
    trainer.iterate(lost={(2, 1)}, complete=False)
    torn = trainer.wait(0, lambda one: one.kind == "torn" and one.iteration, "torn")[0]
    assert (torn.iteration, torn.buckets) == (2, (2,))
    trainer.wait_have(1, 2)
    assert not [one for one in trainer.of_kind(0, "have") if one.iteration >= 2]
    statuses = ask_all(trainer.addresses, trainer.token, WAIT_S, ShadowClient.status)
    assert choose(statuses).iteration == 1
    assert not statuses[0].whole
    # A seed heals; what follows is whole again, and what lies between is given back exactly.
    trainer.seed(2, 2)
    trainer.complete()
    trainer.iterate()
    digest = trainer.digest()
    trainer.close()
    other, choice, _ = restored(trainer)
    assert choice.iteration == 3
    assert other.digest() == digest != before
    other.close()


def test_a_hole_at_the_kill_gives_back_the_step_before(folder, two):
    trainer = trainer_of(folder, two)
    trainer.iterate()
    before = trainer.digest()
    trainer.iterate(lost={(1, 0)}, complete=False)
    trainer.wait(1, lambda one: one.kind == "torn" and one.iteration == 2, "torn")
    trainer.close()
    other, choice, _ = restored(trainer)
    assert choice.iteration == 1
    assert other.digest() == before
    # Nothing of the abandoned iteration is left when its number comes again.
    other.start(adopt=1)
    other.iterate(skip_update=True)
    other.close()
    again, choice, _ = restored(other)
    assert (choice.iteration, choice.saved.epoch) == (2, other.incarnation)
    assert again.digest() == before
    again.close()


def test_a_model_that_differs_is_found_and_is_not_given_back(folder, two):
    trainer = trainer_of(folder, two)
    trainer.iterate()
    trainer.wait_applied(1)
    with torch.no_grad():
        trainer.parameters[trainer.layout.buckets[0].parameters[0]].view(-1)[0].add_(1.0)
    trainer.verify(0)
    diverged = trainer.wait(0, lambda one: one.kind == "diverged", "diverged")[0]
    assert (diverged.bucket, diverged.iteration) == (0, 1)
    statuses = ask_all(trainer.addresses, trainer.token, WAIT_S, ShadowClient.status)
    with pytest.raises(NoCheckpoint, match="wait for seeds"):
        choose(statuses)
    trainer.seed(0, 1)
    trainer.iterate()
    digest = trainer.digest()
    trainer.close()
    other, choice, _ = restored(trainer)
    assert (choice.iteration, other.digest()) == (2, digest)
    other.close()


def test_a_killed_shadow_is_noticed_and_a_fresh_one_is_seeded_bucket_by_bucket(tmp_path):
    with contextlib.ExitStack() as ends:
        two = [ShadowThread(tmp_path, 0, 2), ShadowProcess(tmp_path, 1, 2)]
        ends.callback(two[0].end)
        ends.callback(two[1].kill)
        two[1].wait_ready()
        trainer = trainer_of(tmp_path, two)
        trainer.iterate()
        two[1].kill()
        answers = ask_all(trainer.addresses, trainer.token, 2.0, ShadowClient.status)
        assert isinstance(answers[1], CheckpointError)
        # Training goes on without it: what it held is not available, and nothing is given back.
        trainer.iteration += 1
        trainer.make_gradients(2)
        for key in [key for key in trainer.senders if key[0] == 1]:
            trainer.senders.pop(key).abort()
        fresh = ShadowThread(tmp_path, 1, 2)
        ends.callback(fresh.end)
        trainer.addresses[1] = fresh.address
        with ShadowClient(trainer.addresses[1], trainer.token, WAIT_S, JOB) as client:
            assert client.status().epoch < trainer.incarnation
            client.fence(trainer.incarnation)
        trainer.heard[1].clear()
        trainer.connect(1)
        own = trainer.layout.buckets_of(1)
        torn = trainer.wait(1, lambda one: one.kind == "torn", "torn")[0]
        assert set(torn.buckets) == set(own)
        trainer.send_gradients(2)
        rule = trainer.update()
        trainer.send_step(2, rule)
        for rank in (0, 1):
            trainer.send_side(rank, 2, 20)
        trainer.complete([0], lost=[1])
        # Seeds at different iterations.
        trainer.seed(own[0], 2)
        for _ in range(2):
            trainer.iterate(to=[0])
        for bucket in own[1:]:
            trainer.seed(bucket, trainer.iteration)
        trainer.iterate()
        digest = trainer.digest()
        for bucket in range(len(trainer.layout.buckets)):
            trainer.verify(bucket)
        trainer.wait_applied(trainer.iteration)
        trainer.close()
        other, choice, _ = restored(trainer)
        assert choice.iteration == trainer.iteration
        assert other.digest() == digest
        assert not trainer.of_kind(0, "diverged") and not trainer.of_kind(1, "diverged")
        other.close()


def test_spills_survive_the_loss_of_all_shadows(tmp_path):
    with shadow_threads(tmp_path, 2, spill_directory=tmp_path) as first:
        trainer = trainer_of(tmp_path, first)
        trainer.iterate()
        trainer.iterate(spill=(0, 1))
        digest = trainer.digest()
        for shadow in (0, 1):
            spilled = trainer.wait(shadow, lambda one: one.kind == "spilled", "spilled")[0]
            assert (spilled.iteration, spilled.error) == (2, None)
        trainer.iterate()
        trainer.close()
    with shadow_threads(tmp_path, 2, spill_directory=tmp_path) as second:
        trainer.addresses = addresses_of(second)
        other, choice, sides = restored(trainer)
        assert (choice.source, choice.iteration, choice.step) == ("durable", 2, 20)
        assert other.digest() == digest
        assert bytes(sides[0][1]) == b"side of rank 0 at 2, " + digest.encode()
        # It is the shadows' own state now: training goes on without a seed, and spills again.
        other.start(adopt=2)
        other.iterate(spill=(0, 1))
        other.wait(0, lambda one: one.kind == "spilled" and one.error is None, "spilled")
        after = other.digest()
        other.close()
        again, choice, _ = restored(other)
        assert (choice.source, choice.iteration) == ("memory", 3)
        assert again.digest() == after
        again.close()


def test_shadows_that_have_spilled_different_iterations_find_one_again(tmp_path):
    with shadow_threads(tmp_path, 2, spill_directory=tmp_path) as shadows:
        trainer = trainer_of(tmp_path, shadows)

        def spill(*where, keep=None):
            trainer.iterate(spill=where, keep=keep)
            for shadow in where:
                (said,) = trainer.wait(shadow, lambda one: one.kind == "spilled" and one.iteration == now(), "spilled")
                assert said.error is None

        def now():
            return trainer.iteration

        def durable():
            return [[saved.iteration for saved in shadow.service.core.status().durable] for shadow in shadows]

        spill(0, 1)
        common = Saved(epoch=trainer.incarnation, iteration=1, step=10)
        for _ in range(2):  # each fails at what the other one does
            spill(0, keep=common)
            spill(1, keep=common)
        assert durable() == [[4, 1], [5, 1]]
        spill(0, 1, keep=common)
        assert durable() == [[6, 1], [6, 1]]
        spill(0, 1, keep=Saved(epoch=trainer.incarnation, iteration=6, step=60))
        assert durable() == [[7, 6], [7, 6]]
        trainer.close()


def test_a_spill_of_a_life_that_was_left_is_never_given_back(tmp_path):
    with shadow_threads(tmp_path, 2, spill_directory=tmp_path) as first:
        trainer = trainer_of(tmp_path, first)
        for keep in (None, Saved(epoch=trainer.incarnation, iteration=1, step=10)):
            trainer.iterate(spill=(0, 1), keep=keep)
            for shadow in (0, 1):
                trainer.wait(
                    shadow, lambda one: one.kind == "spilled" and one.iteration == trainer.iteration, "spilled"
                )
        assert [saved.iteration for saved in first[0].service.core.status().durable] == [2, 1]
        other = Trainer(trainer.addresses, trainer.token)
        other.fence()
        for shadow in (0, 1):
            other.connect(shadow, adopt=1, data=False)  # a new life goes on from the first iteration
        other.close()
        trainer.close()
    with shadow_threads(tmp_path, 2, spill_directory=tmp_path) as second:
        for shadow in second:
            assert [saved.iteration for saved in shadow.service.core.status().durable] == [1]


def test_an_old_epoch_is_cut_off(folder, two):
    trainer = trainer_of(folder, two)
    trainer.iterate()
    trainer.fence()
    refused = trainer.wait(0, lambda one: one.kind == "refused", "refused")
    assert "fenced off" in refused[0].why
    assert refused[0].fenced == trainer.incarnation
    with pytest.raises(CheckpointError, match=r"fenced off|refuses"):
        old = trainer.incarnation
        trainer.incarnation = old - 1
        trainer.connect(0)
    trainer.incarnation = old
    deadline = time.monotonic() + WAIT_S
    with pytest.raises(OSError):
        while time.monotonic() < deadline:
            trainer.make_gradients(2)
            trainer.send_gradients(2)
            time.sleep(0.01)
    trainer.close()


def test_another_job_is_refused_and_nothing_is_lost(folder, two):
    trainer = trainer_of(folder, two)
    trainer.iterate()
    stranger = Trainer(trainer.addresses, trainer.token, job="f" * 32)
    with pytest.raises(CheckpointError, match="keeps the state of job"):
        stranger.fence()
    trainer.iterate()
    trainer.close()
    other, choice, _ = restored(trainer)
    assert (choice.iteration, other.digest()) == (2, trainer.digest())
    other.close()


def test_a_wrong_token_and_garbage_are_refused_and_the_service_goes_on(folder, two):
    trainer = trainer_of(folder, two)
    with pytest.raises(MismatchError, match="token"):
        ShadowClient(trainer.addresses[0], b"x" * 32, WAIT_S)
    ports = [two[0].described["port"], int(two[0].described["metrics"].rpartition(":")[2])]
    for port in ports:
        for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(5000), b"\0" * 100):
            with socket.create_connection(("127.0.0.1", port), WAIT_S) as connection:
                connection.sendall(garbage)
    trainer.iterate()
    trainer.close()
    deadline = time.monotonic() + WAIT_S
    refused = 0
    with ShadowClient(trainer.addresses[0], trainer.token, WAIT_S) as client:
        while refused < 5:  # each is refused by a thread of its own
            assert time.monotonic() < deadline, f"{refused} of 5 were refused"
            refused = client.status().refused.get("no proof of the token", 0)


def test_a_layout_that_does_not_fit_is_refused_with_the_numbers(tmp_path):
    with shadow_threads(tmp_path, 1, limit_bytes=2048) as started:
        trainer = Trainer(addresses_of(started), read_token(tmp_path / "token"))
        trainer.fence()
        trainer.ranks = 1
        trainer.connect(0, data=False)
        refused = trainer.wait(0, lambda one: one.kind == "refused", "refused")[0]
        assert "may take 2 KiB" in refused.why and "optimizer state" in refused.why
        trainer.close()
