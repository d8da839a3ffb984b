"""Make a folder of wheels for a machine without network, for `bash install.sh --system-torch --wheels FOLDER` there.

That machine has its own torch, and what only torch needs. All else that the extras ask for is downloaded here, in the
versions that are installed in this environment, with what builds the native core.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# What `pip` brings for a build, and the extras do not name.
BUILDING = ("cmake", "nanobind", "ninja", "scikit-build-core")
CONSTRAINTS = Path(__file__).resolve().parents[1] / "constraints.txt"
GLIBC = ("2_28", "2_27", "2_24", "2_17", "2_12", "2_5")


def requirements(name: str, extras: tuple[str, ...], python: str) -> Iterator[Requirement]:
    """What the installed distribution `name` needs with `extras` under Python `python` on Linux.

    Raises:
        SystemExit: it is not installed here.
    """
    try:
        lines = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        sys.exit(f"{name} is not installed here, so its version cannot be chosen: bash install.sh, or --have {name}")
    for line in lines:
        needed = Requirement(line)
        for extra in ("", *extras):
            environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": extra}
            if needed.marker is None or needed.marker.evaluate(environment):
                yield needed
                break


def closure(roots: list[tuple[str, tuple[str, ...]]], python: str, without: set[str]) -> set[str]:
    """Normalised names of `roots` (name, extras) and of all that they need, but for those `without` and their needs."""
    asked: set[tuple[str, tuple[str, ...]]] = set()
    names: set[str] = set()
    waiting = list(roots)
    while waiting:
        name, extras = waiting.pop()
        normal = canonicalize_name(name)
        if normal in without or (normal, extras) in asked:
            continue
        asked.add((normal, extras))
        names.add(normal)
        waiting += [(need.name, tuple(sorted(need.extras))) for need in requirements(name, extras, python)]
    return names


def is_pure(name: str) -> bool:
    """Whether the installed distribution is Python only, so that its wheel is one for all machines."""
    described = importlib.metadata.distribution(name).read_text("WHEEL") or ""
    return "Root-Is-Purelib: true" in described and "-none-any" in described


def main() -> None:
    """Read the options and fill the folder."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folder", type=Path, help="folder to fill")
    options.add_argument(
        "--python", default=platform.python_version().rpartition(".")[0], metavar="3.12", help="Python of that machine"
    )
    options.add_argument("--arch", default=platform.machine(), help="its processor, as uname -m prints it")
    options.add_argument("--extras", default="harness,test", help="extras of this project to prepare for")
    options.add_argument(
        "--have",
        default="torch,torchvision,transformers",
        help="packages that are there; what only they need is left out as well",
    )
    options.add_argument("--list", action="store_true", help="print what would be downloaded and end")
    chosen = options.parse_args()

    have = [name for name in chosen.have.split(",") if name]
    extras = tuple(sorted(extra for extra in chosen.extras.split(",") if extra))
    without = {canonicalize_name(name) for name in have}
    names = closure([("lastgood", extras)], chosen.python, without) - {"lastgood"}
    wanted = sorted(f"{name}=={importlib.metadata.version(name)}" for name in names)
    building = sorted(set(BUILDING) - without)
    if chosen.list:
        print("\n".join([*wanted, *building]))
        return
    chosen.folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    into = ["--dest", str(chosen.folder), "--only-binary=:all:", f"--python-version={chosen.python}"]
    into += [f"--platform=manylinux_{glibc}_{chosen.arch}" for glibc in GLIBC]
    pure = [name for name in wanted if is_pure(name.partition("==")[0])]
    for command in (
        # Of some there is only a source, whose wheel can be made here since it is the same for every machine.
        ["wheel", "--no-deps", "--wheel-dir", str(chosen.folder), *pure],
        ["download", "--no-deps", *into, *sorted(set(wanted) - set(pure))],
        # What builds is in no environment: pip makes one for each build, so it follows these needs itself.
        ["download", "--constraint", str(CONSTRAINTS), *into, *building],
    ):
        if subprocess.run([*pip, *command], check=False).returncode:
            sys.exit(f"pip could not get all of it; its message is above. What {chosen.folder} has stays there")
    count = len(list(chosen.folder.glob("*.whl")))
    print(f"{count} wheels in {chosen.folder}. There, in this checkout: bash install.sh --system-torch --wheels FOLDER")


if __name__ == "__main__":
    main()
