"""Ranks that are threads of one process, and an exchange between them in memory."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import torch.distributed as dist

from lastgood.sparse.ranks import Ranks

LIMIT_S = 240.0


class Meeting:
    """What the ranks of one training share."""

    def __init__(self, ranks):
        self.ranks = ranks
        self.store = dist.HashStore()
        self.lock = threading.Lock()
        self.blocks = {}
        self.futures = {}
        self.held = set()
        """Tasks (iteration, group of layers) that do not arrive anywhere before `release`."""
        self.lost = None
        """A task whose exchange fails on all ranks."""

    def submit(self, rank, task, sparse):
        future = Future()
        with self.lock:
            self.blocks.setdefault(task, {})[rank] = sparse
            self.futures.setdefault(task, []).append(future)
        self._deliver(task)
        return future

    def release(self):
        with self.lock:
            held, self.held = self.held, set()
        for task in held:
            self._deliver(task)

    def _deliver(self, task):
        with self.lock:
            if task in self.held or len(self.blocks.get(task, ())) < self.ranks:
                return
            gathered = [self.blocks[task][rank] for rank in range(self.ranks)]
            futures = self.futures.pop(task, [])
        for future in futures:
            if task == self.lost:
                future.set_exception(ConnectionError(f"rank 1 on there is lost in {task}"))
            else:
                future.set_result(gathered)


class ThreadRanks(Ranks):
    def __init__(self, meeting, rank):
        super().__init__(rank, meeting.ranks, meeting.store, "0")
        self.meeting = meeting

    def open(self, groups, digest, timeout_s):
        del groups, digest, timeout_s
        return _End(self)


class _End:
    def __init__(self, ranks):
        self._ranks = ranks

    def submit_group(self, iteration, layer, group):
        return self._ranks.meeting.submit(self._ranks.rank, (iteration, layer), tuple(group))

    def close(self):
        pass


def together(ranks, work, meeting=None):
    """What `work(ranks)` returns on each of so many ranks."""
    meeting = meeting or Meeting(ranks)
    with ThreadPoolExecutor(ranks) as pool:
        futures = [pool.submit(work, ThreadRanks(meeting, rank)) for rank in range(ranks)]
        return [future.result(LIMIT_S) for future in futures]
