"""Which shadow a process is, and where it runs, from flags and from what launchers put into the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from lastgood.errors import ConfigError

__all__ = ["Place", "TrainerPlace", "find_place", "find_trainer", "own_cpus", "parse_cpus"]

_MOST = 1 << 16


@dataclass(frozen=True)
class Place:
    """A shadow's number, how many there are, and how many ranks train (None: any)."""

    shadow: int
    shadows: int
    trainers: int | None


@dataclass(frozen=True)
class TrainerPlace:
    """A rank that trains, how many there are, and how many shadows they have."""

    rank: int
    ranks: int
    shadows: int


def find_trainer(environment: Mapping[str, str]) -> TrainerPlace:
    """The same variables as seen by a rank that trains; NUM_STORAGE is 1 if nobody says more.

    If one launcher starts trainers and shadows (WORLD_SIZE is their sum), ranks below NUM_TRAINING train. Raises
    ConfigError for numbers that do not go together.
    """
    rank, world = _number(environment, "RANK") or 0, _number(environment, "WORLD_SIZE")
    shadows = _number(environment, "NUM_STORAGE")
    ranks = _first(_number(environment, "NUM_TRAINING"), world, 1)
    shadows = 1 if shadows is None else shadows
    assert ranks is not None
    if not ranks or not shadows:
        raise ConfigError("NUM_TRAINING, WORLD_SIZE and NUM_STORAGE are at least 1")
    if world not in (None, ranks, ranks + shadows):
        raise ConfigError(
            f"WORLD_SIZE is {world}, neither the {ranks} ranks that train (NUM_TRAINING) nor these and the {shadows} "
            "shadows (NUM_STORAGE)"
        )
    if rank >= ranks:
        raise ConfigError(f"RANK {rank} does not train: ranks 0 to {ranks - 1} do; a shadow is `lastgood shadow serve`")
    return TrainerPlace(rank, ranks, shadows)


def find_place(shadow: int | None, shadows: int | None, trainers: int | None, environment: Mapping[str, str]) -> Place:
    """Flags first, then NUM_STORAGE, NUM_TRAINING, RANK and WORLD_SIZE.

    If one launcher starts trainers and shadows (WORLD_SIZE is their sum), shadows are the ranks after the trainers;
    if it starts shadows alone, RANK is the shadow's number. Raises ConfigError for numbers that fit neither.
    """
    rank, world = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    shadows = _first(shadows, _number(environment, "NUM_STORAGE"))
    trainers = _first(trainers, _number(environment, "NUM_TRAINING"))
    if shadows is None:
        shadows = 1 if world is None else world - (trainers or 0) if trainers and world > trainers else world
    if shadow is None and rank is not None:
        together = trainers is not None and world == trainers + shadows
        shadow = rank - trainers if together and trainers is not None else rank
        if together and shadow < 0:
            raise ConfigError(
                f"RANK {rank} trains, since NUM_TRAINING is {trainers}; shadows are the {shadows} ranks after them"
            )
        if not together and world not in (None, shadows):
            raise ConfigError(
                f"WORLD_SIZE is {world}, neither the {shadows} shadows nor these and NUM_TRAINING ({trainers}) ranks; "
                "give --shadow and --shadows"
            )
    if shadow is None:
        if shadows != 1:
            raise ConfigError(f"which of {shadows} shadows is this one? give --shadow, or RANK")
        shadow = 0
    if not 0 <= shadow < shadows:
        raise ConfigError(f"shadow {shadow} of {shadows}: numbers are 0 to {shadows - 1}")
    return Place(shadow, shadows, trainers)


def own_cpus(text: str | None, environment: Mapping[str, str]) -> tuple[int, ...]:
    """CPUs of a list as 0-3,8 that this process is to stay on.

    If a launcher started several processes on this host (LOCAL_RANK, LOCAL_WORLD_SIZE), each gets its own part of
    the list. Raises ConfigError for what is no list, for CPUs that this process may not use, and for too few of them.
    """
    if not text:
        return ()
    cpus = parse_cpus(text)
    allowed = os.sched_getaffinity(0)
    strange = [cpu for cpu in cpus if cpu not in allowed]
    if strange:
        usable = ",".join(map(str, sorted(allowed)))
        raise ConfigError(f"CPU {strange[0]} of {text!r} is not one that this process may use ({usable})")
    rank, world = _number(environment, "LOCAL_RANK"), _number(environment, "LOCAL_WORLD_SIZE")
    if rank is None or world is None or world <= 1:
        return cpus
    if rank >= world or len(cpus) < world:
        raise ConfigError(
            f"{len(cpus)} CPUs in {text!r} for {world} processes on this host (LOCAL_RANK {rank}): name one for each "
            "at least, with --cpus"
        )
    return cpus[len(cpus) * rank // world : len(cpus) * (rank + 1) // world]


def parse_cpus(text: str) -> tuple[int, ...]:
    """The numbers of a list as 0-3,8, each once, in its order. Raises ConfigError for anything else."""
    found: dict[int, None] = {}
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(f"{text!r} is no list of CPUs; it is written as 0-3,8")
        begin, end = int(first), int(last if dash else first)
        if not begin <= end < _MOST:
            raise ConfigError(f"{text!r} is no list of CPUs: {part.strip()} is no range")
        found.update(dict.fromkeys(range(begin, end + 1)))
    return tuple(found)


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    if not text:
        return None
    if not text.isdecimal() or int(text) > _MOST:
        raise ConfigError(f"the environment's {name} is {text!r}, which is no number from 0 to {_MOST}")
    return int(text)
