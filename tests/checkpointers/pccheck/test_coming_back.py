"""PCcheck comes back from its disk or from the place that it sends checkpoints to, whichever is newer and whole."""

from __future__ import annotations

import secrets
import shutil
import time

import pytest
import torch

from lastgood import PCcheck
from lastgood.errors import CorruptCheckpoint, MismatchError, NoCheckpoint, NoGoodCheckpoint, StorageError
from lastgood.state import state_digest
from lastgood.storage import SlotView
from lastgood.storage import format as fmt
from lastgood.storage.objects import reachable
from lastgood.storage.objects.commits import find_commits
from lastgood.storage.objects.folder import FolderClient
from lastgood.storage.objects.format import CommitName, UploadNote
from lastgood.storage.objects.opening import ObjectPlace
from lastgood.storage.objects.reachable import look_at_place
from tests.checkpointers.support.pushed import failing, flip, manifest_of, push_job, segment_key
from tests.checkpointers.support.rank_states import a_state, save
from tests.suggestions.following import advice, follows, refusal

CHUNK = 4096
AWAY = StorageError("commits: list failed: is the server up?")


class Life:
    """One incarnation of a small training."""

    def __init__(self, directory, remote, **options):
        torch.manual_seed(3)
        self.model = torch.nn.Linear(60, 40)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.ckpt = PCcheck(
            directory,
            interval_steps=1,
            chunk_bytes=CHUNK,
            remote=remote,
            **{"remote_every": 1, "remote_keep": 9} | options,
        )
        self.began = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.ckpt.close()

    def attach(self, **given):
        self.began = self.ckpt.attach(model=self.model, optimizer=self.optimizer, **given)
        return self.began

    def digest(self):
        return state_digest({"model": self.model, "optimizer": self.optimizer})

    def train(self, steps):
        digests = {}
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.ones(2, 60)).square().sum().backward()
            self.optimizer.step()
            digests[self.ckpt.step()] = self.digest()
            self.ckpt.drain()
            self.ckpt._beside.tier.drain(60)
        return digests


@pytest.fixture
def place(tmp_path):
    return FolderClient(tmp_path / "remote")


@pytest.fixture
def trained(tmp_path, place):
    """Digests of steps 1 to 4, which are on the disk (3 and 4) and in the place."""
    with Life(tmp_path / "job", str(place.root)) as life:
        assert life.attach() == 0
        return life.train(4)


def keys(place):
    return [(name.incarnation, name.step) for name in find_commits(place)]


def test_an_empty_disk_takes_the_newest_and_goes_on_after_its_numbers(tmp_path, place, trained):
    job, info = find_commits(place)[0].job_id, manifest_of(place, 4)[1].record
    with Life(tmp_path / "fresh", str(place.root)) as life:
        assert life.attach() == 4
        assert life.digest() == trained[4]
        assert str(life.ckpt._place_of(4)).startswith(str(place.root))
        store = life.ckpt._store
        assert (store.job.job_id, store.incarnation) == (job, info.incarnation + 1)
        further = life.train(2)
        assert [one.sequence for one in store.committed()][-1] > info.sequence
        # The restart was counted, and is forgotten since training got on.
        assert store.book().restarts == {}
    assert keys(place) == [(2, 6), (2, 5), (1, 4), (1, 3), (1, 2), (1, 1)]
    with Life(tmp_path / "third", str(place.root)) as life:
        assert life.attach() == 6 and life.digest() == further[6]
    with Life(tmp_path / "fresh", str(place.root)) as life:  # and the disk alone
        assert life.attach() == 6 and "fresh" in str(life.ckpt._place_of(6))


def test_a_newer_incarnation_on_the_disk_wins_over_a_higher_step_elsewhere(tmp_path, place, trained):
    with Life(tmp_path / "job", str(place.root), remote_every=1000) as life:
        assert life.attach(resume_step=3) == 3
        for name in list(find_commits(place)):
            assert name.incarnation == 1
        life.ckpt._beside.tier = None
        life.optimizer.zero_grad()
        life.model(torch.ones(2, 60)).sum().backward()
        life.optimizer.step()
        assert life.ckpt.step() == 4
        life.ckpt.drain()
        mine = life.digest()
    assert mine != trained[4]
    with Life(tmp_path / "job", str(place.root)) as life:
        assert life.attach() == 4
        assert life.digest() == mine, "step 4 of incarnation 2, not that of 1"


def test_the_disk_is_taken_where_both_have_it(tmp_path, place, trained, monkeypatch):
    with (
        failing(monkeypatch, AssertionError("nothing is fetched"), lambda key: key.startswith("segments")),
        Life(tmp_path / "job", str(place.root)) as life,
    ):
        assert life.attach() == 4 and life.digest() == trained[4]


@pytest.mark.parametrize("how", ["data", "record", "emptied"])
def test_what_is_damaged_on_the_disk_is_fetched(tmp_path, place, trained, how, caplog):
    for info in SlotView(tmp_path / "job").committed():
        if how == "emptied":
            info.path.unlink()
        elif how == "record":
            flip(info.path, fmt.COMMIT_OFFSET + 50)
        else:
            flip(info.path, info.record.data_offset + 100)
    with Life(tmp_path / "job", str(place.root)) as life:
        assert life.attach() == 4 and life.digest() == trained[4]
        assert life.train(1).keys() == {5}
    if how == "data":
        assert "trying its copy in" in caplog.text


def test_what_is_damaged_there_is_passed_over(tmp_path, place, trained, caplog):
    flip(place.root / segment_key(place, 4), 9)
    with Life(tmp_path / "fresh", str(place.root)) as life:
        assert life.attach() == 3 and life.digest() == trained[3]
    assert segment_key(place, 4) in caplog.text
    for step in (1, 2, 3):
        flip(place.root / segment_key(place, step), 9)
    with Life(tmp_path / "other", str(place.root)) as life, pytest.raises(CorruptCheckpoint, match="segments"):
        life.attach()
    assert not (tmp_path / "other").exists(), "it leaves no trace"


def test_a_verdict_of_the_disk_counts_for_what_is_elsewhere(tmp_path, place, trained):
    with Life(tmp_path / "job", str(place.root)) as life:
        assert life.attach() == 4
        life.ckpt.verdict(4, ok=False, reason="spike")
        life.ckpt.verdict(3, ok=False, reason="spike")
    for info in SlotView(tmp_path / "job").committed():
        info.path.unlink()
    with Life(tmp_path / "job", str(place.root)) as life:
        assert life.attach() == 2 and life.digest() == trained[2]
    for step in (1, 2):
        place.delete([f"commits/{next(name for name in find_commits(place) if name.step == step)}"])
    with Life(tmp_path / "job", str(place.root)) as life, pytest.raises(NoGoodCheckpoint, match="judged bad"):
        life.attach()
    with Life(tmp_path / "job", str(place.root)) as life:
        assert life.attach(resume_step=4) == 4


def test_a_step_by_name(tmp_path, place, trained):
    with Life(tmp_path / "job", str(place.root)) as life:
        assert life.attach(resume_step=1) == 1 and life.digest() == trained[1], "not on the disk any more"
    with (
        Life(tmp_path / "job", str(place.root)) as life,
        pytest.raises(NoCheckpoint, match=r"of step 9; committed steps: \[4, 3, 2, 1\]"),
    ):
        life.attach(resume_step=9)


def test_restarts_that_fail_are_counted_on_the_new_disk(tmp_path, place, trained):
    for _ in range(3):
        life = Life(tmp_path / "fresh", str(place.root))
        assert life.attach() == 4
        life.ckpt._store.close()  # as a kill
        life.ckpt._store = None
    with Life(tmp_path / "fresh", str(place.root)) as life:
        assert life.attach() == 3


# -- a place that is away ----------------------------------------------------------------------------------------------


def test_without_the_place_a_good_disk_goes_on_with_a_warning(tmp_path, place, trained, monkeypatch, caplog):
    with failing(monkeypatch, AWAY):
        life = Life(tmp_path / "job", str(place.root))
        assert life.attach() == 4 and life.digest() == trained[4]
        assert "cannot be looked at" in caplog.text and "is the server up" in caplog.text
        life.ckpt.close()


@pytest.mark.parametrize("disk", ["new", "emptied", "damaged"])
def test_without_the_place_and_without_a_disk_nothing_begins_anew(tmp_path, place, trained, monkeypatch, disk):
    directory = tmp_path / ("fresh" if disk == "new" else "job")
    if disk != "new":
        for info in SlotView(directory).committed():
            flip(info.path, fmt.COMMIT_OFFSET + 50) if disk == "damaged" else info.path.unlink()
    before = sorted(path.name for path in directory.iterdir()) if directory.exists() else None
    with failing(monkeypatch, AWAY):
        for begin in ("attach", "start", "restore"):
            life = Life(directory, str(place.root))
            with pytest.raises(StorageError, match=r"remote cannot be looked at.*is the server up") as caught:
                if begin == "attach":
                    life.attach()
                else:
                    getattr(life.ckpt, begin)({"model": life.model})
            assert str(place.root) in str(caught.value)
            life.ckpt.close()
    assert (sorted(path.name for path in directory.iterdir()) if directory.exists() else None) == before


def test_an_empty_place_and_an_empty_disk_are_a_beginning(tmp_path, place):
    with Life(tmp_path / "job", str(place.root)) as life:
        assert life.attach() == 0


def test_another_jobs_place_is_refused(tmp_path, place, trained):
    with Life(tmp_path / "other", str(tmp_path / "elsewhere")) as life:
        life.attach()
        life.train(1)
    with Life(tmp_path / "other", str(place.root)) as life, pytest.raises(MismatchError, match="give each job a place"):
        life.attach()


@follows("start as many ranks as before; or give a new directory and a new place as remote, and resume_from=")
def test_a_place_of_more_ranks_is_refused(tmp_path):
    for rank in range(2):
        save(tmp_path / "ranks", rank, 2, 10)
    push_job(FolderClient(tmp_path / "remote"), tmp_path / "ranks")
    message = refusal(lambda: PCcheck(tmp_path / "job", remote=str(tmp_path / "remote")).restore(a_state(seed=1)))
    assert "of a job of 2 ranks, and this training has 1" in message
    given = eval(f"dict({advice(message, r'and (resume_from=.*)')})")
    new = PCcheck(tmp_path / "new", remote=str(tmp_path / "new-remote"), **given)
    assert new.restore(a_state(seed=1)) == 10


@follows("make it reachable, or start without it (remote=None)")
def test_a_first_beginning_without_the_place_must_be_asked_for(tmp_path, place, monkeypatch):
    with failing(monkeypatch, AWAY):
        message = refusal(lambda: Life(tmp_path / "job", str(place.root)).attach())
        given = eval(f"dict({advice(message, r'start without it .(remote=None)')})")
        ckpt = PCcheck(tmp_path / "job", interval_steps=1, **given)
        assert ckpt.attach(model=torch.nn.Linear(2, 2)) == 0
        ckpt.close()


def test_numbers_of_uploads_in_progress_are_taken(tmp_path, place, trained):
    job = find_commits(place)[0].job_id
    name = CommitName(job, 7, 3)
    place.put(f"{name.uploads}/0000000-{secrets.token_hex(8)}", UploadNote(name, 0).encode())
    place.create(CommitName(job, 6, 1).key, b"")
    found = look_at_place(ObjectPlace(str(place.root)), (0, 1), None)
    assert found.highest == (7, 3) and found.names[0].step == 4
    with Life(tmp_path / "fresh", str(place.root)) as life:
        assert life.attach() == 4
        assert life.ckpt._store.incarnation == 8


# -- a real server -----------------------------------------------------------------------------------------------------


def test_a_lost_disk_on_a_real_server(server, proxy, tmp_path, monkeypatch, caplog):
    keys = server.credentials
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", keys.access_key_id)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", keys.secret_access_key)
    url = f"s3://lastgood/{secrets.token_hex(8)}"
    reach = {"remote_region": "us-east-1", "remote_endpoint_url": proxy.url}
    with Life(tmp_path / "job", url, **reach) as life:
        assert life.attach() == 0
        digests = life.train(3)
    shutil.rmtree(tmp_path / "job")
    proxy.fail("flip", "GET", "/segments/")
    proxy.fail("cut", "GET", "/segments/", after=2)
    proxy.fail("reset", "GET", "/manifests/")
    with Life(tmp_path / "job", url, **reach) as life:
        assert life.attach() == 3 and life.digest() == digests[3]
        life.train(1)
    # The server is away: the disk is enough, and the time is bounded.
    monkeypatch.setattr(reachable, "_LOOK_S", 2.0)
    away = {**reach, "remote_endpoint_url": "http://127.0.0.1:9"}
    began_s = time.monotonic()
    life = Life(tmp_path / "job", url, **away)
    assert life.attach() == 4
    assert time.monotonic() - began_s < 30
    life.ckpt.close()
    shutil.rmtree(tmp_path / "job")
    life = Life(tmp_path / "job", url, **away)
    with pytest.raises(StorageError, match=url):
        life.attach()
    proxy.fail("refuse", "GET", "/commits/", times=999, status=403, code="AccessDenied")
    life = Life(tmp_path / "job", url, **reach)
    proxy.fail("refuse", "GET", "list-type", times=999, status=403, code="AccessDenied")
    with pytest.raises(StorageError, match="403 AccessDenied") as caught:
        life.attach()
    for text in (str(caught.value), caplog.text):
        assert keys.access_key_id not in text and keys.secret_access_key not in text
