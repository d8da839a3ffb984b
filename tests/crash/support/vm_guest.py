"""Runs inside the virtual machine: saves checkpoints on its disk and reports each step once it is durable.

Several lives of one job, each with another number of slots, several checkpoints in flight, and states that grow: so
that the recorded disk sees slots made, grown, reused and removed, and the store opened again.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from slot_helpers import address_of, content_of, open_store

KEEP = 2
LIVES = ((5, 26), (6, 20), (4, 14))
"""Slots, and checkpoints to save, of each life."""
CHECKPOINTS = sum(saves for _, saves in LIVES)
END = "end"
_TIMEOUT_S = 300.0  # an emulated processor on a busy machine


def state_bytes(step: int) -> int:
    """Every step has another length than its neighbours, and slots must grow every few steps."""
    return 60_000 + 7_919 * (step % 11) + 40_000 * (step // 6)


def live(directory: Path, slots: int, saves: int, report: Callable[[str], None]) -> None:
    """Save `saves` checkpoints, as many at once as there are places."""
    with open_store(directory, slots=slots, keep=KEEP) as store:
        assert store.direct_io
        turn = threading.Lock()
        next_step = max((info.step for info in store.committed()), default=0) + 1
        last_step = next_step + saves - 1
        troubles: list[BaseException] = []

        def save_in_turn() -> None:
            nonlocal next_step
            try:
                while not troubles:
                    with turn:
                        step = next_step
                        if step > last_step:
                            return
                        next_step += 1
                        write = store.begin(step, state_bytes(step), _TIMEOUT_S)
                    memory = bytearray(content_of(step, write.stream_bytes))
                    write.copy_host([(address_of(memory), len(memory))], _TIMEOUT_S)
                    if write.commit(write.stream_bytes - 100, 100, bytes(32), _TIMEOUT_S) == "durable":
                        report(f"durable {step}")
            except BaseException as error:
                troubles.append(error)

        threads = [threading.Thread(target=save_in_turn) for _ in range(slots - KEEP)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if troubles:
            raise troubles[0]


def main(directory: Path, *, lying: bool) -> None:
    """With `lying`, fdatasync does nothing: what a store that forgets to flush would do."""
    if lying:
        os.fdatasync = lambda descriptor: None
    lock = threading.Lock()

    def report(line: str) -> None:
        with lock:
            os.write(sys.stdout.fileno(), f"{line}\n".encode())

    for slots, saves in LIVES:
        live(directory, slots, saves, report)
    report(END)


if __name__ == "__main__":
    main(Path(sys.argv[1]), lying=sys.argv[2] == "lying")
