"""What every CheckpointStore promises, and what the local one leaves after a kill at any moment."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lastgood.checkpointers.directories.local import LocalStore
from lastgood.checkpointers.directories.manifest import MANIFEST, check_files, manifest_text, parse_manifest
from lastgood.checkpointers.directories.store import CheckpointStore, Draft
from lastgood.errors import CheckpointError, CorruptCheckpoint, StorageError
from tests.checkpointers.directories.support.memory_store import MemoryStore

KILLED = Path(__file__).parent / "support" / "killed_store.py"
KEEP = 2
STORES: dict[str, Callable[[Path], CheckpointStore]] = {
    "local": lambda directory: LocalStore(directory / "job", KEEP),
    "memory": lambda _: MemoryStore(KEEP),
}


@pytest.fixture(params=sorted(STORES))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStore:
    made = STORES[request.param](tmp_path)
    made.prepare()
    return made


def write(draft: Draft, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        with draft.create(name) as stream:
            stream.write(content)


def committed(store: CheckpointStore, step: int, files: dict[str, bytes]) -> int:
    draft = store.begin(step)
    write(draft, files)
    draft.seal()
    return store.commit(draft)


def test_a_place_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    for make in STORES.values():
        assert make(tmp_path).found() == []
    assert list(tmp_path.iterdir()) == [], "whoever only looks makes nothing"


def test_files_come_as_streams_and_from_a_folder(store: CheckpointStore) -> None:
    draft = store.begin(5)
    write(draft, {"a": b"one", "sub/b": b"two"})
    by_library = draft.folder() / "0" / "state"
    by_library.mkdir(parents=True)
    (by_library / "c").write_bytes(b"three")
    assert store.found() == []
    draft.seal()
    assert store.found() == []
    nbytes = store.commit(draft)
    (one,) = store.found()
    assert (one.sequence, one.step, one.name) == (1, 5, "checkpoint-00000001-step-5")
    manifest = store.read(one, MANIFEST)
    assert nbytes == 11 + len(manifest)
    assert {name: size for name, (size, _) in parse_manifest(manifest, "x", 5).items()} == {
        "a": 3,
        "sub/b": 3,
        "0/state/c": 5,
    }
    assert [store.read(one, name) for name in ("a", "sub/b", "0/state/c")] == [b"one", b"two", b"three"]
    with store.local_folder(one) as folder:
        assert check_files(folder, 5) == 11
        assert (folder / "0" / "state" / "c").read_bytes() == b"three"


def test_ranges_end_where_the_file_ends(store: CheckpointStore) -> None:
    committed(store, 1, {"a": b"0123456789"})
    (one,) = store.found()
    assert store.read(one, "a", 3) == b"3456789"
    assert store.read(one, "a", 3, 4) == b"3456"
    assert store.read(one, "a", 8, 4) == b"89"
    assert store.read(one, "a", 20, 4) == b""
    with pytest.raises(StorageError, match="/b: "):
        store.read(one, "b")


def test_the_newest_is_the_last_committed_and_not_the_highest_step(store: CheckpointStore) -> None:
    for step in (10, 20, 5):
        committed(store, step, {"a": b"%d" % step})
    assert [(one.sequence, one.step) for one in store.found()] == [(3, 5), (2, 20)]
    assert [store.read(one, "a") for one in store.found()] == [b"5", b"20"]


def test_a_checkpoint_that_was_removed_meanwhile_is_named(store: CheckpointStore) -> None:
    committed(store, 1, {"a": b"x"})
    (old,) = store.found()
    for step in (2, 3):
        committed(store, step, {"a": b"x"})
    with pytest.raises(StorageError, match=old.name):
        store.read(old, "a")


def test_a_draft_that_is_not_sealed_is_no_checkpoint(store: CheckpointStore) -> None:
    draft = store.begin(1)
    write(draft, {"a": b"x"})
    with pytest.raises(StorageError, match="seal"):
        store.commit(draft)
    assert store.found() == []


def test_what_was_given_up_is_gone_and_takes_nothing_more(store: CheckpointStore) -> None:
    draft = store.begin(1)
    late = draft.create("late")
    folder = draft.folder()
    write(draft, {"a": b"x"})
    store.give_up(draft)
    store.give_up(draft)
    assert not folder.exists()
    with pytest.raises(StorageError, match="given up"):
        late.write(b"x")
    with pytest.raises(StorageError, match="given up"):
        draft.create("b")
    with pytest.raises(StorageError, match="given up"):
        draft.folder()
    with pytest.raises(StorageError):
        store.commit(draft)
    assert store.found() == [] and not folder.exists()


def test_half_a_file_is_no_file(store: CheckpointStore) -> None:
    draft = store.begin(1)
    with pytest.raises(ZeroDivisionError), draft.create("half") as stream:
        stream.write(b"x" * 100_000)
        raise ZeroDivisionError
    forgotten = draft.create("forgotten")
    forgotten.write(b"x")
    del forgotten
    assert not draft._sums.keys() & {"half", "forgotten"}


@pytest.mark.parametrize("name", ["", "/a", "a//b", "../a", "a/../b", ".", "a/", "a\0b", MANIFEST])
def test_names_that_lead_elsewhere_are_refused(store: CheckpointStore, name: str) -> None:
    with pytest.raises(ValueError, match="no name for a file"):
        store.begin(1).create(name)


def test_a_name_is_taken_once(store: CheckpointStore) -> None:
    draft = store.begin(1)
    write(draft, {"a": b"x"})
    with pytest.raises(FileExistsError):
        draft.create("a")


def test_hostile_manifests_stay_in_their_folder(store: CheckpointStore) -> None:
    for name in ("../outside", "/outside"):
        with pytest.raises(CorruptCheckpoint, match="outside its directory"):
            parse_manifest(manifest_text(1, {name: (1, 0)}), "m", 1)
    committed(store, 1, {"a": b"x"})
    (one,) = store.found()
    with pytest.raises(CorruptCheckpoint, match="not of step 2"):
        parse_manifest(store.read(one, MANIFEST), "m", 2)


def test_a_process_that_ends_leaves_drafts_that_prepare_removes(tmp_path: Path) -> None:
    first = LocalStore(tmp_path, KEEP)
    committed(first, 1, {"a": b"x"})
    write(first.begin(2), {"a": b"x"})
    assert len(list(tmp_path.iterdir())) == 2
    second = LocalStore(tmp_path, KEEP)
    second.prepare()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-00000001-step-1"]


def test_a_local_draft_goes_to_another_process_and_one_in_memory_does_not(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, KEEP)
    draft = store.begin(1)
    there = pickle.loads(pickle.dumps(draft))
    write(there, {"a": b"x"})
    there.seal()
    assert store.commit(draft) > 0
    sent = store.begin(2)
    there = pickle.loads(pickle.dumps(sent))
    store.give_up(sent)
    with pytest.raises(FileNotFoundError):
        there.create("a")
    with pytest.raises(CheckpointError, match="in the memory of this process"):
        pickle.dumps(MemoryStore(1).begin(1))


def test_a_file_that_was_lost_before_it_was_sealed_is_missed(tmp_path: Path) -> None:
    draft = LocalStore(tmp_path, KEEP).begin(1)
    write(draft, {"a": b"x", "b": b"y"})
    (draft.folder() / "a").unlink()
    with pytest.raises(StorageError, match=r"\['a'\] were written and are gone"):
        draft.seal()


def test_a_name_that_is_not_flushed_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path, KEEP)
    committed(store, 1, {"a": b"x"})
    real, failing = os.fsync, []

    def fsync(descriptor: int) -> None:
        if failing and Path(f"/proc/self/fd/{descriptor}").readlink() == tmp_path:
            raise OSError(5, "no")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    failing.append(True)
    with pytest.raises(StorageError, match="flushing a checkpoint's name"):
        committed(store, 2, {"a": b"x"})
    assert [one.step for one in store.found()] == [1]


def test_kills_between_any_two_changes_leave_what_was_committed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(KILLED), str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 50, "kills came at fewer moments than the store has changes"


# -- any sequence of calls, against a list -----------------------------------------------------------------------------

names = st.sampled_from(["a", "b", "sub/c", "0/state/d"])
contents = st.binary(max_size=40)


class Conversation(RuleBasedStateMachine):
    """A store beside a list of what it must hold."""

    kind = ""

    @initialize()
    def begin_anew(self) -> None:
        self.place = tempfile.TemporaryDirectory()
        self.store = STORES[self.kind](Path(self.place.name))
        self.store.prepare()
        self.held: list[tuple[int, int, dict[str, bytes]]] = []
        self.drafts: list[tuple[Draft, dict[str, bytes]]] = []

    def teardown(self) -> None:
        if hasattr(self, "place"):
            self.place.cleanup()

    @rule(step=st.integers(0, 10**17))
    def begin(self, step: int) -> None:
        self.drafts.append((self.store.begin(step), {}))

    @precondition(lambda self: self.drafts)
    @rule(data=st.data(), name=names, content=contents, by_folder=st.booleans())
    def write(self, data: st.DataObject, name: str, content: bytes, by_folder: bool) -> None:
        draft, files = data.draw(st.sampled_from(self.drafts))
        if name in files:
            return
        if by_folder:
            path = draft.folder() / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        else:
            write(draft, {name: content})
        files[name] = content

    @precondition(lambda self: self.drafts)
    @rule(data=st.data(), give_up=st.booleans())
    def end(self, data: st.DataObject, give_up: bool) -> None:
        number = data.draw(st.integers(0, len(self.drafts) - 1))
        draft, files = self.drafts.pop(number)
        if give_up or not files:
            self.store.give_up(draft)
            return
        draft.seal()
        self.store.commit(draft)
        sequence = max((known for known, _, _ in self.held), default=0) + 1
        self.held = [(sequence, draft.step, files), *self.held][:KEEP]

    @rule()
    def restart(self) -> None:
        """The process ended; another one has the lock now."""
        if self.kind == "local":
            self.store = STORES["local"](Path(self.place.name))
        self.store.prepare()
        self.drafts = []

    @invariant()
    def holds_what_it_must(self) -> None:
        if not hasattr(self, "store"):
            return
        found = self.store.found()
        assert [(one.sequence, one.step) for one in found] == [(number, step) for number, step, _ in self.held]
        for one, (_, step, files) in zip(found, self.held, strict=True):
            listed = parse_manifest(self.store.read(one, MANIFEST), one.where, step)
            assert {name: self.store.read(one, name) for name in listed} == files
            with self.store.local_folder(one) as folder:
                assert check_files(folder, step) == sum(map(len, files.values()))


class LocalConversation(Conversation):
    kind = "local"


class MemoryConversation(Conversation):
    kind = "memory"


TestLocal = LocalConversation.TestCase
TestMemory = MemoryConversation.TestCase
TestLocal.settings = TestMemory.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
