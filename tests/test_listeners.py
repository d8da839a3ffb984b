"""Every listening socket of Lastgood, while silent strangers hold connections to it: who knows the token gets in."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lastgood.gradients.asking import Asker
from lastgood.gradients.shadow import ShadowService
from lastgood.gradients.shadow_settings import ShadowSettings
from lastgood.wire import gate
from lastgood.wire.gate import open_listener
from tests.wire.strangers import come_in, strangers

WAIT_S = 60.0
TOKEN = secrets.token_bytes(32)
Enter = Callable[[], None]
"""Connects, and returns once both sides know each other."""


@contextlib.contextmanager
def running(target: Callable[[], object], end: Callable[[], object]) -> Iterator[None]:
    thread = threading.Thread(target=target)
    thread.start()
    try:
        yield
        assert thread.is_alive(), "the service has ended"
    finally:
        end()
        thread.join(WAIT_S)


@contextlib.contextmanager
def shadow(_: Path) -> Iterator[tuple[int, Enter]]:
    listener = open_listener()
    port = listener.getsockname()[1]
    service = ShadowService(ShadowSettings(0, 1), TOKEN, listener)

    def enter() -> None:
        with Asker(f"127.0.0.1:{port}", TOKEN, WAIT_S) as asker:
            asker.status()

    with running(service.run, service.stop):
        yield port, enter


LISTENERS = [shadow]


@pytest.mark.parametrize("listener", LISTENERS, ids=lambda one: one.__name__)
def test_silent_strangers_lock_nobody_out(
    listener: Callable[[Path], contextlib.AbstractContextManager[tuple[int, Enter]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gate, "_MOST_STRANGERS", 200, raising=False)
    with listener(tmp_path) as (port, enter), strangers(port, 300, 1.5, again_per_s=50) as there:
        come_in(there, enter, least=5)


@pytest.mark.slow
@pytest.mark.parametrize("listener", LISTENERS, ids=lambda one: one.__name__)
def test_ten_thousand_strangers_for_a_minute_slow_nobody_down(
    listener: Callable[[Path], contextlib.AbstractContextManager[tuple[int, Enter]]], tmp_path: Path
) -> None:
    with listener(tmp_path) as (port, enter), strangers(port, 10_000, 60.0) as there:
        took = sorted(come_in(there, enter))
    late = sum(seconds > 1.0 for seconds in took)
    assert late <= len(took) // 100, f"{late} of {len(took)} came in after more than 1 s, the last after {took[-1]:.1f}"
