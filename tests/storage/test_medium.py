"""Both ways of writing slots keep the same promises. Persistent memory is emulated on tmpfs."""

from __future__ import annotations

import ctypes.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from reference_reader import read_directory
from slot_helpers import CHUNK, commit, content_of, give, load, open_store, save, steps

from lastgood import _native
from lastgood.errors import StorageError
from lastgood.storage import SlotStore
from lastgood.storage.medium import open_slot_file

STATE = 5 * CHUNK + 77


@pytest.mark.parametrize("medium", ["file", "pmem"])
def test_either_medium_reads_as_the_other(tmp_path: Path, medium: str) -> None:
    with open_store(tmp_path, medium=medium, slots=3, writer_threads=3) as store:
        for step in range(1, 7):
            write = store.begin(step, STATE + 4096 * step)
            assert write.how in (("msync", "libpmem") if medium == "pmem" else ("direct", "page cache"))
            give(write, content_of(step, STATE + 4096 * step), threads=2)
            assert commit(write) == "durable"
        assert load(store, store.committed()[0]) == content_of(6, STATE + 4096 * 6)
        assert [one.stream for one in read_directory(tmp_path)][:2] == [content_of(n, STATE + 4096 * n) for n in (6, 5)]
        broken = store.begin(7, STATE)
        broken.abort()
    with open_store(tmp_path, medium="file" if medium == "pmem" else "pmem", slots=3) as store:
        assert steps(store)[:2] == [6, 5]
        save(store, 8, STATE)
        assert load(store, store.committed()[0]) == content_of(8, STATE)


def test_the_mapping_itself(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))
    descriptor = os.open(path, os.O_RDWR)
    try:
        with pytest.raises(ValueError, match="shorter"):
            _native.PersistentMapping(descriptor, 8193)
        with pytest.raises(ValueError, match="shorter"):
            _native.PersistentMapping(descriptor, 0)
        mapping = _native.PersistentMapping(descriptor, 8192)
        mapping.write(b"abc", 4095)
        mapping.flush()
        assert path.read_bytes() == bytes(4095) + b"abc" + bytes(4094)
        for offset in (8190, 8193, 1 << 63):
            with pytest.raises(ValueError, match="outside"):
                mapping.write(b"abc", offset)
        with pytest.raises(ValueError, match="the mapping is shorter"):
            _native.SlotWriter(_native.ChunkPool(0, 8192, 4096), descriptor, 4096, 8192, 4096, 1, 1, [], "", mapping)
    finally:
        os.close(descriptor)
    with pytest.raises(FileNotFoundError):
        open_slot_file(tmp_path / "none", "pmem", direct=True, nbytes=1)


LIBPMEM = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from slot_helpers import *
with open_store(Path(sys.argv[1]), medium="pmem", slots=3) as store:
    write = store.begin(1, 70_000)
    print(write.how)
    give(write, content_of(1, 70_000))
    commit(write)
    assert load(store, store.committed()[0]) == content_of(1, 70_000)
"""


def test_through_libpmem_itself(tmp_path: Path) -> None:
    if ctypes.util.find_library("pmem") is None:
        pytest.skip("libpmem is not installed (Debian: libpmem1)")
    done = subprocess.run(
        [sys.executable, "-c", LIBPMEM, str(tmp_path / "job"), str(Path(__file__).parent / "support")],
        env={**os.environ, "PMEM_IS_PMEM_FORCE": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert (done.stdout.strip(), done.returncode) == ("libpmem", 0), done.stderr
    assert load(SlotStore.peek(tmp_path / "job"), SlotStore.peek(tmp_path / "job").newest()) == content_of(1, 70_000)


def test_writer_threads_stay_where_they_are_told(tmp_path: Path) -> None:
    cpu = min(os.sched_getaffinity(0))
    with open_store(tmp_path, writer_cpus=[cpu], writer_threads=2) as store:
        before = set(Path("/proc/self/task").iterdir())
        write = store.begin(1, STATE)
        started = set(Path("/proc/self/task").iterdir()) - before
        assert len(started) == 2
        assert all(os.sched_getaffinity(int(thread.name)) == {cpu} for thread in started)
        give(write, content_of(1, STATE))
        commit(write)
    with open_store(tmp_path, writer_cpus=[1023]) as store, pytest.raises(StorageError, match="pinning of a writer"):
        store.begin(2, STATE, 1.0)
    with open_store(tmp_path) as store:
        assert steps(store) == [1]


@pytest.mark.parametrize("variant", _native.crc32c_variants())
def test_every_checksum_variant_writes_the_same(tmp_path: Path, variant: str) -> None:
    with open_store(tmp_path, crc32c_variant=variant) as store:
        save(store, 1, STATE)
        store.verify(store.committed()[0])
