"""Kills a process with SIGKILL before each of its changes to a file system, one after another, while it uses a store.

Run as: killed_store.py DIRECTORY. Prints how many changes there are; exits 1, saying why, at the first that leaves a
store which holds something else than the checkpoints committed, or the one being committed as well.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from lastgood.checkpointers.directories.local import LocalStore
from lastgood.checkpointers.directories.manifest import check_files, files_in

CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod"}
FILES = {"a": b"first", "folder/b": b"second" * 1000}


def use(directory: Path, told: int) -> None:
    """Three checkpoints of which two are kept, one draft that is given up, and one that is left."""
    store = LocalStore(directory, 2)
    store.prepare()
    for step in (1, 2, 3):
        draft = store.begin(step)
        with draft.create("a") as stream:
            stream.write(FILES["a"])
        other = draft.folder() / "folder" / "b"
        other.parent.mkdir()
        other.write_bytes(FILES["folder/b"])
        draft.seal()
        os.write(told, b"c%d " % step)
        store.commit(draft)
        os.write(told, b"d%d " % step)
    given_up = store.begin(8)
    given_up.create("a").close()
    store.give_up(given_up)
    store.begin(9).create("a").close()


def die_before_change(number: int) -> None:
    """SIGKILL before the change `number`; syncs are seen as well, by the descriptors that they open."""
    left = number

    def see(event: str, _: object) -> None:
        nonlocal left
        left -= event in CHANGES
        if left < 0 and event in CHANGES:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(see)


def check(directory: Path, said: bytes) -> None:
    store = LocalStore(directory, 2)
    words = [(word[:1], int(word[1:])) for word in said.decode().split()]
    durable = [step for word, step in words if word == "d"][::-1]
    pending = [step for word, step in words if word == "c" and step not in durable]
    newest = store.found()
    held = [one.step for one in newest]
    if held not in (durable[:2], pending + durable[:2], pending + durable[:1]):
        sys.exit(f"steps {held} are there; {durable} were committed, and {pending} about to be")
    for one in newest:
        check_files(Path(one.where), one.step)
        for name, content in FILES.items():
            if store.read(one, name) != content:
                sys.exit(f"{one.where}: {name} holds something else")
    store.prepare()
    if store.found() != newest:
        sys.exit("prepare() changed what is committed")
    left = [name for name in files_in(directory) if not name.startswith("checkpoint-")]
    left += [path.name for path in directory.iterdir() if not path.name.startswith("checkpoint-")]
    if left:
        sys.exit(f"prepare() leaves {left}")
    draft = store.begin(7)
    draft.create("a").close()
    draft.seal()
    store.commit(draft)
    if [one.step for one in store.found()] != [7, *held[:1]]:
        sys.exit(f"after one more checkpoint there are {store.found()}")


def main(place: Path) -> None:
    for number in range(1000):
        directory = place / str(number)
        hear, told = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(hear)
            die_before_change(number)
            use(directory, told)
            os._exit(0)
        os.close(told)
        said = b""
        while piece := os.read(hear, 1000):
            said += piece
        os.close(hear)
        _, status = os.waitpid(child, 0)
        check(directory, said)
        if os.waitstatus_to_exitcode(status) == 0:
            print(number)
            return
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            sys.exit(f"the process that was to be killed at change {number} ended with {status}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
