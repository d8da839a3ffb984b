"""Pythons for tests of hosts: without Lastgood, and ones that lack something or see it otherwise."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path


def bare_python(folder: Path) -> Path:
    """A new environment with nothing in it; returns its Python."""
    base = sys._base_executable  # type: ignore[attr-defined]
    subprocess.run([base, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
    return folder / "bin" / "python"


def install_here(python: Path) -> None:
    """Give an environment all that this one has, Lastgood included, by a .pth file."""
    (place,) = python.parents[1].glob("lib/python3*/site-packages")
    (place / "all_of_another.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")


def changed_python(path: Path, start: str, host: str | None = None) -> Path:
    """This Python under another path, which runs `start` first: on all hosts, or only on `host`."""
    place = path.parent / f"{path.name}-start"
    place.mkdir(parents=True)
    (place / "sitecustomize.py").write_text(start)
    only = "" if host is None else f'[ "$(hostname)" = {host} ] || exec "{sys.executable}" "$@"\n'
    path.write_text(f'#!/bin/sh\n{only}PYTHONPATH="{place}" exec "{sys.executable}" "$@"\n')
    path.chmod(0o755)
    return path
