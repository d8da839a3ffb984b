"""GPM beyond what all systems promise: the ways into the mapping, what is on the disk, areas that grow or break."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood import _native
from lastgood.checkpointers.copies.chunks import stream_buffers
from lastgood.checkpointers.copies.device_streams import DeviceStreams
from lastgood.checkpointers.events import Outcome
from lastgood.checkpointers.gpm.copies import copy_through_pinned, store_from_host
from lastgood.checkpointers.gpm.system import GPM
from lastgood.errors import CorruptCheckpoint, WaitTimeout
from lastgood.state import Layout
from lastgood.storage import SlotView
from lastgood.storage import format as fmt
from lastgood.storage.mapped_areas import AreaStore, MappedArea
from tests.checkpointers.support.small_training import SmallTraining


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train_and_save(checkpointer, training, saves):
    """Returns the digest of each checkpoint by step; all must have become durable."""
    digests = {}
    for _ in range(saves):
        training.step()
        digests[training.step_number] = training.digest()
        checkpointer.save(training.step_number)
        assert checkpointer.events[-1].outcome is Outcome.DURABLE, checkpointer.events[-1].error
    return digests


def pages_in_memory(path):
    """How many pages of a file are in the page cache."""
    pages = -(-path.stat().st_size // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as view,
    ):
        anchor = ctypes.c_char.from_buffer(view)
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(ctypes.addressof(anchor))
        done = libc.mincore(address, ctypes.c_size_t(view.size()), found)
        del anchor
    assert done == 0, os.strerror(ctypes.get_errno())
    return sum(one & 1 for one in found)


def forget(path):
    """Drop a file's pages from memory. The kernel keeps those that are not on the disk yet."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize("flushes", [True, False])
def test_both_areas_are_on_the_disk_after_two_overwrites(tmp_path, monkeypatch, flushes):
    """Without the flushes, dirty pages stay: the test can tell."""
    probe = tmp_path / "probe"
    probe.write_bytes(bytes(1 << 20))
    os.sync()
    forget(probe)
    if pages_in_memory(probe):
        pytest.skip("this file system keeps its files in memory")
    training = SmallTraining(width=200)
    checkpointer = GPM(tmp_path / "job")
    checkpointer.start(training.state)
    digests = train_and_save(checkpointer, training, 3)
    areas = sorted((tmp_path / "job").glob("slot-*"))
    assert len(areas) == 2

    def on_the_disk():
        for path in areas:
            forget(path)
        return [pages_in_memory(path) == 0 for path in areas]

    if not flushes:
        monkeypatch.setattr(MappedArea, "flush", lambda *_: None)
        for _ in range(20):  # the kernel writes by itself, too, whenever it likes or another process asks it to
            digests |= train_and_save(checkpointer, training, 3)
            if on_the_disk() == [False, False]:
                break
        else:
            raise AssertionError("pages were on the disk without a flush 20 times")
        checkpointer.close()
    else:
        digests |= train_and_save(checkpointer, training, 3)
        checkpointer.close()
        assert on_the_disk() == [True, True]
    newest = training.step_number
    for step in (newest, newest - 1):
        fresh = SmallTraining(width=200, seed=1)
        assert GPM(tmp_path / "job").restore(fresh.state, step=step) == step
        assert fresh.digest() == digests[step]


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9000), min_size=1, max_size=8),
    meta_bytes=st.integers(1, 5000),
    chunk_blocks=st.integers(1, 3),
    threads=st.integers(1, 3),
    places=st.integers(1, 3),
    through_pinned=st.booleans(),
)
def test_the_ways_into_the_mapping_store_the_same(
    sizes, meta_bytes, chunk_blocks, threads, places, through_pinned, tmp_path_factory
):
    """Held to a plain twin: blocks at multiples of 64 bytes, then the layout, and each chunk's checksum."""
    chunk_bytes = chunk_blocks * fmt.BLOCK
    blocks = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    meta = torch.randint(0, 256, (meta_bytes,), dtype=torch.uint8)
    layout = Layout(["n"], tuple(sizes), len(sizes))
    expected = b"".join(block.numpy().tobytes().ljust(-(-block.numel() // 64) * 64, b"\0") for block in blocks)
    expected += meta.numpy().tobytes()
    store = AreaStore(tmp_path_factory.mktemp("area"), chunk_bytes=chunk_bytes)
    try:
        store.reserve(len(expected))
        write = store.begin(1, len(expected))
        tail = torch.zeros(write.padded_bytes - layout.stream_bytes, dtype=torch.uint8)
        tail[:meta_bytes] = meta
        stream = stream_buffers(layout, blocks, tail)
        if through_pinned:
            pinned = torch.zeros(places * chunk_bytes, dtype=torch.uint8)
            sums = copy_through_pinned(write, stream, chunk_bytes, threads, DeviceStreams(blocks), pinned, 60)
        else:
            sums = store_from_host(write, stream, chunk_bytes, threads)
        padded = expected.ljust(write.padded_bytes, b"\0")
        assert write.mapped.memory[write.data_offset :][: len(padded)] == padded
        assert sums == [
            _native.crc32c_portable(padded[begin : begin + chunk_bytes], _native.chunk_seed(write.sequence, number))
            for number, begin in enumerate(range(0, len(padded), chunk_bytes))
        ]
    finally:
        store.close()


def test_a_chunk_that_never_arrives_is_named(tmp_path):
    class Never:
        def synchronize(self):
            released.wait(60)

    class Streams(DeviceStreams):
        def mark(self):
            return [(None, Never())]

        def synchronize(self):
            released.set()

    released = threading.Event()
    store = AreaStore(tmp_path, chunk_bytes=4096)
    store.reserve(8192)
    write = store.begin(7, 8192)
    stream = [torch.zeros(8192, dtype=torch.uint8)]
    with pytest.raises(WaitTimeout, match=r"slot-0000.lgs: waited 0 s for a chunk of step 7"):
        copy_through_pinned(write, stream, 4096, 1, Streams(stream), torch.zeros(4096, dtype=torch.uint8), 0.1)
    store.close()


def test_facts_and_a_life_in_three_lines(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = GPM(tmp_path, interval_steps=2)
    assert checkpointer.attach(model=model, optimizer=optimizer) == 0
    for _ in range(5):
        model(torch.ones(8)).sum().backward()
        optimizer.step()
        checkpointer.step()
    assert [event.step for event in checkpointer.events] == [2, 4]
    assert checkpointer.storage_facts() == {
        "direct_io": False,
        "written_by": "CPU stores into the mapping",
        "durability": "stores into a shared mapping, msync, commit record, msync",
    }
    checkpointer.close()
    again = GPM(tmp_path, interval_steps=2)
    assert again.attach(model=model, optimizer=optimizer) == 4
    again.close()
    assert GPM.Options().disk_bytes(100) == 200
    assert GPM.Options().host_bytes(100) == 0


def test_a_state_that_grows_and_shrinks(tmp_path):
    training = SmallTraining(width=8)
    checkpointer = GPM(tmp_path)
    checkpointer.start(training.state)
    train_and_save(checkpointer, training, 2)
    small = (tmp_path / "slot-0000.lgs").stat().st_size
    kept = training.plain["moving"]
    for size in (300_000, 3, 300_000):
        training.plain["moving"] = torch.ones(size, dtype=torch.float64)
        digests = train_and_save(checkpointer, training, 1)
        assert SlotView(tmp_path).committed()[1].step == training.step_number - 1  # the one before is still there
        fresh = SmallTraining(width=8, seed=1)
        fresh.plain["moving"] = torch.zeros(size, dtype=torch.float64)
        assert GPM(tmp_path).restore(fresh.state) == training.step_number
        assert fresh.digest() == digests[training.step_number]
    training.plain["moving"] = kept
    assert all(path.stat().st_size > small + 2_000_000 for path in tmp_path.glob("slot-*"))
    checkpointer.close()


def flip(info, offset):
    with info.path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x20]))


def test_damage_everywhere_never_begins_anew_in_silence(tmp_path):
    training = SmallTraining()
    checkpointer = GPM(tmp_path)
    checkpointer.start(training.state)
    train_and_save(checkpointer, training, 2)
    checkpointer.close()
    for info in SlotView(tmp_path).committed():
        flip(info, fmt.DATA_OFFSET + 3)
    with pytest.raises(CorruptCheckpoint, match=r"no checkpoint can be read.*slot-0001.*slot-0000"):
        GPM(tmp_path).restore(SmallTraining(seed=1).state)
    for info in SlotView(tmp_path).committed():
        flip(info, fmt.COMMIT_OFFSET + 50)
    with pytest.raises(CorruptCheckpoint, match="damaged"):
        GPM(tmp_path, interval_steps=1).attach(model=training.model)


def test_after_falling_back_the_whole_one_is_not_overwritten(tmp_path):
    """The newest is damaged: the next checkpoint goes over it, and one that never ends loses nothing."""
    training = SmallTraining()
    first = GPM(tmp_path)
    first.start(training.state)
    digests = train_and_save(first, training, 2)
    first.close()
    flip(SlotView(tmp_path).committed()[0], fmt.DATA_OFFSET + 3)
    second = GPM(tmp_path)
    fresh = SmallTraining(seed=1)
    assert second.restore(fresh.state) == 1
    second.start(fresh.state)
    second._store.reserve(1000)
    second._store.begin(2, 1000)  # and never commits
    second.close()
    last = SmallTraining(seed=2)
    assert GPM(tmp_path).restore(last.state) == 1
    assert last.digest() == digests[1]


def test_a_second_start_keeps_the_newest_and_not_what_was_once_restored(tmp_path):
    training = SmallTraining()
    checkpointer = GPM(tmp_path)
    checkpointer.start(training.state)
    train_and_save(checkpointer, training, 2)
    checkpointer.close()
    assert checkpointer.restore(training.state) == 2
    for steps in (1, 0):
        checkpointer.start(training.state)
        train_and_save(checkpointer, training, steps)
        if not steps:
            checkpointer._store.begin(4, 1000)  # and never commits
        checkpointer.close()
    assert GPM(tmp_path).latest() == 3


def test_going_back_in_one_life_keeps_where_it_went_back_to(tmp_path):
    training = SmallTraining()
    checkpointer = GPM(tmp_path)
    checkpointer.start(training.state)
    digests = train_and_save(checkpointer, training, 3)
    assert checkpointer.restore(SmallTraining(seed=1).state, step=2) == 2  # a look by somebody else changes nothing
    assert checkpointer._store._stays.step == 3
    assert checkpointer.restore(training.state, step=2) == 2
    assert training.digest() == digests[2]
    checkpointer._store.begin(3, 1000)  # and never commits
    checkpointer.close()
    assert GPM(tmp_path).latest() == 2


def test_a_file_that_is_cut_during_a_save_is_a_failed_save(tmp_path, monkeypatch):
    training = SmallTraining(width=200)
    checkpointer = GPM(tmp_path, chunk_bytes=4096, copy_threads=1)
    checkpointer.start(training.state)
    digests = train_and_save(checkpointer, training, 2)
    begin = AreaStore.begin

    def begin_and_cut(store, *arguments):
        write = begin(store, *arguments)
        os.truncate(write.path, fmt.DATA_OFFSET + 8192)
        return write

    training.step()
    with monkeypatch.context() as patch:
        patch.setattr(AreaStore, "begin", begin_and_cut)
        checkpointer.save(3)
    assert checkpointer.events[-1].outcome is Outcome.FAILED
    assert "slot-0000.lgs: storing of" in checkpointer.events[-1].error
    fresh = SmallTraining(width=200, seed=1)
    assert GPM(tmp_path).restore(fresh.state) == 2
    assert fresh.digest() == digests[2]
    train_and_save(checkpointer, training, 2)
    checkpointer.close()


# -- on a CUDA device --------------------------------------------------------------------------------------------------


def needs_cuda():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def odd_state(device):
    """Sizes and dtypes that fill no word, a view that starts in the middle, and tensors in host memory between them."""
    whole = torch.zeros(100_003, dtype=torch.uint8, device=device)
    return {
        "bytes": torch.zeros(1_000_003, dtype=torch.uint8, device=device),
        "host": torch.zeros(70_001, dtype=torch.float32),
        "half": torch.zeros(77_777, dtype=torch.bfloat16, device=device),
        "one": torch.zeros(1, dtype=torch.bool, device=device),
        "middle": whole[5:99_999],
        "double": torch.zeros(9_000_001, dtype=torch.float64, device=device),
    }


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["tmpfs", "disk"])
def test_from_a_device(place, tmp_path):
    needs_cuda()
    directory = Path(tempfile.mkdtemp(dir="/dev/shm")) if place == "tmpfs" else tmp_path
    try:
        state = odd_state("cuda")
        checkpointer = GPM(directory, chunk_bytes=64 * 1024, copy_threads=3)
        checkpointer.start(state)
        kept = {}
        for step in range(1, 6):  # both areas are overwritten
            for tensor in state.values():
                tensor.view(torch.uint8).random_(0, 2 if tensor.dtype is torch.bool else 256)
            kept[step] = {name: tensor.cpu().clone() for name, tensor in state.items()}
            checkpointer.save(step)
            assert checkpointer.events[-1].outcome is Outcome.DURABLE, checkpointer.events[-1].error
            state["double"].add_(1)
        how = checkpointer.storage_facts()["written_by"]
        if place == "tmpfs":
            assert how == "device stores into the mapping"
        elif how == "device stores into the mapping":
            pytest.skip("this file system lets mappings be registered")
        else:
            assert how.startswith("through a pinned area, because registering ")
            assert "slot-0000.lgs was refused: " in how
        checkpointer.close()
        torch.ones(3, device="cuda").sum().item()  # a refusal is nobody else's error
        for step in (5, 4):
            for path in directory.glob("slot-*"):
                forget(path)
            fresh = odd_state("cuda")
            assert GPM(directory).restore(fresh, step=step) == step
            for name, tensor in fresh.items():
                assert torch.equal(tensor.cpu().view(torch.uint8), kept[step][name].view(torch.uint8)), name
    finally:
        if place == "tmpfs":
            shutil.rmtree(directory)


@pytest.mark.gpu
def test_a_grown_area_is_registered_anew(tmp_path):
    needs_cuda()
    directory = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        state = {"a": torch.arange(1000, device="cuda")}
        checkpointer = GPM(directory)
        checkpointer.start(state)
        for step, size in enumerate((1000, 1000, 500_000, 500_000, 10), start=1):
            state["a"] = torch.arange(size, device="cuda") * step
            checkpointer.save(step)
            assert checkpointer.events[-1].outcome is Outcome.DURABLE, checkpointer.events[-1].error
            fresh = {"a": torch.zeros(size, dtype=torch.int64, device="cuda")}
            assert GPM(directory).restore(fresh) == step
            assert torch.equal(fresh["a"], state["a"])
        assert checkpointer.storage_facts()["written_by"] == "device stores into the mapping"
        checkpointer.close()
    finally:
        shutil.rmtree(directory)


@pytest.mark.gpu
@pytest.mark.parametrize("shift", [0, 1, 8])
@pytest.mark.parametrize("size", [1, 7, 8, 2047 * 8, 2048 * 8 + 1, 1_000_003])
def test_the_kernel_stores_each_byte_and_no_other(size, shift):
    needs_cuda()
    from lastgood.checkpointers.gpm.device_kernel import store_from_device

    source = torch.randint(0, 256, (size + shift,), dtype=torch.uint8, device="cuda")[shift:]
    target = torch.full((size + 64,), 77, dtype=torch.uint8, pin_memory=True)
    store_from_device(target[16 : 16 + size], source)
    torch.cuda.synchronize()
    assert np.array_equal(target.numpy()[16 : 16 + size], source.cpu().numpy())
    assert (target[:16] == 77).all() and (target[16 + size :] == 77).all()
