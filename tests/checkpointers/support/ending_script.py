"""A training that ends in one way or another. Run as: ending_script.py DIRECTORY HOW SLOW_S GRANTED_S [SIGNAL].

It prints as it goes. Each flush takes SLOW_S longer, GRANTED_S is its `exit_drain_s`, SIGNAL what it sends itself. HOW
"stuck" and "stuck-with-gil" enter a native call that never returns, without and with Python's lock, and print the
address that it waits at.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time

import torch

from lastgood import PCcheck
from lastgood.storage import files


def main(directory: str, how: str, slow_s: float, granted_s: float, number: int = 0) -> None:
    torch.set_num_threads(1)
    model = torch.nn.Linear(700, 700)
    checkpointer = PCcheck(directory, interval_steps=2, exit_drain_s=granted_s)
    resumed = checkpointer.attach(model=model)
    print("resumed", resumed, flush=True)
    if how == "at-once":
        if checkpointer.latest() is None:
            checkpointer.save(1)
        raise RuntimeError("the loop failed")
    if how == "hang":
        checkpointer.save(1)  # makes the slots, which are flushed as well
        checkpointer.drain()
    real = files.flush

    def slow_flush(descriptor: int) -> None:
        # What the loop flushes itself, before its data is written, is no wait at the end.
        if how != "hang" or threading.current_thread() is not threading.main_thread():
            time.sleep(slow_s)
        real(descriptor)

    files.flush = slow_flush
    for _ in range(2):
        # An optimizer of torch's would import its compiler, which takes longer than all the rest.
        with torch.no_grad():
            model.weight += 1
        step = checkpointer.step()
    print("saving", step, flush=True)
    if how == "exception":
        raise RuntimeError("the loop failed")
    if how == "return":
        return
    if how.startswith("stuck"):
        mutex = ctypes.create_string_buffer(64)
        library = ctypes.PyDLL(None) if how == "stuck-with-gil" else ctypes.CDLL(None)
        library.pthread_mutex_lock(mutex)
        print("stuck", hex(ctypes.addressof(mutex)), flush=True)
        library.pthread_mutex_lock(mutex)
    os.kill(os.getpid(), number)
    time.sleep(600)  # the signal comes before


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]), *map(int, sys.argv[5:]))
