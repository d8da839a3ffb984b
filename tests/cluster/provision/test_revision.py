"""The code that hosts get: which commit, whether changes may travel, and that this checkout stays as it is."""

from __future__ import annotations

import pytest

from lastgood.cluster.provision.revision import BUNDLED_REF, bundle_checkout
from lastgood.errors import ConfigError
from tests.cluster.support.git_helper import git


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "a checkout"
    folder.mkdir()
    git(folder, "init", "--quiet")
    (folder / ".gitignore").write_text("/ignored\n")
    (folder / "kept").write_text("one\n")
    (folder / "removed").write_text("old\n")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "first")
    (folder / "ignored").write_text("never sent\n")
    return folder


def unpack(bundle, folder):
    git(folder.parent, "init", "--quiet", folder)
    git(folder, "fetch", "--quiet", bundle.path, BUNDLED_REF)
    git(folder, "checkout", "--quiet", "--detach", "FETCH_HEAD")
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


def bundled(checkout, tmp_path, name, **options):
    folder = tmp_path / name
    folder.mkdir()
    return bundle_checkout(checkout, folder, **options)


def change(checkout):
    (checkout / "kept").write_text("two\n")
    (checkout / "removed").unlink()
    (checkout / "a new file").write_text("new\n")


def test_the_commit_travels_with_its_history(checkout, tmp_path):
    bundle = bundled(checkout, tmp_path, "bundle")
    assert bundle.revision == git(checkout, "rev-parse", "HEAD") and bundle.carried == ()
    files = unpack(bundle, tmp_path / "there")
    assert files == {".gitignore": "/ignored\n", "kept": "one\n", "removed": "old\n"}
    assert git(tmp_path / "there", "rev-parse", "HEAD") == bundle.revision


def test_changes_are_refused_by_name(checkout, tmp_path):
    change(checkout)
    with pytest.raises(ConfigError, match=r"3 files differ from the commit .*a new file.*--carry-changes"):
        bundled(checkout, tmp_path, "bundle")


def test_carried_changes_make_the_same_commit_again_and_leave_the_checkout_alone(checkout, tmp_path):
    change(checkout)
    head = git(checkout, "rev-parse", "HEAD")
    before = git(checkout, "status", "--porcelain"), git(checkout, "count-objects", "-v"), git(checkout, "for-each-ref")
    bundle = bundled(checkout, tmp_path, "bundle", carry_changes=True)
    after = git(checkout, "status", "--porcelain"), git(checkout, "count-objects", "-v"), git(checkout, "for-each-ref")
    assert after == before and git(checkout, "rev-parse", "HEAD") == head
    assert sorted(bundle.carried) == ["a new file", "kept", "removed"]
    files = unpack(bundle, tmp_path / "there")
    assert files == {".gitignore": "/ignored\n", "kept": "two\n", "a new file": "new\n"}
    assert git(tmp_path / "there", "rev-parse", "HEAD^") == head
    assert bundled(checkout, tmp_path, "again", carry_changes=True).revision == bundle.revision
    (checkout / "kept").write_text("three\n")
    assert bundled(checkout, tmp_path, "other", carry_changes=True).revision != bundle.revision


def test_a_worktree_of_a_checkout_is_a_checkout(checkout, tmp_path):
    git(checkout, "worktree", "add", "--quiet", "--detach", tmp_path / "beside")
    (tmp_path / "beside" / "kept").write_text("beside\n")
    bundle = bundled(tmp_path / "beside", tmp_path, "bundle", carry_changes=True)
    assert unpack(bundle, tmp_path / "there")["kept"] == "beside\n"


def test_a_git_environment_of_the_caller_does_not_matter(checkout, tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "index"))
    assert bundled(checkout, tmp_path, "bundle").path.is_file()


def test_no_git_checkout(tmp_path):
    (tmp_path / "plain").mkdir()
    with pytest.raises(ConfigError, match=r"plain: git .* failed: .*provisioning sends a commit"):
        bundled(tmp_path / "plain", tmp_path, "bundle")
