"""Frames of an interface, through a ring that the kernel fills (AF_PACKET, TPACKET_V3)."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import socket
import struct
import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from lastgood import _native
from lastgood.errors import ConfigError, HostError
from lastgood.mirror.capture.frames import ETHERNET, FRAME, MOST_FRAME_BYTES, FrameBatch
from lastgood.units import MIB, format_bytes

__all__ = ["BLOCK_BYTES", "KERNEL_RING_BYTES", "InterfaceSource"]

KERNEL_RING_BYTES: Final = 256 * MIB
"""So much may arrive while nobody reads: a step's traffic, when other work has the processor."""
BLOCK_BYTES: Final = MIB
"""A frame of 64 KiB must fit a block."""
_LEAST_BLOCK_BYTES = 128 << 10
_MOST_BLOCK_BYTES = 64 * MIB
_MOST_RING_BYTES = 64 << 30
_RETIRE_MS = 5
"""A block that is not full is handed over after so long."""
_OVERTAKING_NS = 1_000_000
"""With several processors a frame can come after one that is so much younger; tens of microseconds were seen."""
_SET_BACK_NS = 100_000_000
_SETTLED_S = 0.015
"""After so long without a block nothing older comes: longer than a block stays with the kernel."""
_LEAST_FRAME_BYTES = 96
"""What the shortest frame takes in a block."""

_SOL_PACKET = 263
_ADD_MEMBERSHIP, _RX_RING, _STATISTICS, _VERSION, _RESERVE, _IGNORE_OUTGOING = 1, 5, 6, 10, 12, 23
_TPACKET_V3 = 2
_PROMISCUOUS = 1
_ALL_PROTOCOLS = 3
_TAG_BYTES = 4
_FRAME_BYTES = 2048
"""The kernel only checks that blocks are a multiple of it; frames of version 3 have their own lengths."""
_WITH_ETHERNET_HEADERS = (1, 772)
"""Kinds of hardware: Ethernet and loopback."""
_SIOCGIFINDEX, _SIOCGIFHWADDR = 0x8933, 0x8927
_ATTACH_FILTER, _TIMES = 26, 35
_INTERFACE_OF_FRAME = 0xFFFFF008
"""Where a filter finds the number of a frame's interface (SKF_AD_OFF + SKF_AD_IFINDEX)."""


class InterfaceSource:
    """A FrameSource of an interface, promiscuous, in both directions unless told otherwise. Needs CAP_NET_RAW.

    Frames are given in the order of their times: the youngest are held back until nothing older can come
    (`put_in_order` counts those that were overtaken). With more interfaces (`also`), frames of all come through one
    ring: two rings would show an acknowledgement before what it acknowledges. While an interface is down nothing comes
    from it; once one is gone, the source has ended. `counters` has `kernel_dropped`: frames that came while the ring
    was full.
    """

    link_type = ETHERNET

    def __init__(
        self,
        interface: str,
        *,
        also: Sequence[str] = (),
        ring_bytes: int = KERNEL_RING_BYTES,
        block_bytes: int = BLOCK_BYTES,
        promiscuous: bool = True,
        own_frames: bool = True,
    ) -> None:
        """Raises ConfigError for sizes that cannot be, HostError if there is no such interface, right or memory."""
        if not _LEAST_BLOCK_BYTES <= block_bytes <= _MOST_BLOCK_BYTES or block_bytes & (block_bytes - 1):
            raise ConfigError(
                f"a block of {block_bytes} bytes: a power of two from {format_bytes(_LEAST_BLOCK_BYTES)} (larger than "
                f"any frame) to {format_bytes(_MOST_BLOCK_BYTES)}"
            )
        if not 2 * block_bytes <= ring_bytes <= _MOST_RING_BYTES:
            raise ConfigError(f"a ring of {ring_bytes} bytes: at least two blocks, at most {_MOST_RING_BYTES} bytes")
        self.interfaces = (interface, *also)
        if len(set(self.interfaces)) < len(self.interfaces):
            raise ConfigError(f"each interface is captured once: {', '.join(self.interfaces)}")
        blocks = ring_bytes // block_bytes
        self.ring_bytes = blocks * block_bytes
        self._dropped = self._frozen = self._downs = self._reordered = 0
        self._gone = False
        self._block_bytes = block_bytes
        self._table = np.empty(block_bytes // _LEAST_FRAME_BYTES, FRAME)
        self._pending = np.empty(0, FRAME)
        self._taken_at = 0.0
        self._socket = self._open()
        try:
            self._memory = self._map(blocks, block_bytes)
            self._bind(promiscuous, own_frames)
        except OSError as error:
            self._socket.close()
            raise self._error(error) from error
        except BaseException:
            self._socket.close()
            raise
        self._bytes = np.frombuffer(self._memory, np.uint8)
        self._blocks = _native.PacketBlocks(self._bytes.ctypes.data, block_bytes, blocks, ETHERNET)

    def read(self, limit: int, timeout_s: float) -> FrameBatch | None:
        """As `FrameSource.read`; a batch lies in the kernel's ring. Raises HostError if the socket fails."""
        if self._socket.fileno() < 0:
            return None
        self._release()
        deadline = time.monotonic() + timeout_s
        while True:
            ready = self._ready()
            left_s = max(0.0, deadline - time.monotonic())
            if not ready and not self._gone and self._take(min(left_s, _SETTLED_S) if len(self._pending) else left_s):
                continue
            if not ready and (self._gone or time.monotonic() - self._taken_at >= _SETTLED_S):
                ready = len(self._pending)
            if self._gone and not ready:
                return None
            if ready or not left_s:
                ready = min(ready, max(1, limit))
                batch, self._pending = self._pending[:ready], self._pending[ready:]
                return FrameBatch(self._bytes.data, batch)

    def _take(self, timeout_s: float) -> bool:
        """The frames of one more block, put in order with those that wait. Raises HostError if the socket fails."""
        count = self._blocks.read(self._socket.fileno(), self._table.ctypes.data, len(self._table), timeout_s)
        if count < 0:
            count = self._failed(-count)
        elif not count and len(self.interfaces) > 1:
            self._gone = not self._all_there()  # a socket of several is not told
        if not count:
            return False
        self._taken_at = time.monotonic()
        found, waiting = self._table[:count], self._pending
        if len(waiting) and waiting["time_ns"][-1] > found["time_ns"].max() + np.uint64(_SET_BACK_NS):
            # The clock was set back. What waits came before: it would wait for ever, and its blocks with it.
            waiting["time_ns"] = np.minimum(waiting["time_ns"], found["time_ns"].min())
        both = np.concatenate([waiting, found])
        order = np.argsort(both["time_ns"], kind="stable")
        self._reordered += int(np.count_nonzero(order[1:] < order[:-1]))
        self._pending = both[order]
        return True

    def _ready(self) -> int:
        """How many of the frames that wait are older than any that can still come."""
        if not len(self._pending):
            return 0
        times = self._pending["time_ns"]
        return int(np.searchsorted(times, np.uint64(max(0, int(times[-1]) - _OVERTAKING_NS)), side="right"))

    def _release(self) -> None:
        """Give blocks back of which no frame waits any more, the oldest first."""
        waiting = set((self._pending["offset"] // self._block_bytes).tolist())
        while (oldest := self._blocks.oldest) >= 0 and oldest not in waiting:
            self._blocks.release()

    def counters(self) -> dict[str, int]:
        """As `FrameSource.counters`."""
        self._ask_kernel()
        return {
            **self._blocks.counters(),
            "kernel_dropped": self._dropped,
            "kernel_ring_full": self._frozen,
            "interface_downs": self._downs,
            "put_in_order": self._reordered,
        }

    def close(self) -> None:
        """Close the socket; its memory goes when no batch is held any more."""
        if self._gone and self._socket.fileno() < 0:
            return
        self._ask_kernel()
        self._gone = True
        self._socket.close()
        self._bytes = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):
            self._memory.close()  # which holds the socket as well

    def _open(self) -> socket.socket:
        try:
            # Of no protocol yet: nothing may arrive before the ring is there.
            return socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0)
        except OSError as error:
            raise self._error(error) from error

    def _map(self, blocks: int, block_bytes: int) -> mmap.mmap:
        # Times are then those at which a frame came to the interface, and not at which a processor had time for it.
        self._socket.setsockopt(socket.SOL_SOCKET, _TIMES, 1)
        self._socket.setsockopt(_SOL_PACKET, _VERSION, _TPACKET_V3)
        self._socket.setsockopt(_SOL_PACKET, _RESERVE, _TAG_BYTES)
        frames = blocks * (block_bytes // _FRAME_BYTES)
        request = struct.pack("IIIIIII", block_bytes, blocks, _FRAME_BYTES, frames, _RETIRE_MS, 0, 0)
        self._socket.setsockopt(_SOL_PACKET, _RX_RING, request)
        return mmap.mmap(self._socket.fileno(), blocks * block_bytes)

    def _bind(self, promiscuous: bool, own_frames: bool) -> None:
        if not own_frames:
            with contextlib.suppress(OSError):  # kernels before 4.20; then they have the flag
                self._socket.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
        self._numbers = [self._number(name) for name in self.interfaces]
        for name, number in zip(self.interfaces, self._numbers, strict=True):
            (kind,) = struct.unpack_from("16xH", self._ask(_SIOCGIFHWADDR, name))
            if kind not in _WITH_ETHERNET_HEADERS:
                raise HostError(f"{name}: its frames have no Ethernet header (kind {kind}); name another interface")
            if promiscuous:
                member = struct.pack("IHH8s", number, _PROMISCUOUS, 0, b"")
                self._socket.setsockopt(_SOL_PACKET, _ADD_MEMBERSHIP, member)
        if len(self.interfaces) == 1:
            self._socket.bind((self.interfaces[0], _ALL_PROTOCOLS))
            return
        # Bound to all that there are, of which the filter lets those through. Python binds to a named one only.
        self._filter(self._numbers)
        address = struct.pack("=HHiHBB8s", socket.AF_PACKET, socket.htons(_ALL_PROTOCOLS), 0, 0, 0, 0, b"")
        if ctypes.CDLL(None, use_errno=True).bind(self._socket.fileno(), address, len(address)) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def _filter(self, numbers: Sequence[int]) -> None:
        """Let only frames of these interfaces into the ring (classic BPF)."""
        left = len(numbers)
        program = [struct.pack("HBBI", 0x20, 0, 0, _INTERFACE_OF_FRAME)]  # load it
        for number in numbers:
            program.append(struct.pack("HBBI", 0x15, left, 0, number))  # equal: to the end
            left -= 1
        program += [struct.pack("HBBI", 0x06, 0, 0, length) for length in (0, MOST_FRAME_BYTES)]
        code = ctypes.create_string_buffer(b"".join(program))
        self._socket.setsockopt(
            socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HP", len(program), ctypes.addressof(code))
        )

    def _ask(self, request: int, name: str) -> bytes:
        """Of the socket's own network namespace, which may be another one than this thread's."""
        return fcntl.ioctl(self._socket.fileno(), request, struct.pack("16s24x", name.encode()[:15]))

    def _number(self, name: str) -> int:
        return int(struct.unpack_from("16xi", self._ask(_SIOCGIFINDEX, name))[0])

    def _all_there(self) -> bool:
        try:
            return [self._number(name) for name in self.interfaces] == self._numbers
        except OSError:
            return False

    def _failed(self, number: int) -> int:
        """What an error of the socket means: 0 frames now, or the end."""
        if number not in (errno.ENETDOWN, errno.ENXIO, errno.ENODEV):
            raise HostError(f"{', '.join(self.interfaces)}: capturing failed: {os.strerror(number)}")
        self._downs += 1
        self._gone = not self._all_there()
        return 0

    def _ask_kernel(self) -> None:
        if self._socket.fileno() < 0:
            return
        with contextlib.suppress(OSError):
            found = struct.unpack("III", self._socket.getsockopt(_SOL_PACKET, _STATISTICS, 12))
            self._dropped += found[1]  # since the last time
            self._frozen += found[2]

    def _error(self, error: OSError) -> HostError:
        hint = {
            errno.ENODEV: "there is no such interface; see `ip link`",
            errno.EPERM: "capturing needs root, or CAP_NET_RAW",
            errno.EACCES: "capturing needs root, or CAP_NET_RAW",
            errno.ENOMEM: f"the kernel has no {format_bytes(self.ring_bytes)} for its ring; take a smaller one",
            errno.EAFNOSUPPORT: "this kernel has no packet sockets",
        }.get(error.errno or 0, f"{error.strerror}")
        return HostError(f"{', '.join(self.interfaces)}: cannot capture: {hint}")
