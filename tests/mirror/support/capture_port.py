"""Writes every frame of an interface into a pcap file: ``python -m tests.mirror.support.capture_port INTERFACE FILE``.

A plain packet socket; both directions, each frame once. Says ``ready`` when it listens, and ends at the end of its
standard input: then it says how many frames it has, and how many the kernel dropped.
"""

from __future__ import annotations

import select
import socket
import struct
import sys
import time

ALL_PROTOCOLS = 3
RECEIVE_BUFFER_FORCE = 33
PACKET_STATISTICS = (263, 6)
LONGEST = 1 << 18


def main(interface: str, path: str) -> None:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS))
    port.setsockopt(socket.SOL_SOCKET, RECEIVE_BUFFER_FORCE, 256 << 20)
    port.bind((interface, 0))
    port.setblocking(False)
    print("ready", flush=True)
    frames = 0
    end = None
    with open(path, "wb") as file:  # noqa: PTH123
        file.write(struct.pack("<IHHiIII", 0xA1B23C4D, 2, 4, 0, 0, LONGEST, 1))
        while end is None or time.monotonic() < end:
            ready, _, _ = select.select([port, sys.stdin] if end is None else [port], [], [], 0.2)
            if port in ready:
                content = port.recv(LONGEST)
                now = time.time_ns()
                file.write(struct.pack("<IIII", now // 10**9, now % 10**9, len(content), len(content)) + content)
                frames += 1
            elif sys.stdin in ready:  # Only once nothing waits any more.
                end = time.monotonic() + 0.3
    _, dropped = struct.unpack("II", port.getsockopt(*PACKET_STATISTICS, 8))
    print(frames, dropped, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
