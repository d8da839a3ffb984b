"""Who takes part in a training: one process for each node, what they tell each other at its beginning, and buffers."""

from __future__ import annotations

import datetime
import functools
import hashlib
import itertools
import os
import socket
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from lastgood._lazy import torch
from lastgood.errors import ConfigError, MismatchError, WaitTimeout
from lastgood.sparse.blocks import SparseGradient
from lastgood.sparse.exchange import Exchange
from lastgood.sparse.schedule import Task
from lastgood.sparse.tasks import Tasks, results
from lastgood.world import world_of_torch

__all__ = ["Alone", "Gathers", "Ranks", "ranks_of_torch"]

_PART_BYTES = 1 << 20
"""Of one value of the store."""
_made = itertools.count()


class Gathers(Protocol):
    """What brings together the blocks of all ranks."""

    def submit_group(
        self, iteration: int, layer: int, group: Sequence[SparseGradient]
    ) -> Future[list[tuple[SparseGradient, ...]]]:
        """Send this rank's blocks of some tensors; the future has those of all ranks, in their order."""

    def close(self) -> None:
        """End it."""


class Alone:
    """The exchange of a training of one rank."""

    def submit_group(
        self, iteration: int, layer: int, group: Sequence[SparseGradient]
    ) -> Future[list[tuple[SparseGradient, ...]]]:
        """What was sent is what there is."""
        del iteration, layer
        future: Future[list[tuple[SparseGradient, ...]]] = Future()
        future.set_result([tuple(group)])
        return future

    def close(self) -> None:
        """Nothing is open."""


class Ranks:
    """This rank among `ranks`, and the key-value store (torch.distributed's) through which they meet.

    Every rank makes its engines in the same order: what they tell each other goes by the number of the engine.
    """

    def __init__(
        self, rank: int, ranks: int, store: Any = None, name: str | None = None, address: str | None = None
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        self.address = address
        """This machine's for the others, if it is not the one by which it reaches rank 0."""
        self.host = socket.gethostname()
        self._fetching: Tasks | None = None
        self._own_store: Any = None
        self._expected: dict[str, Future[list[bytes]]] = {}
        """What is on its way from rank 0, or will be."""
        self._store = None
        if ranks > 1:
            from torch.distributed.distributed_c10d import PrefixStore

            self._store = PrefixStore(f"lastgood/sparse/{next(_made) if name is None else name}", store)

    def open(self, groups: Sequence[tuple[int, ...]], digest: str, timeout_s: float) -> Gathers:
        """Connect the ranks, which send tensors of so many elements together, and whose settings have this digest."""
        if self._store is None:
            return Alone()
        return Exchange.open(groups, {"settings": digest}, host=self.address, timeout_s=timeout_s)

    def gather(self, what: str, own: str, timeout_s: float) -> list[str]:
        """Tell all ranks `own`, and hear of each of them, in rank order; all must call it. Raises WaitTimeout."""
        if self._store is None:
            return [own]
        self.show(what, own)
        deadline = time.monotonic() + timeout_s
        return [self._get(f"{what}/{rank}", rank, deadline, timeout_s).decode() for rank in range(self.ranks)]

    def show(self, what: str, own: str) -> None:
        """Tell all ranks `own`, which they get by `shown`."""
        if self._store is not None:
            self._store.set(f"{what}/{self.rank}", own)

    def shown(self, what: str, timeout_s: float) -> list[str]:
        """What all ranks show, in rank order; one request if it is there already. Raises WaitTimeout."""
        assert self._store is not None, "one rank has nobody to hear of"
        keys = [f"{what}/{rank}" for rank in range(self.ranks)]
        try:
            self._store.wait(keys, datetime.timedelta(seconds=timeout_s))
            return [bytes(one).decode() for one in self._store.multi_get(keys)]
        except RuntimeError as error:  # torch's own, of several classes
            raise WaitTimeout(f"waited {timeout_s:g} s for {what!r} of all ranks: {error}") from error

    def show_no_more(self, what: str) -> None:
        """Take away what this rank showed, which all have got."""
        if self._store is not None:
            self._store.delete_key(f"{what}/{self.rank}")

    def compare(self, what: str, own: Sequence[str], timeout_s: float) -> None:
        """Raise MismatchError, naming both sides, unless all ranks give the same lines.

        WaitTimeout if one does not come.
        """
        digest = hashlib.sha256("\n".join(own).encode()).hexdigest()
        theirs = self.gather(f"{what} digest", digest, timeout_s)
        if len(set(theirs)) == 1:
            return
        # All see the same digests, so all come here, and say which line it is.
        everyone = [text.split("\n") for text in self.gather(what, "\n".join(own), timeout_s)]
        for rank, lines in enumerate(everyone):
            for number, (first, other) in enumerate(itertools.zip_longest(everyone[0], lines)):
                if first != other:
                    raise MismatchError(
                        f"{what}: line {number} of rank 0 is {first!r}, and that of rank {rank} is {other!r}; all "
                        "ranks must train the same model in the same way"
                    )

    def of_first(self, what: str, own: Sequence[torch.Tensor], timeout_s: float) -> None:
        """Give all ranks the values that these tensors have on rank 0: `tell_first`, and `hear_first` on the others."""
        self.tell_first(what, own)
        self.hear_first(what, own, timeout_s)

    def tell_first(self, what: str, own: Sequence[torch.Tensor]) -> None:
        """On rank 0: put these tensors' values where the others get them."""
        if self._store is None or self.rank or not own:
            return
        values = _joined(own)
        for part, begin in enumerate(range(0, values.numel(), _PART_BYTES)):
            self._store.set(f"{what}/{part}", values[begin : begin + _PART_BYTES].numpy().tobytes())  # type: ignore[arg-type]  # bytes are kept as they are

    def expect_first(self, what: str, own: Sequence[torch.Tensor], timeout_s: float) -> None:
        """On all ranks but 0: begin to fetch what `tell_first` tells, so that `hear_first` need not wait for the link.

        A link that is full lets each question to the store wait behind what is sent already.
        """
        if self._store is None or not self.rank or not own:
            return
        if self._fetching is None:
            self._fetching, self._own_store = Tasks(1, "sparse-fetch"), _another(self._store)
        store, size = self._own_store, sum(tensor.nbytes for tensor in own)
        # Rank 0 may tell late; whoever needs it has a limit of its own.
        work = functools.partial(self._fetch, what, size, 2 * timeout_s, store)
        self._expected[what] = self._fetching.submit(Task(len(self._expected), 0), work)

    def _fetch(self, what: str, size: int, timeout_s: float, store: Any) -> list[bytes]:
        deadline, parts = time.monotonic() + timeout_s, range(-(-size // _PART_BYTES))
        return [self._get(f"{what}/{part}", 0, deadline, timeout_s, store) for part in parts]

    def hear_first(self, what: str, own: Sequence[torch.Tensor], timeout_s: float) -> None:
        """On all ranks but 0: overwrite these tensors with what `tell_first` told. Raises WaitTimeout."""
        if self._store is None or not self.rank or not own:
            return
        size = sum(tensor.nbytes for tensor in own)
        expected = self._expected.pop(what, None)
        if expected is None:
            texts = self._fetch(what, size, timeout_s, self._store)
        else:
            (texts,) = results([expected], timeout_s, f"{what!r} of rank 0")
        values = torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8)
        if values.numel() != size:
            raise MismatchError(f"{what}: rank 0 told {values.numel()} bytes, and rank {self.rank} has {size}")
        begin = 0
        with torch.no_grad():
            for alike in _by_type(own):
                end = begin + sum(tensor.nbytes for tensor in alike)
                held = values[begin:end].clone().view(alike[0].dtype)
                for tensor, part in zip(alike, held.split([tensor.numel() for tensor in alike]), strict=True):
                    tensor.copy_(part.view(tensor.shape))
                begin = end

    def forget_first(self, what: str, own: Sequence[torch.Tensor]) -> None:
        """On rank 0: take away what `tell_first` told, which all have got."""
        if self._store is None or self.rank or not own:
            return
        for part in range(-(-sum(tensor.nbytes for tensor in own) // _PART_BYTES)):
            self._store.delete_key(f"{what}/{part}")

    def close(self) -> None:
        """End what fetches; it may be used again."""
        fetching, self._fetching = self._fetching, None
        self._expected.clear()
        if fetching is not None:
            fetching.close(0.0)  # it may wait for a rank that is lost, for a bounded time

    def _get(self, key: str, rank: int, deadline: float, timeout_s: float, store: Any = None) -> bytes:
        store = self._store if store is None else store
        assert store is not None
        try:
            store.wait([key], datetime.timedelta(seconds=max(0.001, deadline - time.monotonic())))
        except RuntimeError as error:  # torch's own, of several classes
            raise WaitTimeout(f"waited {timeout_s:g} s for {key!r} of rank {rank}: {error}") from error
        found: bytes = store.get(key)
        return found


def ranks_of_torch(address: str | None = None) -> Ranks:
    """Those of torch.distributed, one process for each node; one rank without it. `address` is as `Ranks` has it.

    Raises ConfigError.
    """
    rank, ranks = world_of_torch()
    asked = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1 and asked > 1:
        raise ConfigError(
            f"WORLD_SIZE is {asked}, and torch.distributed is not initialised; call "
            'torch.distributed.init_process_group("gloo") before the engine is made'
        )
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if ranks > 1 and local > 1:
        raise ConfigError(
            f"{local} processes on this node (LOCAL_WORLD_SIZE): the sparse engine takes one process for each node so "
            "far; start one, as torchrun --nproc-per-node 1"
        )
    if ranks == 1:
        return Ranks(0, 1)
    from torch.distributed.distributed_c10d import _get_default_store

    return Ranks(rank, ranks, _get_default_store(), address=address)


def _another(store: Any) -> Any:
    """The same store by a connection of its own: one that waits keeps nobody else waiting."""
    try:
        return store.clone()
    except (AttributeError, RuntimeError):  # an older torch, or a store without connections
        return store


def _by_type(own: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """In the order in which types come first, and tensors of each in their own."""
    found: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in own:
        found.setdefault(tensor.dtype, []).append(tensor)
    return list(found.values())


def _joined(own: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of all."""
    flat = [torch.cat([tensor.detach().cpu().reshape(-1) for tensor in alike]) for alike in _by_type(own)]
    return torch.cat([one.view(torch.uint8) for one in flat])
