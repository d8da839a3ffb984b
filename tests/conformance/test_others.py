"""The conformance suite for systems of other packages: green for a sound one, red for each of five planted faults."""

from __future__ import annotations

import os
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.suggestions.following import follows, hear
from tests.support.warm import WarmProcess

ROOT = Path(__file__).resolve().parents[2]

PLANTED = '''
"""Five systems, each with one fault."""

import os
import threading
import time
from copy import deepcopy

import torch

from lastgood.checkpointers.baselines.sync import SyncCheckpointer
from lastgood.checkpointers.events import Outcome
from lastgood.checkpointers.torch_files.files import plain_tree, unpack_numpy
from lastgood.checkpointers.traits import Limit, Traits
from lastgood.errors import NoCheckpoint
from lastgood.state import apply_tree, stateful_paths


class Unflushed(SyncCheckpointer):
    name = "unflushed"

    def _save(self, event):
        fsync, os.fsync = os.fsync, lambda descriptor: None
        try:
            super()._save(event)
        finally:
            os.fsync = fsync


class Unchecked(SyncCheckpointer):
    name = "unchecked"

    def restore(self, state, step=None):
        for _, number, path in self._files.files():
            if step in (None, number):
                document = torch.load(path, weights_only=False)
                apply_tree(state, unpack_numpy(document["state"], str(path)), str(path), frozenset(document["objects"]))
                return number
        raise NoCheckpoint(f"{self.directory}: {step}")


class Later(SyncCheckpointer):
    """Writes in a thread; `tree` says what is copied before `save` returns."""

    thread = None

    def _save(self, event):
        self.drain()
        objects, tree = stateful_paths(self._flat().layout), self.tree()
        self.thread = threading.Thread(target=self.write, args=(event, tree, objects))
        self.thread.start()

    def tree(self):
        return deepcopy(plain_tree(dict(self.state)))

    def write(self, event, tree, objects):
        try:
            event.bytes_written = self._files.write(event.step, tree, event.phases, objects)
            event.copied_s = event.finished_s = time.perf_counter()
            event.outcome = Outcome.DURABLE
        except Exception as error:
            self._fail(event, error)

    def drain(self, timeout_s=600.0):
        if self.thread is not None:
            self.thread.join()  # without its limit: the fault of `Endless`
            self.thread = None

    def _close(self):
        self.drain()


class Endless(Later):
    name = "endless"


class Torn(Later):
    """The optimizer's tensors are written as they are by then."""

    name = "torn"

    def tree(self):
        live = plain_tree(dict(self.state))
        copied = deepcopy({key: part for key, part in live.items() if key != "optimizer"})
        return {**copied, "optimizer": live["optimizer"]}

    def write(self, event, tree, objects):
        time.sleep(0.3)
        super().write(event, tree, objects)


class Swallowed(SyncCheckpointer):
    name = "swallowed"

    def _save(self, event):
        try:
            super()._save(event)
        except Exception:
            event.copied_s = event.finished_s = time.perf_counter()
            event.outcome = Outcome.DURABLE


class Limited(SyncCheckpointer):
    """Says that it cannot do what it can."""

    name = "limited"
    traits = Traits(limits=(Limit("paths", "never tried"),))
'''

FAULTS = {
    "unflushed": ("TestDurable", "a power cut would take"),
    "unchecked": ("TestDamage", "assert"),
    "torn": ("test_restores_the_state_at_the_save", "assert"),
    "endless": ("a_disk_that_does_not_answer", r"drain\(timeout_s=0.5\) had not returned after 2 s"),
    "swallowed": ("TestFullDisk", "assert|CorruptCheckpoint|NoCheckpoint"),
    "limited": ("test_nothing_to_restore", r"XPASS\(strict\).*never tried"),
}
"""The tests that find each fault, and what they say."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two packages are installed: the page's own, and the one of planted faults."""
    folder = tmp_path_factory.mktemp("site")
    (module,) = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs" / "adding-a-system.md").read_text(), re.MULTILINE | re.DOTALL
    )
    (folder / "mine.py").write_text(module)
    (folder / "planted.py").write_text(PLANTED)
    systems = {"mine": "mine:Mine", **{name: f"planted:{name.capitalize()}" for name in FAULTS}}
    about = folder / "others-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    lines = [f"{name} = {target}" for name, target in systems.items()]
    (about / "entry_points.txt").write_text("\n".join(["[lastgood.checkpointers]", *lines, ""]))
    return folder


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


@pytest.mark.slow
def test_a_small_package_of_another_passes(site: Path, tmp_path: Path) -> None:
    status, told, failed = suite(site, tmp_path, "--checkpointer", "mine", "--kills", "1", "-k", "not 900")
    assert (status, failed) == (0, {}), told
    assert re.search(r"\b[2-9]\d passed", told), told


def test_each_planted_fault_is_found(site: Path, tmp_path: Path) -> None:
    chosen = " or ".join(f"({tests} and {name})" for name, (tests, _) in FAULTS.items())
    systems = [word for name in FAULTS for word in ("--checkpointer", name)]
    status, told, failed = suite(site, tmp_path, *systems, "-k", chosen, "--answer-s", "2")
    assert status == 1, told
    for name, (tests, said) in FAULTS.items():
        for number in range(5):
            found = [text for case, text in failed.items() if name in case]
            if any(re.search(said, text, re.DOTALL) for text in found):
                break
            # What was not flushed is found, unless the kernel flushes it in that moment since others write much.
            assert name == "unflushed" and number < 4, (name, told)
            again = tmp_path / f"again-{number}"
            again.mkdir()
            _, told, failed = suite(site, again, "--checkpointer", name, "-k", f"{tests} and {name}")


@follows("name the system to test: pytest --pyargs lastgood.conformance --checkpointer NAME")
def test_without_a_name_it_does_not_look_like_success(tmp_path: Path) -> None:
    words = ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(tmp_path), "--pyargs", "lastgood.conformance"]
    program = f"import os, sys; os.chdir({str(tmp_path)!r}); import pytest; sys.exit(pytest.main({words!r}))"
    process = WarmProcess(["-c", program])
    told, _ = process.communicate(120)
    assert process.returncode == 4
    hear(told)  # and the first test calls it so
