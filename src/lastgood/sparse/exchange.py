"""The exchange of sparse gradients: each rank gives its own of a layer, and gets those of all ranks.

A ring: what comes from the previous rank is kept and passed on to the next one, until it has been everywhere. So each
link carries the blocks of all ranks but one, with any number of ranks: ranks - 1 blocks, which is what a rank must
receive in any case. With the share of each rank made smaller with more ranks, as StellaTrain's is (SIGCOMM'24), a
link's bytes stay nearly the same; with a fixed one they grow with the number of ranks.

All records, a rank's own and those that it passes on, wait in one queue by iteration and layer (links.py), so that the
first layer's block, which the next forward pass needs first, overtakes those of later layers on every link.

One failure anywhere ends the exchange on all ranks: each tells both its neighbours, and those theirs. A rank may have
been given results then that another one lacks; none is given a part of one. What they have in common again is the
last checkpoint that all ranks have.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lastgood import _native
from lastgood.errors import CheckpointError, ConfigError, CorruptCheckpoint, LastgoodError, MismatchError, WaitTimeout
from lastgood.sparse.blocks import MAX_ELEMENTS, SparseGradient
from lastgood.sparse.chunks import Chunk, Kind, cut, failure_payload, pack_header, parse_failure
from lastgood.sparse.coding import (
    decode,
    decode_group,
    encode,
    encode_group,
    most_encoded_bytes,
    most_group_bytes,
)
from lastgood.sparse.gathers import Gathered, GatheredGroups, Gathers, Key, Part
from lastgood.sparse.link_clock import sending_s
from lastgood.sparse.links import LAST, LINGER_S, LinkReader, LinkSender, Urgency
from lastgood.sparse.meeting import Place, Setting, about, find_place, meet
from lastgood.wire.frames import keep_alive, shut_down
from lastgood.wire.records import MAX_ITERATION
from lastgood.wire.ring_link import Link

__all__ = ["Elements", "Exchange", "ExchangeFacts"]

_log = logging.getLogger("lastgood")
_LOOK_S = 0.2
_GRACE_S = 0.5
_MAX_LAYERS = 1 << 32

Elements = int | tuple[int, ...]
"""Of a layer, or of each tensor of one that has several."""


@dataclass(frozen=True)
class ExchangeFacts:
    """What an exchange has done since it was opened."""

    sent_bytes: int
    """To the next rank, headers and what is passed on included."""
    received_bytes: int
    link_busy_s: float
    """Seconds in which more was to be sent than the link to the next rank took."""
    sending_s: float
    """Seconds in which something was on its way to the next rank, as the kernel counts them."""
    gathered: int
    """Blocks that have come back complete, those of all ranks together."""
    gather_s: float
    """From `submit` to the result, summed over these."""


class Exchange:
    """This rank's part in it. For any thread; a callback of a future holds up the next results while it runs."""

    @classmethod
    def open(
        cls,
        layers: Sequence[Elements],
        settings: Mapping[str, Setting],
        *,
        place: Place | None = None,
        host: str | None = None,
        timeout_s: float = 30.0,
        join_timeout_s: float = 120.0,
        ahead: int = 4,
    ) -> Exchange:
        """Meet the other ranks; all of them must call this, within `join_timeout_s`.

        `layers` has the elements of each layer, or of each tensor of a layer of several, which go together; these and
        `settings` (compressor, ratio: plain values by name) must be the same everywhere. Without a `place`
        torch.distributed finds one; `host` is this machine's address then, if others reach it by another one than it
        reaches rank 0. If nothing moves for `timeout_s` while blocks are waited for, the exchange ends. Other ranks may
        be `ahead` iterations ahead of this one, no more.

        Raises ConfigError for what no exchange can have; MismatchError, on all ranks, if one has other layers,
        settings or another version; WaitTimeout if one does not come; HostError if this machine cannot listen.
        """
        groups = [(one,) if isinstance(one, int) else one for one in layers]
        if not 0 < len(layers) <= _MAX_LAYERS or not all(
            group and all(0 < elements <= MAX_ELEMENTS for elements in group) for group in groups
        ):
            raise ConfigError(f"an exchange has one or more layers, of 1 to {MAX_ELEMENTS} elements each")
        if not timeout_s > 0 or ahead < 1:
            raise ConfigError(f"an exchange waits for more than {timeout_s:g} s, for others at least 1 iteration ahead")
        described = about(layers, settings)
        if place is None:
            place = find_place(join_timeout_s, host)
        if place is None:
            return cls(layers, timeout_s, ahead)
        if place.ranks == 1:
            place.listener.close()
            return cls(layers, timeout_s, ahead)
        previous, following, names = meet(place, described, join_timeout_s)
        ring = _Ring(place, previous, following, names, layers, Gathers(place.rank, place.ranks, ahead), timeout_s)
        return cls(layers, timeout_s, ahead, ring)

    def __init__(self, layers: Sequence[Elements], timeout_s: float, ahead: int, ring: _Ring | None = None) -> None:
        self.layers = tuple(layers)
        self.rank, self.ranks = (ring.rank, ring.ranks) if ring is not None else (0, 1)
        self.timeout_s = timeout_s
        self._ring = ring
        self._gathers = ring.gathers if ring is not None else Gathers(0, 1, ahead)

    def submit(self, iteration: int, layer: int, sparse: SparseGradient) -> Future[Gathered]:
        """Give this rank's gradient of a layer; the future gives those of all ranks, in their order, or an error.

        A layer's iterations ascend. Indices and values must stay as they are; the result holds this very object.
        Raises ConfigError for a layer or iteration that cannot be, CorruptCheckpoint for what is no sparse gradient.
        """
        key = self._key(iteration, layer, sparse.elements)
        return self._begin(key, sparse, encode(sparse))

    def submit_group(self, iteration: int, layer: int, group: Sequence[SparseGradient]) -> Future[GatheredGroups]:
        """The same of a layer of several tensors: one of each."""
        key = self._key(iteration, layer, tuple(one.elements for one in group))
        return self._begin(key, tuple(group), encode_group(group))

    def _key(self, iteration: int, layer: int, elements: Elements) -> Key:
        if not 0 <= layer < len(self.layers) or not 0 <= iteration < MAX_ITERATION:
            raise ConfigError(f"iteration {iteration}, layer {layer}: this exchange has {len(self.layers)} layers")
        if elements != self.layers[layer]:
            raise ConfigError(f"layer {layer} has {self.layers[layer]} elements, and the gradient {elements}")
        return Key(iteration, layer)

    def _begin(self, key: Key, part: Part, content: npt.NDArray[np.uint8]) -> Future[Any]:
        future, goes = self._gathers.begin(key, part)
        if goes and self._ring is not None:
            self._ring.send(key, content)
        return future

    def facts(self) -> ExchangeFacts:
        """What it has done so far."""
        ring, gathers = self._ring, self._gathers
        sent, received, busy_s = (0, 0, 0.0) if ring is None else ring.traffic()
        sending_s = 0.0 if ring is None else ring.sending_s(busy_s)
        return ExchangeFacts(sent, received, busy_s, sending_s, gathers.gathered, gathers.gather_s)

    def close(self) -> None:
        """Leave, within a bounded time. Safe to call twice.

        If blocks are in progress, their futures fail, here and on all other ranks.
        """
        if self._ring is not None:
            self._ring.close()
        self._gathers.fail(CheckpointError(f"rank {self.rank}: the exchange is closed"))

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


# -- what goes around --------------------------------------------------------------------------------------------------


@dataclass(order=True)
class _Arrived:
    urgency: Urgency
    number: int
    origin: int = field(compare=False)
    memory: npt.NDArray[np.uint8] | None = field(compare=False)
    """None: this rank sends nothing more."""


@dataclass
class _Incoming:
    memory: npt.NDArray[np.uint8]
    filled: int = 0


class _Ring:
    """A thread that sends (links.py), one that receives and passes on, and one that decodes and gives results."""

    def __init__(
        self,
        place: Place,
        previous: Link,
        following: Link,
        names: list[str],
        layers: Sequence[Elements],
        gathers: Gathers,
        timeout_s: float,
    ) -> None:
        self.rank, self.ranks, self.gathers = place.rank, place.ranks, gathers
        self._next = (place.rank + 1) % place.ranks
        self._names, self._layers, self._timeout_s = names, tuple(layers), timeout_s
        self._previous, self._following = previous, following
        job = int.from_bytes(bytes.fromhex(place.job)[:8], "little")
        self._like = Chunk(Kind.CHUNK, job, place.incarnation, place.rank)
        self._ending = threading.Lock()
        self._ended = False
        self._expected_ends: set[socket.socket] = set()
        """Connections on which the other side has said that it leaves."""
        self._incoming: dict[tuple[int, Key], _Incoming] = {}
        self._newest: dict[tuple[int, int], int] = {}
        """By origin and layer, the newest iteration that has come completely."""
        self._sending_s = 0.0
        self._moved_at = time.monotonic()
        self._numbers = itertools.count()
        self._arrived: queue.PriorityQueue[_Arrived] = queue.PriorityQueue()
        keep_alive(previous.socket)
        self._sender = LinkSender(following, timeout_s, self._cannot_send)
        self._readers = {
            previous.socket.fileno(): LinkReader(previous, self._place, self._take),
            following.socket.fileno(): LinkReader(following, self._place_back, self._take_back),
        }
        self._threads = [
            threading.Thread(target=self._guarded, args=(call,), name=f"lastgood-sparse-{what}", daemon=True)
            for what, call in (("give", self._give_all), ("receive", self._receive_all))
        ]
        for thread in self._threads:
            thread.start()

    def send(self, key: Key, content: npt.NDArray[np.uint8]) -> None:
        """Let this rank's block of a layer go around."""
        like = replace(self._like, iteration=key.iteration, layer=key.layer)
        self._sender.put(key, list(cut(content.data, like)))
        # It may have been given before this rank heard that another one has left.
        error = self.gathers.hopeless()
        if error is not None:
            self._fail(error)

    def traffic(self) -> tuple[int, int, float]:
        """Bytes sent and received, and seconds in which the link was busy."""
        received = sum(reader.received_bytes for reader in self._readers.values())
        return self._sender.sent_bytes, received, self._sender.busy_s

    def sending_s(self, busy_s: float) -> float:
        """Seconds in which something was on its way; `busy_s`, in which it could not even leave, if that is more."""
        self._sending_s = max(self._sending_s, busy_s, sending_s(self._following.socket))
        return self._sending_s

    # -- the receiver's thread -------------------------------------------------------------------------------------

    def _receive_all(self) -> None:
        try:
            poll = select.poll()
            for number in self._readers:
                poll.register(number, select.POLLIN)
            look_at = 0.0
            while not self._ended:
                for number, _ in poll.poll(_LOOK_S * 1e3):
                    reader = self._readers[number]
                    if not reader.step():
                        poll.unregister(number)
                        self._check_end(reader.link)
                    elif reader.link is self._previous:
                        self._moved_at = time.monotonic()
                if (now := time.monotonic()) >= look_at:
                    look_at = now + _LOOK_S / 4
                    self._check_progress()
        except CheckpointError as error:
            self._fail(error)
        finally:
            self._drain()

    def _check_end(self, link: Link) -> None:
        if link.socket not in self._expected_ends:
            waiting = self.gathers.oldest()
            what = "" if waiting is None else f" while {waiting.key} was in progress"
            raise CheckpointError(f"{link.name} closed the connection{what}: its process has ended, or was cut off")

    def _check_progress(self) -> None:
        waiting = self.gathers.oldest()
        if waiting is None:
            return
        now = time.monotonic()
        idle_s = now - max(waiting.since, self._moved_at, self._sender.progress_at)
        if idle_s > self._timeout_s:
            names = ", ".join(self._names[rank] for rank in waiting.missing)
            silence_s = now - self._moved_at
            raise WaitTimeout(
                f"waited {self._timeout_s:g} s for {waiting.key} of {names}; "
                f"the last that came over the link from {self._previous.name} was {silence_s:.0f} s ago"
            )

    def _place(self, chunk: Chunk) -> memoryview:
        """Memory for the payload of a record from the previous rank, if that may be one."""
        link = self._previous.name
        self._check_place(chunk, link)
        if chunk.kind is not Kind.CHUNK:
            return memoryview(bytearray(chunk.length))
        name, key = self._names[chunk.origin], Key(chunk.iteration, chunk.layer)
        if chunk.layer >= len(self._layers):
            raise CorruptCheckpoint(f"{link}: a block of layer {chunk.layer} of {len(self._layers)}, from {name}")
        elements = self._layers[chunk.layer]
        most = most_encoded_bytes(elements) if isinstance(elements, int) else most_group_bytes(elements)
        if chunk.total > most:
            raise CorruptCheckpoint(f"{link}: {key} of {name} has {chunk.total} bytes; it can have {most} at most")
        if chunk.iteration <= self._newest.get((chunk.origin, chunk.layer), -1):
            raise CorruptCheckpoint(f"{link}: {key} of {name} comes a second time, or too late")
        incoming = self._incoming.get((chunk.origin, key))
        if incoming is None:
            self.gathers.check_ahead(chunk.iteration, name)
            incoming = _Incoming(np.empty(chunk.total, np.uint8))
            self._incoming[chunk.origin, key] = incoming
        if (chunk.offset, chunk.total) != (incoming.filled, len(incoming.memory)):
            raise CorruptCheckpoint(
                f"{link}: {key} of {name} continues at byte {chunk.offset} of {chunk.total}, "
                f"not at {incoming.filled} of {len(incoming.memory)}"
            )
        return incoming.memory.data[chunk.offset : chunk.offset + chunk.length]

    def _take(self, chunk: Chunk, header: bytes, payload: memoryview) -> None:
        """A record from the previous rank, complete and undamaged."""
        if chunk.kind is Kind.FAILURE:
            self._heard_failure(chunk, header, payload)
            return
        key = Key(chunk.iteration, chunk.layer)
        urgency: Urgency = key if chunk.kind is Kind.CHUNK else LAST
        if chunk.origin != self._next:
            self._sender.put(urgency, [(header, payload)])
        if chunk.kind is Kind.END:
            if chunk.origin == (self.rank - 1) % self.ranks:
                self._expected_ends.add(self._previous.socket)
                shut_down(self._previous.socket, socket.SHUT_WR)
            self._arrived.put(_Arrived(LAST, next(self._numbers), chunk.origin, None))
            return
        incoming = self._incoming[chunk.origin, key]
        incoming.filled += chunk.length
        if incoming.filled == chunk.total:
            del self._incoming[chunk.origin, key]
            self._newest[chunk.origin, chunk.layer] = chunk.iteration
            self._arrived.put(_Arrived(key, next(self._numbers), chunk.origin, incoming.memory))

    def _place_back(self, chunk: Chunk) -> memoryview:
        """The same for the next rank, which has nothing to say but that it ends."""
        self._check_place(chunk, self._following.name)
        if chunk.kind is Kind.CHUNK or (chunk.kind is Kind.END and chunk.origin != self._next):
            raise CorruptCheckpoint(f"{self._following.name} sent a record against the ring's direction")
        return memoryview(bytearray(chunk.length))

    def _take_back(self, chunk: Chunk, header: bytes, payload: memoryview) -> None:
        if chunk.kind is Kind.FAILURE:
            self._heard_failure(chunk, header, payload)
            return
        # It has all that it needs; what it sent itself may still be on its way around the ring.
        self._expected_ends.add(self._following.socket)
        self._sender.discard()
        shut_down(self._following.socket, socket.SHUT_WR)

    def _check_place(self, chunk: Chunk, link: str) -> None:
        if (chunk.job, chunk.incarnation) != (self._like.job, self._like.incarnation):
            raise MismatchError(
                f"{link}: a record of job {chunk.job:016x}, incarnation {chunk.incarnation}; "
                f"this is job {self._like.job:016x}, incarnation {self._like.incarnation}"
            )
        if chunk.origin >= self.ranks or (chunk.origin == self.rank and chunk.kind is not Kind.FAILURE):
            raise CorruptCheckpoint(f"{link}: a record of rank {chunk.origin}, on rank {self.rank} of {self.ranks}")

    # -- the thread that gives results -----------------------------------------------------------------------------

    def _give_all(self) -> None:
        while True:
            arrived = self._arrived.get()
            if self._ended:
                return
            name = self._names[arrived.origin]
            if arrived.memory is None:
                self.gathers.leave(arrived.origin, name)
                error = self.gathers.hopeless()
                if error is not None:
                    raise error
                continue
            key = Key(*map(int, arrived.urgency))
            elements, source = self._layers[key.layer], f"{key} of {name}"
            if isinstance(elements, int):
                self.gathers.add(key, arrived.origin, decode(arrived.memory, elements, source))
            else:
                self.gathers.add(key, arrived.origin, decode_group(arrived.memory, elements, source))

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except CheckpointError as error:
            self._fail(error)
        except MemoryError as error:
            self._fail(
                CheckpointError(f"{self._names[self.rank]} has no memory left for the blocks of others: {error}")
            )
        except (LastgoodError, Exception) as error:
            _log.exception("rank %d: the exchange of gradients", self.rank)
            self._fail(CheckpointError(f"{self._names[self.rank]}: the exchange failed by itself: {error!r}"))

    # -- ends ------------------------------------------------------------------------------------------------------

    def _cannot_send(self, error: CheckpointError) -> None:
        """In the sender's thread. A rank that closes its connection has mostly said why, against the direction."""
        deadline = time.monotonic() + _GRACE_S
        while not self._ended and time.monotonic() < deadline:
            time.sleep(_GRACE_S / 20)
        self._fail(error)

    def _heard_failure(self, chunk: Chunk, header: bytes, payload: memoryview) -> None:
        self._fail(parse_failure(bytes(payload), self._names[chunk.origin]), (header, bytes(payload)))

    def _fail(self, error: CheckpointError, words: tuple[bytes, ...] | None = None) -> None:
        """End it, on all ranks: `words` say so to the neighbours; this rank's own ones if they are not given."""
        if words is None:
            payload = failure_payload(error)
            chunk = replace(self._like, kind=Kind.FAILURE, length=len(payload), checksum=_native.crc32c(payload))
            words = (pack_header(chunk), payload)
        if self._end(words, flush_s=0.0):
            _log.warning("rank %d: the exchange of gradients has ended: %s", self.rank, error)
            self.gathers.fail(error)

    def close(self) -> None:
        """Leave; nothing is in progress, or what is fails everywhere."""
        waiting = self.gathers.oldest()
        if waiting is not None:
            self._fail(
                CheckpointError(f"{self._names[self.rank]} closed its exchange while {waiting.key} was in progress")
            )
        else:
            self._end((pack_header(replace(self._like, kind=Kind.END)),), self._timeout_s)
        for thread in self._threads:
            if thread is not threading.current_thread():  # a future's callback may be in one of them
                thread.join(self._timeout_s + 3 * LINGER_S)

    def _end(self, words: tuple[bytes, ...], flush_s: float) -> bool:
        """Say these words in both directions, after what waits in `flush_s`; False if it has ended before."""
        with self._ending:
            if self._ended:
                return False
            self._ended = True
        self._sender.finish(*words, flush_s=flush_s)
        with contextlib.suppress(OSError):  # against the ring's direction goes nothing else, so that there is room
            self._previous.socket.sendmsg(words)
        shut_down(self._previous.socket, socket.SHUT_WR)
        self._arrived.put(_Arrived(LAST, next(self._numbers), self.rank, None))
        return True

    def _drain(self) -> None:
        """Read on, so that what this rank says last is not lost with a connection that is reset; then close."""
        scratch = bytearray(1 << 16)
        open_ones = {link.socket.fileno(): link.socket for link in (self._previous, self._following)}
        deadline = time.monotonic() + self._timeout_s + LINGER_S
        sending = True
        while open_ones and time.monotonic() < deadline:
            if sending and self._sender.join(0.0):
                sending, deadline = False, time.monotonic() + LINGER_S
            poll = select.poll()
            for number in open_ones:
                poll.register(number, select.POLLIN)
            for number, _ in poll.poll(_LOOK_S * 1e3):
                with contextlib.suppress(BlockingIOError):
                    try:
                        if open_ones[number].recv_into(scratch) == 0:
                            del open_ones[number]
                    except OSError:
                        del open_ones[number]
        self._sender.join(self._timeout_s)
        for link in (self._previous, self._following):
            link.wire.close()
