"""Where a testbed keeps what it knows of itself, and how it is named.

All of it ends with the machine's uptime, as network namespaces do, so it is under /run: `RUN`/NAME, or another folder
that `RUN`/NAME.where names. Everything that a testbed makes in the kernel begins with ``lgtb-NAME``; that is how it is
found again when the process that made it was killed at any point.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import shutil
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from lastgood.cluster.hostfile import MAX_SLOTS
from lastgood.errors import ConfigError, StorageError
from lastgood.files import read_bounded, remove_temporary_files, storage_errors, write_atomically
from lastgood.locks import FileLock
from lastgood.models import FrozenModel
from lastgood.text import parse_model

__all__ = [
    "MAX_NODES",
    "PREFIX",
    "RUN",
    "BedState",
    "beds_lock",
    "check_bed_name",
    "choose_subnet",
    "forget",
    "load_state",
    "parse_delay",
    "parse_rate",
    "parse_rates",
    "prepare_folder",
    "rate_text",
    "save_state",
    "state_folder",
]

PREFIX = "lgtb-"
RUN = Path("/run/lastgood/testbed")
MAX_NODES = 64
_NAME = re.compile(r"[a-z][a-z0-9]{0,9}")
"""A network interface has up to 15 characters, the prefix takes five."""
_FOLDER = re.compile(r"/[A-Za-z0-9_./+@=,-]{0,255}")
"""ssh's configuration files have their own ideas of blanks, quotes and percent signs."""
_STATE_FILE = "testbed.json"
_MAX_STATE_BYTES = 64 << 10
_RATE = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)(kbit|mbit|gbit)")
_DELAY = re.compile(r"([0-9]{1,8}(?:\.[0-9]{1,3})?)(us|ms)")
_MOST_DELAY_US = 10**7
_RATE_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_CANDIDATES = [f"{first}.{third}.0/24" for first in ("10.219", "172.30", "192.168") for third in range(1, 251)]


def _of_256(subnet: ipaddress.IPv4Network) -> ipaddress.IPv4Network:
    if subnet.prefixlen != 24:
        raise ValueError("a testbed has a network of 256 addresses")
    return subnet


class BedState(FrozenModel):
    """A testbed's own record. `complete` is written last: without it, whoever made the testbed was ended meanwhile."""

    version: int = Field(default=1, ge=1, le=1)
    name: str
    nodes: int = Field(ge=1, le=MAX_NODES)
    slots: int = Field(ge=1, le=MAX_SLOTS)
    rate_bits_per_s: int | None = Field(ge=1, le=10**12)
    node_rates_bits_per_s: dict[str, int] = Field(default_factory=dict, max_length=MAX_NODES)
    """Of nodes whose links have another rate than the others."""
    node_delays_us: dict[str, int] = Field(default_factory=dict, max_length=MAX_NODES)
    """Of nodes whose links have a delay, each way."""
    subnet: Annotated[ipaddress.IPv4Network, AfterValidator(_of_256)]
    complete: bool = False

    @property
    def node_names(self) -> tuple[str, ...]:
        """vm1 to vmN."""
        return tuple(f"vm{number}" for number in range(1, self.nodes + 1))

    def address(self, node: str) -> str:
        """The address of a node."""
        return str(self.subnet[int(node.removeprefix("vm"))])

    def rate_of(self, node: str) -> int | None:
        """Bits per second of a node's link; None without a limit."""
        return self.node_rates_bits_per_s.get(node, self.rate_bits_per_s)

    @model_validator(mode="after")
    def _nodes_of_it(self) -> BedState:
        strange = {*self.node_rates_bits_per_s, *self.node_delays_us} - {*self.node_names}
        if strange or not all(1 <= rate <= 10**12 for rate in self.node_rates_bits_per_s.values()):
            raise ValueError(f"rates of nodes {sorted(strange)}, or out of bounds")
        if not all(1 <= delay <= _MOST_DELAY_US for delay in self.node_delays_us.values()):
            raise ValueError("a delay out of bounds")
        return self

    @property
    def host_address(self) -> str:
        """The address of the machine itself on the testbed's network."""
        return str(self.subnet[254])


def check_bed_name(name: str) -> None:
    """Raise ConfigError for a name that cannot be a testbed's."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"not a testbed's name: {name[:80]!r}; give up to 10 small letters and digits, a letter first"
        )


def parse_rate(text: str) -> int:
    """Bits per second of ``100mbit``, ``2.5gbit``: 1 Mbit/s to 100 Gbit/s. Raises ConfigError."""
    found = _RATE.fullmatch(text.strip().lower())
    rate = round(float(found[1]) * _RATE_UNITS[found[2]]) if found else 0
    if not 10**6 <= rate <= 10**11:
        raise ConfigError(f"not a rate: {text[:80]!r}; write it as in 100mbit or 2.5gbit, from 1mbit to 100gbit")
    return rate


def parse_rates(text: str) -> tuple[int | None, dict[str, int]]:
    """The rate of all nodes and those of single ones, of ``1gbit,vm2=50mbit``. Raises ConfigError."""
    every: int | None = None
    single: dict[str, int] = {}
    for word in text.split(","):
        node, equals, rate = word.strip().rpartition("=")
        if equals and node not in single:
            single[node] = parse_rate(rate)
        elif not equals and every is None:
            every = parse_rate(word)
        else:
            raise ConfigError(f"--rate {text[:80]}: a rate is given twice")
    return every, single


def parse_delay(text: str) -> int:
    """Microseconds of ``20ms``, ``500us``, up to 10 s; 0 for no delay. Raises ConfigError."""
    found = _DELAY.fullmatch(text.strip().lower())
    delay = round(float(found[1]) * (1000 if found[2] == "ms" else 1)) if found else -1
    if not 0 <= delay <= _MOST_DELAY_US:
        raise ConfigError(f"not a delay: {text[:80]!r}; 20ms and 500us are, and at most 10000ms")
    return delay


def rate_text(bits_per_s: int) -> str:
    """A rate as `parse_rate` reads it, to the bit, in the largest unit that can say it."""
    unit, factor = [(unit, factor) for unit, factor in _RATE_UNITS.items() if bits_per_s * 1000 % factor == 0][-1]
    return f"{bits_per_s / factor:.3f}".rstrip("0").rstrip(".") + unit


def beds_lock() -> FileLock:
    """One change to this machine's testbeds at a time: two at once could choose one subnet."""
    return FileLock(RUN / "lock", "this machine's testbeds", shared_with_forks=False)


def state_folder(name: str) -> Path | None:
    """The folder of a testbed that exists, or of which something may be left; None if nothing is known of it."""
    try:
        folder = Path(os.fsdecode(read_bounded(_where(name), 4096)))
    except FileNotFoundError:
        return None
    return folder if folder.is_absolute() else None


def prepare_folder(name: str, folder: Path | None) -> Path:
    """Note where the testbed's folder is, and make it.

    Raises ConfigError for a folder that holds anything but an old testbed: it is removed at the end.
    """
    chosen = (folder or RUN / name).absolute()
    if not _FOLDER.fullmatch(str(chosen)):
        raise ConfigError(f"--state {chosen}: ssh cannot use such a path; letters, digits and ._/+@=,- are fine")
    if chosen.exists() and not _is_ours(chosen) and (not chosen.is_dir() or any(chosen.iterdir())):
        raise ConfigError(f"--state {chosen}: there is something else; name a new folder, since `down` removes it")
    with storage_errors(chosen, "making the testbed's folder"):
        RUN.mkdir(parents=True, exist_ok=True)
        # First, so that `down` finds the folder whatever happens from here on.
        write_atomically(_where(name), os.fsencode(chosen))
        if _is_ours(chosen):
            shutil.rmtree(chosen)
        chosen.mkdir(parents=True, exist_ok=True)
        # Ours from here on, whatever is half written in it later.
        (chosen / _STATE_FILE).touch()
        chosen.chmod(0o700)
    return chosen


def save_state(folder: Path, state: BedState) -> None:
    """Write the record, complete or not at all. Raises StorageError."""
    path = folder / _STATE_FILE
    with storage_errors(path, "writing the testbed's record"):
        write_atomically(path, state.model_dump_json(indent=1).encode() + b"\n")


def load_state(name: str) -> tuple[Path, BedState] | None:
    """The folder and record of a testbed; None without one, or with one that cannot be read (`down` removes both)."""
    folder = state_folder(name)
    if folder is None:
        return None
    try:
        content = read_bounded(folder / _STATE_FILE, _MAX_STATE_BYTES)
        state = parse_model(BedState, content, str(folder / _STATE_FILE), most_bytes=_MAX_STATE_BYTES)
    except (OSError, StorageError, ConfigError):
        return None
    return (folder, state) if state.name == name else None


def forget(name: str) -> None:
    """Remove a testbed's folder and the note of it. Raises StorageError."""
    folder = state_folder(name)
    with storage_errors(folder or RUN, "removing the testbed's folder"):
        if folder is not None and _is_ours(folder):
            shutil.rmtree(folder)
        elif folder is not None:
            # Made, and its maker was ended before it put anything in. Anything else in it is not ours.
            with contextlib.suppress(OSError):
                folder.rmdir()
        # With what a kill left of its writing.
        for note in (_where(name), RUN / f"{name}.where.tmp"):
            note.unlink(missing_ok=True)
        remove_temporary_files(RUN)


def choose_subnet(routed: list[str]) -> ipaddress.IPv4Network:
    """A private /24 that overlaps none of the destinations that this machine routes (the default one does not count).

    Raises ConfigError if all are taken.
    """
    taken: list[ipaddress.IPv4Network] = []
    for text in routed:
        with contextlib.suppress(ValueError):
            network = ipaddress.ip_network(text, strict=False)
            if isinstance(network, ipaddress.IPv4Network) and network.prefixlen > 0:
                taken.append(network)
    for candidate in map(ipaddress.IPv4Network, _CANDIDATES):
        if not any(candidate.overlaps(network) for network in taken):
            return candidate
    raise ConfigError("every private network that a testbed would take is routed on this machine; see `ip route`")


def _where(name: str) -> Path:
    check_bed_name(name)
    return RUN / f"{name}.where"


def _is_ours(folder: Path) -> bool:
    return (folder / _STATE_FILE).is_file()
