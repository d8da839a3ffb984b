"""`lastgood hosts check` over real nodes: all well, and one fault after another."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

import pytest

import lastgood as package
from lastgood.cluster.testbed.testbed import Testbed
from tests.multinode.support.host_checks import check, faults

pytestmark = pytest.mark.root


def test_a_testbed_is_well(bed: Testbed) -> None:
    code, report = check(bed)
    assert (code, faults(report)) == (0, []), report["findings"]
    for name in ("vm1", "vm2"):
        host = report["hosts"][name]
        assert host["facts"]["hostname"] == name
        assert host["facts"]["executable"] == sys.executable
        # One machine, one clock: what is read is the error of the reading, and no more than it says.
        assert abs(host["clock"]["skew_s"]) <= host["clock"]["error_s"] + 1e-3
    assert {(rate["source"], rate["target"]) for rate in report["rates"]} == {("vm1", "vm2"), ("vm2", "vm1")}
    assert all(rate["bytes_per_s"] > 0 for rate in report["rates"])


def test_a_lost_host_is_the_only_one_that_is_named(bed: Testbed) -> None:
    bed.kill("vm2")
    code, report = check(bed, "--connect-timeout", 4)  # which the other host keeps, however busy
    assert (code, faults(report)) == (1, [("vm2", "ssh")])
    assert "does not answer within 4 s" in report["findings"][0]["found"]
    assert report["hosts"]["vm1"]["facts"] is not None


def test_other_code_on_one_host_is_found(bed: Testbed, tmp_path: Path) -> None:
    """vm2 runs a Python that finds a copy of the package, of which one file differs."""
    copy = tmp_path / "site" / "lastgood"
    shutil.copytree(Path(package.__file__).parent, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    with (copy / "units.py").open("a") as file:
        file.write("# another revision\n")
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\n[ "$(hostname)" = vm1 ] && exec {shlex.quote(sys.executable)} "$@"\n'
        f"PYTHONPATH={shlex.quote(str(copy.parent))} "
        f'exec {shlex.quote(sys._base_executable)} "$@"\n'  # type: ignore[attr-defined]
    )
    python.chmod(0o755)
    code, report = check(bed, "--no-bandwidth", "--python", python)
    assert code == 1
    assert ("vm2", "lastgood") in faults(report)
    assert all(host == "vm2" for host, _ in faults(report))
    (found,) = (one["found"] for one in report["findings"] if one["what"] == "lastgood")
    assert "other code than here" in found


def test_a_python_that_is_not_there_is_named(bed: Testbed) -> None:
    code, report = check(bed, "--no-bandwidth", "--python", "/no/such/python")
    assert (code, faults(report)) == (1, [("vm1", "ssh"), ("vm2", "ssh")])
    assert "there is no command '/no/such/python'" in report["findings"][0]["found"]


def test_hosts_that_do_not_reach_each_other_have_a_fault_of_their_network(bed: Testbed) -> None:
    """This machine reaches both; between them there is no way, as behind a firewall that says so."""
    nodes = {"vm1": "vm2", "vm2": "vm1"}
    for node, other in nodes.items():
        done = bed.remote().run(node, ["ip", "route", "add", "prohibit", f"{bed.address(other)}/32"], 20)
        assert done.rc == 0, done.stderr
    try:
        code, report = check(bed)
    finally:
        for node, other in nodes.items():
            bed.remote().run(node, ["ip", "route", "del", "prohibit", f"{bed.address(other)}/32"], 20)
    assert code == 1
    assert sorted(faults(report)) == [("vm1", "network to vm2"), ("vm2", "network to vm1")]
    assert all("let TCP ports 29620 to 29622 through" in one["to_do"] for one in report["findings"])
    assert check(bed)[0] == 0  # now that the way is free
