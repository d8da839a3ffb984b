"""Packages that a text names, and what this machine knows about them."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def packages_of(extra: str) -> set[str]:
    """Those of an extra, by Lastgood's metadata."""
    needs = map(Requirement, importlib.metadata.requires("lastgood") or ())
    found = {canonicalize_name(one.name) for one in needs if one.marker and one.marker.evaluate({"extra": extra})}
    assert found, f"no extra {extra}"
    return found


def debian_package_of(program: str) -> str:
    """The Debian package of an installed program. Skips where Debian's tools or the program are missing."""
    found = shutil.which(program, path="/usr/sbin:/usr/bin:/sbin:/bin")
    if found is None or shutil.which("dpkg") is None:
        pytest.skip(f"needs Debian, and {program}")
    real = Path(found).resolve()  # also through update-alternatives
    done = subprocess.run(["dpkg", "-S", str(real)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.partition(":")[0]
