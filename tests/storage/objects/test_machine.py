"""Uploads, commits, sweeps and deaths in any order: every checkpoint that is listed reads back complete and exact.

Sweeping is the one way to lose data, so this stands in front of the code. Actors run one call of the store at a time:
uploads (of two jobs, of two incarnations of one, of two copies of one that differ), retention, and sweeps. Each may be
killed before or after any call, or sleep for as long as it likes and go on (a zombie).
"""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lastgood.errors import CheckpointError
from lastgood.storage.objects.commits import commits_of, find_base, find_commits, read_commit, retire, spared
from lastgood.storage.objects.format import MANIFESTS, SEGMENTS, UPLOADS, CommitName, object_key
from lastgood.storage.objects.sweep import sweep
from lastgood.storage.objects.upload import BEAT_S, commit_parts, told_parts
from lastgood.storage.objects.view import RemoteView
from tests.storage.objects.support.actors import Actor, Clock, ListableFolder, names_of
from tests.storage.objects.support.streams import Stream, read, send

GUARD_S, GRACE_S = 2 * BEAT_S, 60.0
JOBS = [bytes([number]) * 16 for number in (1, 2)]
NAMES = st.builds(CommitName, st.sampled_from([*JOBS, JOBS[0]]), st.sampled_from([1, 2]), st.sampled_from([1, 2]))
STOPS = [
    "create commits",
    "put commits",
    "put retired",
    "head commits",
    "get commits",
    "put uploads",
    "listed uploads",
    "listed commits",
    "listed retired",
    "listed segments",
    "create segments",
    "create manifests",
    "head manifests",
    "delete segments",
    "delete manifests",
    "delete uploads",
    "delete retired",
]
"""Calls before which something else may happen."""
FAR = st.one_of(st.just(""), st.sampled_from(STOPS))
"""How far an actor goes: to the end, or until it is about to make such a call."""
MOST_ACTORS = 3
MEMORY = Path("/dev/shm")


class Machine(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 2**32 - 1))
    def begin(self, seed):
        self.names = names_of(seed)
        self.names.__enter__()
        self.folder = tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None, prefix="lastgood-test-")
        self.clock = Clock()
        self.client = ListableFolder(self.folder, clock=self.clock)
        self.actors: list[Actor] = []
        self.contents: dict[CommitName, list[list[Stream]]] = {}
        """What somebody tried to save under a name: one of these it must be."""
        self.seen: set[CommitName] = set()
        self.taken_away: set[CommitName] = set()

    def teardown(self):
        if not hasattr(self, "folder"):
            return
        try:
            for actor in self.actors:
                actor.kill(after=False)
            self.nothing_is_left_over()
        finally:
            self.names.__exit__(None, None, None)
            shutil.rmtree(self.folder)

    # -- actors ----------------------------------------------------------------------------------------------------

    def few(self):
        return len(self.actors) < MOST_ACTORS

    def some(self):
        return bool(self.actors)

    @precondition(few)
    @rule(
        name=NAMES,
        world_size=st.sampled_from([1, 1, 2]),
        versions=st.tuples(st.integers(0, 1), st.integers(0, 1)),
        take_over=st.sampled_from([True, True, False]),
        hashed=st.sampled_from([True, True, False]),
        again=st.booleans(),
        far=FAR,
    )
    def upload(self, name, world_size, versions, take_over, hashed, again, far):
        tried = self.contents.setdefault(name, [])
        if again and tried:
            streams = tried[-1]  # the same once more: a process that was killed, or still sleeps
        else:
            streams = [
                Stream(versions, name.step, name.incarnation, rank, world_size, name.job_id)
                for rank in range(world_size)
            ]
            tried.append(streams)

        def work(client):
            uploads, parts = [], []
            for stream in streams:
                base = find_base(client, stream.rank, stream.job_id) if take_over else None
                upload, part = send(client, stream, base, hashed=hashed, clock=self.clock)
                uploads.append(upload)
                parts.append(part)
            for upload, part in zip(uploads, parts, strict=True):
                upload.beat()
                upload.tell(part)
            # Of other ranks by this process, or by another one that sends the same.
            told = told_parts(client, name, len(streams), {0: parts[0]})
            if all(rank in told for rank in range(len(streams))):
                commit_parts(uploads[0], [told[rank] for rank in range(len(streams))])
            for upload in uploads:
                upload.done()

        self.start(f"upload {name}", work, far)

    @precondition(few)
    @rule(job_id=st.sampled_from(JOBS), keep=st.sampled_from([1, 1, 2]), far=FAR)
    def retain(self, job_id, keep, far):
        def work(client):
            found = find_commits(client, job_id)
            stays = spared(found, keep)
            for name in found:
                if name not in stays:
                    self.taken_away.add(name)
                    retire(client, name)

        self.start("retention", work, far)

    @precondition(few)
    @rule(orphans=st.booleans(), far=FAR)
    def clean(self, orphans, far):
        def work(client):
            sweep(client, guard_s=GUARD_S, grace_s=GRACE_S, orphans=orphans)

        self.start("sweep", work, far)

    def start(self, label, work, far):
        actor = Actor(label, self.client, work)
        self.actors.append(actor)
        self.run(actor, far)

    # -- what happens to them --------------------------------------------------------------------------------------

    @precondition(some)
    @rule(which=st.integers(0, MOST_ACTORS - 1), far=FAR)
    def go_on(self, which, far):
        self.run(self.actors[which % len(self.actors)], far)

    def run(self, actor, far):
        actor.go()
        while not actor.over and (not far or actor.pending != far):
            actor.go()
        if actor.over:
            self.actors.remove(actor)
            self.failed_rightly(actor)

    @precondition(some)
    @rule(which=st.integers(0, MOST_ACTORS - 1), after=st.booleans())
    def kill(self, which, after):
        self.actors.pop(which % len(self.actors)).kill(after=after)

    @rule(seconds=st.sampled_from([GRACE_S + 10, GUARD_S + 10]), orphans=st.booleans())
    def all_sleep_beside_a_sweep(self, seconds, orphans):
        self.clock.now_s += seconds
        sweep(self.client, guard_s=GUARD_S, grace_s=GRACE_S, orphans=orphans)

    @rule(job_id=st.sampled_from(JOBS), seconds=st.sampled_from([0.0, GRACE_S + 10]))
    def all_but_the_newest_are_taken_away(self, job_id, seconds):
        found = find_commits(self.client, job_id)
        for name in set(found) - spared(found, 1):
            self.taken_away.add(name)
            retire(self.client, name)
        self.clock.now_s += seconds

    @rule(seconds=st.sampled_from([1.0, GRACE_S + 10, GUARD_S / 2, GUARD_S + 10, 3 * GUARD_S]))
    def time_passes(self, seconds):
        self.clock.now_s += seconds

    # -- what must hold --------------------------------------------------------------------------------------------

    def failed_rightly(self, actor):
        """A rival's or a sweep's victim is told so; nothing else ever fails."""
        if actor.failure is not None and not isinstance(actor.failure, CheckpointError):
            raise actor.failure

    @invariant()
    def what_is_listed_is_complete(self):
        if not hasattr(self, "client"):
            return
        listed = {name for name, info in commits_of(self.client).items() if info.nbytes}
        for name in listed:
            world_size = len(read_commit(self.client, name).parts)
            found = []
            for rank in range(world_size):
                view = RemoteView(self.client, rank, name.job_id)
                found.append(read(view, view.look(name)))
            assert found in [[stream.content for stream in streams] for streams in self.contents[name]], name.told
        assert self.seen - self.taken_away <= listed, "a checkpoint is gone, and nobody took it away"
        self.seen |= listed

    def nothing_is_left_over(self):
        """A while after the last death, two sweeps leave what the checkpoints need, and no byte else."""
        for _ in range(2):
            self.clock.now_s += GUARD_S + GRACE_S + 10
            sweep(self.client, guard_s=GUARD_S, grace_s=GRACE_S)
        self.what_is_listed_is_complete()
        needed = set()
        for name in (name for name, info in commits_of(self.client).items() if info.nbytes):
            commit = read_commit(self.client, name)
            for rank, part in enumerate(commit.parts):
                manifest = RemoteView(self.client, rank, name.job_id).look(name).manifest
                needed.add(object_key(MANIFESTS, part.name))
                needed |= {object_key(SEGMENTS, segment.name) for segment in manifest.segments}
        left = {info.key for kind in (SEGMENTS, MANIFESTS, UPLOADS) for info in self.client.list(kind)}
        assert left == needed


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


def played(seed: int) -> list[list[str]]:
    """What there is, and what everybody is about to do, after each of some steps."""
    chance, machine, found = random.Random(seed), Machine(), []
    machine.begin(seed)
    try:
        for _ in range(25):
            turn, which, far = chance.random(), chance.randrange(MOST_ACTORS), chance.choice(["", *STOPS])
            if turn < 0.5 and machine.few():
                name = CommitName(JOBS[0], 1, chance.choice([1, 2]))
                versions = chance.randrange(2), chance.randrange(2)
                machine.upload(name, chance.choice([1, 2]), versions, True, turn < 0.1, turn < 0.3, far)
            elif turn < 0.6 and machine.few():
                machine.clean(which > 0, far)
            elif turn < 0.8 and machine.some():
                machine.go_on(which, far)
            elif turn < 0.9 and machine.some():
                machine.kill(which, which > 0)
            else:
                machine.time_passes(chance.choice([GRACE_S + 10, GUARD_S + 10]))
            machine.what_is_listed_is_complete()
            found.append([info.key for info in machine.client.list("")])
            found.append([f"{actor.label}: {actor.pending}" for actor in machine.actors])
    finally:
        machine.teardown()
    return found


@pytest.mark.parametrize("seed", range(3))
def test_the_same_steps_go_the_same_way(seed):
    """What hypothesis finds it must be able to play again; tokens were another source of chance."""
    assert played(seed) == played(seed)
