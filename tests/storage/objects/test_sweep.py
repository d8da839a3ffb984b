"""What a sweep must not do, one story each; test_machine.py tells them in any order."""

from __future__ import annotations

from pathlib import Path

import pytest

from lastgood.errors import CheckpointError, CorruptCheckpoint
from lastgood.storage.objects.commits import commits_of, find_base, find_commits, retire, spared
from lastgood.storage.objects.format import MANIFESTS, SEGMENTS, UPLOADS, CommitName
from lastgood.storage.objects.sweep import GRACE_S, GUARD_S, SweepReport, sweep
from lastgood.storage.objects.upload import commit_parts
from lastgood.storage.objects.view import RemoteView
from tests.storage.objects.support.actors import Actor, Clock, ListableFolder
from tests.storage.objects.support.streams import Stream, read, save, send

OLD = Stream((1, 1, 1), step=1)
NEW = Stream((1, 2, 1), step=2)
"""Two of its segments are those of OLD."""


class Story:
    def __init__(self, folder: Path) -> None:
        self.clock = Clock()
        self.client = ListableFolder(folder, clock=self.clock)
        self.actors: list[Actor] = []

    def actor(self, label, work) -> Actor:
        self.actors.append(Actor(label, self.client, work))
        return self.actors[-1]

    def saving(self, stream: Stream) -> Actor:
        return self.actor("save", lambda client: save(client, stream, hashed=True, clock=self.clock))

    def sweeping(self, **options) -> Actor:
        return self.actor("sweep", lambda client: sweep(client, **options))

    def sweep(self) -> SweepReport:
        return sweep(self.client)

    def later(self, seconds: float) -> None:
        self.clock.now_s += seconds

    def left(self) -> set[str]:
        return {info.key for kind in (SEGMENTS, MANIFESTS, UPLOADS) for info in self.client.list(kind)}

    def reads(self, stream: Stream) -> bool:
        view = RemoteView(self.client, stream.rank)
        return read(view, view.look(stream.name)) == stream.content


@pytest.fixture
def story(tmp_path):
    story = Story(tmp_path / "objects")
    yield story
    for actor in story.actors:
        actor.kill(after=False)


def test_an_upload_that_sleeps_longer_than_the_guard_cannot_be_committed_after_a_sweep(story):
    upload = story.saving(OLD)
    upload.go_to("create commits")
    story.later(GUARD_S + 10)
    assert story.sweep().given_up == [OLD.name]
    upload.go_to("")
    assert isinstance(upload.failure, CheckpointError)
    assert "given up by a sweep" in str(upload.failure)
    assert find_commits(story.client) == []
    assert story.left() == set()
    with pytest.raises(CheckpointError, match="given up by a sweep"):
        send(story.client, OLD)  # nor is it sent once more


def test_a_sweep_that_is_late_sees_the_commit_that_was_faster(story):
    upload = story.saving(OLD)
    upload.go_to("create commits")
    story.later(GUARD_S + 10)
    late = story.sweeping()
    late.go_to("create commits")
    upload.go_to("")
    late.go_to("")
    assert (upload.failure, late.failure) == (None, None)
    assert story.reads(OLD)


def test_an_upload_that_lives_keeps_its_segments_however_long_it_takes(story):
    upload, part = send(story.client, OLD, clock=story.clock)
    for _ in range(5):
        story.later(GUARD_S * 0.9)
        upload.beat()
        assert story.sweep().segments == 0
    commit_parts(upload, [part])
    assert story.reads(OLD)


def test_what_a_younger_upload_takes_over_stays_though_its_checkpoint_was_taken_away(story):
    save(story.client, OLD, hashed=True)
    upload = story.saving(NEW)
    upload.go_to("create commits")
    retire(story.client, OLD.name)
    story.later(GRACE_S + 10)
    story.sweep()
    upload.go_to("")
    assert upload.failure is None
    assert story.reads(NEW)


def test_nothing_is_taken_over_from_what_was_taken_away_before_the_note(story):
    save(story.client, OLD, hashed=True)
    upload = story.saving(NEW)
    upload.go_to("put uploads")
    retire(story.client, OLD.name)
    story.later(GRACE_S + 10)
    story.sweep()
    assert find_commits(story.client) == [] and story.left() == set()
    upload.go_to("")
    assert upload.failure is None
    assert story.reads(NEW)


def test_a_sweep_that_read_the_notes_before_spares_what_was_taken_away_since(story):
    save(story.client, OLD, hashed=True)
    story.later(GUARD_S + 10)
    late = story.sweeping()
    late.go_to("listed commits")  # it has seen no note
    upload = story.saving(NEW)
    upload.go_to("create commits")  # takes OLD's segments over
    retire(story.client, OLD.name)
    late.go_to("")  # it sees neither commit
    upload.go_to("")
    assert (upload.failure, late.failure) == (None, None)
    assert story.reads(NEW)


def test_an_upload_that_ends_between_two_listings_is_seen_in_one(story):
    upload = story.saving(OLD)
    upload.go_to("create commits")
    story.later(GUARD_S + 10)
    late = story.sweeping()
    late.go_to("listed commits", "listed uploads")
    late.go()  # the first of both
    upload.go_to("")
    late.go_to("")
    assert (upload.failure, late.failure) == (None, None)
    assert story.reads(OLD)


def test_a_late_try_to_commit_what_was_taken_away_fails(story):
    commit, (upload,) = save(story.client, OLD)
    retire(story.client, OLD.name)
    story.later(GRACE_S + 10)
    story.sweep()
    with pytest.raises(CheckpointError, match="not committed"):
        commit_parts(upload, list(commit.parts))
    # Even where its process had looked for the manifests before.
    with pytest.raises(CheckpointError, match="is there already"):
        story.client.create(OLD.name.key, commit.encode())


def test_a_copy_of_a_commit_that_is_there_stays(story):
    """Else a sweep that saw it before would remove the one that a later retention has put."""
    save(story.client, OLD, hashed=True)
    killed = story.actor("retention", lambda client: retire(client, OLD.name))
    killed.go_to("put commits")
    killed.kill(after=False)
    story.later(GUARD_S + 10)
    late = story.sweeping()
    late.go_to("delete retired")
    upload = story.saving(NEW)
    upload.go_to("create commits")
    retire(story.client, OLD.name)
    late.go_to("")
    story.later(GRACE_S + 10)
    story.sweep()
    upload.go_to("")
    assert upload.failure is None
    assert story.reads(NEW)


def test_young_segments_without_a_note_that_the_sweep_saw_stay(story):
    late = story.sweeping()
    late.go_to("listed commits")
    upload = story.saving(OLD)
    upload.go_to("create commits")
    late.go_to("")
    upload.go_to("")
    assert story.reads(OLD)


def test_a_sweep_that_is_killed_anywhere_is_finished_by_the_next(story):
    save(story.client, OLD)
    save(story.client, NEW, take_over=False)
    retire(story.client, OLD.name)
    dead = story.saving(Stream((5, 6, 7), step=3))
    dead.go_to("create commits")
    dead.kill(after=False)
    story.later(GUARD_S + GRACE_S + 10)
    for calls in range(1, 200):
        sweeper = story.sweeping()
        for _ in range(calls):
            sweeper.go()
        finished = sweeper.over
        sweeper.kill(after=calls % 2 == 0)
        assert story.reads(NEW)
        if finished:
            break
    assert finished
    assert len(story.left()) == 4  # NEW's segments and manifest


def test_a_dry_run_changes_nothing_and_counts_the_same(story):
    save(story.client, OLD)
    save(story.client, NEW, take_over=False)
    retire(story.client, OLD.name)
    dead = story.saving(Stream((5, 6, 7), step=3))
    dead.go_to("create commits")
    story.later(GUARD_S + GRACE_S + 10)
    before = story.left(), commits_of(story.client)
    would = sweep(story.client, dry_run=True)
    assert (story.left(), commits_of(story.client)) == before
    assert story.sweep() == would
    assert would.segments == 6 and would.manifests == 2 and would.given_up == [CommitName(OLD.job_id, 1, 3)]


def test_what_is_held_by_a_reader_stays(story):
    save(story.client, OLD)
    view = RemoteView(story.client)
    info = view.look(OLD.name)
    with view.hold(info):
        retire(story.client, OLD.name)
        story.later(GRACE_S + 10)
        story.sweep()
        assert read(view, info) == OLD.content
    assert story.sweep().segments == 3
    with pytest.raises(CorruptCheckpoint, match="was taken away"), view.hold(info):
        pass
    assert story.left() == set()


def test_nothing_is_removed_while_a_manifest_cannot_be_read(story):
    commit, _ = save(story.client, OLD)
    save(story.client, NEW)
    retire(story.client, NEW.name)
    key = next(info.key for info in story.client.list(MANIFESTS) if commit.parts[0].name in info.key)
    content = bytearray(story.client.get(key, 1 << 20))
    content[40] ^= 1
    story.client.put(key, content)
    story.later(GUARD_S + GRACE_S + 10)
    before = story.left()
    with pytest.raises(CorruptCheckpoint, match="does not have the digest in its name"):
        story.sweep()
    story.client.delete([key])
    with pytest.raises(CorruptCheckpoint, match="nothing is swept while it is not known what that needs"):
        story.sweep()
    assert story.left() == before - {key}


def test_retention_spares_the_newest_and_the_newest_good_one():
    names = [Stream((1,), step=step).name for step in (5, 4, 3, 2, 1)]
    assert spared(names, 2) == set(names[:2])
    assert spared(names, 2, bad=names[:3]) == {*names[:2], names[3]}
    assert spared(names, 0) == {names[0]}
    assert spared([], 2) == set()


def test_without_orphans_only_parts_of_removed_checkpoints_go(story):
    save(story.client, OLD)
    save(story.client, NEW, take_over=False)
    retire(story.client, OLD.name)
    dead = story.saving(Stream((5, 6, 7), step=3))
    dead.go_to("create commits")
    dead.kill(after=False)
    story.later(GRACE_S + 10)
    assert sweep(story.client, orphans=False).segments == 3
    assert story.reads(NEW)
    assert find_base(story.client, 0) is not None
