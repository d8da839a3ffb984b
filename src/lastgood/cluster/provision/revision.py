"""The code that hosts get: one commit of the controller's checkout, as a git bundle.

A bundle, not an archive: run records name a git revision, so the hosts need a repository.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from lastgood.errors import ConfigError

__all__ = ["BUNDLED_REF", "Bundle", "bundle_checkout"]

BUNDLED_REF = "refs/heads/provision"
"""The one reference in a bundle."""

_TIMEOUT_S = 300.0
_MOST_NAMED = 5
_MARK = "provision: the work tree of "


@dataclass(frozen=True)
class Bundle:
    """A commit, the file that carries it with its history, and the changed files that it holds beyond HEAD's."""

    path: Path
    revision: str
    carried: tuple[str, ...] = ()


def bundle_checkout(root: Path, folder: Path, *, carry_changes: bool = False) -> Bundle:
    """Bundle the HEAD of the checkout at `root` into `folder`.

    A tree with changes is refused, since the hosts' records would name a commit that they do not run. With
    `carry_changes` the changes, new files included, become a commit on top of HEAD that exists in the bundle only: the
    checkout's branch, index and objects stay as they are. The same changes give the same commit, so that a second
    provisioning finds nothing to do.

    Raises ConfigError if `root` is no git checkout or is refused, and names the changed files.
    """
    head = _git(["-C", str(root), "rev-parse", "--verify", "HEAD^{commit}"], root).strip()
    status = _git(["-C", str(root), "status", "--porcelain", "-z", "--untracked-files=all", "--no-renames"], root)
    changed = tuple(entry[3:] for entry in status.split("\0") if entry)
    if changed and not carry_changes:
        named = ", ".join(changed[:_MOST_NAMED]) + (", ..." if len(changed) > _MOST_NAMED else "")
        raise ConfigError(
            f"{root}: {len(changed)} files differ from the commit {head[:12]}: {named}. Commit them, or add "
            "--carry-changes, which sends them as a commit of their own"
        )
    store = folder / "carry.git"
    _git(["init", "--quiet", "--bare", str(store)], root)
    objects = (root / _git(["-C", str(root), "rev-parse", "--git-path", "objects"], root).strip()).resolve()
    (store / "objects" / "info" / "alternates").write_text(f"{objects}\n", encoding="utf-8")
    revision = _commit_work_tree(root, store, head) if changed else head
    _git(["--git-dir", str(store), "update-ref", BUNDLED_REF, revision], root)
    path = folder / f"{revision}.bundle"
    _git(["--git-dir", str(store), "bundle", "create", "--quiet", str(path), BUNDLED_REF], root)
    return Bundle(path, revision, changed)


def _commit_work_tree(root: Path, store: Path, head: str) -> str:
    """Make a commit of the work tree in `store`. Its hash depends on HEAD and the files alone: dates are HEAD's."""
    exclude = root / _git(["-C", str(root), "rev-parse", "--git-path", "info/exclude"], root).strip()
    if exclude.is_file():
        (store / "info").mkdir(exist_ok=True)
        (store / "info" / "exclude").write_bytes(exclude.read_bytes())
    date = _git(["-C", str(root), "show", "--no-patch", "--format=%ct +0000", head], root).strip()
    who = {"NAME": "lastgood provision", "EMAIL": "provision@localhost", "DATE": date}
    environment = {f"GIT_{role}_{key}": value for role in ("AUTHOR", "COMMITTER") for key, value in who.items()}
    environment |= {"GIT_INDEX_FILE": str(store / "index")}
    git = ["--git-dir", str(store), "--work-tree", str(root)]
    _git([*git, "read-tree", head], root, environment)
    _git([*git, "-C", str(root), "add", "--all", "."], root, environment)
    tree = _git([*git, "write-tree"], root, environment).strip()
    return _git([*git, "commit-tree", tree, "-p", head, "-m", f"{_MARK}{head}"], root, environment).strip()


def _git(arguments: list[str], root: Path, environment: dict[str, str] | None = None) -> str:
    # A GIT_DIR of the caller, as in a hook, would send these commands to another repository.
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    command = ["git", *arguments]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
            env={**inherited, "GIT_OPTIONAL_LOCKS": "0", **(environment or {})},
        )
    except FileNotFoundError as error:
        raise ConfigError(
            "git is not installed here; provisioning sends the checkout's commit (apt-get install git)"
        ) from error
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip() or f"exit code {error.returncode}"
        raise ConfigError(
            f"{root}: {' '.join(command)} failed: {said}; provisioning sends a commit of a git checkout"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{root}: {' '.join(command)} did not end within {_TIMEOUT_S:.0f} s") from error
    return done.stdout
