"""The remote tier: what it sends, that training never hears of its troubles, and what is left there."""

from __future__ import annotations

import json
import logging
import os
import threading

import pytest
import torch

from lastgood import PCcheck
from lastgood.checkpointers.remote.status import REMOTE_FILE, Which, read_status
from lastgood.checkpointers.remote.tier import RemoteTier
from lastgood.errors import ConfigError, StorageError, WaitTimeout
from lastgood.storage.objects.commits import find_commits
from lastgood.storage.objects.folder import FolderClient
from lastgood.storage.objects.opening import ObjectPlace
from lastgood.storage.objects.upload import PartUpload
from lastgood.storage.objects.view import RemoteView
from tests.checkpointers.support.stored_helpers import open_store, put

WAIT_S = 60


def small(step: int) -> dict:
    return {"step": step, "x": torch.full((100,), float(step))}


def steps(place) -> list[int]:
    return [name.step for name in find_commits(FolderClient(place))]


def counts(tier: RemoteTier) -> tuple[int, int, int]:
    return tier.counts.done, tier.counts.replaced, tier.counts.failed


@pytest.fixture
def job(tmp_path):
    with open_store(tmp_path / "job") as store:
        yield store


@pytest.fixture
def place(tmp_path):
    return tmp_path / "remote"


def tier_of(job, place, **given) -> RemoteTier:
    return RemoteTier(ObjectPlace(str(place)), job.directory, **{"every": 1, "keep": 2, **given})


class Away:
    """Lets every request fail while `away` is set."""

    def __init__(self, monkeypatch) -> None:
        self.away = True
        self.tries = 0
        real = ObjectPlace.open

        def open_(place):
            if self.away:
                self.tries += 1
                raise StorageError("s3://bucket: list failed after 8 retries: connect; is the server up?")
            return real(place)

        monkeypatch.setattr(ObjectPlace, "open", open_)


class Gate:
    """Holds the tier's thread before its first segment."""

    def __init__(self, monkeypatch) -> None:
        self.reached, self.open = threading.Semaphore(0), threading.Semaphore(0)
        real = PartUpload.begin

        def begin(upload):
            real(upload)
            self.reached.release()
            assert self.open.acquire(timeout=WAIT_S), "the test did not go on"

        monkeypatch.setattr(PartUpload, "begin", begin)


def test_a_training_sends_every_mth_and_what_comes_back_is_exact(tmp_path, place):
    model, digests = torch.nn.Linear(64, 64), {}
    for incarnation in range(2):
        ckpt = PCcheck(tmp_path / "job", interval_steps=1, remote=str(place), remote_every=3)
        assert ckpt.attach(model=model) == 7 * incarnation
        for _ in range(7):
            with torch.no_grad():
                model.weight += 1
            step = ckpt.step()
            digests[step] = model.weight.clone()
            ckpt.drain()
            ckpt._beside.tier.drain(WAIT_S)
        facts = ckpt.storage_facts()["remote"]
        assert (facts["sent"], facts["replaced"], facts["failed"]) == (2, 0, 0)
        assert facts["step"] == [6, 12][incarnation] and facts["lag_steps"] == [1, 2][incarnation]
        assert facts["lag_s"] > 0 and facts["sent_bytes"] > 2 * 64 * 64 * 4
        assert len(list((tmp_path / "job").glob("slot-*"))) == 5
        ckpt.close()
    assert steps(place) == [12, 9], "the newest two"
    view = RemoteView(FolderClient(place))
    for info in view.committed():
        assert digests[info.step].detach().numpy().tobytes() in view.read_bytes(info, 0, info.stream_bytes)
    described = json.loads((tmp_path / "job" / REMOTE_FILE).read_text())
    assert (described["place"], described["sent"], described["failed"]) == (str(place), 4, 0)


def test_a_place_that_is_away_is_told_once_and_gets_the_newest_when_it_is_back(
    tmp_path, job, place, monkeypatch, caplog
):
    away = Away(monkeypatch)
    tier = tier_of(job, place)
    for step in range(1, 21):
        assert tier.offer(job, put(job, step, small(step)))
        tier.drain(WAIT_S)
    assert counts(tier) == (0, 0, 20) and away.tries == 20
    assert tier.facts()["step"] is None
    assert "is the server up" in read_status(job.directory).last_error
    assert sum("was not sent" in record.message for record in caplog.records) == 1, "logged once"
    away.away = False
    tier.offer(job, put(job, 21, small(21)))
    tier.close(WAIT_S)
    assert counts(tier) == (1, 0, 20) and steps(place) == [21]
    status = read_status(job.directory)
    assert (status.sent, status.failed, status.last_error, status.sending) == (1, 20, "", None)


def test_training_goes_on_beside_a_place_that_is_away(tmp_path, place, monkeypatch):
    model = torch.nn.Linear(8, 8)
    ckpt = PCcheck(tmp_path / "job", interval_steps=1, remote=str(place), remote_every=1)
    ckpt.attach(model=model)
    away = Away(monkeypatch)
    for _ in range(20):
        ckpt.step()
        ckpt.drain()
    ckpt._beside.tier.drain(WAIT_S)
    assert all(event.outcome == "durable" for event in ckpt.events)
    away.away = False
    ckpt.step()
    ckpt.close()
    assert steps(place) == [21]


def test_one_waits_at_most_and_newer_ones_replace_it(job, place, monkeypatch, caplog):
    gate = Gate(monkeypatch)
    tier = tier_of(job, place)
    tier.offer(job, put(job, 1, small(1)))
    assert gate.reached.acquire(timeout=WAIT_S)
    for step in range(2, 5):
        tier.offer(job, put(job, step, small(step)))
    with pytest.raises(WaitTimeout, match=r"steps \[1, 4\] to be sent"):
        tier.drain(0.05)
    gate.open.release(2)
    tier.close(WAIT_S)
    assert counts(tier) == (2, 2, 0) and steps(place) == [4, 1], "the slot of step 1 stayed while it was sent"
    assert sum("remote_mbps" in record.message for record in caplog.records) == 1


def test_a_waiting_one_whose_slot_training_needs_is_lost_and_counted(job, place, monkeypatch):
    gate = Gate(monkeypatch)
    tier = tier_of(job, place, every=2)
    tier.offer(job, put(job, 1, small(1)))
    tier.offer(job, put(job, 2, small(2)))
    assert gate.reached.acquire(timeout=WAIT_S)
    waits = put(job, 4, small(4))
    put(job, 5, small(5))
    tier.every = 1
    assert tier.offer(job, waits)
    tier.every = 1000
    for step in range(6, 12):
        tier.offer(job, put(job, step, small(step)))
    gate.open.release(2)
    tier.close(WAIT_S)
    assert counts(tier) == (1, 0, 1) and steps(place) == [2]
    assert "was overwritten" in read_status(job.directory).last_error


def test_what_was_interrupted_goes_on_and_sends_what_is_missing(job, place, monkeypatch):
    state = {"x": torch.randn(100_000), "step": 1}
    real, sent = FolderClient.create, []

    def create(client, key, content):
        if key.startswith("segments/"):
            if len(sent) == 2:
                raise StorageError(f"{key}: cut")
            sent.append(key)
        real(client, key, content)

    monkeypatch.setattr("lastgood.storage.objects.format.SEGMENT_BYTES", 64 * 1024)
    monkeypatch.setattr(FolderClient, "create", create)
    tier = tier_of(job, place)
    info = put(job, 1, state)
    tier.offer(job, info)
    with pytest.raises(WaitTimeout):
        tier.drain(0)
    tier.close(WAIT_S)
    assert counts(tier) == (0, 0, 1) and steps(place) == []
    assert read_status(job.directory).sending.names(info)
    monkeypatch.setattr(FolderClient, "create", real)
    again = tier_of(job, place)
    again.resume(job, job.committed())
    again.close(WAIT_S)
    assert counts(again) == (1, 0, 0) and steps(place) == [1]
    assert again.facts()["kept_bytes"] >= 2 * 64 * 1024
    assert again.facts()["sent_bytes"] + again.facts()["kept_bytes"] == info.stream_bytes
    third = tier_of(job, place)
    third.resume(job, job.committed())
    third.close(WAIT_S)
    assert counts(third) == (0, 0, 0), "it is there"


def test_what_did_not_change_is_not_sent_again(job, place, monkeypatch):
    monkeypatch.setattr("lastgood.storage.objects.format.SEGMENT_BYTES", 64 * 1024)
    frozen, tier = torch.randn(200_000), tier_of(job, place)
    facts = tier.facts()
    for step in range(1, 5):
        tier.offer(job, put(job, step, {"frozen": frozen, "head": torch.full((100,), float(step))}))
        tier.drain(WAIT_S)
        before, facts = facts["sent_bytes"], tier.facts()
    tier.close(WAIT_S)
    assert facts["sent_bytes"] - before <= 4 * 64 * 1024, "the head and what lies beside it"
    assert facts["kept_bytes"] > 1_000_000


def test_of_a_state_that_changes_in_part_two_small_segments_are_sent(job, place):
    frozen, tier = torch.randn(6 << 20), tier_of(job, place)
    before = facts = tier.facts()
    for step in range(1, 5):
        before = facts
        tier.offer(job, put(job, step, {"frozen": frozen, "head": torch.full((100,), float(step))}))
        tier.drain(WAIT_S)
        facts = tier.facts()
    tier.close(WAIT_S)
    assert facts["sent_bytes"] - before["sent_bytes"] <= 2 * (4 << 20)
    assert facts["kept_bytes"] - before["kept_bytes"] >= 16 << 20


def test_the_newest_ones_stay_and_the_newest_good_one(job, place):
    from lastgood.storage import Verdict

    tier = tier_of(job, place, keep=2)
    for step in range(1, 7):
        info = put(job, step, small(step))
        if step > 2:
            job.judge(info.sequence, Verdict(step, False, "a spike"))
        tier.offer(job, info)
        tier.drain(WAIT_S)
    tier.close(WAIT_S)
    assert steps(place) == [6, 5, 2]


def test_two_jobs_at_one_place_do_no_harm_to_each_other(tmp_path, job, place):
    with open_store(tmp_path / "other") as other:
        tiers = [tier_of(job, place, keep=1), tier_of(other, place, keep=1)]
        for step in range(1, 4):
            for store, tier in zip((job, other), tiers, strict=True):
                tier.offer(store, put(store, step, small(step)))
                tier.drain(WAIT_S)
        for store, tier in zip((job, other), tiers, strict=True):
            tier.close(WAIT_S)
            assert counts(tier) == (3, 0, 0)
            client, job_id = FolderClient(place), store.job.job_id
            assert [name.step for name in find_commits(client, job_id)] == [3]
            view = RemoteView(client, 0, job_id)
            view.verify(view.newest())


def test_it_sends_no_faster_than_it_may(job, place, monkeypatch):
    monkeypatch.setattr("lastgood.storage.objects.format.SEGMENT_BYTES", 64 * 1024)
    slept = []
    monkeypatch.setattr(RemoteTier, "_sleep", lambda tier, seconds: slept.append(seconds))
    tier = tier_of(job, place, mbps=1.0)
    tier.offer(job, put(job, 1, {"x": torch.randn(100_000)}))
    tier.close(WAIT_S)
    assert slept[0] == 0.0
    assert max(slept) == pytest.approx(400_000 * 8 / 1e6, rel=0.25), "of what was sent before the last segment"


def test_its_thread_is_polite_and_stops_when_nobody_waits(job, place, monkeypatch):
    seen, began = [], threading.Event()
    real = PartUpload.begin

    def begin(upload):
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        real(upload)
        began.set()

    monkeypatch.setattr(PartUpload, "begin", begin)
    tier = tier_of(job, place, mbps=1e-6)
    tier.offer(job, put(job, 1, small(1)))
    tier.close(WAIT_S)
    assert seen == [max(10, os.getpriority(os.PRIO_PROCESS, 0))]
    monkeypatch.setattr("lastgood.storage.objects.format.SEGMENT_BYTES", 64 * 1024)
    tier = tier_of(job, place, mbps=1e-6)
    began.clear()
    tier.offer(job, put(job, 2, {"x": torch.randn(100_000)}))
    assert began.wait(WAIT_S)
    with pytest.raises(WaitTimeout, match="steps \\[2\\]"):
        tier.close(0.1)
    tier.drain(WAIT_S)
    assert counts(tier) == (0, 0, 1) and steps(place) == [1]


def test_what_is_damaged_beside_the_slots_is_told_and_does_not_matter(job, place, caplog):
    tier = tier_of(job, place)
    tier.offer(job, put(job, 1, small(1)))
    tier.close(WAIT_S)
    path = job.directory / REMOTE_FILE
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_bytes(path.read_bytes().replace(b'"sent": 1', b'"sent": 2'))
    assert read_status(job.directory) is None
    tier = tier_of(job, place)
    tier.resume(job, job.committed())
    tier.close(WAIT_S)
    assert "is damaged" in caplog.text
    assert counts(tier) == (1, 0, 0), "looked at, and found there"
    assert tier.facts()["sent_bytes"] == 0


def test_counts_begin_again_for_another_job_or_place(tmp_path, job, place):
    tier = tier_of(job, place)
    tier.offer(job, put(job, 1, small(1)))
    tier.close(WAIT_S)
    assert read_status(job.directory).committed == Which(1, 1, 1, read_status(job.directory).committed.at_s)
    other = tier_of(job, tmp_path / "other")
    other.resume(job, job.committed())
    other.close(WAIT_S)
    assert steps(tmp_path / "other") == [1]
    assert read_status(job.directory).sent == 1


def test_what_cannot_be_is_refused_at_once(tmp_path, monkeypatch):
    import importlib.util

    with pytest.raises(ConfigError, match="agree"):
        PCcheck(
            tmp_path / "a", rank=0, world_size=2, control="off", remote=str(tmp_path / "r"), interval_steps=1
        ).attach(model=torch.nn.Linear(2, 2))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs obstore, which is not installed: pip install 'lastgood\[s3\]'"):
        PCcheck(tmp_path / "a", remote="s3://bucket/x", interval_steps=1).attach(model=torch.nn.Linear(2, 2))
    assert not (tmp_path / "a").exists()


def test_a_log_line_says_what_was_sent(job, place, caplog):
    caplog.set_level(logging.INFO, "lastgood")
    tier = tier_of(job, place)
    tier.offer(job, put(job, 1, small(1)))
    tier.close(WAIT_S)
    assert any("has step 1" in record.message and "sent" in record.message for record in caplog.records)
