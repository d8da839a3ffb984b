"""Whether an installed Lastgood works: from any folder, with nothing of a checkout. Exit code 1, and why, if not.

    python install/try_installation.py [README.md]

Trains, saves and restores as the README shows it, in a folder that is removed again; calls the command where it is
installed; looks at the native module.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
LOOP = "while step < 1000:\n"
"""Of the README's example: where it can say at which step it begins."""


def call(*words: str | Path, folder: str) -> str:
    """What a program said; the end of this one if it fails."""
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        sys.exit(f"{words}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def main(readme: Path) -> None:
    """Exits with the first thing that does not work."""
    with tempfile.TemporaryDirectory(prefix="lastgood-") as folder:
        where = call(sys.executable, "-c", "import lastgood._native as n; print(n.__file__)", folder=folder).strip()
        if Path(where).is_relative_to(CHECKOUT / "src"):
            sys.exit(f"{where} is the checkout's, not an installed one")
        (code,) = re.findall(r"```python\n(.*?)```", readme.read_text(encoding="utf-8"), flags=re.DOTALL)
        if LOOP not in code:
            sys.exit(f"{readme}: the example has no line {LOOP.strip()!r}")
        script = Path(folder, "train.py")
        script.write_text(code.replace(LOOP, f"print('from', step)\n{LOOP}", 1).replace("1000", "25"))
        for began in ("from 0\n", "from 20\n"):
            said = call(sys.executable, script, folder=folder)
            if said != began:
                sys.exit(f"the README's example said {said!r} instead of {began!r}")
        print(f"native module: {where}; the README's example ran, and went on where it had stopped")
        command = Path(sysconfig.get_path("scripts"), "lastgood")
        if importlib.util.find_spec("typer") is None:
            return
        print(call(command, "--version", folder=folder).strip())
        print(call(command, "status", "checkpoints/job1", "--max-age", "1h", folder=folder).strip())
        print(call(command, "examples", "list", folder=folder).strip())
        doctor = ("doctor", "--scratch", folder, "--data-dir", str(Path(folder, "data")))
        print(call(command, *doctor, folder=folder).strip())


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else CHECKOUT / "README.md")
