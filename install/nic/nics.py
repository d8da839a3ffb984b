#!/usr/bin/env python3
"""Sets network interfaces up for gradient streams, takes that back, and writes what a user-space TCP stack asks for.

    python3 install/nic/nics.py list                               what this machine has
    sudo python3 install/nic/nics.py setup NIC [NIC] [options]     MTU, offloads, rings, flow control, buffers
    sudo python3 install/nic/nics.py undo FILE                     all as it was
    python3 install/nic/nics.py tpa-conf NIC [NIC] --out DIR       a tpa.cfg for each, from this machine's own addresses

Needs Python's standard library, iproute2 and ethtool. Nothing lasts over a reboot. docs/nics.md says which setting is
for what. `setup --dry-run` reads, prints every command and changes nothing.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

COMMAND_S = 30
SYS_NET = Path("/sys/class/net")
UNDO_FILE = Path("/var/lib/lastgood/nics-undo.json")
OFFLOADS = {
    "lro": "large-receive-offload",
    "gro": "generic-receive-offload",
    "gso": "generic-segmentation-offload",
    "tso": "tcp-segmentation-offload",
}
BUFFER_BYTES = 256 << 20
SYSCTLS = {
    "net.core.rmem_max": str(BUFFER_BYTES),
    "net.core.wmem_max": str(BUFFER_BYTES),
    "net.ipv4.tcp_rmem": f"4096 131072 {BUFFER_BYTES}",
    "net.ipv4.tcp_wmem": f"4096 65536 {BUFFER_BYTES}",
    "net.core.netdev_max_backlog": "250000",
}


class NicError(Exception):
    """What failed, on which interface, and what to do; printed as one line."""


@dataclass
class Step:
    """One setting: what it is now, what it shall be, and the commands for both ways."""

    nic: str
    what: str
    now: str
    wanted: str
    apply: list[list[str]] = field(default_factory=list)
    undo: list[list[str]] = field(default_factory=list)
    skipped: str | None = None
    """Why this setting cannot be made here."""


def run(*command: str) -> str:
    """Run a command that must work; returns what it printed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    except FileNotFoundError as error:
        raise NicError(f"{command[0]} is not installed; apt-get install iproute2 ethtool") from error
    except subprocess.TimeoutExpired as error:
        raise NicError(f"{' '.join(command)}: no end within {COMMAND_S} s") from error
    if done.returncode:
        raise NicError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip() or f'exit {done.returncode}'}")
    return done.stdout


def ask(*command: str) -> str | None:
    """What a command printed, or None where the driver does not know the question."""
    try:
        return run(*command)
    except NicError:
        return None


# -- what there is -----------------------------------------------------------------------------------------------------


def interfaces() -> list[dict]:
    """`ip`'s own list of interfaces, with addresses; never the loopback."""
    found = json.loads(run("ip", "-json", "-details", "address", "show"))
    return [item for item in found if "LOOPBACK" not in item.get("flags", [])]


def interface(name: str) -> dict:
    """One of them."""
    known = interfaces()
    for item in known:
        if item["ifname"] == name:
            return item
    raise NicError(f"there is no interface {name}; there are: {', '.join(item['ifname'] for item in known) or 'none'}")


def pci_address(name: str) -> str | None:
    """PCI address of an interface (0000:3b:00.0), or None where it hangs on none (veth, virtio over MMIO)."""
    device = SYS_NET / name / "device"
    # A virtio device is a child of the PCI device.
    parts = reversed(device.resolve().parts) if device.exists() else ()
    return next((part for part in parts if re.fullmatch(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", part)), None)


def inventory() -> list[dict]:
    """Name, PCI address, driver, NUMA node, speed, MTU and addresses of every interface."""
    rows = []
    for item in interfaces():
        name = item["ifname"]
        device = SYS_NET / name / "device"
        driver = device / "driver"
        rows.append(
            {
                "nic": name,
                "pci": pci_address(name),
                "driver": driver.resolve().name if driver.exists() else item.get("linkinfo", {}).get("info_kind"),
                "numa_node": _number(device / "numa_node"),
                "speed_mbit": _number(SYS_NET / name / "speed"),
                "mtu": item["mtu"],
                "addresses": [
                    f"{entry['local']}/{entry['prefixlen']}"
                    for entry in item.get("addr_info", [])
                    if entry.get("scope") == "global"
                ],
            }
        )
    return rows


def _number(path: Path) -> int | None:
    try:
        value = int(path.read_text())
    except (OSError, ValueError):
        return None  # the kernel refuses the question for a link that is down, and for virtual ones
    return value if value >= 0 else None


# -- what to change ----------------------------------------------------------------------------------------------------


def plan(nic: str, mtu: int, lossless: str, priority: int, dscp: int) -> list[Step]:
    """All settings of one interface; those that it has already have no commands."""
    item = interface(nic)
    steps = [_mtu(item, mtu), *_offloads(nic), _rings(nic), *_flow_control(nic, lossless, priority, dscp)]
    steps.append(_dropless(nic))
    return steps


def _mtu(item: dict, mtu: int) -> Step:
    nic, now, most = item["ifname"], item["mtu"], item.get("max_mtu") or 65535
    step = Step(nic, "MTU (jumbo frames)", str(now), str(mtu))
    if mtu > most:
        step.skipped = f"its driver allows {most} at most"
    elif now != mtu:
        step.apply = [["ip", "link", "set", "dev", nic, "mtu", str(mtu)]]
        step.undo = [["ip", "link", "set", "dev", nic, "mtu", str(now)]]
    return step


def _offloads(nic: str) -> list[Step]:
    told = ask("ethtool", "-k", nic)
    steps = []
    for short, name in OFFLOADS.items():
        found = re.search(rf"^{name}: (on|off)( \[[^]]*\])?", told or "", re.MULTILINE)
        step = Step(nic, name, found.group(1) if found else "unknown", "on")
        if found is None:
            step.skipped = "ethtool -k does not show it"
        elif found.group(1) == "off":
            if found.group(2):
                step.skipped = f"its driver says{found.group(2)}"
            else:
                step.apply, step.undo = [["ethtool", "-K", nic, short, "on"]], [["ethtool", "-K", nic, short, "off"]]
        steps.append(step)
    return steps


def _rings(nic: str) -> Step:
    told = ask("ethtool", "-g", nic) or ""
    values = {key: re.findall(rf"^{key}:\s+(\d+)$", told, re.MULTILINE) for key in ("RX", "TX")}
    if any(len(found) != 2 for found in values.values()):
        return Step(nic, "rings (RX, TX)", "unknown", "the largest", skipped="its driver has no ring sizes to set")
    (most_rx, rx), (most_tx, tx) = values["RX"], values["TX"]
    step = Step(nic, "rings (RX, TX)", f"{rx}, {tx}", f"{most_rx}, {most_tx}")
    if (rx, tx) != (most_rx, most_tx):
        step.apply = [["ethtool", "-G", nic, "rx", most_rx, "tx", most_tx]]
        step.undo = [["ethtool", "-G", nic, "rx", rx, "tx", tx]]
    return step


def _flow_control(nic: str, lossless: str, priority: int, dscp: int) -> list[Step]:
    """Pause frames, priority flow control, or neither: a link can obey one of the two."""
    if lossless == "keep":
        return []
    wanted = "on" if lossless == "pause" else "off"
    told = ask("ethtool", "-a", nic) or ""
    found = dict(re.findall(r"^(Autonegotiate|RX|TX):\s+(on|off)$", told, re.MULTILINE))
    pause = Step(nic, "pause frames (RX, TX)", f"{found.get('RX', 'unknown')}, {found.get('TX', 'unknown')}", wanted)
    if {"RX", "TX"} - found.keys():
        pause.skipped = "its driver has no pause frames"
    elif (found["RX"], found["TX"]) != (wanted, wanted):
        pause.apply = [["ethtool", "-A", nic, "rx", wanted, "tx", wanted]]
        pause.undo = [["ethtool", "-A", nic, "rx", found["RX"], "tx", found["TX"]]]
    if lossless != "pfc":
        return [pause]
    return [pause, _priority_flow_control(nic, priority), _trust_dscp(nic, priority, dscp)]


def _priority_flow_control(nic: str, priority: int) -> Step:
    told = ask("dcb", "-json", "pfc", "show", "dev", nic)
    step = Step(nic, "priority flow control", "unknown", f"priority {priority} only")
    try:
        on = [number for number, state in enumerate(json.loads(told or "")["prio-pfc"]) if state in (True, "on")]
    except (ValueError, KeyError, TypeError):
        step.skipped = "its driver has no DCB (on NVIDIA's own driver: mlnx_qos --pfc)"
        return step
    step.now = f"priorities {on}"
    if on != [priority]:
        before = ["all:off", *(f"{number}:on" for number in on)]
        step.apply = [["dcb", "pfc", "set", "dev", nic, "prio-pfc", "all:off", f"{priority}:on"]]
        step.undo = [["dcb", "pfc", "set", "dev", nic, "prio-pfc", *before]]
    return step


def _trust_dscp(nic: str, priority: int, dscp: int) -> Step:
    told = ask("dcb", "-json", "app", "show", "dev", nic)
    step = Step(nic, "trust DSCP", "unknown", f"DSCP {dscp} is priority {priority}")
    try:
        entries = [tuple(entry) for entry in json.loads(told or "").get("dscp_prio", [])]
    except (ValueError, AttributeError, TypeError):
        step.skipped = "its driver has no DCB (on NVIDIA's own driver: mlnx_qos --trust dscp)"
        return step
    step.now = f"{len(entries)} rules"
    if (dscp, priority) not in entries:
        rule = f"{dscp}:{priority}"
        step.apply = [["dcb", "app", "add", "dev", nic, "dscp-prio", rule]]
        step.undo = [["dcb", "app", "del", "dev", nic, "dscp-prio", rule]]
    return step


def _dropless(nic: str) -> Step:
    told = ask("ethtool", "--show-priv-flags", nic) or ""
    found = re.search(r"^dropless_rq\s*: (on|off)$", told, re.MULTILINE)
    if found is None:
        return Step(nic, "dropless receive queue", "unknown", "on", skipped="its driver has no such flag (mlx5 has)")
    step = Step(nic, "dropless receive queue", found.group(1), "on")
    if found.group(1) == "off":
        step.apply = [["ethtool", "--set-priv-flags", nic, "dropless_rq", "on"]]
        step.undo = [["ethtool", "--set-priv-flags", nic, "dropless_rq", "off"]]
    return step


def plan_capture(nic: str, roce: str, vfio: bool) -> list[Step]:
    """What a port that only captures mirrored frames needs more: no RoCE, and for DPDK a driver of its own."""
    pci = pci_address(nic)
    steps = []
    if roce == "off":
        steps.append(_roce_off(nic, pci))
    if vfio:
        steps.append(_vfio(nic, pci))
    return steps


def _roce_off(nic: str, pci: str | None) -> Step:
    # A card with RoCE on takes RDMA packets that look like its own out of the stream before anything else sees them.
    told = ask("devlink", "-json", "dev", "param", "show", f"pci/{pci}", "name", "enable_roce") if pci else None
    step = Step(nic, "RoCE", "unknown", "off")
    try:
        (values,) = (one["values"] for found in json.loads(told or "{}")["param"].values() for one in found)
        (now,) = (one["value"] for one in values if one["cmode"] == "driverinit")
    except (KeyError, ValueError, TypeError, AttributeError):
        step.skipped = "its driver cannot switch it (mlx5 can); without RDMA drivers there is none"
        return step
    step.now = "on" if now in (True, "true") else "off"
    if step.now == "on":
        for commands, value in ((step.apply, "false"), (step.undo, "true")):
            words = ["devlink", "dev", "param", "set", f"pci/{pci}", "name", "enable_roce"]
            commands.append([*words, "value", value, "cmode", "driverinit"])
            commands.append(["devlink", "dev", "reload", f"pci/{pci}"])
    return step


def _vfio(nic: str, pci: str | None) -> Step:
    driver = (SYS_NET / nic / "device" / "driver").resolve().name
    step = Step(nic, "driver for DPDK", driver if pci else "none", "vfio-pci")
    if pci is None:
        step.skipped = "it hangs on no PCI device"
    elif driver.startswith("mlx"):
        step.skipped = "DPDK uses this driver's cards as they are"
    elif shutil.which("dpdk-devbind.py") is None:
        step.skipped = "dpdk-devbind.py is not installed; apt-get install dpdk"
    else:
        step.apply = [["modprobe", "vfio-pci"], ["dpdk-devbind.py", "--force", "-b", "vfio-pci", pci]]
        step.undo = [["dpdk-devbind.py", "-b", driver, pci]]
    return step


def plan_kernel(hugepages: int | None) -> list[Step]:
    """Socket buffers, and huge pages where they are asked for (only a user-space stack needs them)."""
    wanted = dict(SYSCTLS)
    if hugepages is not None:
        wanted["vm.nr_hugepages"] = str(hugepages)
    steps = []
    for name, value in wanted.items():
        path = Path("/proc/sys") / name.replace(".", "/")
        step = Step("kernel", name, "unknown", value)
        try:
            step.now = " ".join(path.read_text().split())
        except OSError:
            step.skipped = f"{path} is not there (a container or a network namespace?)"
        else:
            if _smaller(step.now, value):
                step.apply = [["sysctl", "-qw", f"{name}={value}"]]
                step.undo = [["sysctl", "-qw", f"{name}={step.now}"]]
        steps.append(step)
    return steps


def _smaller(now: str, wanted: str) -> bool:
    """Whether any number is smaller than wanted: nothing is ever made smaller."""
    return any(int(have) < int(want) for have, want in zip(now.split(), wanted.split(), strict=True))


# -- doing it ----------------------------------------------------------------------------------------------------------


def show(steps: list[Step]) -> None:
    """Print a line for each step, and its commands."""
    for step in steps:
        state = f"left alone: {step.skipped}" if step.skipped else ("change" if step.apply else "is so already")
        print(f"{step.nic}: {step.what}: {step.now} -> {step.wanted}: {state}")
        for command in step.apply:
            print(f"    {' '.join(command)}")


def set_up(steps: list[Step], undo_file: Path) -> int:
    """Make the changes. The way back is on the disk before the first of them. Returns how many failed."""
    changes = [step for step in steps if step.apply]
    if not changes:
        return 0
    if undo_file.exists():
        raise NicError(f"{undo_file} is there: these interfaces were set up before. `undo {undo_file}` first")
    undo = [command for step in reversed(changes) for command in step.undo]
    undo_file.parent.mkdir(parents=True, exist_ok=True)
    draft = undo_file.with_suffix(".draft")
    draft.write_text(json.dumps(undo, indent=1) + "\n")
    draft.replace(undo_file)
    failed = 0
    for step in changes:
        try:
            for command in step.apply:
                run(*command)
        except NicError as error:
            failed += 1
            print(f"{step.nic}: {step.what}: {error}", file=sys.stderr)
    print(f"to take it back: {Path(__file__).name} undo {undo_file}")
    return failed


def undo(undo_file: Path) -> int:
    """Run the way back; what fails is told, and stays in the file."""
    try:
        commands = json.loads(undo_file.read_text())
        if not all(isinstance(part, str) for command in commands for part in command):
            raise ValueError("not a list of commands")
    except FileNotFoundError as error:
        raise NicError(f"{undo_file} is not there: nothing was set up, or it was undone already") from error
    except (ValueError, TypeError) as error:
        raise NicError(f"{undo_file} holds no commands: {error}") from error
    left = []
    for command in commands:
        try:
            run(*command)
        except NicError as error:
            print(error, file=sys.stderr)
            left.append(command)
    if left:
        undo_file.write_text(json.dumps(left, indent=1) + "\n")
    else:
        undo_file.unlink()
    return len(left)


def tpa_conf(nic: str, gateway: str | None) -> str:
    """Configuration of libtpa for one interface, from its PCI address and its first IPv4 address."""
    (row,) = (row for row in inventory() if row["nic"] == interface(nic)["ifname"])
    if row["pci"] is None:
        driver = row["driver"] or "no driver"
        raise NicError(f"{nic} hangs on no PCI device ({driver}): a user-space stack cannot take it")
    own = [entry for entry in map(ipaddress.ip_interface, row["addresses"]) if entry.version == 4]
    if not own:
        raise NicError(f"{nic} has no IPv4 address; give it one first: ip address add A.B.C.D/24 dev {nic}")
    gate = gateway or _gateway(nic)
    lines = [f"name = {nic}", f"ip = {own[0].ip}", f"mask = {own[0].netmask}", *([f"gw = {gate}"] if gate else [])]
    body = "\n".join(f"    {line}" for line in lines)
    return f"net {{\n{body}\n}}\n\ndpdk {{\n    pci = {row['pci']}\n}}\n"


def _gateway(nic: str) -> str | None:
    routes = json.loads(run("ip", "-json", "-4", "route", "show", "default", "dev", nic) or "[]")
    return next((route["gateway"] for route in routes if "gateway" in route), None)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code (1 something failed, 2 asked for wrongly)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list")
    listing.add_argument("--json", action="store_true")
    setting = commands.add_parser("setup")
    setting.add_argument("nic", nargs="+")
    setting.add_argument("--mtu", type=int, default=9000)
    setting.add_argument("--lossless", choices=["off", "pause", "pfc", "keep"], default="off")
    setting.add_argument("--priority", type=int, choices=range(8), default=3, help="of gradient traffic, for pfc")
    setting.add_argument("--dscp", type=int, choices=range(64), default=26, metavar="0..63", help="mark, for pfc")
    setting.add_argument("--hugepages", type=int, help="2 MiB pages for a user-space stack")
    setting.add_argument("--roce", choices=["off", "keep"], default="keep", help="off: for a port that only captures")
    setting.add_argument("--vfio", action="store_true", help="give it to DPDK: the kernel loses the interface")
    setting.add_argument("--undo-file", type=Path, default=UNDO_FILE)
    setting.add_argument("--dry-run", action="store_true")
    undoing = commands.add_parser("undo")
    undoing.add_argument("file", type=Path, nargs="?", default=UNDO_FILE)
    writing = commands.add_parser("tpa-conf")
    writing.add_argument("nic", nargs="+")
    writing.add_argument("--gateway")
    writing.add_argument("--out", type=Path, help="folder for tpa-NIC.cfg; without it they are printed")
    given = parser.parse_args(arguments)
    try:
        if given.command == "list":
            return _list(given.json)
        if given.command == "undo":
            return int(undo(given.file) > 0)
        if len(set(given.nic)) != len(given.nic):
            raise NicError("the same interface is named twice")
        if given.command == "tpa-conf":
            return _write_conf(given.nic, given.gateway, given.out)
        steps = [step for nic in given.nic for step in plan(nic, given.mtu, given.lossless, given.priority, given.dscp)]
        steps += [step for nic in given.nic for step in plan_capture(nic, given.roce, given.vfio)]
        steps += plan_kernel(given.hugepages)
        show(steps)
        if given.dry_run:
            return 0
        if os.geteuid() != 0 and any(step.apply for step in steps):
            raise NicError("changing interfaces needs root; run it with sudo, or look with --dry-run")
        return int(set_up(steps, given.undo_file) > 0)
    except NicError as error:
        print(f"nics.py: {error}", file=sys.stderr)
        return 1


def _list(as_json: bool) -> int:
    rows = inventory()
    if as_json:
        print(json.dumps(rows, indent=1))
        return 0
    for row in rows:
        speed = f"{row['speed_mbit']} Mbit/s" if row["speed_mbit"] else "speed unknown"
        numa = f", NUMA node {row['numa_node']}" if row["numa_node"] is not None else ""
        addresses = " ".join(row["addresses"]) or "no address"
        where = f"{row['pci'] or 'no PCI device'}, {row['driver'] or 'no driver'}"
        print(f"{row['nic']}: {where}, {speed}, MTU {row['mtu']}{numa}")
        print(f"    {addresses}")
    if shutil.which("ethtool") is None:
        print("ethtool is not installed: setup needs it", file=sys.stderr)
    return 0


def _write_conf(nics: list[str], gateway: str | None, folder: Path | None) -> int:
    made = {nic: tpa_conf(nic, gateway) for nic in nics}
    for nic, text in made.items():
        if folder is None:
            print(f"# {nic}\n{text}")
        else:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"tpa-{nic}.cfg").write_text(text)
            print(folder / f"tpa-{nic}.cfg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
