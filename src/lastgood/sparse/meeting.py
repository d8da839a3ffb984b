"""How the ranks of an exchange find each other, and what they must have in common before they begin.

Through the store of torch.distributed each rank says where it listens, and rank 0 makes up the job's id and its token.
Once the ring is closed each rank's description goes around it, so that all ranks see the same ones and come to the same
verdict: all begin, or all name the rank that differs, and in what.
"""

from __future__ import annotations

import datetime
import errno
import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lastgood.errors import CheckpointError, ConfigError, CorruptCheckpoint, HostError, MismatchError, WaitTimeout
from lastgood.text import parse_json
from lastgood.tokens import new_token
from lastgood.wire.ring_link import Hello, Link, connect_ring, listen_ring
from lastgood.world import world_of_torch

__all__ = ["PROTOCOL", "SPARSE_GREETING", "Place", "Setting", "about", "find_place", "find_place_in", "meet"]

SPARSE_GREETING = b"lastgood sparse 1\n"
"""Its digit changes only if the proof or the hello does."""
PROTOCOL = 1
"""Version of all that follows the hello; each rank says its own in the roll call, so that others can be named."""
_LAYOUT = hashlib.sha256(b"lastgood sparse exchange").hexdigest()
"""In the hello, where a ring of gradients has the digest of its layout: one never takes the other for its own."""
_MOST_SETTINGS = 64
_MOST_ANSWER_BYTES = 4096
_POLL_S = 0.1

Setting = str | int | float | bool | None


@dataclass(frozen=True)
class Place:
    """A rank's place in a ring that is still to be closed. `listener` is the exchange's then."""

    rank: int
    ranks: int
    job: str
    """32 hex digits."""
    incarnation: int
    token: bytes
    listener: socket.socket
    next_address: str
    """HOST:PORT of the next rank."""


def about(layers: Sequence[int | Sequence[int]], settings: Mapping[str, Setting]) -> dict[str, Setting]:
    """What all ranks must have in common: the elements of each layer, or of each of its tensors, and settings by name.

    Raises ConfigError for settings that are no plain values.
    """
    if len(settings) > _MOST_SETTINGS or not all(
        isinstance(name, str) and len(f"{name}{value}") < 256 and isinstance(value, str | int | float | None)
        for name, value in settings.items()
    ):
        raise ConfigError(f"settings of an exchange are up to {_MOST_SETTINGS} short names with plain values")
    groups = [(one,) if isinstance(one, int) else tuple(one) for one in layers]
    digest = hashlib.sha256(",".join("+".join(map(str, group)) for group in groups).encode()).hexdigest()
    return {
        "protocol": PROTOCOL,
        "layers": len(layers),
        "elements": sum(map(sum, groups)),
        "layout": digest,
        **settings,
    }


# -- where everybody is ------------------------------------------------------------------------------------------------


def find_place(timeout_s: float, host: str | None = None) -> Place | None:
    """By torch.distributed, whose ranks must all call this; None if there is only one rank.

    `host` is this machine's address for the others, if it is not the one by which it reaches rank 0. Raises as
    `find_place_in`.
    """
    rank, ranks = world_of_torch()
    if ranks == 1:
        return None
    from torch.distributed.distributed_c10d import _get_default_store

    return find_place_in(_get_default_store(), rank, ranks, timeout_s, host or _own_host(rank))


def find_place_in(store: Any, rank: int, ranks: int, timeout_s: float, host: str) -> Place:
    """By any store of torch.distributed that all ranks share.

    Raises WaitTimeout, which names ranks that do not come, and HostError on all ranks if one cannot listen.
    """
    from torch.distributed.distributed_c10d import PrefixStore

    try:
        number = PrefixStore("lastgood/sparse", store).add(f"made/{rank}", 1)
        shared = PrefixStore(f"lastgood/sparse/{number}", store)
        try:
            listener = _listen(host)
        except HostError as error:
            shared.set(str(rank), json.dumps({"error": f"rank {rank}: {error}"}))
            raise
        try:
            port = listener.getsockname()[1]
            address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            if rank == 0:
                shared.set("job", json.dumps({"job": secrets.token_hex(16), "token": new_token()}))
            shared.set(str(rank), json.dumps({"address": address}))
            _wait_for_all(shared, ranks, timeout_s)
            answers = [_answer(shared, str(other)) for other in range(ranks)]
            errors = [answer["error"] for answer in answers if "error" in answer]
            if errors:
                raise HostError("; ".join(errors))
            job = _answer(shared, "job")
            next_address = answers[(rank + 1) % ranks]["address"]
            return Place(rank, ranks, job["job"], number, job["token"].encode(), listener, next_address)
        except BaseException:
            listener.close()
            raise
    except (RuntimeError, ValueError, KeyError, AttributeError) as error:  # the store's own, or others put things there
        raise CheckpointError(f"rank {rank}: torch.distributed's store fails, so ranks cannot meet: {error}") from error


def _wait_for_all(store: Any, ranks: int, timeout_s: float) -> None:
    """Raise WaitTimeout, naming those that are missing, unless all ranks report in time."""
    deadline = time.monotonic() + timeout_s
    missing = [str(rank) for rank in range(ranks)]
    while missing := [rank for rank in missing if not store.check([rank])]:
        if time.monotonic() > deadline:
            raise WaitTimeout(f"waited {timeout_s:g} s for rank {', '.join(missing)} to begin its exchange")
        time.sleep(_POLL_S)
    store.wait(["job"], datetime.timedelta(seconds=max(1.0, deadline - time.monotonic())))


def _answer(store: Any, key: str) -> dict[str, str]:
    content = parse_json(bytes(store.get(key)), f"what rank {key} says", most_bytes=_MOST_ANSWER_BYTES)
    if not isinstance(content, dict) or not all(isinstance(value, str) for value in content.values()):
        raise CorruptCheckpoint(f"torch.distributed's store holds something else under {key} than ranks put there")
    return content


def _own_host(rank: int) -> str:
    """The address by which this machine reaches rank 0; rank 0's own is the one that all ranks know it by."""
    master = os.environ.get("MASTER_ADDR") or socket.gethostname()
    if rank == 0:
        return master
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # of datagrams: nothing is sent
            return str(probe.getsockname()[0])
    except OSError as error:
        raise HostError(f"this machine finds no way to rank 0 at {master} (MASTER_ADDR): {error}") from error


def _listen(host: str) -> socket.socket:
    """On `host`, or on all addresses if its name is none of this machine's (as with address translation)."""
    try:
        return listen_ring(host)
    except HostError as error:
        cause = error.__cause__
        if isinstance(cause, socket.gaierror) or getattr(cause, "errno", None) == errno.EADDRNOTAVAIL:
            return listen_ring("")
        raise


# -- the ring ----------------------------------------------------------------------------------------------------------


def meet(place: Place, described: Mapping[str, Setting], timeout_s: float) -> tuple[Link, Link, list[str]]:
    """Close the ring; returns the links to the previous and the next rank, and each rank's name for messages.

    Raises what `connect_ring` does, and MismatchError on all ranks if one differs in `described`, naming it.
    """
    host = os.uname().nodename
    own = Hello(place.job, place.incarnation, place.rank, place.ranks, _LAYOUT, host)
    with place.listener:
        links = connect_ring(own, place.listener, place.next_address, place.token, timeout_s, SPARSE_GREETING)
    try:
        names, others = _call_roll(place, host, described, *links)
        _compare(place.rank, described, names, others)
    except BaseException:
        for link in links:
            link.wire.close()
        raise
    return *links, names


def _call_roll(
    place: Place, host: str, described: Mapping[str, Setting], previous: Link, following: Link
) -> tuple[list[str], list[dict[str, Any]]]:
    names = [""] * place.ranks
    found: list[dict[str, Any]] = [{}] * place.ranks
    rank = place.rank
    said: dict[str, Any] = {"kind": "sparse", "host": host, "about": dict(described)}
    while not names[rank]:
        names[rank], found[rank] = f"rank {rank} on {said['host']}", said["about"]
        rank = (rank - 1) % place.ranks
        if rank != place.rank:
            following.wire.send_message(**said)
            said = _check_description(previous.wire.receive_message(f"what rank {rank} says of itself"), previous.name)
    return names, found


def _check_description(content: dict[str, Any], other: str) -> dict[str, Any]:
    described, host = content.get("about"), content.get("host")
    if content.get("kind") != "sparse" or not isinstance(described, dict) or not isinstance(host, str):
        raise CorruptCheckpoint(f"{other} sent no description of a rank")
    if len(host) > 255 or not all(isinstance(value, str | int | float | None) for value in described.values()):
        raise CorruptCheckpoint(f"{other} sent a description that no rank gives of itself")
    return content


def _compare(rank: int, own: Mapping[str, Setting], names: list[str], others: list[dict[str, Any]]) -> None:
    differences = []
    for name, other in zip(names, others, strict=True):
        keys = [key for key in [*own, *sorted(other.keys() - own.keys())] if own.get(key, "") != other.get(key, "")]
        if "protocol" in keys:
            keys = ["protocol"]  # of another version, the rest may mean something else
        if keys:
            what = ", ".join(f"{key} is {_shown(other, key)} there and {_shown(own, key)} here" for key in keys)
            differences.append(f"{name}: {what}")
    if differences:
        raise MismatchError(
            f"this rank {rank} cannot exchange gradients with {'; '.join(differences)}; "
            "give all ranks the same model, options and version of Lastgood"
        )


def _shown(described: Mapping[str, Any], key: str) -> str:
    return f"{described[key]!r:.80}" if key in described else "not given"
