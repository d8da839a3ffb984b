"""DCP's collectives, each after a roll call: every wait for another rank has an end, and the error names that rank.

DCP gathers, scatters and broadcasts through a `_DistWrapper`, on the training's process group, whose limit is minutes
(NCCL's, gloo's). A rank that has died never comes there. So the wrapper of one save or load calls the roll before each
of its collectives: the ranks count themselves in a key of the process group's store, and none enters before all have
come. A rank shows that it lives by a counter that a thread of it moves. What one rank decides, all do: a key that is
set once says whether the roll was complete.

DCP gives a storage neither this wrapper nor the process group; `join` finds it in DCP's own frame.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException, _is_wrapped_exception, _wrap_exception
from torch.distributed.checkpoint.utils import _DistWrapper

from lastgood.errors import CheckpointError, ConfigError, MismatchError, WaitTimeout
from lastgood.integrations.dcp.collector import no_collection
from lastgood.text import parse_json
from lastgood.units import MIB

__all__ = ["RollCall", "join"]

_MOST_WAIT_S = 1.0
"""For a key at a time; then it is looked whether the ranks still live, and whether this process was interrupted."""
_LOOK_S = 0.05
"""How often rank 0 looks for a rank that begins anew."""
_NOTHING = "-"
"""No message."""
_MOST_SILENCE_S = 30.0
_OF_TIMEOUT = 0.7
"""So much of it in silence, and a rank counts as dead: all know it before the time is up."""
_BEGUN = "lastgood_roll_call"
_CALLER = {"save": "_save_state_dict", "load": "_load_state_dict"}
_STAGES = {
    "save": ("planning the save", "handing out the plan", "writing", "finishing"),
    "load": ("planning the load", "handing out the plan", "reading"),
}


_done: dict[str, list[str]] = {}
"""By kind of call and group: keys of the newest one."""


def join(what: Literal["save", "load"], place: str, timeout_s: float, ended: Callable[[], None]) -> RollCall | None:
    """Called by a storage in its first call of a save or load, on each rank: its roll call, once all ranks are there.

    None if this is no call of DCP's. `ended` is called on this rank when the save or load is over and has failed.
    Raises WaitTimeout, MismatchError if other ranks name another `place`; then DCP's collectives raise the same.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != _CALLER[what]:
        if frame.f_back is None:
            return None
        frame = frame.f_back
    wrapper = frame.f_locals.get("distW")
    if not isinstance(wrapper, _DistWrapper):
        raise ConfigError(f"this torch ({torch_version()}) runs DCP in a way that Lastgood does not know")
    begun: RollCall | None = vars(wrapper).get(_BEGUN)
    if begun is not None:
        return begun
    collective = wrapper.use_dist and (what == "load" or frame.f_locals.get("use_collectives", True))
    roll = RollCall(wrapper, what, place, timeout_s, ended, collective=collective)
    roll.begin()
    return roll


def torch_version() -> str:
    """For messages."""
    return str(sys.modules["torch"].__version__)


class RollCall:
    """The side of one rank in one save or load."""

    def __init__(
        self,
        wrapper: _DistWrapper,
        what: Literal["save", "load"],
        place: str,
        timeout_s: float,
        ended: Callable[[], None],
        *,
        collective: bool,
    ) -> None:
        self._over = threading.Event()
        self.rank = wrapper.get_rank()
        self.group_size = wrapper.get_world_size()
        self.world_size = self.group_size if collective else 1
        """Ranks that make this save or load together."""
        self.collective = collective
        self.id = secrets.token_bytes(8) + time.time_ns().to_bytes(8, "big")
        """Of this save or load, the same on all ranks; the second half says when it began, by rank 0's clock."""
        self.refusal: BaseException | None = None
        """Sent to all ranks instead of the error that DCP makes of it."""
        self._what: Literal["save", "load"] = what
        self._place = place
        self._timeout_s = timeout_s
        self._silence_s = min(_OF_TIMEOUT * timeout_s, _MOST_SILENCE_S)
        self._ended = ended
        self._error: BaseException | None = None
        self._calls = 0
        self._store: Any = None
        self._beat_store: Any = None
        self._keys: list[str] = []
        """That this rank is to delete, once all ranks have done with them."""
        self._group_ranks: list[int] = []
        if collective and self.world_size > 1:
            # Connections of its own: a wait on one keeps other threads of this process off it.
            store = dist.distributed_c10d._get_default_store()
            self._store, self._beat_store = store.clone(), store.clone()
            group = wrapper.group
            self._group_ranks = list(range(self.world_size)) if group is None else dist.get_process_group_ranks(group)
        setattr(wrapper, _BEGUN, self)
        for name in ("gather_object", "scatter_object", "broadcast_object", "all_gather_object"):
            setattr(wrapper, name, self._called(name, getattr(wrapper, name)))

    def __del__(self) -> None:
        self._over.set()

    def begin(self) -> None:
        """Wait for all ranks to begin this save or load. Raises as `join`."""
        if self._store is None:
            return
        try:
            self._meet()
        except BaseException as error:
            self._error = error
            self.end()
            raise

    def _start_beating(self) -> None:
        beat = (self._beat_store, self._own_key(f"beat/{self.rank}"), self._silence_s / 5, self._over)
        threading.Thread(target=_beat, args=beat, name="lastgood-beat", daemon=True).start()

    def end(self) -> None:
        """This save or load is over on this rank."""
        self._over.set()

    # -- around DCP's collectives ----------------------------------------------------------------------------------

    def _called(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        last = name in ("broadcast_object", "all_gather_object")

        def called(*args: Any, **kwargs: Any) -> Any:
            given = args[0] if args else next(iter(kwargs.values()), None)
            if self.refusal is not None and _is_wrapped_exception(given):
                given = _wrap_exception(self.refusal)
            failed = True
            try:
                self._call_roll()
                # The plans of all ranks are unpickled in it. A save may run beside a training, whose collector it is.
                with no_collection() if self._what == "load" else contextlib.nullcontext():
                    result = real(given)
                failed = isinstance(result, CheckpointException) or (
                    name == "all_gather_object" and any(map(_is_wrapped_exception, result))
                )
                return result
            finally:
                if failed or last:
                    self.end()
                if failed:
                    self._ended()

        return called

    def _call_roll(self) -> None:
        """Return when all ranks have come here. Raises WaitTimeout, naming those that did not, on all that did."""
        if self._error is not None:
            raise self._error
        number, self._calls = self._calls, self._calls + 1
        if self._store is None:
            return
        try:
            with _store_errors():
                self._wait_for_all(f"call/{number}", number)
        except BaseException as error:
            self._error = error
            raise

    def _wait_for_all(self, call: str, number: int) -> None:
        store, outcome = self._store, self._key(f"{call}/outcome")
        count = self._key(f"{call}/count")
        if self.rank == 0:
            self._keys += [count, outcome]
        store.set(self._own_key(f"{call}/{self.rank}"), b"here")
        verdict = "complete" if store.add(count, 1) >= self.world_size else ""
        heard: dict[int, tuple[int, float]] = {}
        while not verdict and not _appears(store, [outcome], min(_MOST_WAIT_S, self._silence_s / 4)):
            # The last rank may have died between counting itself and saying so.
            complete = store.add(count, 0) >= self.world_size
            verdict = "complete" if complete else self._silent(call, number, heard)
        decided = store.compare_set(outcome, "", verdict).decode()
        if decided != "complete":
            raise WaitTimeout(decided)

    def _silent(self, call: str, number: int, heard: dict[int, tuple[int, float]]) -> str:
        """What is to be said of the first rank that has not come and shows no sign of life; "" if there is none."""
        now = time.monotonic()
        for rank in range(self.world_size):
            if self._store.check([self._key(f"{call}/{rank}")]):
                continue
            beat = self._store.add(self._key(f"beat/{rank}"), 0)
            if rank not in heard or heard[rank][0] != beat:
                heard[rank] = (beat, now)
            elif now - heard[rank][1] > self._silence_s:
                stages = _STAGES[self._what]
                return (
                    f"{self._place}: rank {rank}{self._who(rank)} gave no sign of life for {self._silence_s:.0f} s "
                    f"while {stages[min(number, len(stages) - 1)]}: it has died or hangs; see its log"
                )
        return ""

    # -- meeting -----------------------------------------------------------------------------------------------------

    def _meet(self) -> None:
        """Agree on an id with all ranks, whatever earlier attempts have left in the store."""
        token = secrets.token_hex(8)
        mine = {"token": token, "place": self._place, "who": f"host {socket.gethostname()}, process {os.getpid()}"}
        deadline = time.monotonic() + self._timeout_s
        with _store_errors():
            if self.rank == 0:
                self._keys += [self._key("here"), self._key("all here")]
                self._store.set(self._own_key("who/0"), mine["who"])
                self._start_beating()
                self._gather(deadline)
                self._delete_older()
                return
            self._store.set(self._come(self.rank), json.dumps(mine))
            go = f"lastgood-dcp/go/{token}"
            while not _appears(self._store, [go], _slice_s(deadline)):
                if time.monotonic() > deadline:
                    self._store.delete_key(self._come(self.rank))
                    raise WaitTimeout(
                        f"{self._place}: waited {self._timeout_s:.0f} s for rank 0 to begin this {self._what} with all "
                        "ranks; see the log of rank 0, and whether each rank calls DCP"
                    )
            self._store.delete_key(self._come(self.rank))  # or rank 0 would take it for that of the next one
            answer = _message(self._store.get(go))
            if "error" in answer:
                raise MismatchError(answer["error"])
            self.id = bytes.fromhex(answer["id"])
            self._store.set(self._own_key(f"who/{self.rank}"), mine["who"])
            if self._store.add(self._key("here"), 1) >= self.world_size - 1:
                self._store.set(self._key("all here"), b"yes")
            self._start_beating()
            while not self._all_here(_slice_s(deadline)):
                self._refuse_after(deadline)
            self._delete_older()

    def _all_here(self, wait_s: float) -> bool:
        """Whether all ranks have taken the id; waits for it."""
        if _appears(self._store, [self._key("all here")], wait_s):
            return True
        return bool(self._store.add(self._key("here"), 0) >= self.world_size - 1)

    def _delete_older(self) -> None:
        """All ranks have begun this save or load, so none looks any more at keys of the one before."""
        kind = self._come(self.rank)
        for key in _done.get(kind, []):
            self._store.delete_key(key)
        _done[kind] = self._keys

    def _gather(self, deadline: float) -> None:
        """Rank 0's side: give each rank that comes the id, until all have taken it.

        What a rank said in an attempt that it gave up may still be there; so all are looked at again while some have
        not taken the id.
        """
        answered: dict[int, str] = {}
        answer: dict[str, str] = {"id": self.id.hex()}
        store = self._store
        while True:
            _appears(store, [self._come(rank) for rank in range(1, self.world_size) if rank not in answered], _LOOK_S)
            for rank in range(1, self.world_size):
                content = store.compare_set(self._come(rank), _NOTHING, _NOTHING)  # a `get` waits for what is not there
                if content == _NOTHING.encode():
                    continue
                told = _message(content)
                if answered.get(rank) == told["token"]:
                    continue
                if told["place"] != self._place and "error" not in answer:
                    answer = {
                        "error": f"rank 0's {self._what} names {self._place}, and that of rank {rank} {told['place']}; "
                        "give all ranks one path, or call DCP with no_dist=True"
                    }
                answered[rank] = told["token"]
                store.set(f"lastgood-dcp/go/{told['token']}", json.dumps(answer))
                self._keys.append(f"lastgood-dcp/go/{told['token']}")
            if len(answered) == self.world_size - 1:
                if "error" in answer:
                    raise MismatchError(answer["error"])
                if self._all_here(_LOOK_S):
                    return
            self._refuse_after(deadline)

    def _refuse_after(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            absent = [rank for rank in range(1, self.world_size) if not self._store.check([self._key(f"who/{rank}")])]
            raise WaitTimeout(
                f"{self._place}: waited {self._timeout_s:.0f} s for {_ranks(absent)} to begin this {self._what}; dead, "
                "hanging, or not calling DCP: see the logs there"
            )

    def _come(self, rank: int) -> str:
        group = "-".join(map(str, self._group_ranks[:8])) + f"+{len(self._group_ranks)}"
        return f"lastgood-dcp/{self._what}/{group}/{rank}"

    def _own_key(self, name: str) -> str:
        self._keys.append(self._key(name))
        return self._keys[-1]

    def _key(self, name: str) -> str:
        return f"lastgood-dcp/{self.id.hex()}/{name}"

    def _who(self, rank: int) -> str:
        key = self._key(f"who/{rank}")
        return f" ({self._store.get(key).decode()})" if self._store.check([key]) else ""


def _ranks(numbers: list[int]) -> str:
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers[:8]))}{more}"


def _beat(store: Any, key: str, every_s: float, over: threading.Event) -> None:
    """Show that this process lives, until a save or load is over."""
    with contextlib.suppress(Exception):
        while not over.wait(every_s):
            store.add(key, 1)


def _slice_s(deadline: float) -> float:
    return min(_MOST_WAIT_S, max(0.001, deadline - time.monotonic()))


def _appears(store: Any, keys: list[str], wait_s: float) -> bool:
    """Whether all the keys are there, as soon as they are; False after `wait_s`."""
    if not keys:
        return True
    try:
        store.wait(keys, timedelta(seconds=wait_s))
    except dist.DistNetworkError:
        raise
    except RuntimeError:  # each kind of store has its own for the time being over
        return bool(store.check(keys))  # raises what is wrong, if it was not the time
    return True


@contextlib.contextmanager
def _store_errors() -> Iterator[None]:
    """A store that does not answer has lost its host, which is a rank, or the process that launched the ranks."""
    try:
        yield
    except (dist.DistError, ConnectionError) as error:
        raise CheckpointError(
            f"the process group's store does not answer: rank 0, or whatever process keeps it, has ended: {error}"
        ) from error


def _message(content: bytes) -> dict[str, Any]:
    """What another rank of the job wrote into the store."""
    found: dict[str, Any] = parse_json(content, "a message of another rank", most_bytes=MIB, error=CheckpointError)
    return found
