"""What a mirror node captures of a veth: without loss at half of what the veth carries, and against a bare counter.

In a namespace of its own (root) a process sends raw frames over a veth pair. First nobody captures: that is what the
veth carries. At half of that rate the dump stage captures into a ring that another process reads; lost is what did not
come there. At the full rate the dump stage and a loop that only counts the frames of a TPACKET_V3 ring take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness import Comparison, Limit, Report, TextTable, cannot, command_line, interleaved, judge, main, say, spread

from lastgood.units import MIB

FRAME_BYTES = (1500, 65_535)
SENDS, TAKES = "lbs", "lbt"
FAST = 1e12
"""Bits/s that no sender reaches."""
KERNEL_RING = 64 * MIB
FRAME_RING = 64 * MIB
GOAL = 0.9
PATIENCE_S = 60.0
HERE = Path(__file__).resolve().parent


@contextmanager
def link() -> Iterator[str]:
    """A namespace with both ends of a veth pair."""
    space = f"lgbench{os.getpid()}"

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, timeout=PATIENCE_S)

    ip("netns", "add", space)
    try:
        ip("-n", space, "link", "add", SENDS, "type", "veth", "peer", "name", TAKES)
        for end in (SENDS, TAKES):
            ip("-n", space, "link", "set", end, "mtu", "65521", "up")
        yield space
    finally:
        ip("netns", "del", space)


class Process:
    """A program in the namespace: it says a line of JSON when it is ready (but the sender), and one at its end."""

    def __init__(self, space: str, *words: str) -> None:
        self._process = subprocess.Popen(
            ["ip", "netns", "exec", space, sys.executable, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])},
        )

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def line(self, more_s: float = 0.0) -> dict[str, float]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], PATIENCE_S + more_s)[0]:
            cannot("a program that handles frames says nothing")
        text = self._process.stdout.readline()
        if not text:
            cannot("a program that handles frames failed; its words are above")
        found: dict[str, float] = json.loads(text)
        return found

    def end(self) -> dict[str, float]:
        """Close its standard input: it takes what is still coming, and says what it had."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self.line()


def send(space: str, frame_bytes: int, bits_per_s: float, seconds: float) -> dict[str, float]:
    words = ["-m", "lastgood.experiments.flowcheck.frames", "send", SENDS]
    with Process(space, *words, str(frame_bytes), repr(bits_per_s), repr(seconds)) as sender:
        return sender.line(seconds)


def dumped(space: str, frame_bytes: int, bits_per_s: float, seconds: float, ring: Path) -> dict[str, float]:
    """What was sent, and what came through the dump stage to a reader of its ring."""
    side = str(HERE / "mirror_capture_side.py")
    with (
        Process(space, side, "dump", TAKES, str(KERNEL_RING), str(ring), str(FRAME_RING)) as dump,
        Process(space, side, "drain", str(ring), str(frame_bytes)) as drain,
    ):
        dump.line()
        drain.line()
        sent = send(space, frame_bytes, bits_per_s, seconds)
        told = dump.end()
        taken = drain.line()
    return {**told, **sent, "taken": taken["frames"], "cpu_s": told["cpu_s"]}


def counted(space: str, frame_bytes: int, bits_per_s: float, seconds: float) -> dict[str, float]:
    with Process(
        space, str(HERE / "mirror_capture_side.py"), "count", TAKES, str(KERNEL_RING), str(frame_bytes)
    ) as one:
        one.line()
        sent = send(space, frame_bytes, bits_per_s, seconds)
        told = one.end()
    return {**told, **sent, "taken": told["taken"]}


def measure(options: argparse.Namespace, _folder: Path) -> Report:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        cannot("frames are sent inside a network namespace: it needs root and iproute2")
    seconds = 0.3 if options.quick else options.seconds
    report = Report(settings={"seconds": seconds, "kernel_ring_bytes": KERNEL_RING, "frame_ring_bytes": FRAME_RING})
    parts = TextTable(
        "By size of frames: medians (lowest..highest)",
        ("frames", "veth alone, Gbit/s", "lost at half of it", "dump, CPU us a frame", "counter, CPU us a frame"),
    )
    with link() as space, tempfile.TemporaryDirectory(prefix="lgbench-", dir="/dev/shm") as memory:
        ring = Path(memory, "frames")
        for frame_bytes in FRAME_BYTES:
            say(f"frames of {frame_bytes} bytes")
            found: dict[str, list[dict[str, float]]] = {"alone": [], "half": [], "dump": [], "count": []}
            for number in range(options.rounds):
                alone = send(space, frame_bytes, FAST, seconds)
                found["alone"].append(alone)
                half = frame_bytes * 8 * alone["frames"] / alone["seconds"] / 2
                found["half"].append(dumped(space, frame_bytes, half, seconds, ring))
                for _, name in interleaved(["dump", "count"], 1, options.seed + number):
                    if name == "dump":
                        found["dump"].append(dumped(space, frame_bytes, FAST, seconds, ring))
                    else:
                        found["count"].append(counted(space, frame_bytes, FAST, seconds))
            lost = [1 - one["taken"] / one["frames"] for one in found["half"]]
            worst = max(lost)
            report.limits.append(
                Limit(
                    f"lost at half of the veth's rate, {frame_bytes} B",
                    "share",
                    worst,
                    0.0,
                    judge(worst, at_most=0.0),
                    "most of all rounds",
                )
            )
            rates = {name: [one["taken"] / one["seconds"] for one in found[name]] for name in ("dump", "count")}
            report.comparisons.append(
                Comparison(
                    f"captured at the full rate, {frame_bytes} B",
                    "frames/s",
                    "dump",
                    rates["dump"],
                    "bare counter",
                    rates["count"],
                    GOAL,
                )
            )
            carried = [frame_bytes * 8 * one["frames"] / one["seconds"] / 1e9 for one in found["alone"]]
            cpu = {name: [1e6 * one["cpu_s"] / max(1, one["taken"]) for one in found[name]] for name in rates}
            parts.rows.append(
                (f"{frame_bytes} B", spread(carried), spread(lost, digits=6), spread(cpu["dump"]), spread(cpu["count"]))
            )
            report.results[f"frames_{frame_bytes}"] = found
    report.tables.append(parts)
    cores = len(os.sched_getaffinity(0))
    report.notes.append(
        f"Sender, dump and the reader of its ring share {cores} cores; a mirror's sender is another machine."
    )
    return report


if __name__ == "__main__":
    parser = command_line(__doc__, rounds=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each sending (default: 2)")
    main(parser, measure, __file__)
