"""A cluster inside one machine: nodes with address, name and ssh server, which can be cut off, stopped and lost.

Each node is a set of namespaces on a bridge (testbed_net.py has the picture). Kernel, clock, processors, disk and
memory are the machine's, so a testbed is for faults and for what goes over the network, not for the speed of computing.
Needs root.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lastgood.cluster.hostfile import MAX_SLOTS, Hostfile, read_hostfile
from lastgood.cluster.ssh.remote import Remote, SshOptions
from lastgood.cluster.testbed import net
from lastgood.cluster.testbed.monitor import (
    Monitor,
    MonitorCounts,
    add_monitor,
    count_monitor,
    load_monitors,
    remove_monitor,
    save_monitors,
)
from lastgood.cluster.testbed.node import start_node, wait_for_node, write_material
from lastgood.cluster.testbed.state import (
    MAX_NODES,
    BedState,
    beds_lock,
    check_bed_name,
    choose_subnet,
    forget,
    load_state,
    parse_delay,
    parse_rate,
    parse_rates,
    prepare_folder,
    rate_text,
    save_state,
    state_folder,
)
from lastgood.errors import ConfigError, HostError

__all__ = ["NodeStatus", "Testbed", "why_no_testbed"]

_Settings = tuple[int, int, int | None]
"""Nodes, slots, bits per second."""
NodeState = Literal["up", "cut", "paused", "cut and paused", "killed"]

_LOCK_S = 180.0
_PAUSE_S = 15.0
_ROUNDS = 3
"""Of removing: a program that a killed `up` had started may make one thing more."""
_GUARD_END_S = 60.0


@dataclass(frozen=True)
class NodeStatus:
    """A node now: `processes` counts all that run in it, its first process included."""

    name: str
    address: str
    state: NodeState
    processes: int


def why_no_testbed() -> str | None:
    """Why there can be no testbed on this machine, as far as can be seen without making one; None if there can."""
    if sys.platform != "linux":
        return f"this is {sys.platform}; a testbed is made of Linux's namespaces"
    if os.geteuid() != 0:
        return (
            "a testbed needs root (it makes network namespaces); use sudo, or a container or VM in which you are root"
        )
    missing = net.missing_programs()
    if missing:
        packages = " ".join(sorted(set(missing.values())))
        return f"there is no {', '.join(missing)} on this machine (Debian, Ubuntu: apt-get install {packages})"
    if not net.namespaces_allowed():
        return "even root may not make namespaces here; a container needs CAP_SYS_ADMIN and CAP_NET_ADMIN"
    if net.in_a_testbed():
        return "this is a node of a testbed; use the machine itself"
    return None


class Testbed:
    """A testbed that is up. As a context it is taken down at the end, whatever happens.

    Every method that changes something may raise HostError (a program of the machine failed, a node does not do what it
    should) and LockHeld (another change to this machine's testbeds takes longer than three minutes).
    """

    __test__ = False  # for pytest, to which it looks like a class of tests

    def __init__(self, folder: Path, state: BedState, guard: subprocess.Popen[bytes] | None = None) -> None:
        self.folder = folder
        self.settings = state
        """What it was made with."""
        self.name = state.name
        """Its name on this machine."""
        self.node_names = state.node_names
        """vm1 to vmN."""
        self.host_address = state.host_address
        """The machine's own address on the testbed's network: it reaches all nodes, and they reach it there."""
        self.ssh_config = folder / "ssh_config"
        """The ssh configuration that reaches all nodes, from the machine and from any node."""
        self._guard = guard

    # -- making, finding, removing --

    @classmethod
    def up(
        cls,
        nodes: int = 2,
        *,
        name: str = "main",
        rate: str | None = None,
        slots: int = 1,
        state: Path | None = None,
        guarded: bool = False,
    ) -> Testbed:
        """Make a testbed of nodes vm1 to vmN, or repair the one of this name.

        So killed, cut and paused nodes are up when this returns.
        `rate` limits each node's link, as ``1gbit``, or single ones, as ``1gbit,vm2=50mbit``, both ways; rates and
        delays that single nodes were given later are those of this call again. `state` is a new or empty folder for
        keys and configuration (by default below /run). With `guarded`, a process of its own takes the testbed down
        when this process ends, however it ends.
        Raises ConfigError for wrong arguments, and if a testbed of this name has others.
        """
        check_bed_name(name)
        if not 1 <= nodes <= MAX_NODES:
            raise ConfigError(f"a testbed has 1 to {MAX_NODES} nodes, not {nodes}")
        if not 1 <= slots <= MAX_SLOTS:
            raise ConfigError(f"a node has 1 to {MAX_SLOTS} slots, not {slots}")
        every, single = (None, {}) if rate is None else parse_rates(rate)
        if strange := set(single) - {f"vm{number}" for number in range(1, nodes + 1)}:
            raise ConfigError(f"--rate {rate}: a testbed of {nodes} nodes has no {', '.join(sorted(strange))[:80]}")
        settings = nodes, slots, every
        _require()
        with _changing():
            bed = _whole(cls, name, settings, state)
            # Not before here: a testbed of other settings, which is refused, is none of the guard's business.
            guard = _start_guard(name) if guarded else None
            try:
                if bed is None:
                    bed = _build(cls, name, settings, single, state)
                else:
                    bed._reshape(single, {})
            except BaseException:
                _end_guard(guard)
                raise
        bed._guard = guard
        return bed

    @classmethod
    def load(cls, name: str = "main") -> Testbed:
        """The testbed of this name. Raises ConfigError if there is none, or none that is complete."""
        check_bed_name(name)
        _require()
        found = load_state(name)
        if found is None or not found[1].complete or not net.has_bridge(name):
            left = "half a testbed" if state_folder(name) is not None else "no testbed"
            raise ConfigError(f"there is {left} {name!r} on this machine; `lastgood testbed up --name {name}` makes it")
        return cls(*found)

    @classmethod
    def remove(cls, name: str = "main") -> bool:
        """Remove a testbed, complete or half made. Returns whether there was something."""
        check_bed_name(name)
        _require()
        with _changing():
            return _remove(name)

    def down(self) -> None:
        """Kill all nodes and remove all that the testbed made."""
        type(self).remove(self.name)
        _end_guard(self._guard)
        self._guard = None

    def __enter__(self) -> Testbed:
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    # -- what it is --

    @property
    def hostfile(self) -> Hostfile:
        """All nodes, with their slots."""
        return read_hostfile(self.folder / "hostfile")

    def address(self, node: str) -> str:
        """A node's address."""
        return self.settings.address(self._checked(node))

    def remote(self, connect_timeout_s: int = 10) -> Remote:
        """Commands on the nodes, by ssh."""
        return Remote(SshOptions(config=self.ssh_config, connect_timeout_s=connect_timeout_s))

    def status(self) -> list[NodeStatus]:
        """How each node is."""
        return [self._status_of(node) for node in self.node_names]

    # -- mirrors --

    def mirror(self, watched: Sequence[str], to: str, *, split: bool = False) -> Monitor:
        """Copy all that the `watched` nodes send and get to node `to`, where it arrives at mir0.

        With `split`, what they get arrives at mir1. Afterwards these and no other nodes are mirrored there; what was
        mirrored before goes on without a gap. A restart of a node brings its part back. Raises ConfigError.
        """
        nodes = tuple(dict.fromkeys(self._checked(node) for node in watched))
        if not nodes or self._checked(to) in nodes:
            raise ConfigError(f"a monitor watches other nodes than itself, and at least one: give --watch, not {to}")
        monitor = Monitor(node=to, watched=nodes, split=split)
        with self._changing(to):
            # Noted first: what is half made is made complete, or removed, by the next call.
            save_monitors(self.folder, [*(one for one in self.monitors() if one.node != to), monitor])
            add_monitor(self.settings, monitor)
        return monitor

    def unmirror(self, to: str) -> bool:
        """Remove all that is mirrored to a node. Returns whether there was something."""
        with self._changing(to):
            kept = [one for one in self.monitors() if one.node != to]
            found = len(kept) < len(self.monitors())
            remove_monitor(self.settings, to)
            save_monitors(self.folder, kept)
        return found

    def monitors(self) -> tuple[Monitor, ...]:
        """What is mirrored, to which nodes."""
        return load_monitors(self.folder)

    def count_mirrored(self, to: str) -> list[MonitorCounts]:
        """Copies, and their losses before node `to` sees them, since its mirror was made.

        Raises ConfigError if nothing is mirrored there, HostError if the mirror is not complete.
        """
        for monitor in self.monitors():
            if monitor.node == self._checked(to):
                return count_monitor(self.settings, monitor)
        raise ConfigError(f"testbed {self.name} mirrors nothing to {to}; `lastgood mirror setup` makes a mirror")

    # -- faults --

    def cut(self, node: str) -> None:
        """Drop all that a node sends and gets. Nothing tells its peers: connections go on waiting."""
        with self._changing_running(node):
            net.set_link(self.name, node, up=False)

    def heal(self, node: str) -> None:
        """Let a node's traffic pass again; connections that still wait go on."""
        with self._changing_running(node):
            net.set_link(self.name, node, up=True)

    def pause(self, node: str) -> None:
        """Stop all processes of a node (SIGSTOP). Its links stay up: connections are accepted, and not answered."""
        with self._changing_running(node):
            space, deadline = net.namespace_of(self.name, node), time.monotonic() + _PAUSE_S
            # Again until none runs: a process may have made another one before it was stopped.
            while any(not net.is_stopped(pid) for pid in net.signal_processes(space, signal.SIGSTOP)):
                if time.monotonic() > deadline:
                    raise HostError(
                        f"{node}: some processes do not stop within {_PAUSE_S:g} s; resume it and try again"
                    )
                time.sleep(0.01)

    def resume(self, node: str) -> None:
        """Let all processes of a node go on (SIGCONT)."""
        with self._changing_running(node):
            net.signal_processes(net.namespace_of(self.name, node), signal.SIGCONT)

    def kill(self, node: str) -> None:
        """Lose a node at once, with its memory: all processes are killed, and its network is gone.

        The link goes first, so that its peers hear nothing, no reset and no farewell, as when a machine loses its
        power. Nothing happens to a node that is killed already.
        """
        with self._changing(node):
            self._kill(node)

    def restart(self, node: str) -> None:
        """Bring a node up again, with its old name, address and host key; what still runs in it is killed before."""
        with self._changing(node):
            self._restart(node)

    def set_rate(self, node: str, rate: str) -> None:
        """Limit a node's link from now on, both ways, as ``50mbit``; connections go on. A restart keeps it."""
        bits_per_s = parse_rate(rate)
        with self._changing(node):
            rates = {**self.settings.node_rates_bits_per_s, node: bits_per_s}
            self._reshape(rates, self.settings.node_delays_us)

    def set_delay(self, node: str, delay: str) -> None:
        """Delay what a node sends and gets, each by ``20ms`` say, from now on; ``0ms`` ends it. A restart keeps it.

        Raises HostError if this machine's kernel has no netem.
        """
        delay_us = parse_delay(delay)
        with self._changing_running(node):
            if delay_us and not net.has_netem(net.namespace_of(self.name, node)):
                raise HostError("this machine: its kernel has no netem (module sch_netem), so links have no delay here")
            delays = {**self.settings.node_delays_us, node: delay_us}
            self._reshape(self.settings.node_rates_bits_per_s, {one: us for one, us in delays.items() if us})

    # -- inside --

    def _reshape(self, rates: dict[str, int], delays: dict[str, int]) -> None:
        before = self.settings
        state = before.model_copy(update={"node_rates_bits_per_s": dict(rates), "node_delays_us": dict(delays)})
        if state == before:
            return
        # Noted first: a restart of the node makes its link as the record says.
        save_state(self.folder, state)
        self.settings = state
        for node in self.node_names:
            changed = state.rate_of(node) != before.rate_of(node) or delays.get(node) != before.node_delays_us.get(node)
            if changed and net.processes_in(net.namespace_of(self.name, node)):
                net.shape_link(state, node)

    def _kill(self, node: str) -> None:
        space = net.namespace_of(self.name, node)
        if self._status_of(node).state != "killed":
            net.set_link(self.name, node, up=False)
        net.kill_processes(space)
        net.remove_node_link(self.name, node)
        if any(one.node == node for one in self.monitors()):
            remove_monitor(self.settings, node)
        net.remove_namespace(space)

    def _restart(self, node: str) -> None:
        self._kill(node)
        net.add_node_link(self.settings, node)
        for monitor in self.monitors():
            if node in (monitor.node, *monitor.watched):
                add_monitor(self.settings, monitor)
        start_node(self.folder, self.settings, node)
        wait_for_node(self.folder, self.settings, node)

    def _status_of(self, node: str) -> NodeStatus:
        pids = net.processes_in(net.namespace_of(self.name, node))
        state: NodeState = "killed"
        if pids:
            cut, paused = not net.link_is_up(self.name, node), all(map(net.is_stopped, pids))
            state = ("cut and paused" if paused else "cut") if cut else ("paused" if paused else "up")
        return NodeStatus(node, self.settings.address(node), state, len(pids))

    def _make_whole(self) -> None:
        for status in self.status():
            if status.state == "killed":
                self._restart(status.name)
            elif status.state != "up":
                net.set_link(self.name, status.name, up=True)
                net.signal_processes(net.namespace_of(self.name, status.name), signal.SIGCONT)

    def _checked(self, node: str) -> str:
        if node not in self.node_names:
            raise ConfigError(f"testbed {self.name} has no node {node!r}; its nodes are {', '.join(self.node_names)}")
        return node

    @contextmanager
    def _changing(self, node: str) -> Iterator[None]:
        self._checked(node)
        with _changing():
            found = load_state(self.name)
            if found is None or (found[0], _made_with(found[1])) != (self.folder, _made_with(self.settings)):
                raise ConfigError(
                    f"testbed {self.name} was taken down meanwhile, or made again; see `lastgood testbed status --name "
                    f"{self.name}`"
                )
            self.settings = found[1]  # another process may have given a link another rate
            yield

    @contextmanager
    def _changing_running(self, node: str) -> Iterator[None]:
        with self._changing(node):
            if self._status_of(node).state == "killed":
                raise HostError(
                    f"{node}: it was killed; `lastgood testbed restart {node} --name {self.name}` brings it back"
                )
            yield


def _made_with(state: BedState) -> BedState:
    """What does not change while a testbed is up."""
    return state.model_copy(update={"node_rates_bits_per_s": {}, "node_delays_us": {}})


def _require() -> None:
    reason = why_no_testbed()
    if reason is not None:
        raise HostError(f"this machine: {reason}")


@contextmanager
def _changing() -> Iterator[None]:
    lock = beds_lock()
    lock.acquire(_LOCK_S)
    with lock:
        yield


def _whole(kind: type[Testbed], name: str, settings: _Settings, folder: Path | None) -> Testbed | None:
    """The testbed of these settings, if there is one, made complete. Raises ConfigError for one of other settings."""
    found = load_state(name)
    if found is None or not found[1].complete or not net.has_bridge(name):
        return None
    place, state = found
    if (state.nodes, state.slots, state.rate_bits_per_s) != settings or (
        folder is not None and folder.absolute() != place
    ):
        rate = "no limit" if state.rate_bits_per_s is None else rate_text(state.rate_bits_per_s)
        raise ConfigError(
            f"testbed {name} is up with other settings: {state.nodes} nodes, {state.slots} slots, {rate}, state in "
            f"{place}; give the same, another --name, or run `lastgood testbed down --name {name}` first"
        )
    bed = kind(place, state)
    bed._make_whole()
    return bed


def _build(kind: type[Testbed], name: str, settings: _Settings, single: dict[str, int], folder: Path | None) -> Testbed:
    _remove(name)
    nodes, slots, rate_bits_per_s = settings
    subnet = choose_subnet(net.routed_networks())
    state = BedState(
        name=name,
        nodes=nodes,
        slots=slots,
        rate_bits_per_s=rate_bits_per_s,
        node_rates_bits_per_s=single,
        subnet=subnet,
    )
    place = prepare_folder(name, folder)
    try:
        save_state(place, state)
        write_material(place, state)
        net.add_bridge(state)
        for node in state.node_names:
            net.add_node_link(state, node)
            start_node(place, state, node)
        for node in state.node_names:
            wait_for_node(place, state, node)
        state = state.model_copy(update={"complete": True})
        save_state(place, state)
    except BaseException:
        _remove(name)
        raise
    return kind(place, state)


def _remove(name: str) -> bool:
    found = state_folder(name) is not None
    for _ in range(_ROUNDS):
        spaces = net.namespaces(name)
        found = found or bool(spaces)
        for space in spaces:
            net.kill_processes(space)
        net.remove_host_link(name)
        for space in spaces:
            net.remove_namespace(space)
        if not net.namespaces(name):
            break
    forget(name)
    return found


def _start_guard(name: str) -> subprocess.Popen[bytes]:
    """A process that takes the testbed down at the end of its input, unless it is told that this was done."""
    return subprocess.Popen(
        [sys.executable, "-m", "lastgood.cluster.testbed.guard", name],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


def _end_guard(guard: subprocess.Popen[bytes] | None) -> None:
    """Tell a guard that the testbed is gone."""
    if guard is None:
        return
    try:
        guard.communicate(b"done\n", timeout=_GUARD_END_S)
    except subprocess.TimeoutExpired:
        # It has nothing to do any more, so nothing is lost with it.
        guard.kill()
        guard.wait(_GUARD_END_S)
