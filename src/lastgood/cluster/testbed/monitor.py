"""Mirrors on a testbed's bridge: what watched nodes send and get is copied to a link into a monitor node.

    vm1  eth0 ───────── vm1 ┐  tc: clsact, u32, mirred ── mon-vm4-0 ───────── mir0  vm4
    vm2  eth0 ───────── vm2 ├ br0
    vm4  eth0 ───────── vm4 ┘

The link is outside the bridge and carries copies only. Copies are taken before the rate limit of a node's link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from lastgood.cluster.testbed.net import ip_batch, links_in, listed, namespace_of, namespaces, run_program
from lastgood.cluster.testbed.state import MAX_NODES, BedState
from lastgood.errors import HostError
from lastgood.files import read_bounded, storage_errors, write_atomically
from lastgood.models import FrozenModel
from lastgood.text import parse_model

__all__ = [
    "Monitor",
    "MonitorCounts",
    "add_monitor",
    "count_monitor",
    "load_monitors",
    "remove_monitor",
    "save_monitors",
]

_FILE = "monitors.json"
_MOST_BYTES = 64 << 10
_LINK_BYTES = 65535
"""A monitor link takes every frame that any link of the testbed can carry."""
_FIRST_ACTION = 0x4C470000
_FIRST_PREFERENCE = 49100
_WAYS: tuple[Literal["sent", "received"], ...] = ("sent", "received")
_HOOKS = {"sent": "ingress", "received": "egress"}
"""Seen from the bridge's port, what a node sends comes in."""


class Monitor(FrozenModel):
    """What is mirrored to one node; `split`: what is sent on one link (mir0), what is received on another (mir1)."""

    node: str
    watched: tuple[str, ...] = Field(min_length=1, max_length=MAX_NODES)
    split: bool = False

    @property
    def interfaces(self) -> tuple[str, ...]:
        """Of the monitor node: mir0, and mir1 if split."""
        return ("mir0", "mir1") if self.split else ("mir0",)

    def interface_of(self, way: Literal["sent", "received"]) -> str:
        """Where copies of what watched nodes send, or receive, arrive."""
        return self.interfaces[-1 if way == "received" else 0]


class _Monitors(FrozenModel):
    version: int = Field(default=1, ge=1, le=1)
    monitors: tuple[Monitor, ...] = Field(max_length=MAX_NODES)


@dataclass(frozen=True)
class MonitorCounts:
    """Copies of one direction of a watched node: taken by tc, dropped by tc, and dropped on the link to the monitor.

    The link is one for all directions that share it, so its drops are too.
    """

    watched: str
    way: Literal["sent", "received"]
    interface: str
    frames: int
    nbytes: int
    dropped: int
    link_dropped: int


def load_monitors(folder: Path) -> tuple[Monitor, ...]:
    """The mirrors that a testbed should have. Raises ConfigError for a record that is none, StorageError."""
    path = folder / _FILE
    with storage_errors(path, "reading the testbed's mirrors"):
        try:
            content = read_bounded(path, _MOST_BYTES)
        except FileNotFoundError:
            return ()
    return parse_model(_Monitors, content, str(path), most_bytes=_MOST_BYTES).monitors


def save_monitors(folder: Path, monitors: Sequence[Monitor]) -> None:
    """Write them, complete or not at all. Raises StorageError."""
    path = folder / _FILE
    content = _Monitors(monitors=tuple(monitors)).model_dump_json(indent=1).encode() + b"\n"
    with storage_errors(path, "writing the testbed's mirrors"):
        write_atomically(path, content)


def add_monitor(state: BedState, monitor: Monitor) -> None:
    """Make a mirror, or what is missing of it; what is right stays as it is, so that nothing that passes is missed.

    A watched node or a monitor that is killed gets its part when it is restarted.
    """
    space = namespace_of(state.name, "br")
    if namespace_of(state.name, monitor.node) not in namespaces(state.name):
        return
    _add_links(state, monitor)
    present, there = _actions(space), links_in(space)
    for node in state.node_names:
        for way in _WAYS:
            if node not in there:
                continue
            found, target = present.get(_action(monitor.node, node, way)), _link(monitor, way)
            wanted = node in monitor.watched
            if found is not None and (not wanted or found.get("to_dev") != target):
                _remove_filter(space, monitor.node, node, way)
                found = None
            if wanted and found is None:
                _add_filter(space, monitor.node, node, way, target)
    if not monitor.split and (unused := f"mon-{monitor.node}-1") in there:
        ip_batch(space, f"link del {unused}")


def remove_monitor(state: BedState, node: str) -> None:
    """Remove all that mirrors to a node, links included; nothing happens if there is nothing."""
    space = namespace_of(state.name, "br")
    if space not in namespaces(state.name):
        return
    present, there = _actions(space), links_in(space)
    for watched in state.node_names:
        for way in _WAYS:
            if watched in there and _action(node, watched, way) in present:
                _remove_filter(space, node, watched, way)
    for link in (f"mon-{node}-0", f"mon-{node}-1"):
        if link in there:
            ip_batch(space, f"link del {link}")


def count_monitor(state: BedState, monitor: Monitor) -> list[MonitorCounts]:
    """What tc and the links counted since the mirror was made, for each watched node and direction.

    Raises HostError, naming what is missing, for a mirror that is not complete.
    """
    space, node_space = namespace_of(state.name, "br"), namespace_of(state.name, monitor.node)
    present, near = _actions(space), links_in(space)
    far = links_in(node_space) if node_space in namespaces(state.name) else {}
    counts = []
    for watched in monitor.watched:
        for way in _WAYS:
            link, interface = _link(monitor, way), monitor.interface_of(way)
            action = present.get(_action(monitor.node, watched, way))
            if action is None or action.get("to_dev") != link or link not in near or interface not in far:
                raise HostError(
                    f"testbed {state.name}: what {watched} {way} is not mirrored to {monitor.node} now; restart what "
                    f"was killed, or run `lastgood mirror setup` again"
                )
            stats = action["stats"]
            lost = near[link]["stats64"]["tx"]["dropped"] + far[interface]["stats64"]["rx"]["dropped"]
            dropped = stats["drops"] + stats["overlimits"]
            counts.append(MonitorCounts(watched, way, interface, stats["packets"], stats["bytes"], dropped, lost))
    return counts


def _add_links(state: BedState, monitor: Monitor) -> None:
    space, node_space = namespace_of(state.name, "br"), namespace_of(state.name, monitor.node)
    near, far = links_in(space), links_in(node_space)
    for number, interface in enumerate(monitor.interfaces):
        link = f"mon-{monitor.node}-{number}"
        # One end alone is what a kill at the wrong moment leaves.
        if link in near and interface not in far:
            ip_batch(space, f"link del {link}")
        if link not in near or interface not in far:
            far_end = f"name {interface} mtu {_LINK_BYTES} netns {node_space}"
            ip_batch(space, f"link add {link} mtu {_LINK_BYTES} type veth peer {far_end}")
        # Neither end speaks or answers: nothing but copies is on this link.
        for where, device in ((node_space, interface), (space, link)):
            ip_batch(where, f"link set {device} arp off multicast off addrgenmode none", f"link set {device} up")


def _add_filter(space: str, node: str, watched: str, way: Literal["sent", "received"], target: str) -> None:
    if not any(
        one.get("kind") == "clsact" for one in listed("tc", "-n", space, "-json", "qdisc", "show", "dev", watched)
    ):
        run_program("tc", "-n", space, "qdisc", "add", "dev", watched, "clsact")
    where = ["dev", watched, _HOOKS[way], "protocol", "all", "pref", str(_preference(node))]
    every = ["u32", "match", "u32", "0", "0"]
    # With "continue", filters of other monitors on this port are asked too.
    copy = ["mirred", "egress", "mirror", "index", str(_action(node, watched, way)), "dev", target, "continue"]
    run_program("tc", "-n", space, "filter", "add", *where, *every, "action", *copy)


def _remove_filter(space: str, node: str, watched: str, way: Literal["sent", "received"]) -> None:
    """And the qdisc with the last filter, whoever made that one."""
    run_program("tc", "-n", space, "filter", "del", "dev", watched, _HOOKS[way], "pref", str(_preference(node)))
    if not any(run_program("tc", "-n", space, "filter", "show", "dev", watched, hook) for hook in _HOOKS.values()):
        run_program("tc", "-n", space, "qdisc", "del", "dev", watched, "clsact")


def _actions(space: str) -> dict[int, dict[str, Any]]:
    """This testbed's mirror actions by their number."""
    found = {}
    for entry in listed("tc", "-n", space, "-json", "-statistics", "actions", "list", "action", "mirred"):
        for action in entry.get("actions", []):
            if _FIRST_ACTION <= action.get("index", 0) < _FIRST_ACTION + (MAX_NODES + 1) * 256:
                found[int(action["index"])] = action
    return found


def _link(monitor: Monitor, way: Literal["sent", "received"]) -> str:
    return f"mon-{monitor.node}-{monitor.interfaces.index(monitor.interface_of(way))}"


def _action(node: str, watched: str, way: Literal["sent", "received"]) -> int:
    return _FIRST_ACTION + _number(node) * 256 + _number(watched) * 2 + _WAYS.index(way)


def _preference(node: str) -> int:
    return _FIRST_PREFERENCE + _number(node)


def _number(node: str) -> int:
    return int(node.removeprefix("vm"))
