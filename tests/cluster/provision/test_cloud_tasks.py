"""Tasks for SkyPilot and dstack (install/cloud): they are read, and what they call is here."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "install" / "cloud"
TASKS = {path.name: yaml.safe_load(path.read_text()) for path in sorted(FOLDER.iterdir())}
SKYPILOT = {"name", "resources", "num_nodes", "workdir", "file_mounts", "setup", "run"}
DSTACK = {"type", "name", "nodes", "files", "volumes", "commands", "resources", "retry"}
GIVEN = {
    *("SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_GPUS_PER_NODE", "SKYPILOT_NODE_IPS"),
    *("DSTACK_NODES_NUM", "DSTACK_NODE_RANK", "DSTACK_GPUS_PER_NODE", "DSTACK_MASTER_NODE_IP"),
}
"""Keys and variables of theirs that their documents name."""


def script_of(task: dict[str, Any]) -> str:
    return "\n".join(task["commands"]) if "commands" in task else task["setup"] + task["run"]


@pytest.mark.parametrize("name", TASKS)
def test_keys_are_those_of_the_tool(name: str) -> None:
    assert set(TASKS[name]) <= (SKYPILOT if name.startswith("skypilot") else DSTACK)


@pytest.mark.parametrize("name", TASKS)
def test_its_commands_are_here(name: str) -> None:
    script = script_of(TASKS[name])
    checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, timeout=30)
    assert checked.returncode == 0, checked.stderr
    assert set(re.findall(r"\$([A-Z_]+)", script)) <= GIVEN
    files = re.findall(r"[\w/-]+\.(?:sh|yaml|py)\b", script)
    assert {"install.sh", "install/install_preq_at_vm.sh"} < set(files)
    assert [path for path in files if not (ROOT / path).is_file()] == []
    assert "snakemake fig8 " in script or "examples/fsdp2/train.py" in script


def test_the_page_names_each_of_them() -> None:
    page = (ROOT / "docs" / "clouds.md").read_text()
    assert [name for name in TASKS if f"install/cloud/{name}`" not in page] == []
