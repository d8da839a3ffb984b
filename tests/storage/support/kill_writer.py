"""Saves for ever, three checkpoints in flight, and reports each step once it is durable. Made to be killed."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from slot_helpers import content_of, give, open_store

STATE = 300_000


def state_bytes(step: int) -> int:
    return STATE + 7919 * (step % 11)


def main(directory: Path) -> None:
    report = threading.Lock()
    with open_store(directory, slots=5, writer_threads=1) as store:
        step = max((info.step for info in store.committed()), default=0)
        turn = threading.Lock()

        def save_for_ever() -> None:
            nonlocal step
            while True:
                with turn:
                    step += 1
                    mine = step
                    write = store.begin(mine, state_bytes(mine), 60)
                give(write, content_of(mine, state_bytes(mine)))
                outcome = write.commit(write.stream_bytes - 100, 100, bytes(32), 60)
                if outcome == "durable":
                    with report:
                        sys.stdout.write(f"{mine}\n")
                        sys.stdout.flush()

        threads = [threading.Thread(target=save_for_ever, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
