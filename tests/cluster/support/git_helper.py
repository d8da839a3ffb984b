"""git with an identity of its own, whatever this machine's configuration says."""

from __future__ import annotations

import os
import subprocess

IDENTITY = {f"GIT_{role}_{key}": "test" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")}


def git(folder, *arguments):
    done = subprocess.run(
        ["git", "-C", folder, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **IDENTITY, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
