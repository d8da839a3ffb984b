"""What all tests need of their process."""

from __future__ import annotations

import signal

from hypothesis import settings

# Hypothesis fails an example that takes more than 200 ms: on a busy machine, or a slow disk, any does.
settings.register_profile("lastgood", deadline=None)
settings.load_profile("lastgood")


def pytest_configure() -> None:
    """Let Ctrl-C reach what tests start. Where a shell runs pytest in the background, all inherit it ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
