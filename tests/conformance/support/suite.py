"""Runs the suite in a process of its own, with packages of others beside it."""

from __future__ import annotations

import os
import xml.etree.ElementTree as ET
from pathlib import Path

from tests.support.warm import WarmProcess

__all__ = ["suite"]


def suite(site: Path, folder: Path, *words: str) -> tuple[int, str, dict[str, str]]:
    """The suite's exit status, what it said, and what each failing test said, by its name."""
    report = folder / "report.xml"
    asked = ["-p", "no:cacheprovider", "-q", f"--junitxml={report}", f"--basetemp={folder / 'base'}", "-c", os.devnull]
    # Elsewhere: pytest would load the conftest.py of this checkout's own tests.
    program = (
        f"import os, sys; os.chdir({str(folder)!r}); sys.path.insert(0, {str(site)!r}); import pytest; "
        "sys.exit(pytest.main(sys.argv[1:]))"
    )
    process = WarmProcess(
        ["-c", program, *asked, "--rootdir", folder, "--pyargs", "lastgood.conformance", *words],
        env={**os.environ, "PYTHONPATH": str(site)},
    )
    told, _ = process.communicate(280)
    assert report.is_file(), told
    failed = {
        str(case.get("name")) + str(case.get("classname")): f"{one.get('message')} {one.text}"
        for case in ET.parse(report).getroot().iter("testcase")
        for one in case
        if one.tag in ("failure", "error")
    }
    assert process.returncode is not None
    return process.returncode, told, failed
