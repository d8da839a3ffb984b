"""A virtual environment in which nothing is installed but Lastgood and what a plain `pip install lastgood` brings.

Its packages are links to those of the running environment, so it is made in a second; torch alone takes gigabytes.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import venv
from functools import cache
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

__all__ = ["distributions", "make_environment"]


@cache
def distributions(extras: tuple[str, ...] = ()) -> dict[str, importlib.metadata.Distribution]:
    """What `lastgood` with these extras requires, directly or through others, itself included, by name."""
    found: dict[str, importlib.metadata.Distribution] = {}
    seen: set[tuple[str, str]] = set()
    todo = [("lastgood", extra) for extra in ("", *extras)]
    while todo:
        name, extra = todo.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        found[name] = importlib.metadata.distribution(name)
        for text in found[name].requires or ():
            need = Requirement(text)
            if need.marker is None or need.marker.evaluate({"extra": extra}):
                todo += [(canonicalize_name(need.name), inner) for inner in ("", *need.extras)]
    return found


def make_environment(folder: Path, extras: tuple[str, ...] = ()) -> Path:
    """Make the environment in `folder`, which does not exist; returns its Python. `lastgood` stands beside it."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    asked = [str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]
    site = Path(subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60).stdout.strip())
    for found in distributions(extras).values():
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            link = site / top
            if not link.is_symlink():  # a namespace of several packages
                link.symlink_to(Path(found.locate_file(top)).absolute())
    (script,) = importlib.metadata.distribution("lastgood").entry_points.select(group="console_scripts")
    module, _, function = script.value.partition(":")
    command = folder / "bin" / script.name
    command.write_text(f"#!{python}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    command.chmod(0o755)
    return python
