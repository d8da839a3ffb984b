"""DeepSpeed hostfiles: which hosts a job may use, and how many processes each takes.

One host a line, ``NAME slots=N``; blank lines and comments (``#``, on a line of their own or after an entry) mean
nothing. What is accepted here, DeepSpeed's launcher reads the same way (deepspeed/launcher/runner.py). It is more
lenient: anything may follow the number there, and zero slots are a host; here both are errors, since they are slips of
the pen.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from lastgood.errors import ConfigError
from lastgood.files import storage_errors, write_atomically

__all__ = [
    "MAX_HOSTS",
    "MAX_SLOTS",
    "Host",
    "Hostfile",
    "check_host_name",
    "parse_hostfile",
    "read_hostfile",
    "render_hostfile",
    "write_hostfile",
]

MAX_HOSTS = 4096
MAX_SLOTS = 1024
_MAX_FILE_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
_ENTRY = re.compile(r"(?P<name>\S+)[ \t]+slots=(?P<slots>[0-9]{1,9})[ \t]*(?:#.*)?")
_EXAMPLE = "write one host a line, as in: worker-1 slots=4"


@dataclass(frozen=True)
class Host:
    """One host: its name or address, the processes it takes, and its line in the file (from 1; not compared)."""

    name: str
    slots: int
    line: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Hostfile:
    """Hosts in the file's order, which is the order of ranks; `origin` names the file in messages (not compared)."""

    hosts: tuple[Host, ...]
    origin: str = field(default="", compare=False)

    @property
    def names(self) -> tuple[str, ...]:
        """The hosts' names, in order."""
        return tuple(host.name for host in self.hosts)

    @property
    def slots(self) -> int:
        """The slots of all hosts: the largest world size."""
        return sum(host.slots for host in self.hosts)


def check_host_name(name: str) -> str | None:
    """Why `name` cannot be a host's (None if it can): ssh would take a dash for an option, a shell other characters."""
    if _NAME.fullmatch(name):
        return None
    if ":" in name and "%" not in name:
        try:
            ipaddress.IPv6Address(name)
        except ValueError:
            pass
        else:
            return None
    if name.startswith("-"):
        return "a name cannot begin with a dash"
    if "@" in name:
        return "a user belongs into the ssh configuration (User ...), not into a hostfile"
    return "a name has up to 253 letters, digits, dots, dashes and underscores, or is an address"


def parse_hostfile(text: str, origin: str = "hostfile") -> Hostfile:
    """Read a hostfile's text. `origin` names it in messages.

    Raises ConfigError, beginning with ``ORIGIN:LINE:``, for what is not an entry, a host that is named twice (also with
    other capitals), slots outside 1 to `MAX_SLOTS`, no host at all, and a file that is too long.
    """
    hosts: list[Host] = []
    seen: dict[str, int] = {}
    if len(text) > _MAX_FILE_BYTES:
        raise _too_long(origin, text.count("\n", 0, _MAX_FILE_BYTES) + 1)
    lines = text.split("\n")
    for number, raw in enumerate(lines, start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        found = _ENTRY.fullmatch(line)
        where = f"{origin}:{number}:"
        if found is None:
            raise ConfigError(f"{where} not a host's entry: {line[:80]!r}; {_EXAMPLE}")
        name, slots = found["name"], int(found["slots"])
        fault = check_host_name(name)
        if fault is not None:
            raise ConfigError(f"{where} not a host's name: {name[:80]!r}: {fault}")
        if not 1 <= slots <= MAX_SLOTS:
            raise ConfigError(f"{where} {name} has {slots} slots; give it 1 to {MAX_SLOTS}, or remove the line")
        earlier = seen.setdefault(name.lower(), number)
        if earlier != number:
            raise ConfigError(f"{where} {name} is already on line {earlier}; write one line with all its slots")
        if len(hosts) == MAX_HOSTS:
            raise ConfigError(f"{where} more than {MAX_HOSTS} hosts; split the file")
        hosts.append(Host(name, slots, number))
    if not hosts:
        raise ConfigError(f"{origin}:{len(lines)}: there is no host in this file; {_EXAMPLE}")
    return Hostfile(tuple(hosts), origin)


def read_hostfile(path: Path) -> Hostfile:
    """Read a hostfile. Raises ConfigError as `parse_hostfile`, and where it cannot be read or is no UTF-8 text."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot read this hostfile: {error.strerror}; `lastgood hosts make` writes one"
        ) from error
    if len(content) > _MAX_FILE_BYTES:
        raise _too_long(str(path), content.count(b"\n") + 1)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text: {error.reason}; save the file as plain text") from error
    return parse_hostfile(text, str(path))


def render_hostfile(hosts: Iterable[Host], comment: str = "") -> str:
    """Write hosts as a hostfile's text, below `comment`, which may have several lines."""
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    lines += [f"{host.name} slots={host.slots}" for host in hosts]
    return "".join(f"{line}\n" for line in lines)


def write_hostfile(path: Path, hosts: Iterable[Host], comment: str = "") -> Hostfile:
    """Check the hosts, write them to `path` complete or not at all, and return them as they will be read.

    Raises ConfigError for hosts that no hostfile can hold, StorageError if the file cannot be written.
    """
    hosts = tuple(hosts)
    for host in hosts:
        fault = check_host_name(host.name)
        if fault is not None:
            raise ConfigError(f"{path}: not a host's name: {host.name[:80]!r}: {fault}")
    text = render_hostfile(hosts, comment)
    made = parse_hostfile(text, str(path))
    with storage_errors(path, "writing a hostfile", len(text)):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode(), mode=None)
    return made


def _too_long(origin: str, line: int) -> ConfigError:
    return ConfigError(f"{origin}:{line}: this file is longer than {_MAX_FILE_BYTES >> 20} MiB; it is no hostfile")
