"""What users import of a system comes from its room, and what earlier documentation showed says where it is now."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lastgood
from lastgood._moved import MOVED

ROOT = Path(lastgood.__file__).parent
REPOSITORY = Path(__file__).parents[1]
ROOMS = sorted(path.parent.name for path in (ROOT / "checkpointers").glob("*/__init__.pyi"))
DOCUMENTED = (
    " import Checkmate, Checkpointer, PCcheck",
    ".checkpointers.agreement import rank_directory",
    ".checkpointers.archive import Archive",
    ".checkpointers.checkmate import Checkmate",
    ".checkpointers.export import load_exported",
    ".checkpointers.gemini import Gemini",
    ".checkpointers.gemini_memory.ddp import marked_all_reduce",
    ".checkpointers.pccheck import PCcheck",
    ".checkpointers.reshard import restore_ranks",
    ".checkpointers.snapshot import CopyFence, HostSnapshot",
    ".checkpointers.torch_files import TorchFiles",
    ".checkpointers.tuned import read_tuning, write_tuning",
    ".cluster.launch import launch",
    ".cluster.remote import Remote",
    ".cluster.testbed import Testbed",
    ".experiments.record import RunRecord",
    ".gradients.ddp import checkmate_hook",
    ".gradients.ring_hook import RingReducer",
    ".integrations.deepspeed import export_torch, use_lastgood",
    ".integrations.deepspeed_live import EngineCounters, LiveZero",
    ".integrations.deepspeed_traffic import mark_communication",
    ".optim.probe import probed",
    ".state import NewWorld, apply_tree, flatten, state_digest",
    ".storage import SlotStore",
    ".training.tuning import tune_training",
    ".wire.ring_comm import RingComm",
    ".wire.ring_link import listen_ring",
)
"""What the documentation of the version before the rooms showed, behind ``from lastgood``."""


@pytest.mark.parametrize("rest", DOCUMENTED)
def test_an_import_of_earlier_documentation_works_or_says_what_to_write(rest):
    line = f"from lastgood{rest}"
    names = line.partition(" import ")[2].split(", ")
    try:
        exec(line)
    except ImportError as error:
        found = re.fullmatch(r"lastgood\.(\S+) has moved; write: (from lastgood\.\S+ import .+)", str(error))
        assert found and found[1] in MOVED, error
        line = found[2]
    given = {}
    exec(line, given)
    assert set(names) <= given.keys()


@pytest.mark.parametrize("old", MOVED)
def test_what_has_moved_says_what_to_write(old):
    package, _, name = old.rpartition(".")
    with pytest.raises(ImportError, match="has moved; write: ") as raised:
        exec(f"from lastgood.{package} import {name}")
    assert MOVED[old] in str(raised.value)
    exec(MOVED[old])


def test_each_entry_was_documented():
    assert all(any(line.startswith(f".{old.partition('.')[0]}") for line in DOCUMENTED) for old in MOVED)
    assert not any((ROOT / f"{old.replace('.', '/')}.py").exists() for old in MOVED)


def test_other_wrong_imports_stay_as_they_are():
    with pytest.raises(ModuleNotFoundError, match="no_such"):
        importlib.import_module("lastgood.no_such")
    with pytest.raises(ImportError, match="cannot import name 'no_such'"):
        exec("from lastgood.checkpointers.pccheck import no_such")


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_offers_what_its_stub_says(room):
    offered = importlib.import_module(f"lastgood.checkpointers.{room}")
    stub = ast.parse((ROOT / "checkpointers" / room / "__init__.pyi").read_text())
    seen = {
        alias.asname: node.module for node in ast.walk(stub) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert seen == offered._HOMES
    assert [name for name in seen if not hasattr(offered, name)] == []


def test_rooms_need_no_torch():
    rooms = ", ".join(f"lastgood.checkpointers.{room}" for room in ROOMS)
    code = f"import {rooms}, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_documents_import_systems_from_their_rooms():
    within = re.compile(
        rf"lastgood\.checkpointers\.(?:{'|'.join(ROOMS)})\.[a-z_]+|lastgood\.gradients\.[a-z_]+\.[a-z_]+"
    )
    texts = [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]
    # A line that begins with ::: is made into the reference of what is defined there; it is no import.
    found = {str(path): within.findall(re.sub(r"(?m)^:::.*", "", path.read_text())) for path in texts}
    assert {path: names for path, names in found.items() if names} == {}
