"""install/nic/nics.py: on a real interface of a namespace, and on a NIC whose tools are stand-ins that keep state."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "install" / "nic" / "nics.py"
LIMIT_S = 60

# A ConnectX-like NIC: each tool answers from, and writes to, state.json beside it, as the real one would.
TOOL = """import json, sys, pathlib
path = pathlib.Path({state!r})
state = json.loads(path.read_text())
tool, *words = sys.argv[1:]
with open(path.with_name("calls"), "a") as log:
    log.write(" ".join([tool, *words]) + "\\n")
if " ".join([tool, *words]) == state.get("fails"):
    sys.exit("it refused")
names = {{"lro": "large-receive-offload", "gro": "generic-receive-offload", "gso": "generic-segmentation-offload",
         "tso": "tcp-segmentation-offload"}}
if tool == "ip":
    if words[:3] == ["link", "set", "dev"]:
        state["mtu"] = int(words[5])
    elif "route" in words:
        print(json.dumps([{{"gateway": "10.1.0.1"}}]))
    else:
        print(json.dumps([{{"ifname": "lo", "flags": ["LOOPBACK"], "mtu": 65536}},
            {{"ifname": "mlx0", "flags": ["UP"], "mtu": state["mtu"], "max_mtu": 9978, "addr_info": [
                {{"local": "fe80::1", "prefixlen": 64, "scope": "link"}},
                {{"local": "10.1.0.7", "prefixlen": 16, "scope": "global"}}]}}]))
elif tool == "ethtool":
    verb = words[0]
    if verb == "-k":
        for short, name in names.items():
            print(f"{{name}}: {{state[short]}}")
    elif verb == "-K":
        state[words[2]] = words[3]
    elif verb == "-g":
        print("Ring parameters:\\nPre-set maximums:\\nRX:\\t\\t8192\\nTX:\\t\\t8192\\nCurrent hardware settings:")
        print(f"RX:\\t\\t{{state['rx']}}\\nTX:\\t\\t{{state['tx']}}")
    elif verb == "-G":
        state["rx"], state["tx"] = int(words[3]), int(words[5])
    elif verb == "-a":
        print(f"Pause parameters:\\nAutonegotiate:\\toff\\nRX:\\t\\t{{state['pause']}}\\nTX:\\t\\t{{state['pause']}}")
    elif verb == "-A":
        state["pause"] = words[3]
    elif verb == "--show-priv-flags":
        print(f"Private flags:\\nrx_cqe_moder       : on\\ndropless_rq        : {{state['dropless']}}")
    elif verb == "--set-priv-flags":
        state["dropless"] = words[3]
elif tool == "dcb":
    words = [word for word in words if word != "-json"]
    if words[:2] == ["pfc", "show"]:
        print(json.dumps({{"prio-pfc": [number in state["pfc"] for number in range(8)]}}))
    elif words[:2] == ["pfc", "set"]:
        state["pfc"] = [int(word.split(":")[0]) for word in words[5:] if word.endswith(":on")]
    elif words[:2] == ["app", "show"]:
        print(json.dumps({{"dscp_prio": state["dscp"]}}))
    else:
        rule = [int(part) for part in words[5].split(":")]
        (state["dscp"].append if words[1] == "add" else state["dscp"].remove)(rule)
path.write_text(json.dumps(state))
"""
BEFORE = {
    "mtu": 1500, "lro": "off", "gro": "on", "gso": "on", "tso": "on", "rx": 1024, "tx": 1024,
    "pause": "off", "dropless": "off", "pfc": [5], "dscp": [],
}  # fmt: skip


@pytest.fixture
def nic(tmp_path):
    """Runs the script beside the stand-ins; `state()` is what the NIC is set to."""
    folder = tmp_path / "tools"
    folder.mkdir()
    state = folder / "state.json"
    state.write_text(json.dumps(BEFORE))
    answers = folder / "answers.py"
    answers.write_text(TOOL.format(state=str(state)))
    for tool in ("ip", "ethtool", "dcb", "sysctl"):
        # Through a shell: a first line that names an interpreter takes no blanks in its path.
        call = shlex.join([sys.executable, str(answers), tool])
        (folder / tool).write_text(f'#!/bin/sh\nexec {call} "$@"\n')
        (folder / tool).chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}

    class Nic:
        undo_file = tmp_path / "undo.json"

        def run(self, *words):
            command = [sys.executable, str(SCRIPT), *map(str, words)]
            return subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
            )

        def setup(self, *words):
            return self.run("setup", "mlx0", "--undo-file", self.undo_file, *words)

        def state(self):
            return json.loads(state.read_text())

        def fails_at(self, command):
            state.write_text(json.dumps({**self.state(), "fails": command}))

        def calls(self):
            log = folder / "calls"
            return log.read_text().splitlines() if log.exists() else []

    return Nic()


def changing(calls):
    asking = {"-k", "-g", "-a", "--show-priv-flags", "show", "-json"}
    return [call for call in calls if not asking & set(call.split())]


def test_dry_run_prints_what_a_real_run_does_and_changes_nothing(nic):
    said = nic.setup("--dry-run", "--lossless", "pfc")
    assert said.returncode == 0, said.stderr
    assert nic.state() == BEFORE
    assert not changing(nic.calls())
    assert not nic.undo_file.exists()
    printed = [line.strip() for line in said.stdout.splitlines() if line.startswith("    ")]
    assert nic.setup("--lossless", "pfc").returncode == 0
    assert changing(nic.calls()) == printed
    assert "ethtool --set-priv-flags mlx0 dropless_rq on" in printed


def test_pause_frames_and_all_else_are_set_and_undone(nic):
    assert nic.setup("--lossless", "pause").returncode == 0
    wanted = {"mtu": 9000, "lro": "on", "rx": 8192, "tx": 8192, "dropless": "on", "pause": "on"}
    assert nic.state() == {**BEFORE, **wanted}
    said = nic.run("undo", nic.undo_file)
    assert said.returncode == 0, said.stderr
    assert nic.state() == BEFORE
    assert not nic.undo_file.exists()


def test_priority_flow_control_turns_pause_frames_off(nic):
    assert nic.setup("--lossless", "pause").returncode == 0
    nic.undo_file.unlink()
    before = nic.state()
    assert nic.setup("--lossless", "pfc", "--priority", "4", "--dscp", "30").returncode == 0
    state = nic.state()
    assert (state["pause"], state["pfc"], state["dscp"]) == ("off", [4], [[30, 4]])
    assert nic.run("undo", nic.undo_file).returncode == 0
    assert nic.state() == before


def test_a_second_setup_does_not_lose_the_way_back(nic):
    assert nic.setup().returncode == 0
    again = nic.setup()
    # Only kernel settings may still be open: a NIC that is set up has nothing to change.
    assert not [line for line in again.stdout.splitlines() if line.startswith("mlx0") and line.endswith("change")]
    other = nic.setup("--mtu", "4000")
    assert other.returncode == 1
    assert "set up before" in other.stderr
    assert nic.state()["mtu"] == 9000


def test_what_fails_is_told_and_the_rest_is_done(nic):
    nic.fails_at("ethtool -G mlx0 rx 8192 tx 8192")
    said = nic.setup()
    assert said.returncode == 1
    assert "rings" in said.stderr
    assert "it refused" in said.stderr
    assert nic.state()["dropless"] == "on"


def test_an_undo_that_fails_half_way_can_be_repeated(nic):
    assert nic.setup().returncode == 0
    nic.fails_at("ip link set dev mlx0 mtu 1500")
    assert nic.run("undo", nic.undo_file).returncode == 1
    assert json.loads(nic.undo_file.read_text()) == [["ip", "link", "set", "dev", "mlx0", "mtu", "1500"]]
    nic.fails_at(None)
    assert nic.run("undo", nic.undo_file).returncode == 0
    assert nic.state()["mtu"] == 1500


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["setup", "mlx9", "--dry-run"], "there is no interface mlx9"),
        (["setup", "mlx0", "mlx0", "--dry-run"], "named twice"),
        (["undo", "no-such-file"], "nothing was set up"),
    ],
)
def test_errors_say_what_is_wrong(nic, words, says):
    said = nic.run(*words)
    assert said.returncode == 1
    assert says in said.stderr


def test_an_mtu_over_the_drivers_limit_is_left_alone(nic):
    said = nic.setup("--mtu", "12000")
    assert "its driver allows 9978 at most" in said.stdout
    assert nic.state()["mtu"] == 1500


def load_script():
    spec = importlib.util.spec_from_file_location("nics", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["nics"] = module
    spec.loader.exec_module(module)
    return module


def test_tpa_conf_comes_from_the_machine(nic, tmp_path, monkeypatch):
    """PCI addresses are read from sysfs: a tree of our own, one NIC straight on the bus and one behind virtio."""
    for name, device in (("mlx0", "pci0000:3a/0000:3b:00.1"), ("virt0", "pci0000:00/0000:00:05.0/virtio2")):
        (tmp_path / "devices" / device).mkdir(parents=True)
        (tmp_path / "net" / name).mkdir(parents=True)
        (tmp_path / "net" / name / "device").symlink_to(tmp_path / "devices" / device)
    monkeypatch.setenv("PATH", f"{tmp_path / 'tools'}:{os.environ['PATH']}")
    nics = load_script()
    monkeypatch.setattr(nics, "SYS_NET", tmp_path / "net")
    assert nics.pci_address("virt0") == "0000:00:05.0"
    assert nics.main(["tpa-conf", "mlx0", "--out", str(tmp_path / "conf")]) == 0
    text = (tmp_path / "conf" / "tpa-mlx0.cfg").read_text()
    assert [line.strip() for line in text.split("\n")] == [
        "net {", "name = mlx0", "ip = 10.1.0.7", "mask = 255.255.0.0", "gw = 10.1.0.1", "}", "",
        "dpdk {", "pci = 0000:3b:00.1", "}", "",
    ]  # fmt: skip


def test_a_port_that_captures_speaks_no_roce_and_may_belong_to_dpdk(tmp_path, monkeypatch):
    tree = tmp_path / "devices" / "0000:3b:00.1"
    tree.mkdir(parents=True)
    (tmp_path / "net" / "nic0").mkdir(parents=True)
    (tmp_path / "net" / "nic0" / "device").symlink_to(tree)
    nics = load_script()
    monkeypatch.setattr(nics, "SYS_NET", tmp_path / "net")
    told = {
        "param": {"pci/0000:3b:00.1": [{"name": "enable_roce", "values": [{"cmode": "driverinit", "value": True}]}]}
    }
    monkeypatch.setattr(nics, "ask", lambda *command: json.dumps(told) if command[0] == "devlink" else None)
    monkeypatch.setattr(nics.shutil, "which", lambda name: f"/usr/bin/{name}")
    (tree / "driver").symlink_to(tmp_path / "ice")
    roce, driver = nics.plan_capture("nic0", "off", True)
    words = "devlink dev param set pci/0000:3b:00.1 name enable_roce value"
    assert [" ".join(one) for one in roce.apply] == [
        f"{words} false cmode driverinit",
        "devlink dev reload pci/0000:3b:00.1",
    ]
    assert " ".join(roce.undo[0]) == f"{words} true cmode driverinit"
    assert driver.apply[-1] == ["dpdk-devbind.py", "--force", "-b", "vfio-pci", "0000:3b:00.1"]
    assert driver.undo == [["dpdk-devbind.py", "-b", "ice", "0000:3b:00.1"]]
    # One whose driver has no such switch, and one that DPDK uses as it is.
    monkeypatch.setattr(nics, "ask", lambda *command: None)
    (tree / "driver").unlink()
    (tree / "driver").symlink_to(tmp_path / "mlx5_core")
    roce, driver = nics.plan_capture("nic0", "off", True)
    assert roce.skipped and not roce.apply and driver.skipped and not driver.apply
    assert nics.plan_capture("nic0", "keep", False) == []


def test_an_interface_without_pci_is_refused(nic):
    said = nic.run("tpa-conf", "mlx0")
    assert said.returncode == 1
    assert "hangs on no PCI device" in said.stderr


# Runs inside a namespace that ends with its process. The kernel's own settings are the machine's: not touched.
INSIDE = """
import contextlib, io, json, runpy, subprocess, sys
script, undo = sys.argv[1:]
main = runpy.run_path(script)["main"]
main.__globals__["SYSCTLS"].clear()
def told(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
def now():
    features = told("ethtool", "-k", "na").splitlines()
    gro = next(line.split()[1] for line in features if line.startswith("generic-receive-offload"))
    return json.loads(told("ip", "-j", "link", "show", "na"))[0]["mtu"], gro
told("ip", "link", "add", "na", "type", "veth", "peer", "name", "nb")
before = now()
with contextlib.redirect_stdout(io.StringIO()) as said:
    codes = [main(["setup", "na", "--undo-file", undo])]
    during = now()
    codes.append(main(["undo", undo]))
print(json.dumps({"before": before, "during": during, "after": now(), "codes": codes, "said": said.getvalue()}))
"""


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="makes a network namespace, which needs root")
@pytest.mark.skipif(shutil.which("ethtool") is None, reason="ethtool is missing (install/test_prerequisites.sh)")
def test_a_real_interface(tmp_path):
    command = ["unshare", "--net", sys.executable, "-c", INSIDE, str(SCRIPT), str(tmp_path / "undo.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["codes"] == [0, 0]
    assert seen["during"] == [9000, "on"]
    assert seen["before"] == seen["after"] != seen["during"]
    assert "large-receive-offload: off -> on: left alone: its driver says [fixed]" in seen["said"]
