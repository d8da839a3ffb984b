"""`lastgood doctor`: what it finds, and when it fails."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-c", "from lastgood.cli import main; main()", "doctor", "--json"]


def doctor(*arguments):
    done = subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=60)
    return done.returncode, {finding["what"]: finding for finding in json.loads(done.stdout)}


def test_finds_software_machine_and_data(tmp_path):
    _, findings = doctor("--scratch", tmp_path / "scratch", "--data-dir", tmp_path / "data")
    assert findings["native core"]["verdict"] == "ok"
    assert findings["torch"]["verdict"] == "ok"
    assert findings["data"]["verdict"] == "warning"
    assert "lastgood data prepare" in findings["data"]["to_do"]
    assert all(finding["to_do"] for finding in findings.values() if finding["verdict"] != "ok")
    assert not (tmp_path / "scratch").exists(), "a look changes nothing"


def test_memory_as_scratch_is_a_fault():
    code, findings = doctor("--scratch", "/dev/shm/lastgood-doctor")
    assert code == 1
    assert findings["scratch"]["verdict"] == "fault"
    assert "disk" in findings["scratch"]["to_do"]


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["data", "--help"], ["inspect", "--help"]])
def test_every_command_explains_itself(arguments):
    done = subprocess.run([*COMMAND[:3], *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "Usage" in done.stdout


def test_a_wrong_command_exits_with_2():
    done = subprocess.run([*COMMAND[:3], "no-such-command"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2


def test_a_store_of_objects_is_tried(tmp_path):
    _, findings = doctor("--scratch", tmp_path, "--data-dir", tmp_path, "--uri", tmp_path / "objects")
    assert findings[f"{tmp_path / 'objects'}: delete"]["verdict"] == "ok"
    code, findings = doctor("--scratch", tmp_path, "--data-dir", tmp_path, "--uri", "gs://bucket/x")
    assert code == 1
    assert findings["objects at gs://bucket/x"]["verdict"] == "fault"
