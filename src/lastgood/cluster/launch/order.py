"""What a launch tells each of its ranks: one word over standard input or in a private file, never a command line."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Literal, get_args

from pydantic import ConfigDict, Field, RootModel

from lastgood.errors import ConfigError, LaunchError
from lastgood.text import parse_model
from lastgood.wire.frames import proof

__all__ = [
    "HOWS",
    "MAX_MESSAGE_BYTES",
    "MAX_TICKET_BYTES",
    "TICKET_FILE",
    "How",
    "Ticket",
    "check_env",
    "is_nonce",
    "launch_proof",
    "rank_log",
]

How = Literal["torchrun", "ssh", "deepspeed", "openmpi", "srun"]
"""What starts the ranks; `ssh` nothing else, `openmpi` DeepSpeed's launcher as well, with mpirun in place of pdsh."""
HOWS: tuple[How, ...] = get_args(How)

MAX_MESSAGE_BYTES = 64 << 10
"""Of one line between a rank and its launch."""
MAX_TICKET_BYTES = 90 << 10
TICKET_FILE = "/tmp/lastgood-ticket-"
"""Begins the name of a ticket's file on a host, for launchers that leave ranks no standard input. Ranks remove it."""
_NONCE = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_Seconds = Annotated[float, Field(gt=0, le=1e9)]


@dataclass(frozen=True)
class Ticket:
    """A rank's orders. Only this user can read them on their way: `token` and `env` may be secrets.

    What came from outside is checked by `decode`.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    token: Annotated[str, Field(min_length=1)] = field(repr=False)
    addresses: list[str]
    """Where the launch may be reached, the likeliest first."""
    port: Annotated[int, Field(ge=1, le=65535)]
    how: How
    argv: Annotated[list[str], Field(min_length=1)]
    cwd: str
    env: dict[str, str] = field(repr=False)
    logs: str
    start_s: _Seconds
    """How long a rank waits for the launch and for the other ranks."""
    timeout_s: _Seconds
    """How long the program may run."""
    grace_s: Annotated[float, Field(ge=0, le=1e9)]
    """From SIGTERM to SIGKILL."""

    def encode(self) -> str:
        """One word of letters, digits, dash, underscore and equals sign. Raises ConfigError if it grows too long."""
        word = base64.urlsafe_b64encode(json.dumps(asdict(self)).encode()).decode()
        if len(word) > MAX_TICKET_BYTES:
            raise ConfigError(
                f"program and environment are {len(word) >> 10} KiB, encoded; at most {MAX_TICKET_BYTES >> 10} KiB "
                "can be sent: put the rest into a file that every host has"
            )
        return word

    @classmethod
    def decode(cls, word: str) -> Ticket:
        """The reverse of `encode`. Raises LaunchError for anything else; its text does not show the ticket."""
        what = "not a ticket of `lastgood launch`"
        try:
            content = base64.b64decode(word.encode(), altchars=b"-_", validate=True)
        except ValueError as error:
            raise LaunchError(f"{what}: {error}") from error
        return parse_model(RootModel[Ticket], content, what, most_bytes=MAX_TICKET_BYTES, error=LaunchError).root


def launch_proof(token: str, side: str, rank_nonce: str, board_nonce: str) -> str:
    """What shows that `side` ("rank" or "launch") knows the token, for one connection: 64 hexadecimal digits.

    The rank proves first: a stranger who connects is shown nothing with which to try tokens.
    """
    return proof(token.encode(), side.encode(), rank_nonce.encode(), board_nonce.encode()).hex()


def is_nonce(value: object) -> bool:
    """Whether `value` is what a side may give as its nonce."""
    return isinstance(value, str) and _NONCE.fullmatch(value) is not None


def rank_log(logs: str, rank: int) -> str:
    """The log of a rank, as ``LOGS/rank-00003.log``."""
    return f"{logs.rstrip('/')}/rank-{rank:05d}.log"


def check_env(env: Mapping[str, str]) -> None:
    """Raises ConfigError for what cannot travel: odd names, and values with line ends or NUL bytes."""
    for name, value in env.items():
        if not _NAME.fullmatch(name):
            raise ConfigError(f"--env: not the name of an environment variable: {name[:80]!r}")
        if any(sign in value for sign in "\n\r\0"):
            raise ConfigError(f"--env {name}: a value has no line ends and no NUL bytes; put it into a file")
