"""Frames of a DPDK port: a program of its own fills the ring (native/src/capture/dpdk), if DPDK was there to build it.

A port is a NIC that is bound to vfio-pci (its PCI address), or one of DPDK's virtual devices: af_packet, pcap.
"""

from __future__ import annotations

import functools
import os
import re
import select
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lastgood import _native
from lastgood.errors import ConfigError, HostError
from lastgood.mirror.capture.ring import RingWriter
from lastgood.processes import die_with_parent, wait_or_kill
from lastgood.text import parse_json
from lastgood.units import MIB

__all__ = ["DpdkPort", "dpdk_program", "run_dpdk"]

_PROGRAM = "lastgood-mirror-dpdk"
_PCI = re.compile(r"[0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7](,.*)?")
_DEVICE = re.compile(r"[a-z][A-Za-z0-9_]{0,62}(,[A-Za-z0-9_]+=[A-Za-z0-9_./:+@-]+)*")
_AF_PACKET_FRAME_BYTES = 65408
"""The largest that one of DPDK's buffers takes; longer ones (only of segmentation offload) are cut."""
_AF_PACKET = f"framesz={_AF_PACKET_FRAME_BYTES},blocksz={32 * _AF_PACKET_FRAME_BYTES},framecnt=512"
"""DPDK takes it that frames fill a block; the kernel, that a block fills its pages."""
_NIC_FRAME_BYTES = 9216
_BESIDE_MIB = 64
_BUFFER_HEAD_BYTES = 512
_MOST_LINE_BYTES = 4096
_END_S = 10.0
_TURN_S = 0.1


@dataclass(frozen=True)
class DpdkPort:
    """What to capture from, and with what. `device` is a PCI address, or a virtual device as DPDK's --vdev has it."""

    device: str
    frame_bytes: int = 0
    """Of a buffer; 0: what fits the device."""
    buffers: int = 0
    queues: int = 1
    dma: int = 0
    """DMA engines that copy; 0: the processor does."""
    dma_devices: tuple[str, ...] = ()
    """Their PCI addresses; without any, engines in software (dma_skeleton) stand in."""
    core: int | None = None
    hugepages: bool = False
    idle_end_s: float = 0.0
    """End when nothing came for so long, as for a file; 0: never."""

    def __post_init__(self) -> None:
        if not _PCI.fullmatch(self.device) and not _DEVICE.fullmatch(self.device):
            raise ConfigError(f"--dpdk {self.device[:200]}: a PCI address, or a device as net_af_packet0,iface=mir0")
        if not 1 <= self.queues <= 64 or not 0 <= self.dma <= 16 or len(self.dma_devices) not in (0, self.dma):
            raise ConfigError("--queues: 1 to 64; --dma: 0 to 16, with as many --dma-device or none")
        if not all(_PCI.fullmatch(one) for one in self.dma_devices):
            raise ConfigError("--dma-device is a PCI address, as 0000:00:04.0")

    @property
    def is_af_packet(self) -> bool:
        """Whether DPDK reads an interface of the kernel."""
        return self.device.startswith("net_af_packet")

    @property
    def buffer_bytes(self) -> int:
        """Of a frame's buffer."""
        return self.frame_bytes or (_AF_PACKET_FRAME_BYTES if self.is_af_packet else _NIC_FRAME_BYTES)

    @property
    def buffer_count(self) -> int:
        """How many buffers there are."""
        return self.buffers or (1024 if self.is_af_packet else 8192)

    @property
    def memory_bytes(self) -> int:
        """What the program takes beside the ring."""
        return self.buffer_count * (self.buffer_bytes + _BUFFER_HEAD_BYTES) + _BESIDE_MIB * MIB

    def words(self, program: Path, ring_descriptor: int, ring_bytes: int) -> list[str]:
        """The program's command line."""
        core = min(os.sched_getaffinity(0)) if self.core is None else self.core
        words = [str(program), "-l", str(core), "--no-telemetry", "--iova-mode=va", "--log-level=4"]
        # Either way it leaves no files, and knows of no other such program.
        if self.hugepages:
            words += ["--in-memory"]
        else:
            words += ["--no-shconf", "--no-huge", "-m", str(-(-self.memory_bytes // MIB))]
        pci = [one for one in (self.device, *self.dma_devices) if _PCI.fullmatch(one)]
        words += [word for one in pci for word in ("-a", one)] or ["--no-pci"]
        if self.device not in pci:
            more = f",{_AF_PACKET}" if self.is_af_packet and "framesz" not in self.device else ""
            words += [f"--vdev={self.device}{more}"]
        if not self.dma_devices:
            words += [f"--vdev=dma_skeleton{number}" for number in range(self.dma)]
        numbers = (
            ring_descriptor,
            ring_bytes,
            self.buffer_bytes,
            self.queues,
            self.buffer_count,
            self.dma,
            round(self.idle_end_s * 1000),
        )
        return [*words, "--", *map(str, numbers)]


def dpdk_program() -> Path:
    """Where the program is. Raises ConfigError if it was not built."""
    found = Path(str(_native.__file__)).with_name(_PROGRAM)
    if not found.is_file():
        raise ConfigError(
            f"{_PROGRAM} was not built: install DPDK's files (Debian, Ubuntu: apt-get install libdpdk-dev pkg-config), "
            f"then install lastgood again"
        )
    return found


def run_dpdk(
    port: DpdkPort,
    ring: RingWriter,
    stop: threading.Event,
    report: Callable[[dict[str, Any]], None] | None = None,
    *,
    patience_s: float = 60.0,
) -> dict[str, dict[str, int]]:
    """Let the program fill `ring` until it ends or `stop` is set; returns the last counters of source and ring.

    Its counters are reported in the ring as those of a source. Raises HostError, with its own words, if it fails.
    """
    command = port.words(dpdk_program(), ring.descriptor, ring.nbytes)
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=(ring.descriptor,),
        preexec_fn=functools.partial(die_with_parent, os.getpid()),
    )
    source: dict[str, int] = {}
    errors: list[bytes] = []
    reader = threading.Thread(target=_read_words, args=(process, errors), daemon=True)
    reader.start()
    assert process.stdout is not None
    try:
        for line in _lines(process, stop):
            source = _counters(line) or source
            ring.report({"source": source})
            if report is not None:
                report({"source": source, "ring": ring.counters()})
    finally:
        wait_or_kill(process, _END_S, _END_S)
        reader.join(_END_S)
        process.stdout.close()
    if process.returncode != 0:
        said = " ".join(b"".join(errors).decode(errors="replace").split())[-400:]
        raise HostError(f"{_PROGRAM} ended with exit code {process.returncode}: {said or 'it said nothing'}")
    ring.end()
    if port.idle_end_s and not stop.is_set():
        ring.wait_drained(patience_s)
    return {"source": source, "ring": ring.counters()}


def _lines(process: subprocess.Popen[bytes], stop: threading.Event) -> Iterator[bytes]:
    """The program's lines until its output ends; it is told to end once `stop` is set."""
    assert process.stdout is not None
    descriptor, rest, told = process.stdout.fileno(), b"", 0.0
    while True:
        if stop.is_set() and not told:
            process.terminate()
            told = time.monotonic()
        if told and time.monotonic() - told > _END_S:
            return
        if not select.select([descriptor], [], [], _TURN_S)[0]:
            continue
        chunk = os.read(descriptor, 65536)
        if not chunk:
            return
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > _MOST_LINE_BYTES:
            raise HostError(f"{_PROGRAM} writes lines without an end")
        yield from lines


def _read_words(process: subprocess.Popen[bytes], kept: list[bytes]) -> None:
    """All that the program says to people; the last of it is kept."""
    assert process.stderr is not None
    with process.stderr as stream:
        while chunk := os.read(stream.fileno(), 4096):
            kept.append(chunk)
            del kept[:-4]


def _counters(line: bytes) -> dict[str, int]:
    try:
        found = parse_json(line, _PROGRAM, most_bytes=_MOST_LINE_BYTES, error=HostError)
    except HostError:
        return {}  # what DPDK itself writes to its output
    return {name: value for name, value in found.items() if isinstance(value, int)} if isinstance(found, dict) else {}
