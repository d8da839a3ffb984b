"""Large host memory against what the kernel says of it."""

from __future__ import annotations

import gc
import re
import weakref
from pathlib import Path

import pytest
import torch

from lastgood import host_memory
from lastgood.host_memory import fresh_memory, map_memory

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_kib(address: int) -> int | None:
    """KiB in huge pages of the mapping that begins there; None: there is none."""
    own: str | None = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            own = line if begin <= address < end else None
        elif own is not None and line.startswith("AnonHugePages:"):
            return int(line.split()[1])
    return None


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
def test_it_lies_in_huge_pages():
    size = 64 << 20
    memory = map_memory(size)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    tensor.fill_(1)
    found = huge_kib(tensor.data_ptr())
    assert found is not None
    assert found >= size / 1024 / 2, "the kernel may be short of huge pages, though hardly of this many"
