"""What all tests need of their process."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

# A property is about what holds, not about how long an example took on a machine that had other things to do:
# Hypothesis gives each one 200 ms, and fails one that takes longer once.
settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")


def pytest_configure() -> None:
    """Let Ctrl-C reach what tests start. Where a shell runs pytest in the background, all inherit it ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
