"""The network's part of the ceilings: TCP over loopback, and to a peer that runs `lastgood ceilings --serve-peer`."""

from __future__ import annotations

import os
import secrets
import selectors
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from lastgood.errors import LastgoodError
from lastgood.experiments.ceilings.network_peer import Direction, PeerClient
from lastgood.models import FrozenModel
from lastgood.ports import free_ports
from lastgood.text import parse_json
from lastgood.units import KIB, MIB

__all__ = [
    "LoopbackCeilings",
    "NetworkPlan",
    "NetworkPoint",
    "PeerCeilings",
    "iperf3_loopback",
    "measure_loopback",
    "measure_peer",
    "measure_points",
]

_START_TIMEOUT_S = 30.0
_SERVE_S = 120.0
_IPERF3_START_S = 3.0
_MOST_ANSWER_BYTES = 1 << 20


@dataclass(frozen=True)
class NetworkPlan:
    """How much to measure."""

    streams: tuple[int, ...] = (1, 2, 4)
    """Connections at once, each way."""
    message_bytes: tuple[int, ...] = (64 * KIB, MIB)
    directions: tuple[Direction, ...] = ("send",)
    """Loopback is the same both ways."""
    repetitions: int = 3
    pass_s: float = 0.15
    iperf3_s: int = 1
    """Seconds of the check by iperf3 on loopback, if it is installed; 0: no check."""

    @classmethod
    def quick(cls) -> NetworkPlan:
        """A short look at loopback, for tests and for `--quick`."""
        return cls(streams=(1, 2), message_bytes=(MIB,), repetitions=2, pass_s=0.05, iperf3_s=0)

    @classmethod
    def peer(cls, quick: bool = False) -> NetworkPlan:
        """A real network: each way and both at once; longer passes, because its connections start slowly."""
        if quick:
            return cls(streams=(1,), message_bytes=(MIB,), directions=("send", "receive", "both"), repetitions=2)
        return cls(streams=(1, 4), directions=("send", "receive", "both"), pass_s=0.4)


class NetworkPoint(FrozenModel):
    """One combination of direction, streams and message size."""

    direction: Direction
    """From this machine's side; ``both``: both at once, and rates are the sum."""
    streams: int
    message_bytes: int
    bytes_per_s: list[float]
    """One value per repetition, from the start to the arrival of the last byte."""
    median_bytes_per_s: float


class LoopbackCeilings(FrozenModel):
    """TCP between two processes of this machine: what one host's network stack moves, without any wire."""

    points: list[NetworkPoint]
    bytes_per_s: float
    """The best median."""
    iperf3_bytes_per_s: float | None
    """What iperf3 says of the same path, as a check; None if it is not installed."""


class PeerCeilings(FrozenModel):
    """TCP to and from one other machine."""

    address: str
    points: list[NetworkPoint]
    send_bytes_per_s: float
    """The best median of each direction."""
    receive_bytes_per_s: float
    both_bytes_per_s: float
    """Both ways at once, summed."""


def measure_loopback(plan: NetworkPlan) -> LoopbackCeilings:
    """Measure TCP over 127.0.0.1 against a process of our own, which ends with this call, or with this process."""
    points = measure_points(None, plan)
    return LoopbackCeilings(
        points=points,
        bytes_per_s=_best(points, "send"),
        iperf3_bytes_per_s=iperf3_loopback(plan.iperf3_s) if plan.iperf3_s else None,
    )


def measure_peer(host: str, port: int, token: str, plan: NetworkPlan) -> PeerCeilings:
    """Measure TCP to a machine that runs `lastgood ceilings --serve-peer` with the same token.

    Raises LastgoodError if it cannot be reached, refuses the token, or is busy measuring.
    """
    points = measure_points((host, port, token), plan)
    return PeerCeilings(
        address=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        points=points,
        send_bytes_per_s=_best(points, "send"),
        receive_bytes_per_s=_best(points, "receive"),
        both_bytes_per_s=_best(points, "both"),
    )


def measure_points(peer: tuple[str, int, str] | None, plan: NetworkPlan) -> list[NetworkPoint]:
    """All points of `plan`, to a peer (its host, port and token), or over loopback. Raises as `measure_peer`."""
    if peer is not None:
        return _measure(PeerClient(*peer), plan)
    token = secrets.token_hex(16)
    with _loopback_server(token) as port:
        return _measure(PeerClient("127.0.0.1", port, token), plan)


def _measure(client: PeerClient, plan: NetworkPlan) -> list[NetworkPoint]:
    """Repetitions go round over all combinations, so that a drift touches all of them alike."""
    combinations = [
        (direction, streams, size)
        for direction in plan.directions
        for streams in plan.streams
        for size in plan.message_bytes
    ]
    rates: dict[tuple[Direction, int, int], list[float]] = {combination: [] for combination in combinations}
    with client.session():
        for _ in range(plan.repetitions):
            for direction, streams, size in combinations:
                rates[direction, streams, size].append(client.measure(direction, streams, size, plan.pass_s))
    return [
        NetworkPoint(
            direction=direction,
            streams=streams,
            message_bytes=size,
            bytes_per_s=values,
            median_bytes_per_s=statistics.median(values),
        )
        for (direction, streams, size), values in rates.items()
    ]


def _best(points: list[NetworkPoint], direction: Direction) -> float:
    return max(point.median_bytes_per_s for point in points if point.direction == direction)


@contextmanager
def _loopback_server(token: str) -> Iterator[int]:
    """A second process on 127.0.0.1; gives its port."""
    program = (
        "import sys; from lastgood.experiments.ceilings.network_peer import serve_for_parent; "
        "serve_for_parent(int(sys.argv[1]), float(sys.argv[2]))"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(os.getpid()), str(_SERVE_S)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        with child.stdin, child.stdout:
            # One that is gone already takes no token; that it prints no port is found below.
            with suppress(BrokenPipeError):
                os.write(child.stdin.fileno(), f"{token}\n".encode())
            with selectors.DefaultSelector() as selector:
                selector.register(child.stdout, selectors.EVENT_READ)
                line = child.stdout.readline() if selector.select(_START_TIMEOUT_S) else b""
            if not line.strip().isdigit():
                raise LastgoodError(
                    f"loopback: the process that answers on 127.0.0.1 did not start within {_START_TIMEOUT_S:g} s; "
                    "its own message is above"
                )
            yield int(line)
    finally:
        child.kill()
        child.wait(_START_TIMEOUT_S)


def iperf3_loopback(seconds: int) -> float | None:
    """Bytes per second that iperf3 measures over 127.0.0.1, one stream; None if it is not installed or fails."""
    program = shutil.which("iperf3")
    if program is None:
        return None
    port = str(free_ports()[0])
    server = subprocess.Popen(
        [program, "--server", "--one-off", "--bind", "127.0.0.1", "--port", port],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    client = [program, "--client", "127.0.0.1", "--port", port, "--time", str(seconds), "--json"]
    limit_s = seconds + _START_TIMEOUT_S
    deadline = time.monotonic() + _IPERF3_START_S
    try:
        # A look at the port would use up the one test that the server answers, so its first refusals are retried.
        while time.monotonic() < deadline and server.poll() is None:
            done = subprocess.run(client, capture_output=True, text=True, timeout=limit_s, check=False)
            # With --json some versions exit with 0 even when they could not connect.
            found = parse_json(done.stdout or "{}", program, most_bytes=_MOST_ANSWER_BYTES, error=LastgoodError)
            if done.returncode == 0 and "error" not in found:
                return float(found["end"]["sum_received"]["bits_per_second"]) / 8
            time.sleep(0.05)
    except (LastgoodError, OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        # A cross-check that fails is no reason to lose the ceilings.
        return None
    finally:
        server.kill()
        server.wait(_START_TIMEOUT_S)
    return None
