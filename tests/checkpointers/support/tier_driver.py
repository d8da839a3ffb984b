"""Kills a process that saves, sends, commits and sweeps, at random moments, and looks at what is there each time.

Run as: tier_driver.py DIRECTORY PLACE ROUNDS SEED. Every child is forked from a parent that has imported torch and
started no thread. Prints how often what was in progress; exits 1, saying why, if something is wrong.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import torch

from lastgood.checkpointers.remote import sending
from lastgood.checkpointers.remote.tier import RemoteTier
from lastgood.processes import die_with_parent
from lastgood.storage.objects import format as objects
from lastgood.storage.objects.commits import find_commits, read_commit
from lastgood.storage.objects.folder import FolderClient
from lastgood.storage.objects.opening import ObjectPlace
from lastgood.storage.objects.sweep import sweep
from lastgood.storage.objects.view import RemoteView
from tests.checkpointers.support.stored_helpers import open_store, put

AT_ONCE_S = -10.0
"""An age that everything has: nothing is spared for being young. The one process here has no upload while it sweeps."""


def state_of(step: int) -> dict:
    generator = torch.Generator().manual_seed(step)
    frozen = torch.Generator().manual_seed(0)
    return {
        "frozen": torch.randn(60_000, generator=frozen),
        "x": torch.randn(60_000, generator=generator),
        "step": step,
    }


def train(directory: Path, place: Path, told: int, seed: int) -> None:
    torch.set_num_threads(1)
    objects.SEGMENT_BYTES = 64 * 1024
    sending.sweep = partial(sweep, guard_s=AT_ONCE_S, grace_s=AT_ONCE_S)
    chance = random.Random(seed)
    with open_store(directory) as store:
        tier = RemoteTier(ObjectPlace(str(place)), directory, every=1, keep=1 + chance.randrange(2))
        tier.resume(store, store.committed())
        step = max((info.step for info in store.committed()), default=0)
        os.write(told, b"ready\n")
        while True:
            step += 1
            tier.offer(store, put(store, step, state_of(step)))
            if chance.random() < 0.5:
                tier.drain(60)
            if tier.counts.done:
                os.write(told, f"{tier._status.committed.step}\n".encode())


def look(place: Path, least: int) -> int:
    """Everything that is listed is complete and exact; returns the newest step."""
    client = FolderClient(place)
    names = find_commits(client)
    for name in names:
        view = RemoteView(client)
        info = view.look(name)
        content = view.read_bytes(info, 0, info.stream_bytes)
        state = state_of(name.step)
        for part in ("frozen", "x"):
            assert state[part].numpy().tobytes() in content, f"step {name.step} came back with another {part}"
    newest = max((name.step for name in names), default=0)
    assert newest >= least, f"step {least} was there, and now only {newest} is"
    return newest


def nothing_else(place: Path) -> None:
    """After a sweep there is not a byte that no checkpoint needs."""
    client = FolderClient(place)
    for _ in range(2):
        sweep(client, guard_s=AT_ONCE_S, grace_s=AT_ONCE_S)
    needed = set()
    for name in find_commits(client):
        needed.update(objects.object_key(objects.MANIFESTS, part.name) for part in read_commit(client, name).parts)
        manifest = RemoteView(client).look(name).manifest
        needed.update(objects.object_key(objects.SEGMENTS, segment.name) for segment in manifest.segments)
        needed.add(name.retired_key)  # there if the taking away was cut short; the next one needs it
    kinds = (objects.SEGMENTS, objects.MANIFESTS, objects.UPLOADS, objects.RETIRED)
    left = {info.key for kind in kinds for info in client.list(kind)}
    missing = {key for key in needed - left if not key.startswith(f"{objects.RETIRED}/")}
    assert not left - needed and not missing, f"left over: {sorted(left - needed)[:5]}; missing: {sorted(missing)[:5]}"


def main(directory: Path, place: Path, rounds: int, seed: int) -> None:
    chance = random.Random(seed)
    least, met = 0, Counter()
    for number in range(rounds):
        reads, writes = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                die_with_parent()
                train(directory, place, writes, seed + number)
            finally:
                os._exit(1)
        os.close(writes)
        with os.fdopen(reads, "rb") as told:
            first = told.readline()
            time.sleep(chance.uniform(0, chance.choice([0.1, 0.6])))
            os.kill(child, signal.SIGKILL)
            rest = told.read()
        _, status = os.waitpid(child, 0)
        assert first == b"ready\n" and os.WTERMSIG(status) == signal.SIGKILL, f"a child ended by itself: {rest!r}"
        lines = rest.rpartition(b"\n")[0].split()
        newest = look(place, max([least, *map(int, lines)]))
        client = FolderClient(place)
        met["upload"] += any(True for _ in client.list(objects.UPLOADS))
        met["retention"] += any(True for _ in client.list(objects.RETIRED))
        met["new"] += newest > least
        least = newest
        if number % 10 == 9:
            nothing_else(place)
            look(place, least)
    nothing_else(place)
    look(place, least)
    sys.stdout.write(" ".join(f"{name}={count}" for name, count in sorted(met.items())) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
