"""What all tests need of their process."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

# No property is about time: by default an example fails after 0.2 s, which a busy machine may need for any of them.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_configure() -> None:
    """Let Ctrl-C reach what tests start. Where a shell runs pytest in the background, all inherit it ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
