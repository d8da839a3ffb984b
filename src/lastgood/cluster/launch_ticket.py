"""What a launch tells each of its ranks: one word on the command line, which every launcher passes on unharmed."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal, get_args

from lastgood.errors import ConfigError, LaunchError

__all__ = ["HOWS", "MAX_MESSAGE_BYTES", "How", "Ticket", "check_env", "greeting", "rank_log"]

How = Literal["torchrun", "ssh", "deepspeed", "openmpi", "srun"]
"""What starts the ranks; `ssh` nothing else, `openmpi` DeepSpeed's launcher as well, with mpirun in place of pdsh."""
HOWS: tuple[How, ...] = get_args(How)

MAX_MESSAGE_BYTES = 64 << 10
"""Of one line between a rank and its launch."""
_MAX_TICKET_BYTES = 90 << 10
"""Linux takes 128 KiB in one argument, and Remote sends a whole command as one."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Ticket:
    """A rank's orders. It can be read in the host's list of processes: `token` keeps strangers apart, not enemies."""

    token: str
    addresses: list[str]
    """Where the launch may be reached, the likeliest first."""
    port: int
    how: How
    argv: list[str]
    cwd: str
    env: dict[str, str]
    logs: str
    start_s: float
    """How long a rank waits for the launch and for the other ranks."""
    timeout_s: float
    """How long the program may run."""
    grace_s: float
    """From SIGTERM to SIGKILL."""

    def encode(self) -> str:
        """One word of letters, digits, dash, underscore and equals sign. Raises ConfigError if it grows too long."""
        word = base64.urlsafe_b64encode(json.dumps(asdict(self)).encode()).decode()
        if len(word) > _MAX_TICKET_BYTES:
            raise ConfigError(
                f"program and environment are {len(word) >> 10} KiB, encoded; at most {_MAX_TICKET_BYTES >> 10} KiB "
                "can be sent: put the rest into a file that every host has"
            )
        return word

    @classmethod
    def decode(cls, word: str) -> Ticket:
        """The reverse of `encode`. Raises LaunchError for anything else."""
        try:
            return cls(**json.loads(base64.urlsafe_b64decode(word.encode())))
        except (ValueError, TypeError, binascii.Error) as error:
            raise LaunchError(f"not a ticket of `lastgood launch`: {word[:40]!r}: {error}") from error


def greeting(token: str) -> str:
    """What a launch says first, so that a rank tells no stranger at an old address its token."""
    return hashlib.sha256(f"lastgood launch {token}".encode()).hexdigest()


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
