"""How every command talks: tables and progress for people on stderr, JSON for programs on stdout."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Progress", "be_quiet", "console", "emit_json", "emit_table", "reporter"]

# Lines in a log stay whole: a path or a message cut at 80 columns cannot be searched for.
# Square brackets are what they are: paths and messages hold them.
console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)


_PIPE_WIDTH = 1000
_PROGRESS_AFTER_S = 2.0


def be_quiet(quiet: bool) -> None:
    """Whether notices and progress are left out from here on; called at the start of every command."""
    console.quiet = quiet


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
    # Lines are not cut in a pipe or a file: file names cut at 80 columns could not be searched for.
    Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH).print(table)


class Progress:
    """How much of something is done, how fast, and how long the rest takes: a line on stderr that goes away at the end.

    It appears once the work has taken two seconds, and only on a terminal: nothing is said in a file, with `--quiet`,
    or if `shown` is false, as beside `--json`. Use it as a context manager; `advance` may be called from any thread.
    """

    def __init__(
        self,
        what: str,
        total_bytes: int,
        *,
        shown: bool = True,
        to: Console = console,
        after_s: float = _PROGRESS_AFTER_S,
    ) -> None:
        self._what = what
        self._total_bytes = total_bytes
        self._shown = shown and to.is_terminal and not to.quiet
        self._to = to
        self._lock = threading.Lock()
        self._done_bytes = 0
        self._show: Callable[[int], None] | None = None
        self._stop: Callable[[], None] | None = None
        self._timer = threading.Timer(after_s, self._begin)
        self._timer.daemon = True
        self._ended = False

    def advance(self, nbytes: int) -> None:
        """So many more bytes are done."""
        with self._lock:
            self._done_bytes += nbytes
            if self._show is not None:
                self._show(nbytes)

    def __enter__(self) -> Self:
        if self._shown:
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        with self._lock:
            self._ended = True
            if self._stop is not None:
                self._stop()

    def _begin(self) -> None:
        from rich import progress

        bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.DownloadColumn(binary_units=True),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
            console=self._to,
            transient=True,
        )
        with self._lock:
            if self._ended:
                return
            task = bar.add_task(self._what, total=self._total_bytes, completed=self._done_bytes)
            bar.start()
            self._show, self._stop = (lambda nbytes: bar.advance(task, nbytes)), bar.stop
