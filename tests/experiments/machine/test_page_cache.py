"""What is in the page cache: all of what was just written, none of what was dropped, and half of half."""

from __future__ import annotations

import os

import pytest

from lastgood.experiments.machine.page_cache import cached_share, forget_cached_pages
from lastgood.mounts import lies_in_memory

NBYTES = 8 << 20


@pytest.fixture
def folder(tmp_path):
    if lies_in_memory(tmp_path):
        pytest.skip("the temporary folder lies in memory, whose page cache is the file itself")
    return tmp_path


def write(path):
    path.write_bytes(os.urandom(NBYTES))
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def test_files_are_cached_until_they_are_dropped(folder):
    (folder / "inner").mkdir()
    write(folder / "a")
    write(folder / "inner" / "b")
    assert cached_share(folder) == pytest.approx(1, abs=0.05)
    forget_cached_pages(folder)
    assert cached_share(folder) < 0.05
    (folder / "a").read_bytes()
    assert cached_share(folder) == pytest.approx(0.5, abs=0.05)


def test_no_bytes_have_no_share(folder):
    assert cached_share(folder) is None
    (folder / "empty").touch()
    assert cached_share(folder) is None
