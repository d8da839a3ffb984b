"""install/install_preq_at_vm.sh: what it would do on each system, and its way across the reboot that a driver needs.

apt, dpkg, curl, dkms and systemctl are stand-ins on the PATH: they note how they were called and keep what they were
told. All else is real, the script with its state, its lock and its unit file under a root of its own. `Machine.boot`
does what systemd does: it runs what the enabled unit says.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "install" / "install_preq_at_vm.sh"
SYSTEMS = {
    "ubuntu2004": ("ubuntu", "20.04", "Ubuntu 20.04.6 LTS"),
    "ubuntu2204": ("ubuntu", "22.04", "Ubuntu 22.04.5 LTS"),
    "ubuntu2404": ("ubuntu", "24.04", "Ubuntu 24.04.3 LTS"),
    "debian12": ("debian", "12", "Debian GNU/Linux 12 (bookworm)"),
    "debian13": ("debian", "13", "Debian GNU/Linux 13 (trixie)"),
    "fedora": ("fedora", "41", "Fedora Linux 41 (Server Edition)"),
}
TOOLS = {
    "apt-get": """
        case " $* " in *" $(cat "$ROOT_DIR/refused" 2>/dev/null || echo none) "*) exit 100 ;; esac
        for word in "$@"; do
            case $word in -* | install | update | *=*) ;; *) echo "$word" >>"$ROOT_DIR/installed" ;; esac
        done""",
    "dpkg-query": """
        for word in "$@"; do :; done
        grep -qxF "$word" "$ROOT_DIR/installed" 2>/dev/null && printf installed""",
    "dpkg": 'echo cuda-keyring >>"$ROOT_DIR/installed"',
    "curl": "",
    "dkms": "",
    "systemctl": """
        case $1 in enable) touch "$ROOT_DIR/enabled" ;; disable) rm -f "$ROOT_DIR/enabled" ;; esac""",
}


def os_release(folder, system):
    name, version, pretty = SYSTEMS[system]
    path = folder / f"os-release.{system}"
    path.write_text(f'PRETTY_NAME="{pretty}"\nNAME="whatever"\nVERSION_ID="{version}"\nID={name}\nID_LIKE=debian\n')
    return path


class Machine:
    """A root of its own, and stand-ins for the system's programs."""

    def __init__(self, folder):
        self.root = folder / "root"
        self.calls_file = folder / "calls"
        self.tools = folder / "tools"
        self.tools.mkdir(parents=True)
        self.system = os_release(folder, "debian12")
        for name, text in TOOLS.items():
            program = self.tools / name
            noted = "" if name == "dpkg-query" else f'echo "{name} $*" >>"{self.calls_file}"\n'
            program.write_text(f'#!/bin/bash\nROOT_DIR="{folder}"\n{noted}{text}\n')
            program.chmod(0o755)
        self.write("proc/sys/kernel/random/boot_id", "boot-0")
        self.boots = 0

    def write(self, path, text):
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text + "\n")

    def add_gpu(self):
        self.write("sys/bus/pci/devices/0000:00:04.0/vendor", "0x10de")
        self.write("sys/bus/pci/devices/0000:00:04.0/class", "0x030200")

    def run(self, *arguments):
        where = ("--root", self.root, "--os-release", self.system)
        return self._bash([SCRIPT, *where, *arguments])

    def boot(self, *, driver):
        """Boot, and run the unit if it is enabled; returns None if not."""
        self.boots += 1
        self.write("proc/sys/kernel/random/boot_id", f"boot-{self.boots}")
        if driver:
            self.write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.1")
        if not (self.calls_file.parent / "enabled").exists():
            return None
        (command,) = re.findall(r"^ExecStart=/bin/bash (.*)$", self.unit.read_text(), re.MULTILINE)
        return self._bash(command.split())

    def _bash(self, words):
        return subprocess.run(
            ["bash", *map(str, words)],
            env={**os.environ, "PATH": f"{self.tools}{os.pathsep}{os.environ['PATH']}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )

    @property
    def unit(self):
        return self.root / "etc/systemd/system/lastgood-prerequisites.service"

    @property
    def state(self):
        lines = (self.root / "var/lib/lastgood/prerequisites.state").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines)

    @property
    def log(self):
        return (self.root / "var/log/lastgood-prerequisites.log").read_text()

    @property
    def calls(self):
        return self.calls_file.read_text().splitlines() if self.calls_file.exists() else []

    def called(self, *words):
        return [call for call in self.calls if all(word in call.split() for word in words)]


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path / "machine")


def dry_run(machine, system, *arguments):
    done = machine._bash([SCRIPT, "--dry-run", "--os-release", os_release(machine.tools.parent, system), *arguments])
    assert machine.calls == [], "a dry run calls nothing"
    return done.returncode, done.stdout


def position(output, pattern):
    found = re.search(pattern, output, re.MULTILINE)
    assert found, f"{pattern} is missing in\n{output}"
    return found.start()


# -- each system ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", [name for name in SYSTEMS if name != "fedora"])
def test_a_dry_run_names_every_command_for_each_system(machine, system):
    code, output = dry_run(machine, system)
    assert code == 0, output
    base = position(output, r"^\+ apt-get .*install -y --no-install-recommends .*\bg\+\+ ")
    for package in ("cmake", "git", "ninja-build", "openssh-server", "pdsh", "python3-dev", "python3-venv"):
        assert f" {package}" in output
    repository = position(output, rf"^\+ curl .*/compute/cuda/repos/{system}/(x86_64|sbsa)/cuda-keyring_1.1-1_all.deb")
    driver = position(output, r"^\+ apt-get .*install .* cuda-drivers$")
    unit = position(output, r"^\+ systemctl enable lastgood-prerequisites.service$")
    toolkit = position(output, r"^\+ apt-get .*install .* cuda-toolkit$")
    assert base < repository < driver < unit < toolkit
    assert (f"/compute/cuda/repos/{system}/" in output) and output.count("/compute/cuda/repos/") == 1
    assert ("uv python install 3.12" in output) == (system in ("ubuntu2004", "ubuntu2204"))
    assert ("main contrib" in output) == system.startswith("debian")
    assert output.endswith("changed: yes\nreboot: needed\n")


@pytest.mark.parametrize("system", ["ubuntu2004", "debian13"])
def test_without_a_gpu_nothing_of_nvidia_is_touched(machine, system):
    code, output = dry_run(machine, system, "--no-gpu")
    assert code == 0
    assert "cuda" not in output and "reboot: no" in output
    assert ("PYTHON=python3.12 bash install.sh" in output) == (system == "ubuntu2004")


def test_an_unknown_system_is_named_and_nothing_happens(machine):
    code, output = dry_run(machine, "fedora")
    assert code == 1
    assert "this is Fedora Linux 41 (Server Edition)" in output
    assert "supported: Ubuntu 20.04, 22.04, 24.04 and Debian 12, 13" in output
    assert "+ " not in output


def test_options_of_the_driver(machine):
    _, output = dry_run(machine, "debian12", "--driver-package", "nvidia-open", "--no-toolkit", "--reboot")
    assert re.search(r"^\+ apt-get .* nvidia-open$", output, re.MULTILINE)
    assert "cuda-toolkit" not in output
    assert "+ systemctl reboot\n" in output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--fast"], "unknown argument --fast; known: --dry-run"),
        (["--driver-package", "a; rm -rf /"], "not the name of a Debian package"),
        (["--root"], "--root needs a value"),
    ],
)
def test_wrong_arguments(machine, arguments, said):
    done = machine._bash([SCRIPT, "--dry-run", *arguments])
    assert done.returncode == 1
    assert said in done.stdout


def test_another_systems_file_is_for_dry_runs(machine):
    done = machine._bash([SCRIPT, "--os-release", machine.system])
    assert done.returncode == 1
    assert "add --dry-run" in done.stdout


def test_a_dry_run_on_this_machine():
    release = Path("/etc/os-release").read_text() if Path("/etc/os-release").exists() else ""
    if not re.search(r'^VERSION_ID="?(20\.04|22\.04|24\.04|12|13)"?$', release, re.MULTILINE):
        pytest.skip("this machine is none of the supported systems")
    state = Path("/var/lib/lastgood/prerequisites.state")
    before = state.stat().st_mtime_ns if state.exists() else None
    done = subprocess.run(["bash", SCRIPT, "--no-gpu", "--dry-run"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^changed: (yes|no)\nreboot: no\n\Z", done.stdout, re.MULTILINE)
    assert ("== nothing to do" in done.stdout) == ("changed: no" in done.stdout)
    assert (state.stat().st_mtime_ns if state.exists() else None) == before


# -- across the reboot ---------------------------------------------------------------------------------------------


def test_the_whole_way_across_the_reboot(machine):
    machine.add_gpu()
    machine.write("etc/apt/sources.list", "deb http://mirror.example/debian bookworm main\n# deb nothing main")
    first = machine.run()
    assert first.returncode == 0, first.stdout
    assert first.stdout.endswith("changed: yes\nreboot: needed\n")
    assert machine.state == {"phase": "reboot", "tries": "0", "boot": "boot-0"}
    assert machine.called("systemctl", "enable") and not machine.called("reboot")
    assert machine.called("apt-get", "cuda-drivers") and not machine.called("cuda-toolkit")
    sources = (machine.root / "etc/apt/sources.list").read_text()
    assert sources == "deb http://mirror.example/debian bookworm main contrib\n# deb nothing main\n"

    before = len(machine.calls)
    again = machine.run()
    assert again.stdout.endswith("changed: no\nreboot: needed\n"), "before the reboot there is nothing more to do"
    assert len(machine.calls) == before

    resumed = machine.boot(driver=True)
    assert resumed is not None and resumed.returncode == 0, machine.log
    assert machine.called("apt-get", "cuda-toolkit")
    assert machine.state == {"phase": "done", "tries": "1", "boot": "boot-1"}
    assert machine.called("systemctl", "disable") and not machine.unit.exists()
    assert "driver: NVRM version" in machine.log and "next: PYTHON=python3 bash install.sh" in machine.log

    before = len(machine.calls)
    last = machine.run()
    assert "nothing to do" in last.stdout and last.stdout.endswith("changed: no\nreboot: no\n")
    assert len(machine.calls) == before
    assert machine.boot(driver=True) is None


def test_the_unit_keeps_the_options(machine):
    machine.add_gpu()
    machine.run("--no-toolkit", "--driver-package", "nvidia-open")
    assert machine.boot(driver=True).returncode == 0
    assert machine.state["phase"] == "done"
    assert machine.called("nvidia-open") and not machine.called("cuda-toolkit")


@pytest.mark.parametrize("reboot", [False, True])
def test_a_driver_that_never_loads_ends_the_tries(machine, reboot):
    machine.add_gpu()
    machine.run(*(["--reboot"] if reboot else []))
    for tries in (1, 2):
        assert machine.boot(driver=False).returncode == 0
        assert machine.state == {"phase": "reboot", "tries": str(tries), "boot": f"boot-{tries}"}
        assert len(machine.called("dkms", "autoinstall")) == tries
    last = machine.boot(driver=False)
    assert last.returncode == 1
    assert machine.state["phase"] == "failed" and not machine.unit.exists()
    assert "still not loaded after 3 reboots; look at: dkms status" in machine.log
    assert len(machine.called("systemctl", "reboot")) == (3 if reboot else 0)
    assert machine.boot(driver=False) is None


def test_a_toolkit_that_cannot_be_installed_is_not_tried_for_ever(machine):
    machine.add_gpu()
    machine.run()
    refused = machine.tools.parent / "refused"
    refused.write_text("cuda-toolkit")
    for tries in (1, 2, 3):
        assert machine.boot(driver=True).returncode == 1
        assert machine.state["phase"] == "reboot" and machine.state["tries"] == str(tries)
    assert machine.boot(driver=True).returncode == 1
    assert machine.state["phase"] == "failed" and not machine.unit.exists()
    assert len(machine.called("cuda-toolkit")) == 3
    refused.unlink()
    assert machine.run().returncode == 0 and machine.state["phase"] == "done"


def test_what_failed_after_the_reboot_is_gone_on_with_by_hand_in_the_same_boot(machine):
    machine.add_gpu()
    machine.run()
    refused = machine.tools.parent / "refused"
    refused.write_text("cuda-toolkit")
    machine.boot(driver=True)
    refused.unlink()
    assert machine.run().stdout.endswith("changed: yes\nreboot: no\n")
    assert machine.state["phase"] == "done" and not machine.unit.exists()


def test_a_person_may_come_before_the_unit(machine):
    machine.add_gpu()
    machine.run()
    (machine.tools.parent / "enabled").unlink()
    assert machine.boot(driver=True) is None
    done = machine.run()
    assert done.stdout.endswith("changed: yes\nreboot: no\n")
    assert machine.called("cuda-toolkit") and machine.state["phase"] == "done" and not machine.unit.exists()


def test_a_unit_that_is_started_in_the_same_boot_waits(machine):
    machine.add_gpu()
    machine.run("--reboot")
    machine.boots = -1
    resumed = machine.boot(driver=False)
    assert resumed.returncode == 0 and machine.state["tries"] == "0"
    assert len(machine.called("systemctl", "reboot")) == 1


def test_a_failure_is_named_and_the_next_call_goes_on_from_there(machine):
    machine.add_gpu()
    refused = machine.tools.parent / "refused"
    refused.write_text("cuda-drivers")
    done = machine.run()
    assert done.returncode == 1
    assert "this command failed, with exit code 100: apt-get" in done.stdout and "it goes on from there" in done.stdout
    assert not machine.unit.exists()
    refused.unlink()
    again = machine.run()
    assert again.returncode == 0 and again.stdout.endswith("reboot: needed\n")
    assert len(machine.called("apt-get", "g++")) == 1, "what was installed is not installed again"
    assert len(machine.called("apt-get", "cuda-drivers")) == 2


def test_a_machine_without_a_gpu_gets_no_driver(machine):
    done = machine.run()
    assert done.returncode == 0 and "no NVIDIA GPU" in done.stdout
    assert machine.state["phase"] == "done"
    assert not machine.called("curl", "--fail") and not machine.unit.exists()


def test_a_driver_of_the_image_stays(machine):
    machine.add_gpu()
    machine.write("proc/driver/nvidia/version", "NVRM version: 535")
    machine.write("usr/local/cuda/bin/nvcc", "#!/bin/sh")
    (machine.root / "usr/local/cuda/bin/nvcc").chmod(0o755)
    done = machine.run()
    assert done.returncode == 0 and "driver: NVRM version: 535" in done.stdout
    assert not machine.called("curl", "--fail") and not machine.called("cuda-toolkit")


def test_a_second_run_waits_for_the_first(machine):
    lock = machine.root / "var/lib/lastgood/lock"
    lock.parent.mkdir(parents=True)
    environment = {**os.environ, "PATH": f"{machine.tools}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", SCRIPT, "--root", machine.root, "--os-release", machine.system]
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        second = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        try:
            with pytest.raises(subprocess.TimeoutExpired):
                second.wait(1.5)
            assert machine.calls == []
            fcntl.flock(held, fcntl.LOCK_UN)
            assert second.wait(120) == 0
        finally:
            second.kill()
            second.wait()
    assert machine.state["phase"] == "done"


# -- the scripts' own quality --------------------------------------------------------------------------------------


def test_shellcheck():
    program = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("shellcheck is not installed")
    scripts = sorted(ROOT.glob("install/*.sh"))
    done = subprocess.run([program, "--severity=style", *scripts], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
