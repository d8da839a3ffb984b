"""What all tests need of their process."""

from __future__ import annotations

import gc
import os
import signal

import pytest
from hypothesis import HealthCheck, settings

from tests.support.patience import PATIENCE

# Threads of torch that have nothing to do wait asleep, here and in all that tests start: by default they spin, which
# takes the cores from the tests beside. OpenMP reads it when it is loaded, so it stands before any import of torch.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# No property is about time: by default an example fails after 0.2 s, which a busy machine may need for any of them.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.hookimpl(tryfirst=True)  # before pytest-timeout reads its limit
def pytest_configure(config: pytest.Config) -> None:
    """Let Ctrl-C reach what tests start. Where a shell runs pytest in the background, all inherit it ignored."""
    if config.option.timeout is None:
        config.option.timeout = float(config.getini("timeout")) * PATIENCE
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """What was imported stays, so no collection looks through it: with torch one would take half a second each time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)  # of what -m has left
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch finds none"))
