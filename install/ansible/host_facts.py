"""Prints what this host is and what Lastgood has there, as one line of JSON. Any Python from 3.8 runs it.

HostFacts in src/lastgood/cluster/provision/facts.py is its schema.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys


def said(*command):
    """What a program prints, or None where it is missing, fails or takes longer than a minute."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace").strip() or None


def read(path):
    """A small file's text, or nothing."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            return file.read(1 << 20)
    except OSError:
        return ""


def first(pattern, text):
    """The first group of the first match, or None."""
    found = re.search(pattern, text, re.MULTILINE)
    return found.group(1).strip() if found else None


def disk_free(folder):
    """Free bytes where `folder` is, or will be."""
    while not os.path.isdir(folder):  # noqa: PTH112
        folder = os.path.dirname(folder)  # noqa: PTH120
    return shutil.disk_usage(folder).free


def gpus():
    """GPUs by name, and the driver's version."""
    lines = (said("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader") or "").splitlines()
    pairs = [line.rsplit(",", 1) for line in lines if "," in line]
    return [name.strip() for name, _ in pairs], pairs[0][1].strip() if pairs else None


def main():
    """Look, and print."""
    folder = sys.argv[1]
    python = os.path.join(folder, ".venv", "bin", "python")  # noqa: PTH118
    # Without an import: torch takes seconds, and on a bare driver some minutes at its first time.
    version = "from importlib.metadata import version; print(version('torch'))"
    names, driver = gpus()
    facts = {
        "os": first(r'^PRETTY_NAME="?([^"\n]*)', read("/etc/os-release")) or platform.system(),
        "kernel": platform.release(),
        "cpu": first(r"^model name\s*:\s*(.+)$", read("/proc/cpuinfo")) or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": int(first(r"^MemTotal:\s*(\d+) kB$", read("/proc/meminfo")) or 0) * 1024,
        "disk_free_bytes": disk_free(folder),
        "gpus": names,
        "driver": driver,
        "python": said(python, "-c", "import platform; print(platform.python_version())"),
        "torch": said(python, "-c", version),
        "revision": said("git", "--git-dir=" + os.path.join(folder, ".git"), "rev-parse", "HEAD"),  # noqa: PTH118
    }
    report = {"facts": facts, "reboot_needed": "--reboot-needed" in sys.argv}
    sys.stdout.write("lastgood-host " + json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
