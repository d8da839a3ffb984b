"""Large host memory against what the kernel says of it."""

from __future__ import annotations

import gc
import re
import weakref
from pathlib import Path

import pytest
import torch

from lastgood import host_memory
from lastgood.host_memory import fresh_memory, into_huge_pages, map_memory

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def flags_of(address: int) -> set[str]:
    """What the kernel was told of the mapping that holds `address`, in its two-letter words."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            inside = begin <= address < end
        elif inside and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    raise AssertionError(f"no mapping holds {address:#x}")


@pytest.mark.parametrize("size", [0, 1, 4097, (2 << 20) - 1, 2 << 20, (5 << 20) + 3])
def test_it_is_as_large_as_asked_for_zero_and_writable(size):
    memory = fresh_memory(size)
    assert memory.shape == (size,)
    assert memory.dtype == torch.uint8
    assert not memory.any()
    memory.fill_(7)
    assert int(memory.sum()) == 7 * size


def test_a_view_keeps_it_and_the_last_one_lets_go(monkeypatch):
    made = []

    def noted(size):
        memory = map_memory(size)
        made.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr(host_memory, "map_memory", noted)
    memory = fresh_memory(64 << 20)
    view = memory[3 << 20 :].view(torch.float32)
    del memory
    gc.collect()
    view.fill_(1.5)
    assert made[0]() is not None
    del view
    gc.collect()
    assert made[0]() is None


@pytest.mark.skipif(
    not THP.exists() or "[never]" in THP.read_text(), reason="this kernel gives no transparent huge pages"
)
def test_huge_pages_are_asked_for_where_one_fits():
    # How many come is the kernel's matter, which may be short of them.
    for size, wanted in ((64 << 20, True), (1 << 20, False)):
        memory = map_memory(size)
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        assert ("hg" in flags_of(tensor.data_ptr() + size // 2)) == wanted


def test_what_a_tensor_holds_stays_when_its_pages_change():
    values = torch.arange(3 << 20, dtype=torch.int64)
    address = values.data_ptr()
    moved = into_huge_pages(values)
    assert values.data_ptr() == address
    assert torch.equal(values, torch.arange(3 << 20, dtype=torch.int64))
    mode = re.search(r"\[(\w+)\]", THP.read_text()).group(1) if THP.exists() else "never"
    if mode == "never":
        assert not moved
    assert not into_huge_pages(torch.zeros(100))  # none would fit in
    assert not into_huge_pages(torch.zeros(0))
