"""`lastgood examples`: complete programs to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lastgood.cli._app import App
from lastgood.cli._output import console, emit_json, emit_table
from lastgood.errors import ConfigError
from lastgood.names import nearest

__all__ = ["app"]

app = App(help="Complete programs to begin with: list them, copy one.", no_args_is_help=True)

_SKIPPED = ("__pycache__",)


def _folder() -> Path:
    """Where the examples lie: in an installed package beside its modules, in a checkout at its top."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "_examples", package.parents[1] / "examples"):
        if folder.is_dir():
            return folder
    raise ConfigError(f"{package}: this installation has no examples")


def _examples() -> dict[str, Path]:
    return {path.name: path for path in sorted(_folder().iterdir()) if path.is_dir() and path.name not in _SKIPPED}


def _about(example: Path) -> str:
    """The first sentence of its program."""
    import ast

    for path in sorted(example.glob("*.py"), key=lambda one: (one.name != "train.py", one.name)):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        return " ".join(text.partition("\n\n")[0].split())
    return ""


def _complete_name(incomplete: str) -> list[str]:
    return [name for name in _examples() if name.startswith(incomplete)]


@app.command("list")
def list_examples(
    as_json: Annotated[bool, typer.Option("--json", help="Print them to stdout as JSON.")] = False,
) -> None:
    """Say which examples there are."""
    found = {name: _about(path) for name, path in _examples().items()}
    if as_json:
        emit_json(found)
    else:
        emit_table("Examples", ("name", "what it is"), found.items())


@app.command()
def copy(
    name: Annotated[str, typer.Argument(help="An example.", show_default=False, autocompletion=_complete_name)],
    directory: Annotated[Path, typer.Argument(help="Folder that gets the folder NAME.", show_default=False)],
) -> None:
    """Copy an example to a folder of that name in DIRECTORY. Nothing that is there is replaced."""
    import shutil

    known = _examples()
    if name not in known:
        raise ConfigError(f"unknown example {name!r}{nearest(name, known)}; known: {', '.join(known)}")
    target = directory / name
    if target.exists():
        raise ConfigError(f"{target}: is there already; choose another folder")
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copytree(known[name], target, ignore=shutil.ignore_patterns(*_SKIPPED))
    console.print(f"{target}: {', '.join(sorted(path.name for path in target.iterdir()))}")
