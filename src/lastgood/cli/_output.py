"""How every command talks: tables and progress for people on stderr, JSON for programs on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["console", "emit_json", "emit_table", "reporter"]

# Lines in a log stay whole: a path or a message cut at 80 columns cannot be searched for.
# Square brackets are what they are: paths and messages hold them.
console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)


_PIPE_WIDTH = 1000


def reporter(command: str) -> Callable[[str], None]:
    """What tells a person how far a command is, a line for each text."""
    return lambda text: console.print(f"{command}: {text}")


def emit_json(value: Any) -> None:
    """Print `value` (made of JSON types) to stdout as indented JSON."""
    sys.stdout.write(json.dumps(value, indent=1, sort_keys=False) + "\n")


def emit_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table for a person to stdout."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*("" if cell is None else str(cell) for cell in row))
    # Into a pipe or a file whole lines: file names cut at 80 columns could not be searched for.
    Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH).print(table)
