"""A disk that fails or is full in any writer thread, and what torch's own tools make of files of its format."""

from __future__ import annotations

import errno
import io
import os
import re
import resource
import signal
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lastgood.checkpointers.dcp.torch_io import first_cause
from lastgood.checkpointers.directories.local import LocalDraft
from lastgood.checkpointers.directories.manifest import parse_manifest, sum_file
from lastgood.errors import StorageError
from lastgood.integrations.dcp import LastgoodReader, LastgoodWriter
from lastgood.storage import write

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]
LAYOUTS = pytest.mark.parametrize("layout", ["lastgood", "dcp"])


def state_of(seed, size=400_000):
    generator = torch.Generator().manual_seed(seed)
    return {f"t{number}": torch.randn(size, generator=generator) for number in range(6)} | {"step": seed}


def load(path, size=400_000):
    into = {name: torch.zeros(size) for name in state_of(0, 1) if name != "step"} | {"step": -1}
    dcp.load(into, storage_reader=LastgoodReader(path))
    return into


def is_state(found, seed):
    return found["step"] == seed and all(
        torch.equal(found[name], one) for name, one in state_of(seed).items() if name != "step"
    )


def refused(call):
    with pytest.raises(CheckpointException) as caught:
        call()
    return first_cause(caught.value)


@pytest.fixture
def older(tmp_path):
    dcp.save(state_of(1), storage_writer=LastgoodWriter(tmp_path / "step-1"))
    yield tmp_path / "step-1"
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"], "nothing half-written is left"


@LAYOUTS
@pytest.mark.parametrize("limit", [1 << 12, (1 << 20) + (1 << 16), 2 << 20])
def test_a_full_disk_fails_the_save_and_leaves_the_older_checkpoint(older, layout, limit):
    """The kernel refuses to make files longer than `limit`, to whatever thread writes."""
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        error = refused(lambda: dcp.save(state_of(2), storage_writer=LastgoodWriter(older, layout=layout)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert isinstance(error, StorageError)
    assert error.errno == errno.EFBIG
    assert ".lgs" in str(error) or ".distcp" in str(error)
    assert is_state(load(older), 1)


def test_no_space_for_a_native_writer_thread_fails_the_save(older, monkeypatch):
    full = os.open("/dev/full", os.O_RDWR)
    native = write._native.SlotWriter
    monkeypatch.setattr(
        write._native, "SlotWriter", lambda pool, descriptor, *rest: native(pool, full if descriptor else 0, *rest)
    )
    error = refused(lambda: dcp.save(state_of(2), storage_writer=LastgoodWriter(older)))
    monkeypatch.undo()
    os.close(full)
    assert isinstance(error, StorageError)
    assert error.errno == errno.ENOSPC
    assert is_state(load(older), 1)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_in_any_thread_fails_the_save(older, monkeypatch, failing):
    """torch's own writer prints it in all threads but the first, and says that the checkpoint was saved."""
    opened = []
    real = LocalDraft._open

    class Refusing(io.FileIO):
        def write(self, data):
            if self.tell() > 100_000:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().write(data)

    def open_one(draft, name):
        opened.append(threading.current_thread().name)
        if name.startswith(f"__0_{failing}-"):
            return Refusing(draft.path / name, "xb")
        return real(draft, name)

    monkeypatch.setattr(LocalDraft, "_open", open_one)
    error = refused(lambda: dcp.save(state_of(2), storage_writer=LastgoodWriter(older, layout="dcp", writer_threads=3)))
    assert isinstance(error, StorageError)
    assert error.errno == errno.EIO
    assert f"__0_{failing}-" in str(error)
    assert len(opened) == 3
    assert is_state(load(older), 1)


@LAYOUTS
def test_one_layout_takes_the_place_of_the_other(older, layout):
    for seed, one in ((2, layout), (3, "dcp"), (4, "lastgood")):
        dcp.save(state_of(seed), storage_writer=LastgoodWriter(older, layout=one, writer_threads=1))
        assert is_state(load(older), seed)
        assert len(list(older.iterdir())) == 3


def test_a_checkpoint_of_torchs_is_replaced_with_all_its_files(tmp_path):
    place = tmp_path / "step-1"
    dcp.save(state_of(1), storage_writer=dcp.FileSystemWriter(place, thread_count=3))
    (place / "mine.txt").write_text("a note")
    dcp.save(state_of(2), storage_writer=LastgoodWriter(place))
    assert is_state(load(place), 2)
    names = sorted(path.name.partition("-")[0] for path in place.iterdir())
    assert names == [".metadata", "__0_0", "lastgood", "mine.txt"]


def test_torchs_own_tools_read_the_layout_dcp(tmp_path):
    dcp.save(state_of(2), storage_writer=LastgoodWriter(tmp_path / "step-1", layout="dcp", writer_threads=3))
    dcp_to_torch_save(tmp_path / "step-1", tmp_path / "one.pt")
    found = torch.load(tmp_path / "one.pt", weights_only=True)
    assert is_state(found, 2)


def test_the_manifest_has_each_file_of_the_layout_dcp(tmp_path):
    place = tmp_path / "step-1"
    dcp.save(state_of(2), storage_writer=LastgoodWriter(place, layout="dcp", writer_threads=3, readable_by="all"))
    (manifest,) = place.glob("lastgood-manifest-*.json")
    files = parse_manifest(manifest.read_bytes(), "it", 0)
    assert files.keys() == {path.name for path in place.iterdir()} - {manifest.name}
    assert len(files) == 4
    for name, (nbytes, checksum) in files.items():
        assert ((place / name).stat().st_size, sum_file(place / name)) == (nbytes, checksum)
    assert {path.stat().st_mode & 0o777 for path in place.iterdir()} == {0o644}
    assert place.stat().st_mode & 0o777 == 0o755


def test_a_flipped_bit_in_the_layout_dcp_is_seen(tmp_path):
    dcp.save(state_of(2), storage_writer=LastgoodWriter(tmp_path / "step-1", layout="dcp"))
    for path in (tmp_path / "step-1").glob("*.distcp"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    # Of the manifest, of a zip's entry, or of the entry's own head.
    assert re.search("checksum|damaged", str(refused(lambda: load(tmp_path / "step-1"))))


def test_drafts_of_a_dead_save_go_and_those_of_a_living_one_stay(tmp_path):
    from lastgood.integrations.dcp.folder import CheckpointFolder

    dead = CheckpointFolder(tmp_path / "step-1", bytes(range(16)))
    dead.make().release()
    living = CheckpointFolder(tmp_path / "step-1", bytes(16))
    lock = living.make()
    assert not dead.draft.exists()
    other = CheckpointFolder(tmp_path / "step-10", bytes(range(16)))
    other.make().release()
    dcp.save(state_of(1), storage_writer=LastgoodWriter(tmp_path / "step-1"))
    assert {path.name for path in tmp_path.iterdir()} == {"step-1", living.draft.name, other.draft.name}
    lock.release()


def test_a_state_that_is_larger_than_the_pool_is_not_copied_as_a_whole(tmp_path):
    """Of memory, a save takes the pool, and no copy of the state."""
    state = {"big": torch.ones(64 << 20, dtype=torch.uint8)}
    peaks = []
    writer = LastgoodWriter(tmp_path / "step-1", pool_bytes=8 << 20)
    dcp.save({"small": torch.ones(1)}, storage_writer=LastgoodWriter(tmp_path / "step-0"))
    before = resident()
    done = threading.Event()
    watch = threading.Thread(target=lambda: [peaks.append(resident()) for _ in iter(lambda: done.wait(0.001), True)])
    watch.start()
    dcp.save(state, storage_writer=writer)
    done.set()
    watch.join(20)
    assert max(peaks) - before < 40 << 20


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_draft_that_another_save_removes_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    from lastgood.integrations.dcp import folder

    mine = folder.CheckpointFolder(tmp_path / "step-1", bytes(range(16)))
    real, removed = folder.FileLock.acquire, []

    def acquire(self, *arguments):
        if len(removed) < 3:
            removed.append(self.path)
            folder._remove_unheld(mine.draft)
        return real(self, *arguments)

    monkeypatch.setattr(folder.FileLock, "acquire", acquire)
    lock = mine.make()
    assert len(removed) == 3
    assert mine.draft.is_dir()
    folder._remove_unheld(mine.draft)
    assert mine.draft.is_dir()
    lock.release()
