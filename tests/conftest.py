"""What all tests need of their process."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Let Ctrl-C reach what tests start. Where a shell runs pytest in the background, all inherit it ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
