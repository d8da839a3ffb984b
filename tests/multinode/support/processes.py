"""Processes of all nodes of a testbed, which run on this machine."""

from __future__ import annotations

import psutil


def processes_with(mark: str) -> list[psutil.Process]:
    """Processes whose command line holds `mark`, in whatever namespace."""
    found = []
    for process in psutil.process_iter():
        try:
            if mark in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found
