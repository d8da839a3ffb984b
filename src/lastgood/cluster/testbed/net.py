"""The kernel's side of a testbed: network namespaces, links, and the processes inside them.

A bridge in a namespace of its own joins one link for each node and one for the machine itself::

    machine  lgtb-NAME ── host ┐
    vm1      eth0 ───────── vm1 ├ br0      in namespace lgtb-NAME-br
    vm2      eth0 ───────── vm2 ┘

A process belongs to a node if its network namespace is the node's: that is how processes are found, never by a name.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from lastgood.cluster.testbed.state import PREFIX, BedState
from lastgood.errors import ConfigError, HostError
from lastgood.files import closed_after
from lastgood.processes import die_with_parent
from lastgood.text import parse_json

__all__ = [
    "add_bridge",
    "add_node_link",
    "has_bridge",
    "has_netem",
    "in_a_testbed",
    "in_namespace",
    "ip_batch",
    "is_stopped",
    "kill_processes",
    "link_is_up",
    "links_in",
    "listed",
    "missing_programs",
    "namespace_of",
    "namespaces",
    "namespaces_allowed",
    "processes_in",
    "program",
    "remove_host_link",
    "remove_namespace",
    "remove_node_link",
    "routed_networks",
    "run_program",
    "set_link",
    "shape_link",
    "signal_processes",
]

_Result = TypeVar("_Result")
_NETNS = Path("/run/netns")
_NEW_NETWORK = 0x40000000
"""CLONE_NEWNET."""
_PROGRAM_S = 30.0
_MOST_BYTES = 64 << 20
"""Of what `ip` lists."""
_END_S = 15.0
_SEARCH_PATH = os.pathsep.join(filter(None, (os.environ.get("PATH"), "/usr/sbin", "/sbin")))
_PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "nsenter": "util-linux",
    "setsid": "util-linux",
    "unshare": "util-linux",
    "mount": "mount",
    "bash": "bash",
}
_KERNEL_HINT = (
    "the kernel must have network namespaces, veth, bridge and tbf; a container needs CAP_SYS_ADMIN and CAP_NET_ADMIN"
)
_BRIDGE = "br0"
_HOST_PORT = "host"


# -- programs ------------------------------------------------------------------------------------------------------


def missing_programs() -> dict[str, str]:
    """Programs that a testbed needs and this machine lacks, with their Debian packages."""
    return {name: package for name, package in _PACKAGES.items() if shutil.which(name, path=_SEARCH_PATH) is None}


def program(name: str) -> str:
    """The path of a program. Raises ConfigError, naming its Debian package, if it is missing."""
    path = shutil.which(name, path=_SEARCH_PATH)
    if path is None:
        raise ConfigError(f"there is no {name} on this machine (Debian, Ubuntu: apt-get install {_PACKAGES[name]})")
    return path


def run_program(name: str, *arguments: str, lines: Iterable[str] = ()) -> str:
    """Run a program with `lines` on its standard input and return its output. Raises HostError if it fails.

    It ends with this process: after a kill nothing is made beside whoever removes what was made.
    """
    command = " ".join([name, *arguments])[:200]
    try:
        done = subprocess.run(
            [program(name), *arguments],
            input="".join(f"{line}\n" for line in lines),
            capture_output=True,
            text=True,
            timeout=_PROGRAM_S,
            check=False,
            preexec_fn=functools.partial(die_with_parent, os.getpid()),
        )
    except subprocess.TimeoutExpired as error:
        raise HostError(f"this machine: `{command}` did not end within {_PROGRAM_S:g} s; see `dmesg`") from error
    if done.returncode != 0:
        said = " ".join(done.stderr.split())[:300] or f"exit code {done.returncode}"
        hint = _KERNEL_HINT if name in ("ip", "tc") else "see its own words"
        raise HostError(f"this machine: `{command}` failed: {said}; {hint}")
    return done.stdout


# -- namespaces and links ------------------------------------------------------------------------------------------


def namespace_of(bed: str, node: str) -> str:
    """The name of the network namespace of a node, or of the bridge (``br``)."""
    return f"{PREFIX}{bed}-{node}"


def namespaces(bed: str) -> list[str]:
    """The network namespaces of a testbed that exist, complete or half made."""
    return sorted(path.name for path in _NETNS.glob(f"{PREFIX}{bed}-*"))


def namespaces_allowed() -> bool:
    """Whether this process may make all the namespaces that a node consists of."""
    command = [program("unshare"), "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "true"]
    return subprocess.run(command, capture_output=True, timeout=_PROGRAM_S, check=False).returncode == 0


def in_a_testbed() -> bool:
    """Whether this process is inside a node of some testbed."""
    own = _identity(Path("/proc/self/ns/net"))
    return any(_identity(path) == own for path in _NETNS.glob(f"{PREFIX}*"))


def routed_networks() -> list[str]:
    """Destinations of all IPv4 routes of this machine, its own addresses included."""
    routes = listed("ip", "-json", "-4", "route", "show", "table", "all")
    return [str(route["dst"]) for route in routes if "dst" in route]


def listed(*command: str) -> list[dict[str, Any]]:
    """What a command of `ip -json` or `tc -json` lists."""
    text = run_program(*command) or "[]"
    found = parse_json(text, " ".join(command), most_bytes=_MOST_BYTES, error=HostError)
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise HostError(f"{' '.join(command)}: lists something else than objects")
    return found


def links_in(space: str) -> dict[str, dict[str, Any]]:
    """The links of a network namespace by name, with their statistics, as `ip` shows them."""
    return {str(link["ifname"]): link for link in listed("ip", "-n", space, "-json", "-statistics", "link", "show")}


def in_namespace(space: str, function: Callable[[], _Result]) -> _Result:
    """Call a function in a thread whose network is that of a namespace: sockets that it makes stay there."""

    def call() -> _Result:
        libc = ctypes.CDLL(None, use_errno=True)
        with closed_after(os.open(_NETNS / space, os.O_RDONLY | os.O_CLOEXEC)) as descriptor:
            if libc.setns(descriptor, _NEW_NETWORK) != 0:
                raise HostError(f"this machine: cannot enter namespace {space}: {os.strerror(ctypes.get_errno())}")
        return function()

    if not (_NETNS / space).exists():
        raise HostError(f"this machine: there is no network namespace {space}; see `ip netns`")
    with ThreadPoolExecutor(1) as pool:  # its thread is used for nothing else
        return pool.submit(call).result()


def add_bridge(state: BedState) -> None:
    """Make the bridge's namespace, and the link between it and the machine."""
    bridge_space, link = namespace_of(state.name, "br"), _host_link(state.name)
    run_program("ip", "netns", "add", bridge_space)
    # Without spanning tree, and so without its half minute of silence on each new port.
    ip_batch(
        bridge_space,
        f"link add {_BRIDGE} type bridge stp_state 0 forward_delay 0",
        f"link set {_BRIDGE} up",
        "link set lo up",
    )
    run_program("ip", "link", "add", link, "type", "veth", "peer", "name", _HOST_PORT, "netns", bridge_space)
    ip_batch(bridge_space, f"link set {_HOST_PORT} master {_BRIDGE} up")
    run_program("ip", "address", "add", f"{state.host_address}/{state.subnet.prefixlen}", "dev", link)
    run_program("ip", "link", "set", link, "up")


def has_bridge(bed: str) -> bool:
    """Whether the bridge's namespace and the machine's link to it are there."""
    return namespace_of(bed, "br") in namespaces(bed) and Path("/sys/class/net", _host_link(bed)).exists()


def add_node_link(state: BedState, node: str) -> None:
    """Make a node's namespace with its eth0, joined to the bridge, and limit both ends to the testbed's rate."""
    space, bridge_space = namespace_of(state.name, node), namespace_of(state.name, "br")
    run_program("ip", "netns", "add", space)
    ip_batch(
        space,
        f"link add eth0 address {_hardware_address(node)} type veth peer name {node} netns {bridge_space}",
        f"address add {state.address(node)}/{state.subnet.prefixlen} dev eth0",
        "link set lo up",
        "link set eth0 up",
    )
    ip_batch(bridge_space, f"link set {node} master {_BRIDGE} up")
    if state.rate_of(node) is not None or node in state.node_delays_us:
        shape_link(state, node)


def set_link(bed: str, node: str, *, up: bool) -> None:
    """Put a node's link up, or down: then nothing passes, either way."""
    ip_batch(namespace_of(bed, "br"), f"link set {node} {'up' if up else 'down'}")


def link_is_up(bed: str, node: str) -> bool:
    """Whether a node's link is up."""
    (link,) = listed("ip", "-n", namespace_of(bed, "br"), "-json", "link", "show", "dev", node)
    return "UP" in link["flags"]


def remove_node_link(bed: str, node: str) -> None:
    """Remove a node's link. Its namespace alone would not do: sockets that the kernel still closes keep it alive."""
    bridge_space = namespace_of(bed, "br")
    if node in links_in(bridge_space):
        ip_batch(bridge_space, f"link del {node}")


def remove_host_link(bed: str) -> None:
    """Remove the machine's own link to the testbed, with its address and route."""
    link = _host_link(bed)
    if Path("/sys/class/net", link).exists():
        run_program("ip", "link", "del", link)


def remove_namespace(name: str) -> None:
    """Remove a network namespace, or what is left of one. There must be no process in it."""
    if (_NETNS / name).exists():
        run_program("ip", "netns", "del", name)


def _host_link(bed: str) -> str:
    return f"{PREFIX}{bed}"


def _hardware_address(node: str) -> str:
    # The same after a restart, as a machine keeps its card: peers still know the old one for up to a minute.
    return "02:4c:47:00:00:" + f"{int(node.removeprefix('vm')):02x}"


def ip_batch(space: str, *commands: str) -> None:
    """Commands of `ip` inside a namespace, in one go. Raises HostError at the first that fails."""
    run_program("ip", "-n", space, "-batch", "-", lines=commands)


def shape_link(state: BedState, node: str) -> None:
    """Give both ends of a node's link the rate and delay that its testbed's record says, also while it is used."""
    rate, delay_us = state.rate_of(node), state.node_delays_us.get(node)
    wanted = {"tbf"} if rate is not None else set()
    if delay_us is not None:
        wanted.add("netem")
    for space, device in ((namespace_of(state.name, node), "eth0"), (namespace_of(state.name, "br"), node)):
        where = ["tc", "-n", space, "qdisc"]
        present = {str(one.get("kind")) for one in listed("tc", "-n", space, "-json", "qdisc", "show", "dev", device)}
        if present & {"tbf", "netem"} - wanted:
            run_program(*where, "del", "dev", device, "root")
        if rate is not None:
            # tbf cannot send more in one go than its bucket holds: large segments need 64 KiB, and each tick of the
            # kernel's clock (4 ms at worst) its share of the rate.
            burst = max(128 << 10, rate // 8 // 250)
            bucket = ["rate", f"{rate}bit", "burst", str(burst), "latency", "50ms"]
            run_program(*where, "replace", "dev", device, "root", "handle", "1:", "tbf", *bucket)
        if delay_us is not None:
            parent = ["root"] if rate is None else ["parent", "1:1"]
            run_program(*where, "replace", "dev", device, *parent, "netem", "limit", "100000", "delay", f"{delay_us}us")


def has_netem(space: str) -> bool:
    """Whether this kernel can delay packets (sch_netem), as a try in a namespace shows."""
    try:
        run_program("tc", "-n", space, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1us")
    except HostError:
        return False
    run_program("tc", "-n", space, "qdisc", "del", "dev", "lo", "root")
    return True


# -- processes -----------------------------------------------------------------------------------------------------


def processes_in(space: str) -> list[int]:
    """Process ids, as this machine numbers them, of all processes in a network namespace."""
    wanted = _identity(_NETNS / space)
    if wanted is None:
        return []
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in pids if _identity(Path(f"/proc/{pid}/ns/net")) == wanted]


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal; one that has ended counts as stopped."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return True
    return text.rpartition(")")[2].split()[0] in "TtZX"


def signal_processes(space: str, number: signal.Signals) -> list[int]:
    """Send a signal to all processes of a namespace; returns those that were there."""
    wanted = _identity(_NETNS / space)
    pids = processes_in(space)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError), closed_after(os.pidfd_open(pid)) as descriptor:
            # Looked at again, now that the number cannot pass to another process any more.
            if _identity(Path(f"/proc/{pid}/ns/net")) == wanted:
                signal.pidfd_send_signal(descriptor, number)
    return pids


def kill_processes(space: str) -> None:
    """End all processes of a namespace at once, and wait until they are gone. Raises HostError if one stays."""
    deadline = time.monotonic() + _END_S
    while left := signal_processes(space, signal.SIGKILL):
        if time.monotonic() > deadline:
            raise HostError(
                f"{space}: processes {left[:10]} did not end within {_END_S:g} s after SIGKILL; see what they wait "
                f"for in /proc/PID/stack, then try again"
            )
        time.sleep(0.02)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:  # it has ended, or is nearly gone
        return None
    return status.st_dev, status.st_ino
