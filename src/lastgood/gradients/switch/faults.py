"""Faults on a switch's copies, drawn from a seed: what shadows must notice. The relay itself is never touched."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields

from lastgood.errors import ConfigError
from lastgood.wire.records import Record, RecordKind

__all__ = ["CopyFaults", "FaultPlan", "Faulty", "parse_faults"]


_LONGEST_DELAY_S = 3600.0


@dataclass(frozen=True)
class FaultPlan:
    """How often each fault befalls a copy (0 to 1 each, of one record each time)."""

    seed: int = 0
    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    """The record comes after the next one."""
    delay: float = 0.0
    delay_s: float = 0.1
    corrupt: float = 0.0
    """One bit, anywhere in header or payload, is another one."""
    truncate: float = 0.0
    """The connection ends inside the record."""


@dataclass(frozen=True)
class Faulty:
    """What to do with a copy: wait `delay_s`, send `content`, then end the connection if `cut`."""

    content: bytes
    delay_s: float = 0.0
    cut: bool = False


def parse_faults(text: str) -> FaultPlan:
    """Read ``loss=0.01,corrupt=0.001,seed=7``. Raises ConfigError for unknown names and numbers out of range."""
    known = {field.name for field in fields(FaultPlan)}
    values: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        try:
            values[name] = int(value) if name == "seed" else float(value)
        except ValueError:
            equals = ""
        if not equals or name not in known:
            raise ConfigError(f"not a fault: {part!r} (NAME=NUMBER, of {', '.join(sorted(known))})")
        if name == "delay_s" and not 0 <= values[name] <= _LONGEST_DELAY_S:
            raise ConfigError(f"delay_s is from 0 to {_LONGEST_DELAY_S:g} seconds, not {value}")
        if name not in ("seed", "delay_s") and not 0 <= values[name] <= 1:
            raise ConfigError(f"{name} is how often, from 0 to 1, not {value}")
    return FaultPlan(**values)  # type: ignore[arg-type] # the seed was read as a whole number


class CopyFaults:
    """The faults of one stream of copies: the same for the same plan, stream and records."""

    def __init__(self, plan: FaultPlan, stream: str) -> None:
        self._plan = plan
        self._random = random.Random(f"{plan.seed} {stream}")
        self._held: bytes | None = None
        self.count = 0
        """Faults so far."""

    def befall(self, record: Record, content: bytes) -> Iterator[Faulty]:
        """What becomes of a copy. Ends of iteration are spared: a full queue does not drop them either."""
        if record.kind is RecordKind.END:
            yield Faulty(content)
            return
        plan = self._plan
        if self._hits(plan.loss):
            return
        if self._held is None and self._hits(plan.reorder):
            self._held = content
            return
        delay_s = plan.delay_s if self._hits(plan.delay) else 0.0
        if self._hits(plan.truncate):
            yield Faulty(content[: self._random.randrange(len(content))], delay_s, cut=True)
            return
        if self._hits(plan.corrupt):
            changed = bytearray(content)
            changed[self._random.randrange(len(changed))] ^= 1 << self._random.randrange(8)
            content = bytes(changed)
        yield Faulty(content, delay_s)
        if self._hits(plan.duplicate):
            yield Faulty(content)
        if self._held is not None:
            held, self._held = self._held, None
            yield Faulty(held)

    def _hits(self, rate: float) -> bool:
        hit = self._random.random() < rate
        self.count += hit
        return hit
