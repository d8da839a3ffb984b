"""Suggestions about testbeds, followed to the letter with real ones."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lastgood.cli import app
from lastgood.cluster.testbed import net
from lastgood.cluster.testbed.testbed import Testbed
from tests.suggestions.following import advice, follows, hear, refusal

pytestmark = pytest.mark.root

# What a container's root may do by default.
OF_A_CONTAINER = "chown dac_override fowner fsetid kill setgid setuid setpcap net_bind_service net_raw sys_chroot mknod"
OF_A_CONTAINER += " audit_write setfcap"


def lastgood(line: str) -> str:
    """What a call says that must succeed."""
    done = CliRunner().invoke(app, shlex.split(line))
    assert done.exit_code == 0, (done.output, done.exception)
    return hear(done.output)


def refused(line: str) -> str:
    """What an unsuccessful call says."""
    done = CliRunner().invoke(app, shlex.split(line))
    assert done.exit_code != 0
    return hear(str(done.exception))


@pytest.fixture
def name(needs_testbed: None) -> Iterator[str]:
    """Of a testbed that the test makes."""
    name = f"a{os.getpid()}"
    yield name
    Testbed.remove(name)


@follows(
    "there is {} {} on this machine; `lastgood testbed up --name {}` makes it",
    "for Lastgood: export LASTGOOD_SSH_CONFIG={}",
    "{}: it was killed; `lastgood testbed restart {} --name {}` brings it back",
    "testbed {} was taken down meanwhile, or made again; see `lastgood testbed status --name {}`",
)
def test_the_life_of_a_testbed(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LASTGOOD_SSH_CONFIG", raising=False)
    said = lastgood(advice(refused(f"testbed status --name {name}"), r"`lastgood (testbed up .*?)`"))
    assert "vm2" in lastgood(f"testbed status --name {name}")

    login = advice(said, r"for ssh: (ssh -F .*)")
    done = subprocess.run([*shlex.split(login), "hostname"], capture_output=True, text=True, timeout=60)
    assert done.stdout == "vm1\n"
    bed = Testbed.load(name)
    wanted = f"launch --how ssh --hostfile {bed.folder}/hostfile --logs {tmp_path} -- true"
    refused(wanted)
    monkeypatch.setenv(*advice(said, r"for Lastgood: export (\S+)").split("="))
    lastgood(wanted)

    lastgood(f"testbed kill vm2 --name {name}")
    lastgood(advice(refused(f"testbed cut vm2 --name {name}"), r"`lastgood (testbed restart .*?)`"))
    lastgood(f"testbed cut vm2 --name {name}")

    lastgood(f"testbed down --name {name}")
    look = advice(refusal(lambda: bed.cut("vm1")), r"`lastgood (testbed status .*?)`")
    assert "there is no testbed" in refused(look)


@follows("testbed {} is up with other settings")
def test_a_testbed_of_other_settings(name: str, tmp_path: Path) -> None:
    # A rate of so many digits has to be said with all of them.
    bed = Testbed.up(1, name=name, rate="1234.567mbit", guarded=True)
    message = refused(f"testbed up --nodes 1 --name {name}")
    found = re.search(r"settings: (\d+) nodes, (\d+) slots, (\S+), state in (\S+);", message)
    assert found
    lastgood(f"testbed up --nodes {found[1]} --slots {found[2]} --rate {found[3]} --state {found[4]} --name {name}")
    other = f"b{os.getpid()}"
    try:
        lastgood(f"testbed up --nodes 1 {advice(message, 'another (--name)')} {other}")
    finally:
        Testbed.remove(other)
    lastgood(advice(message, r"`lastgood (testbed down .*?)`"))
    lastgood(f"testbed up --nodes 1 --name {name}")
    bed.down()


def with_capabilities(names: str, program: str) -> str:
    """The output of a program of a process that may do no more than that; its error's text if it ends by one."""
    allowed = ",".join(["-all", *(f"+{one}" for one in names.split())])
    code = (
        "from lastgood.cluster.testbed.testbed import Testbed, why_no_testbed\n"
        f"try: print({program})\nexcept Exception as error: print(error)\n"
    )
    command = ["setpriv", f"--bounding-set={allowed}", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv is not installed (Debian: util-linux)")
@follows(
    "even root may not make namespaces here; a container needs CAP_SYS_ADMIN and CAP_NET_ADMIN",
    "the kernel must have network namespaces, veth, bridge and tbf",
)
def test_what_a_container_may_do(name: str) -> None:
    message = hear(with_capabilities(OF_A_CONTAINER, "why_no_testbed()"))
    needed = [one.lower() for one in re.findall(r"CAP_(\w+)", message)]
    make = f"Testbed.up(1, name={name!r}, rate='1gbit').remote().run('vm1', ['hostname'], 60).text"
    message = hear(with_capabilities(f"{OF_A_CONTAINER} {needed[0]}", make))
    assert needed == [one.lower() for one in re.findall(r"CAP_(\w+)", message)]
    assert with_capabilities(f"{OF_A_CONTAINER} {' '.join(needed)}", make) == "vm1\n"


@follows("this machine: `{}` did not end within {} s; see `dmesg`")
def test_a_program_that_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ip").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "ip").chmod(0o755)
    monkeypatch.setattr(net, "_PROGRAM_S", 0.2)
    with monkeypatch.context() as hanging:
        hanging.setattr(net, "_SEARCH_PATH", f"{tmp_path}:{net._SEARCH_PATH}")
        program = advice(refusal(lambda: net.run_program("ip", "link")), r"see `(\w+)`")
    if shutil.which(program) is None:
        pytest.skip(f"there is no {program} (Debian: util-linux)")
    done = subprocess.run([program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 or "not permitted" in done.stderr  # a container may not read its machine's log
