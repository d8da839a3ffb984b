"""`lastgood hosts check`: are these hosts fit to train together, and if not, which one, why, and what to do.

A small program (host_agent.py) runs on every host at the end of an ssh connection and answers questions. What is asked
and what the answers mean are apart: `judge` takes answers and gives findings, and touches no host.
"""

from __future__ import annotations

import secrets
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lastgood.cluster.host_check import agent as host_agent
from lastgood.cluster.hostfile import Hostfile
from lastgood.cluster.ssh.conversation import Conversation
from lastgood.cluster.ssh.remote import Remote
from lastgood.errors import ConfigError, HostError
from lastgood.units import GIB, MIB, format_bytes, format_rate, format_seconds

__all__ = [
    "CheckOptions",
    "CheckReport",
    "ClockReading",
    "Finding",
    "HostFacts",
    "Rate",
    "check_hosts",
    "clock_text",
    "judge",
    "pairings",
    "read_clock",
]

_AGENT_S: Final = 1800
"""An agent whose connection was cut ends after this."""
_FACTS_S: Final = 90.0
_TIME_S: Final = 10.0
_LATEST_S: Final = 1e11
"""Of a clock, in seconds since 1970: some three thousand years."""
_CLOCK_READINGS: Final = 8
_PARALLEL: Final = 64
_TRANSFER_SLACK_S: Final = 40.0
"""Connecting, proving the token and the last bytes, on top of the transfer's own seconds."""
_SLOW_SHARE: Final = 0.25
_MAX_BANDWIDTH_HOSTS: Final = 128
"""All pairs of more would take longer than an agent lives."""
_T = TypeVar("_T")

Verdict = Literal["warning", "fault"]


@dataclass(frozen=True)
class CheckOptions:
    """What is asked of hosts. `ports` are first and last of the control ports; rates are bytes per second."""

    python: str = sys.executable
    folder: str = "."
    min_free_bytes: int = 4 * GIB
    ports: tuple[int, int] = (29500, 29509)
    clock_limit_s: float = 0.1
    bandwidth: bool = True
    transfer_bytes: int = 64 * MIB
    transfer_s: float = 2.0
    min_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        first, last = self.ports
        if not (1 <= first <= last <= 65535 and last - first < 1000):
            raise ConfigError(f"not a range of ports: {first}-{last}; give up to 1000 ports from 1 to 65535")
        if not (1 <= self.transfer_bytes <= 512 * MIB and 0 < self.transfer_s <= 20):
            raise ConfigError("a transfer has up to 512 MiB and 20 s")
        if not self.clock_limit_s > 0:
            raise ConfigError(f"the clocks' limit is more than 0 s, not {self.clock_limit_s}")


class HostFacts(BaseModel):
    """An agent's answer (host_agent.facts). `code` is a digest over its Lastgood's Python files, None without."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    hostname: str = Field(max_length=300)
    python: str = Field(max_length=50)
    executable: str = Field(max_length=4096)
    torch: str | None = Field(max_length=100)
    lastgood: str | None = Field(max_length=100)
    code: str | None = Field(max_length=64)
    revision: str | None = Field(max_length=64)
    dirty: bool | None
    folder: str = Field(max_length=4096)
    free_bytes: int | None = Field(ge=0)
    gpus: list[str] = Field(max_length=1024)
    busy_ports: list[int] = Field(max_length=1000)


@dataclass(frozen=True)
class ClockReading:
    """How far a host's clock is ahead of this machine's, and how far off that may be (half the best round trip)."""

    skew_s: float
    error_s: float


@dataclass(frozen=True)
class Rate:
    """A transfer from one host to another: bytes per second, or None and why it failed."""

    source: str
    target: str
    bytes_per_s: float | None
    error: str = ""


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be on `host`, and what to do about it."""

    verdict: Verdict
    host: str
    what: str
    found: str
    to_do: str


@dataclass(frozen=True)
class CheckReport:
    """All that was learnt, by host in the hostfile's order; hosts that were not reached have no facts."""

    names: tuple[str, ...]
    facts: Mapping[str, HostFacts]
    clocks: Mapping[str, ClockReading]
    rates: tuple[Rate, ...]
    findings: tuple[Finding, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Whether there is no fault; warnings may be."""
        return all(finding.verdict != "fault" for finding in self.findings)

    def slowest_from(self, host: str) -> Rate | None:
        """The slowest transfer that `host` sent."""
        sent = [rate for rate in self.rates if rate.source == host and rate.bytes_per_s is not None]
        return min(sent, key=lambda rate: rate.bytes_per_s or 0.0, default=None)

    def as_json(self) -> dict[str, Any]:
        """The report in JSON types."""
        hosts = {
            name: {
                "facts": self.facts[name].model_dump(mode="json") if name in self.facts else None,
                "clock": asdict(self.clocks[name]) if name in self.clocks else None,
            }
            for name in self.names
        }
        rates = [asdict(rate) for rate in self.rates]
        return {"ok": self.ok, "hosts": hosts, "rates": rates, "findings": [asdict(one) for one in self.findings]}


# -- asking --------------------------------------------------------------------------------------------------------


def check_hosts(
    hostfile: Hostfile, remote: Remote, options: CheckOptions, report: Callable[[str], None] = lambda _: None
) -> CheckReport:
    """Ask all hosts at the same time, then let them send to each other, each taking part in one transfer at a time.

    A host that is not reached, or fails on the way, is a finding and not an error. Raises ConfigError if there are
    too many hosts for all pairs.
    """
    if options.bandwidth and len(hostfile.hosts) > _MAX_BANDWIDTH_HOSTS:
        raise ConfigError(
            f"{hostfile.origin}: {len(hostfile.hosts)} hosts, and bandwidth is measured between up to "
            f"{_MAX_BANDWIDTH_HOSTS}; leave it out with --no-bandwidth"
        )
    failures: dict[str, str] = {}
    argv = [options.python, "-c", host_agent.source(), str(_AGENT_S)]
    with ExitStack() as opened:
        pool = opened.enter_context(ThreadPoolExecutor(max_workers=min(_PARALLEL, len(hostfile.hosts))))
        talks: dict[str, Conversation] = {}
        opened.callback(lambda: list(pool.map(Conversation.close, talks.values())))
        for name in hostfile.names:
            talks[name] = Conversation(remote, name, argv)

        def question(name: str) -> tuple[HostFacts, ClockReading] | HostError:
            try:
                return _ask_facts(talks[name], options), read_clock(talks[name])
            except HostError as error:
                return error

        report(f"asking {len(talks)} hosts")
        facts: dict[str, HostFacts] = {}
        clocks: dict[str, ClockReading] = {}
        for name, answer in zip(hostfile.names, pool.map(question, hostfile.names), strict=True):
            if isinstance(answer, HostError):
                failures[name] = str(answer)
            else:
                facts[name], clocks[name] = answer
        rates: list[Rate] = []
        if options.bandwidth and len(facts) > 1:
            rounds = list(pairings(list(facts)))
            report(f"bandwidth between {len(facts)} hosts, {len(rounds)} rounds of up to {2 * options.transfer_s:g} s")
            for pairs in rounds:
                for done in pool.map(lambda pair: _measure_pair(talks, pair, options), pairs):
                    rates += done
    learnt = CheckReport(hostfile.names, facts, clocks, tuple(rates))
    ours = host_agent.lastgood_facts()
    findings = judge(hostfile, learnt, failures, ours["code"], options)
    return CheckReport(hostfile.names, facts, clocks, tuple(rates), tuple(findings))


def _ask_facts(talk: Conversation, options: CheckOptions) -> HostFacts:
    first, last = options.ports
    answer = talk.ask({"do": "facts", "folder": options.folder, "ports": list(range(first, last + 1))}, _FACTS_S)
    try:
        return HostFacts.model_validate(answer)
    except ValidationError as error:
        raise HostError(f"{talk.host}: its facts make no sense: {error.errors()[0]['msg']}") from error


def read_clock(talk: Conversation, now: Callable[[], float] = time.time) -> ClockReading:
    """Compare clocks as NTP does: of several readings, the one with the shortest round trip, taken at its middle."""
    best: ClockReading | None = None
    for _ in range(_CLOCK_READINGS):
        # Elapsed by the monotonic clock: the other may be set meanwhile.
        sent_at, begin = now(), time.monotonic()
        theirs = talk.ask({"do": "time"}, _TIME_S).get("time_s")
        if not isinstance(theirs, (int, float)) or not 0 <= theirs <= _LATEST_S:
            raise HostError(f"{talk.host}: its clock says {str(theirs)[:40]}, which is no time")
        half_s = (time.monotonic() - begin) / 2
        if best is None or half_s < best.error_s:
            best = ClockReading(theirs - (sent_at + half_s), half_s)
    assert best is not None
    return best


def pairings(names: list[_T]) -> Iterator[list[tuple[_T, _T]]]:
    """Rounds in which each name meets one other, until all have met (a round-robin tournament, the circle method)."""
    seats: list[_T | None] = list(names)
    if len(seats) % 2:
        seats.append(None)
    half = len(seats) // 2
    for _ in range(len(seats) - 1):
        opposite = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield [(left, right) for left, right in opposite if left is not None and right is not None]
        seats[1:] = [seats[-1], *seats[1:-1]]


def _measure_pair(talks: Mapping[str, Conversation], pair: tuple[str, str], options: CheckOptions) -> list[Rate]:
    one, other = (talks[name] for name in pair)
    return [_measure(one, other, options), _measure(other, one, options)]


def _measure(source: Conversation, target: Conversation, options: CheckOptions) -> Rate:
    token, (first, last) = secrets.token_hex(16), options.ports
    limits = {"token": token, "seconds": options.transfer_s}
    try:
        listen = target.ask({"do": "listen", "ports": list(range(first, last + 1)), **limits}, _TIME_S)
        send = {"do": "send", "host": target.host, "port": listen["port"], "bytes": options.transfer_bytes, **limits}
        answer = source.ask(send, options.transfer_s + _TRANSFER_SLACK_S)
        return Rate(source.host, target.host, float(answer["bytes"]) / max(float(answer["seconds"]), 1e-9))
    except (HostError, KeyError, TypeError, ValueError) as error:
        return Rate(source.host, target.host, None, str(error))


# -- judging -------------------------------------------------------------------------------------------------------


def judge(
    hostfile: Hostfile, report: CheckReport, failures: Mapping[str, str], our_code: str | None, options: CheckOptions
) -> list[Finding]:
    """What is wrong with hosts, from their answers. `failures` are those of hosts that gave none.

    Code is compared with this machine's (`our_code`), which a job is started from; Python and torch with the first host
    that answered; GPUs with the slots.
    """
    findings = [Finding("fault", name, "ssh", _without(name, why), _to_do(why)) for name, why in failures.items()]
    reference = next(iter(report.facts.values()), None)
    any_gpu = any(facts.gpus for facts in report.facts.values())
    for host in hostfile.hosts:
        facts = report.facts.get(host.name)
        if facts is None or reference is None:
            continue
        clock = report.clocks.get(host.name)
        if clock is not None:
            findings += _judge_clock(host.name, clock, options)
        findings += _judge_software(host.name, facts, reference, our_code, options)
        findings += _judge_machine(host.name, host.slots, facts, any_gpu, options)
    findings += _judge_rates(report.rates, options)
    return findings


def _judge_clock(name: str, clock: ClockReading, options: CheckOptions) -> Iterator[Finding]:
    found = f"{clock.skew_s * 1e3:+.1f} ms (give or take {clock.error_s * 1e3:.1f} ms)"
    if abs(clock.skew_s) - clock.error_s > options.clock_limit_s:
        to_do = f"set it by NTP (Debian: apt-get install chrony); {options.clock_limit_s * 1e3:g} ms are allowed"
        yield Finding("fault", name, "clock", found, to_do)
    elif abs(clock.skew_s) + clock.error_s > options.clock_limit_s:
        yield Finding(
            "warning", name, "clock", found, "the connection is too slow to tell; look with `chronyc tracking`"
        )


def _judge_software(
    name: str, facts: HostFacts, reference: HostFacts, our_code: str | None, options: CheckOptions
) -> Iterator[Finding]:
    if facts.code is None:
        to_do = f"install it for {shlex.quote(options.python)}, or name its Python with --python"
        yield Finding("fault", name, "lastgood", "not installed", to_do)
    elif facts.code != our_code:
        changed = ", with changes" if facts.dirty else ""
        version, revision = facts.lastgood or "unknown", (facts.revision or "unknown")[:12]
        found = f"other code than here: version {version}, revision {revision}{changed}"
        yield Finding("fault", name, "lastgood", found, "bring it to this machine's revision and install again")
    if _minor(facts.python) != _minor(reference.python):
        found = f"{facts.python}, and {reference.python} on {reference.hostname}"
        yield Finding("fault", name, "Python", found, "use one version on all hosts (--python names the interpreter)")
    if facts.torch is None:
        yield Finding("fault", name, "torch", "not installed", "run bash install.sh there")
    elif facts.torch != reference.torch:
        found = f"{facts.torch}, and {reference.torch} on {reference.hostname}"
        yield Finding("fault", name, "torch", found, "install one version on all hosts (constraints.txt)")


def _judge_machine(name: str, slots: int, facts: HostFacts, any_gpu: bool, options: CheckOptions) -> Iterator[Finding]:
    if facts.free_bytes is None:
        yield Finding(
            "fault", name, "disk", f"there is no folder {facts.folder}", "make it, or name another with --folder"
        )
    elif facts.free_bytes < options.min_free_bytes:
        found = f"{format_bytes(facts.free_bytes)} free in {facts.folder}"
        to_do = f"free {format_bytes(options.min_free_bytes - facts.free_bytes)}, or name another with --folder"
        yield Finding("fault", name, "disk", found, to_do)
    gpus = len(facts.gpus)
    found = f"{gpus} GPUs, {slots} slots"
    if gpus < slots and any_gpu:
        yield Finding(
            "fault", name, "GPUs", found, "lower its slots in the hostfile, or see why nvidia-smi shows fewer"
        )
    elif gpus > slots:
        yield Finding("warning", name, "GPUs", found, "raise its slots in the hostfile to use them all")
    if facts.busy_ports:
        found = f"taken: {', '.join(map(str, facts.busy_ports[:10]))}"
        yield Finding(
            "fault", name, "ports", found, "end what listens there (`ss -ltnp`), or choose others with --ports"
        )


def _judge_rates(rates: Iterable[Rate], options: CheckOptions) -> Iterator[Finding]:
    rates = list(rates)
    known = [rate.bytes_per_s for rate in rates if rate.bytes_per_s is not None]
    median = statistics.median(known) if known else 0.0
    first, last = options.ports
    for rate in rates:
        what = f"network to {rate.target}"
        if rate.bytes_per_s is None:
            to_do = (
                f"let TCP ports {first} to {last} through the firewall between them; each must know the other's name"
            )
            yield Finding("fault", rate.source, what, _without(rate.source, rate.error), to_do)
        elif rate.bytes_per_s < options.min_bytes_per_s:
            to_do = f"see the link and its speed (`ethtool`); {format_rate(options.min_bytes_per_s)} was asked for"
            yield Finding("fault", rate.source, what, format_rate(rate.bytes_per_s), to_do)
        elif rate.bytes_per_s < _SLOW_SHARE * median:
            found = f"{format_rate(rate.bytes_per_s)}, and {format_rate(median)} in the median of all pairs"
            yield Finding(
                "warning", rate.source, what, found, "see the link and its speed (`ethtool`), and who else uses it"
            )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _without(name: str, message: str) -> str:
    return message.removeprefix(f"{name}: ").split("; ", 1)[0]


def _to_do(message: str) -> str:
    return message.partition("; ")[2] or "try `ssh` to it by hand"


def clock_text(clock: ClockReading) -> str:
    """A clock's reading for a table."""
    return f"{clock.skew_s * 1e3:+.1f} ms ± {format_seconds(clock.error_s)}"
