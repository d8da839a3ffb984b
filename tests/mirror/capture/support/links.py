"""Two network namespaces with a link between them, for tests of real captures."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from lastgood.cluster.testbed.net import in_namespace, run_program

_Result = TypeVar("_Result")


class Link:
    """Interfaces `near` (in one namespace) and `far` (in the other), with addresses 10.77.0.1 and 10.77.0.2."""

    near_address, far_address = "10.77.0.1", "10.77.0.2"

    def __init__(self) -> None:
        self.spaces = [f"lgcap{os.getpid()}{side}" for side in "ab"]

    def near(self, function: Callable[[], _Result]) -> _Result:
        return in_namespace(self.spaces[0], function)

    def far(self, function: Callable[[], _Result]) -> _Result:
        return in_namespace(self.spaces[1], function)

    def raw(self) -> socket.socket:
        """What sends complete frames at the far end."""

        def make() -> socket.socket:
            one = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
            one.bind(("far", 0))
            return one

        return self.far(make)

    def ip(self, side: int, *words: str) -> None:
        run_program("ip", "-n", self.spaces[side], *words)


@contextmanager
def a_link(*, mtu: int = 65535) -> Iterator[Link]:
    link = Link()
    near, far = link.spaces
    try:
        for space in link.spaces:
            run_program("ip", "netns", "add", space)
        peer = ["peer", "name", "far", "mtu", str(mtu), "netns", far]
        link.ip(0, "link", "add", "near", "mtu", str(mtu), "type", "veth", *peer)
        for side, name in enumerate(("near", "far")):
            link.ip(side, "link", "set", name, "addrgenmode", "none", "up")
            link.ip(side, "address", "add", f"10.77.0.{side + 1}/24", "dev", name)
            link.ip(side, "link", "set", "lo", "up")
        yield link
    finally:
        for space in (near, far):
            subprocess.run(["ip", "netns", "del", space], capture_output=True, timeout=30, check=False)
