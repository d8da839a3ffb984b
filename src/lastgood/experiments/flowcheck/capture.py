"""Measures how many frames of a virtual link a capture misses, by size and offered rate. Needs root."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from lastgood.cluster.testbed.net import program, run_program
from lastgood.cluster.testbed.testbed import why_no_testbed
from lastgood.errors import ConfigError, LastgoodError
from lastgood.experiments.machine.lock import machine_turn
from lastgood.experiments.records.flowcheck import CapturePoint, CaptureResult, CaptureSettings
from lastgood.text import parse_json
from lastgood.units import MIB

__all__ = ["measure_capture"]

Report = Callable[[str], None]
_SENDS, _TAKES = "lgs", "lgt"
_MOST_MTU: Final = 65_535
_ETHERNET_BYTES: Final = 14
_PATIENCE_S: Final = 60.0
_NO_DPDK: Final = "DPDK: this capture program has af_packet only"


def measure_capture(
    settings: CaptureSettings, _seed: int, _scratch: Path, _logs: Path, report: Report
) -> CaptureResult:
    """Send and capture at every point. Raises ConfigError, saying what to do, if no namespace can be made."""
    reason = why_no_testbed()
    if reason is not None:
        raise ConfigError(f"frames are sent inside a network namespace: {reason}")
    points = []
    with machine_turn(report), _link() as space:
        for frame_bytes in settings.frame_bytes:
            for bits_per_s in settings.offered_bits_per_s:
                point = _point(space, settings, frame_bytes, bits_per_s)
                report(
                    f"{frame_bytes} B at {point.offered_bits_per_s / 1e9:.3g} Gbit/s: {point.lost_share:.2%} of "
                    f"{point.sent_frames} frames lost"
                )
                points.append(point)
    return CaptureResult(points=points, left_out=[_NO_DPDK])


@contextmanager
def _link() -> Iterator[str]:
    """A namespace with both ends of a veth pair, large frames allowed."""
    space = f"lgcap{os.getpid()}"
    run_program("ip", "netns", "add", space)
    try:
        run_program("ip", "-n", space, "link", "add", _SENDS, "type", "veth", "peer", "name", _TAKES)
        for end in (_SENDS, _TAKES):
            run_program("ip", "-n", space, "link", "set", end, "mtu", str(_MOST_MTU - _ETHERNET_BYTES), "up")
        yield space
    finally:
        with suppress(LastgoodError):
            run_program("ip", "netns", "del", space)


def _point(space: str, settings: CaptureSettings, frame_bytes: int, bits_per_s: float) -> CapturePoint:
    taker = _start(space, "take", _TAKES, str(frame_bytes), str(settings.ring_bytes))
    try:
        _line(taker)  # it captures from now on
        sender = _start(space, "send", _SENDS, str(frame_bytes), repr(bits_per_s), repr(settings.seconds))
        try:
            sent = _line(sender, settings.seconds)
            sender.wait(_PATIENCE_S)
        finally:
            _end(sender)
        assert taker.stdin is not None
        taker.stdin.close()
        taken = _line(taker)
        taker.wait(_PATIENCE_S)
    finally:
        _end(taker)
    return CapturePoint(
        device=settings.device,
        frame_bytes=frame_bytes,
        asked_bits_per_s=bits_per_s,
        sent_frames=sent["frames"],
        sent_s=sent["seconds"],
        captured_frames=taken["frames"],
        kernel_dropped=taken["dropped"],
        capture_cpu_s=taken["cpu_s"],
    )


def _start(space: str, *arguments: str) -> subprocess.Popen[str]:
    command = [program("ip"), "netns", "exec", space, sys.executable, "-m", "lastgood.experiments.flowcheck.frames"]
    return subprocess.Popen(
        [*command, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _line(process: subprocess.Popen[str], more_s: float = 0.0) -> dict[str, Any]:
    """The next line of a program: JSON. Raises LastgoodError with what it said if it ends, or says nothing for long."""
    assert process.stdout is not None and process.stderr is not None
    end = time.monotonic() + _PATIENCE_S + more_s
    from lastgood.wire.frames import is_ready  # poll, for any descriptor

    while time.monotonic() < end:
        if is_ready(process.stdout, _READABLE, 0.5):
            text = process.stdout.readline()
            if text:
                found = parse_json(text, "a program that handles frames", most_bytes=MIB)
                assert isinstance(found, dict)
                return found
            raise LastgoodError(f"a program that handles frames failed: {process.stderr.read().strip()[-2000:]}")
    raise LastgoodError(f"a program that handles frames said nothing for {_PATIENCE_S + more_s:g} s")


_READABLE: Final = 1


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
