"""What the suite's tests share: opened checkpointers, declared limits, a disk that refuses, what is not flushed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from lastgood.checkpointers.base import Checkpointer
from lastgood.checkpointers.events import Outcome
from lastgood.checkpointers.traits import traits_of_class
from lastgood.errors import LastgoodError

__all__ = [
    "Opening",
    "answer_s",
    "declared_limit",
    "device",
    "file_size_limit",
    "in_time",
    "not_flushed",
    "opened",
    "outcomes",
    "stuck_flushes",
]

Opening = Callable[..., Checkpointer]

_CACHESTAT = 451
"""The number of the system call on every architecture, from Linux 6.5 on."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where the training computes."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device here")
    return str(request.param)


@pytest.fixture
def answer_s(pytestconfig: pytest.Config) -> float:
    """Seconds after which a bounded wait of half a second counts as one without an end."""
    return float(pytestconfig.getoption("--answer-s", 60.0))


@pytest.fixture
def opened() -> Iterator[Opening]:
    """Makes started checkpointers and closes them at the end of the test."""
    made: list[Checkpointer] = []

    def make(kind: type[Checkpointer], directory: Path, state: Mapping[str, Any], **options: Any) -> Checkpointer:
        checkpointer = kind(directory, kind.Options(**options))
        made.append(checkpointer)
        checkpointer.start(state)
        return checkpointer

    yield make
    for checkpointer in made:
        checkpointer.close()


@pytest.fixture(autouse=True)
def declared_limit(request: pytest.FixtureRequest) -> None:
    """A test of a promise that the system does not make must fail: limits are true, too."""
    mark = request.node.get_closest_marker("promise")
    if mark is None or "system" not in request.fixturenames:
        return
    system = request.getfixturevalue("system")
    why = traits_of_class(system).limit_of(mark.args[0])
    if why is not None:
        request.node.add_marker(pytest.mark.xfail(reason=f"declared by {system.name}: {why}", strict=True))


@pytest.fixture
def file_size_limit() -> Iterator[Callable[[int | None], None]]:
    """Makes the kernel refuse writes beyond a file size, as a full disk would, and lifts that again."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def limit(size: int | None) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, before if size is None else (size, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def outcomes(checkpointer: Checkpointer) -> list[Outcome]:
    """What became of each checkpoint that was asked for."""
    return [event.outcome for event in checkpointer.events]


def in_time(what: str, call: Callable[[], Any], limit_s: float) -> LastgoodError | None:
    """What a call raised that must return, or raise a LastgoodError, within `limit_s`; else the test fails."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name=f"conformance-{what}", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        pytest.fail(f"{what} had not returned after {limit_s:g} s: every wait must have an end")
    error = raised[0] if raised else None
    if error is not None and not isinstance(error, LastgoodError):
        raise error
    return error


@contextlib.contextmanager
def stuck_flushes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A disk that does not answer: whoever asks Python to flush waits until the context ends, or for two minutes."""
    answers = threading.Event()
    with monkeypatch.context() as patch:
        for name in ("fsync", "fdatasync", "sync"):
            flush = getattr(os, name)
            patch.setattr(os, name, lambda *given, flush=flush: (answers.wait(120), flush(*given))[1])
        try:
            yield
        finally:
            answers.set()


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("nbytes", ctypes.c_uint64))


class _Pages(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recent"))


def not_flushed(path: Path) -> int:
    """Bytes of a file that are in memory and not on the disk yet. Raises OSError where the kernel cannot tell."""
    libc = ctypes.CDLL(None, use_errno=True)
    asked, pages = _Range(0, 0), _Pages()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if libc.syscall(_CACHESTAT, descriptor, ctypes.byref(asked), ctypes.byref(pages), 0) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))
    finally:
        os.close(descriptor)
    return int(pages.dirty + pages.writeback) * _PAGE_BYTES
