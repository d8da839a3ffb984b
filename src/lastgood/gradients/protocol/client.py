"""Asking shadows: how they stand, the fence before a restore, and what they give back.

`fence` all shadows, `choose` the newest iteration that all of them hold, `fetch` tensors and `fetch_side` a rank's own
state. Nothing that is torn, or held by some shadows only, can be chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

from lastgood.errors import CheckpointError, CorruptCheckpoint, LastgoodError, MismatchError, NoCheckpoint
from lastgood.gradients.layout.entries import Entry, Saved, Side
from lastgood.gradients.protocol.connection import connect_shadow, expect
from lastgood.gradients.protocol.messages import (
    CHUNK_BYTES,
    Fence,
    Fetch,
    FetchSide,
    Hello,
    Message,
    Status,
    StatusAsked,
    Tensors,
)
from lastgood.gradients.protocol.payload import receive_stream

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Choice", "ShadowClient", "ask_all", "choose", "fence", "fetch", "fetch_side", "signs_of_loss"]

_MAX_SIDE_BYTES = 1 << 34
_MAX_TENSOR_BYTES = 1 << 44
_Answer = TypeVar("_Answer", bound=Message)
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Choice:
    """An iteration that all shadows hold."""

    source: Literal["memory", "durable"]
    saved: Saved

    @property
    def iteration(self) -> int:
        """Its number."""
        return self.saved.iteration

    @property
    def step(self) -> int:
        """The training's own number of the saved step."""
        return self.saved.step


class ShadowClient:
    """One connection to one shadow, for one thread at a time. Use it as a context manager.

    Every method raises CheckpointError if the shadow refuses (in its own words), closes, or breaks the protocol, and
    WaitTimeout if it does not answer.
    """

    def __init__(self, address: str, token: bytes, timeout_s: float, job: str | None = None) -> None:
        self.address = address
        self._wire, self.welcome = connect_shadow(address, token, Hello(role="asker", job=job), timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._wire.close()

    def status(self) -> Status:
        """How the shadow stands."""
        return self._ask(StatusAsked(), Status)

    def fence(self, incarnation: int) -> Status:
        """Begin an incarnation there: connections of older ones end."""
        return self._ask(Fence(epoch=incarnation), Status)

    def fetch(self, choice: Choice, incarnation: int, take: Callable[[Entry], memoryview | None]) -> int:
        """Receive all tensors of this shadow at the chosen iteration; return their bytes.

        `take` gives the memory that an entry's bytes go into, all of it, or None to drop them.
        """
        saved = choice.saved
        question = Fetch(epoch=incarnation, iteration=saved.iteration, made=saved.epoch, source=choice.source)
        answer = self._ask(question, Tensors)
        views: list[memoryview] = []
        for entry in answer.entries:
            view = take(entry)
            if view is None:
                views += _scratch(entry)
            elif len(view) == entry.nbytes:
                views.append(view)
            else:
                raise MismatchError(
                    f"{self._wire.other} gives {entry.nbytes} bytes for {entry.key} of parameter {entry.parameter}; "
                    f"there are {len(view)} here"
                )
        receive_stream(self._wire, saved.iteration, views, f"the tensors of iteration {saved.iteration}")
        return sum(entry.nbytes for entry in answer.entries)

    def fetch_side(self, choice: Choice, incarnation: int, rank: int) -> tuple[Side, bytearray]:
        """A rank's side record at the chosen iteration."""
        saved = choice.saved
        question = FetchSide(
            epoch=incarnation, iteration=saved.iteration, made=saved.epoch, rank=rank, source=choice.source
        )
        side = self._ask(question, Side)
        if side.nbytes > _MAX_SIDE_BYTES:
            raise CorruptCheckpoint(f"{self._wire.other} gives a side record of {side.nbytes} bytes")
        content = bytearray(side.nbytes)
        receive_stream(self._wire, saved.iteration, [memoryview(content)], f"the side record of rank {rank}")
        return side, content

    def _ask(self, question: Message, answer: type[_Answer]) -> _Answer:
        self._wire.send_message(**question.content())
        return expect(self._wire, answer, f"its answer to {question.kind}")


def ask_all(
    addresses: Sequence[str],
    token: bytes,
    timeout_s: float,
    question: Callable[[ShadowClient], _Result],
    job: str | None = None,
) -> list[_Result | LastgoodError]:
    """Put a question to all shadows in parallel: each one's answer, or what went wrong with it, in their order."""

    def one(address: str) -> _Result | LastgoodError:
        try:
            with ShadowClient(address, token, timeout_s, job) as client:
                return question(client)
        except LastgoodError as error:
            return error

    with ThreadPoolExecutor(max(1, len(addresses))) as pool:
        return list(pool.map(one, addresses))


def fence(addresses: Sequence[str], token: bytes, *, job: str, timeout_s: float) -> list[Status]:
    """Begin a new incarnation on all shadows, and say how they stand then; `Status.epoch` is the new incarnation.

    Raises CheckpointError, naming each shadow that cannot be reached or refuses; those that were fenced stay so, and a
    further call fences all again. MismatchError if they are not the shadows of one training, in their order.
    """
    before = _all_or_none(ask_all(addresses, token, timeout_s, ShadowClient.status, job), addresses)
    check_set(before, addresses)
    known = [status.epoch for status in before]
    known += [saved.epoch for status in before for saved in (*status.durable, *status.memory)]
    incarnation = max(known) + 1
    return _all_or_none(ask_all(addresses, token, timeout_s, lambda client: client.fence(incarnation), job), addresses)


def check_set(statuses: Sequence[Status], addresses: Sequence[str]) -> None:
    """Raises MismatchError if these are not all shadows of one set, in their order."""
    for place, (status, address) in enumerate(zip(statuses, addresses, strict=True)):
        if status.shadow != place or status.shadows != len(addresses):
            raise MismatchError(
                f"{address} is shadow {status.shadow} of {status.shadows}, and stands at place {place} of "
                f"{len(addresses)}; give all shadows, in their order"
            )


def choose(statuses: Sequence[Status], step: int | None = None) -> Choice:
    """The newest iteration that all shadows can give back, or the one of the training's `step`.

    From memory if it can be, since that is nearer. Raises NoCheckpoint, naming what each shadow holds.
    """
    found: list[Choice] = []
    for source in ("memory", "durable"):
        lists = [status.memory if source == "memory" else status.durable for status in statuses]
        common = set(lists[0]).intersection(*lists[1:]) if lists else set()
        found += [Choice(source, saved) for saved in common]
    layouts = {status.layout for status in statuses if status.layout is not None}
    if step is not None:
        found = [choice for choice in found if choice.step == step]
    if len(layouts) > 1:  # an incarnation may have ended before all had taken its layout; spills bring their own
        found = [choice for choice in found if choice.source == "durable"]
        if not found:
            raise NoCheckpoint("the shadows' memory is of different layouts, and no spill is held by all of them")
    if not found:
        held = "; ".join(f"shadow {status.shadow}: {describe(status)}" for status in statuses)
        wanted = "no iteration" if step is None else f"no iteration of step {step}"
        raise NoCheckpoint(f"{wanted} is held by all shadows ({held})")
    return max(found, key=lambda one: (one.saved.epoch, one.saved.iteration, one.source == "memory"))


def signs_of_loss(statuses: Sequence[Status]) -> list[str]:
    """Why shadows that hold nothing in common may have lost what they held; nothing if no step was ever complete.

    An incarnation that ends before its first step is complete leaves steps with some shadows, and none of these signs.
    """
    held = [saved.epoch for status in statuses for saved in status.memory]
    found = []
    for status in statuses:
        if status.promised is not None:
            found.append(f"shadow {status.shadow} knows that step {status.promised} was complete on all")
        elif status.durable:
            found.append(f"shadow {status.shadow} has spilled step {status.durable[0].step}")
        elif status.epoch < max(held, default=0):
            found.append(f"shadow {status.shadow} has been started again since others took what they hold")
    return found


def describe(status: Status) -> str:
    """What one shadow can give back, in words."""
    if status.layout is None:
        return "empty"
    memory = _names(status.memory) or "nothing"
    durable = _names(status.durable) or "nothing"
    return f"in memory {memory}, durable {durable}" + ("" if status.whole else ", buckets wait for seeds")


def fetch(
    addresses: Sequence[str],
    token: bytes,
    choice: Choice,
    *,
    job: str,
    incarnation: int,
    timeout_s: float,
    take: Callable[[Entry], memoryview | None],
) -> int:
    """Receive all tensors from all shadows in parallel; return their bytes. `take` is called from several threads.

    Raises CheckpointError, naming each shadow that failed; memory given by `take` then holds a mixture.
    """
    answers = ask_all(addresses, token, timeout_s, lambda client: client.fetch(choice, incarnation, take), job)
    return sum(_all_or_none(answers, addresses))


def fetch_side(
    addresses: Sequence[str], token: bytes, choice: Choice, *, job: str, incarnation: int, rank: int, timeout_s: float
) -> tuple[Side, bytearray]:
    """A rank's side record, from the shadow that keeps it. Raises CheckpointError."""
    with ShadowClient(addresses[rank % len(addresses)], token, timeout_s, job) as client:
        return client.fetch_side(choice, incarnation, rank)


def _names(held: Iterable[Saved]) -> str:
    return ", ".join(f"step {saved.step} (iteration {saved.iteration} of incarnation {saved.epoch})" for saved in held)


def _all_or_none(answers: Sequence[_Result | LastgoodError], addresses: Sequence[str]) -> list[_Result]:
    failures = [
        f"{address}: {answer}"
        for address, answer in zip(addresses, answers, strict=True)
        if isinstance(answer, LastgoodError)
    ]
    if failures:
        raise CheckpointError(
            f"{len(failures)} of {len(addresses)} shadows did not answer as they should: " + "; ".join(failures)
        )
    return [answer for answer in answers if not isinstance(answer, LastgoodError)]


def _scratch(entry: Entry) -> list[memoryview]:
    """Memory for bytes that nobody wants: the same again and again, since a shadow's chunks are no longer than this."""
    if entry.nbytes > _MAX_TENSOR_BYTES:
        raise CorruptCheckpoint(f"a shadow gives {entry.nbytes} bytes for {entry.key} of parameter {entry.parameter}")
    scratch = memoryview(bytearray(min(entry.nbytes, CHUNK_BYTES)))
    whole, rest = divmod(entry.nbytes, CHUNK_BYTES)
    return [scratch] * whole + ([scratch[:rest]] if rest else [])
