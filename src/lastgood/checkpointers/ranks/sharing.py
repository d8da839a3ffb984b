"""Ranks that fetch the same bytes of a checkpoint: one of them fetches, and passes them on through a group of theirs.

Nobody depends on it: a rank that is lost, or does not come, costs the others a bounded wait, and then each fetches for
itself what it still lacks. Whatever comes from another rank is checked as if it came from the store.
"""

from __future__ import annotations

import datetime
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from lastgood._lazy import torch
from lastgood.errors import CheckpointError
from lastgood.storage.objects.view import RemoteRead
from lastgood.world import world_of_torch

__all__ = ["Sharing", "join_sharing"]

_log = logging.getLogger("lastgood")

WAIT_S = 30.0
"""For other ranks: that they say whether they take part, and for each piece that comes from them."""
_AHEAD = 4
"""Pieces (of 8 MiB at most) that a rank fetches before their turn."""


class _Piece(NamedTuple):
    part: int
    first: int
    chunks: int
    ranks: tuple[int, ...]
    """Who needs it, by number in the group; the first of them fetches it."""


def join_sharing(what: str, world: tuple[int, int], *, takes_part: bool) -> Sharing | None:
    """Called by each rank of torch.distributed as it begins to read `what`; None if it is to fetch all by itself.

    All ranks say whether they take part; whoever does waits for that, at most `WAIT_S`. Never raises.
    """
    if world[1] == 1 or world_of_torch() != world:
        return None
    rank, ranks = world
    wait = datetime.timedelta(seconds=WAIT_S)
    try:
        from torch.distributed import ProcessGroupGloo
        from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

        store = PrefixStore(f"lastgood/sharing/{what}", _get_default_store())
        number = store.add(f"made/{rank}", 1)  # one after another in a process; ranks make as many
        keys = [f"{number}/part/{other}" for other in range(ranks)]
        store.set(keys[rank], str(int(takes_part)))
        if not takes_part:
            return None
        store.wait(keys, wait)
        members = [other for other, key in enumerate(keys) if store.get(key) == b"1"]
        if len(members) < 2:
            return None
        # Not torch.distributed.new_group: that counts groups, and a rank that is not here would count others.
        group = ProcessGroupGloo(PrefixStore(f"{number}/group", store), members.index(rank), len(members), wait)
    except Exception as error:  # torch's own, of many kinds
        _log.warning("this rank fetches all by itself, since others did not come in %.0f s: %s", WAIT_S, error)
        return None
    return Sharing(group, members.index(rank), len(members))


class Sharing:
    """The ranks that fetch at one time. Used once, by all of them."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self._group = group
        self._rank = rank
        self._size = size
        self._delivered: dict[int, set[int]] = {}
        """Chunks, by part."""

    def pass_on(self, reads: Sequence[RemoteRead], threads: int) -> None:
        """Deliver what several ranks need of `reads`, one for each part, in order; the rest stays in `RemoteRead.left`.

        Never raises for what becomes of other ranks, or of the store.
        """
        try:
            needed = self._needed(reads)
            if needed is not None:
                self._move(list(_schedule(reads, needed)), reads, threads)
                self._group.barrier().wait()  # a connection that is closed too early takes what is in progress with it
        except (RuntimeError, ValueError) as error:  # torch's own: a rank is lost, or late
            _log.warning("a rank was lost while ranks passed on what they fetched; each fetches the rest: %s", error)
        finally:
            self._group = None
            for part, done in self._delivered.items():
                reads[part].left = [chunk for chunk in reads[part].left if chunk not in done]

    def _needed(self, reads: Sequence[RemoteRead]) -> torch.Tensor | None:
        """Which chunks of all parts each rank needs (ranks x chunks); None if ranks do not read the same checkpoint."""
        total = sum(read.info.record.chunks for read in reads)
        of = int.from_bytes(b"".join(read.info.record.table_digest[:1] for read in reads)[:7], "little")
        sizes = self._gather(torch.tensor([total, of], dtype=torch.int64))
        if any(size.tolist() != [total, of] for size in sizes):
            return None
        mine = torch.zeros(total, dtype=torch.uint8)
        begin = 0
        for read in reads:
            mine[[begin + chunk for chunk in read.left]] = 1
            begin += read.info.record.chunks
        return torch.stack(self._gather(mine))

    def _gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        found = [torch.empty_like(mine) for _ in range(self._size)]
        self._group.allgather([found], [mine]).wait()
        return found

    def _move(self, schedule: Sequence[_Piece], reads: Sequence[RemoteRead], threads: int) -> None:
        own = deque(piece for piece in schedule if piece.ranks[0] == self._rank)
        ahead: deque[Future[memoryview]] = deque()
        with ThreadPoolExecutor(max(1, min(threads, _AHEAD)), thread_name_prefix="lastgood-share") as pool:
            try:
                for tag, piece in enumerate(schedule):
                    while own and len(ahead) < _AHEAD:
                        due = own.popleft()
                        ahead.append(pool.submit(reads[due.part].fetch, due.first, due.chunks))
                    if piece.ranks[0] == self._rank:
                        self._give(piece, reads[piece.part], ahead.popleft(), tag)
                    elif self._rank in piece.ranks:
                        self._take(piece, reads[piece.part], tag)
            finally:
                pool.shutdown(cancel_futures=True)

    def _give(self, piece: _Piece, read: RemoteRead, fetched: Future[memoryview], tag: int) -> None:
        """Deliver a piece here, and send it to the others; or tell them that it could not be fetched."""
        # The byte before it says whether it is there.
        buffer = torch.zeros(1 + read.size_of(piece.first, piece.chunks), dtype=torch.uint8)
        try:
            content = fetched.result()
        except CheckpointError as error:  # whoever needs it meets that by itself
            _log.warning("%s", error)
        else:
            buffer.numpy().data[1:] = content.cast("B")
            buffer[0] = 1
            self._deliver(piece, read, content)
        sent = [self._group.send([buffer], rank, tag) for rank in piece.ranks[1:]]
        for work in sent:
            work.wait()

    def _take(self, piece: _Piece, read: RemoteRead, tag: int) -> None:
        buffer = torch.empty(1 + read.size_of(piece.first, piece.chunks), dtype=torch.uint8)
        self._group.recv([buffer], piece.ranks[0], tag).wait()
        content = buffer.numpy().data[1:]
        if buffer[0] == 1 and read.holds(piece.first, content):
            self._deliver(piece, read, content)

    def _deliver(self, piece: _Piece, read: RemoteRead, content: memoryview) -> None:
        read.deliver(piece.first, piece.chunks, content)
        self._delivered.setdefault(piece.part, set()).update(range(piece.first, piece.first + piece.chunks))


def _schedule(reads: Sequence[RemoteRead], needed: torch.Tensor) -> Iterator[_Piece]:
    """The pieces that several ranks need, the same on all of them; who needs one takes its turn to fetch."""
    begin = turn = 0
    for part, read in enumerate(reads):
        columns = needed[:, begin : begin + read.info.record.chunks].numpy()
        begin += read.info.record.chunks
        runs: list[tuple[bytes, list[int]]] = []
        for chunk in (columns.sum(0, dtype=int) > 1).nonzero()[0].tolist():
            who = columns[:, chunk].tobytes()
            if runs and runs[-1][0] == who and runs[-1][1][-1] == chunk - 1:
                runs[-1][1].append(chunk)
            else:
                runs.append((who, [chunk]))
        for who, chunks in runs:
            ranks = tuple(rank for rank, needs in enumerate(who) if needs)
            for first, count in read.pieces(chunks):
                at = turn % len(ranks)
                yield _Piece(part, first, count, (*ranks[at:], *ranks[:at]))
                turn += 1
