"""SIGTERM as tests of one process want it: nobody's."""

from __future__ import annotations

import gc
import signal
import time

from lastgood.checkpointers.attach import process_end as endings


def wait_for_nobody_to_have_sigterm() -> None:
    """An earlier test may not have closed one, and a thread that is still ending may hold it."""
    deadline = time.monotonic() + 60
    while endings._live:
        assert time.monotonic() < deadline, "waited 60 s for SIGTERM to be given back"
        gc.collect()
        time.sleep(0.01)
    if signal.getsignal(signal.SIGTERM) is endings._leave:  # that thread may not give it back
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
