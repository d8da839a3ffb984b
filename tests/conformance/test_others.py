"""The conformance suite for systems of other packages: green for a sound one, red for each of five planted faults."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.support.suite import suite
from tests.suggestions.following import follows, hear
from tests.support.bare import make_environment
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


@pytest.mark.slow
def test_a_small_package_of_another_passes(site: Path, tmp_path: Path) -> None:
    status, told, failed = suite(site, tmp_path, "--checkpointer", "mine", "--kills", "1", "-k", "not 900")
    assert (status, failed) == (0, {}), told
    assert re.search(r"\b[2-9]\d passed", told), told


@pytest.mark.slow
def test_the_pages_package_is_installed_into_a_fresh_environment_and_passes(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", reason="what builds the page's package")
    project, environment = tmp_path / "project", tmp_path / "environment"
    project.mkdir()
    page = (ROOT / "docs" / "adding-a-system.md").read_text()
    for name, language in (("mine.py", "python"), ("pyproject.toml", "toml")):
        (text,) = re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
        (project / name).write_text(text)
    python = make_environment(environment, ("cli", "conformance"))

    def call(*words: object, folder: Path = tmp_path) -> str:
        done = subprocess.run(list(map(str, words)), cwd=folder, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    call(*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "-w", tmp_path, project)
    (wheel,) = tmp_path.glob("mine-1.0-*.whl")
    call(*pip, "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
    words = ["-q", "-c", os.devnull, "--rootdir", tmp_path, "--basetemp", tmp_path / "base", "-p", "no:cacheprovider"]
    told = call(
        python, "-m", "pytest", *words, "--pyargs", "lastgood.conformance", "--checkpointer", "mine", "--kills", "1"
    )
    assert re.search(r"\b[2-9]\d passed", told) and "failed" not in told, told
    planned = call(
        python.parent / "lastgood", "plan", "fig8", "--config", "systems=none,mine", "--no-probe", folder=ROOT
    )
    assert re.search(r"\bmine\b", planned), "it is in no run of figure 8"


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
