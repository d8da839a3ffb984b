"""Receiving gradient records with their checksums, against iperf3 on the same path with as many streams.

Both sides are two processes on this machine: over loopback, or with --namespaces (root) over a veth pair between two
network namespaces that this script makes and removes. iperf3 writes messages as long as our records.

`receive` is the receive path alone: one thread that receives into slots and checks every payload, from a sender that
repeats one payload, as iperf3 does. `recv` is one thread that reads the same stream into as much memory, without
checksums: iperf3 reads into one small buffer, which stays in the cache, and keeps nothing. `send and receive` has the
native sender too, one thread a stream, which reads memory as large as the bucket and takes the checksums. Where both
ends share the cores of one machine, as here, that work is taken from what the kernel has for the path.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import Comparison, Report, cannot, command_line, interleaved, main, say

from lastgood.ports import free_ports
from lastgood.units import MIB, format_bytes

GOAL = 0.9
BUCKET_BYTES = 32 * MIB
SIDES = Path(__file__).with_name("receive_sides.py")
START_S, GRACE_S = 30.0, 90.0


class Route:
    """Where the two ends run, and how they reach each other."""

    def __init__(self, name: str, host: str, receiver: list[str], sender: list[str]) -> None:
        self.name, self.host, self.receiver, self.sender = name, host, receiver, sender


@contextmanager
def veth() -> Iterator[Route]:
    """Two namespaces of this process's number and a veth pair between them."""
    near, far = (f"lgb{os.getpid()}{side}" for side in "ab")

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=START_S)

    try:
        for name in (near, far):
            ip("netns", "add", name)
        ip("link", "add", "lg0", "netns", near, "type", "veth", "peer", "name", "lg0", "netns", far)
        for name, address in ((near, "10.213.7.1/30"), (far, "10.213.7.2/30")):
            ip("-n", name, "address", "add", address, "dev", "lg0")
            ip("-n", name, "link", "set", "lg0", "up")
        yield Route("veth", "10.213.7.1", ["ip", "netns", "exec", near], ["ip", "netns", "exec", far])
    finally:
        for name in (near, far):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True, timeout=START_S)


def ours(receiving: str, sending: str, path: Route, streams: int, record_bytes: int, seconds: float) -> dict[str, Any]:
    """Payload bytes per second from the first accepted stream to the end of the last one."""
    run = [sys.executable, str(SIDES)]
    receiver = subprocess.Popen(
        [*path.receiver, *run, receiving, path.host, str(streams), str(BUCKET_BYTES), "1"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert receiver.stdout is not None
        port = receiver.stdout.readline().strip()
        if not port.isdigit():
            cannot("the receiving process did not start; its own message is above")
        arguments = [path.host, port, str(streams), str(BUCKET_BYTES), str(record_bytes), str(seconds)]
        subprocess.run([*path.sender, *run, sending, *arguments], check=True, timeout=seconds + GRACE_S)
        text, _ = receiver.communicate(timeout=GRACE_S)
    finally:
        receiver.kill()
        receiver.wait(START_S)
    found: dict[str, Any] = json.loads(text)
    return found


def theirs(path: Route, streams: int, record_bytes: int, seconds: float) -> float:
    """What iperf3's server says that it received, in bytes per second."""
    port = str(free_ports()[0])
    server = subprocess.Popen(
        [*path.receiver, "iperf3", "--server", "--one-off", "--forceflush", "--port", port],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        while "listening" not in (line := server.stdout.readline()):
            if not line:
                cannot("iperf3's server did not start; its own message is above")
        arguments = ["--client", path.host, "--port", port, "--parallel", str(streams), "--length", str(record_bytes)]
        done = subprocess.run(
            [*path.sender, "iperf3", *arguments, "--time", f"{max(1, round(seconds))}", "--json"],
            check=True,
            capture_output=True,
            text=True,
            timeout=seconds + GRACE_S,
        )
    finally:
        server.kill()
        server.wait(START_S)
    return float(json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"]) / 8


def measure(options: argparse.Namespace, folder: Path) -> Report:
    """Both ways on each path for each number of streams, in turn."""
    del folder  # nothing goes to a disk
    if shutil.which("iperf3") is None:
        cannot("iperf3 is not installed (Debian: iperf3)")
    report = Report(
        settings={
            "streams": options.streams,
            "record_bytes": options.record_bytes,
            "bucket_bytes": BUCKET_BYTES,
            "seconds": options.seconds,
        }
    )
    _compare(Route("loopback", "127.0.0.1", [], []), options, report)
    if options.namespaces:
        if os.geteuid() != 0 or shutil.which("ip") is None:
            cannot("--namespaces needs root and iproute2")
        with veth() as path:
            _compare(path, options, report)
    return report


def _compare(path: Route, options: argparse.Namespace, report: Report) -> None:
    sides = {"receive": ("receive", "blast"), "send and receive": ("receive", "send"), "recv": ("keep", "blast")}
    for streams in options.streams:
        rates: dict[str, list[float]] = {name: [] for name in (*sides, "iperf3")}
        shares: dict[str, list[float]] = {name: [] for name in sides}
        given = (path, streams, options.record_bytes, options.seconds)
        for number, name in interleaved(list(rates), options.rounds, options.seed):
            say(f"{path.name}, {streams} streams, round {number + 1} of {options.rounds}: {name}")
            if name in sides:
                found = ours(*sides[name], *given)
                rates[name].append(found["bytes_per_s"] / MIB)
                shares[name].append(found["checksum_share"])
            else:
                rates[name].append(theirs(*given) / MIB)
        pairs = [("receive", "iperf3", GOAL), ("receive", "recv", None), ("send and receive", "iperf3", None)]
        for name, other, goal in pairs:
            what = f"{name}, {path.name}, {streams} x {format_bytes(options.record_bytes)}"
            report.comparisons.append(Comparison(what, "MiB/s", "ours", rates[name], other, rates[other], goal))
        report.results[f"{path.name}_{streams}"] = {"checksum_share_of_receiver": shares}


def _counts(text: str) -> list[int]:
    numbers = [int(part) for part in text.split(",")]
    if not all(1 <= number <= 64 for number in numbers):
        raise argparse.ArgumentTypeError("1 to 64 streams")
    return numbers


if __name__ == "__main__":
    parser = command_line(__doc__, rounds=7)
    parser.add_argument("--streams", type=_counts, default=[1, 2, 4], help="connections at once (default: 1,2,4)")
    parser.add_argument("--record-bytes", type=int, default=MIB, help="of a record, and of iperf3's messages")
    parser.add_argument("--seconds", type=float, help="of one measurement (default: 3; with --quick: 1)")
    parser.add_argument("--namespaces", action="store_true", help="also over a veth pair (root)")
    parsed = parser.parse_known_args()[0]
    parser.set_defaults(seconds=1.0 if parsed.quick else 3.0)
    main(parser, measure, __file__)
