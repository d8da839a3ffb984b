"""The command `lastgood`, also as `python -m lastgood`: loads without any extra, to name a missing one."""

from __future__ import annotations

import sys

from lastgood.extras import why_missing

__all__ = ["main"]


def main() -> None:
    """Run a command, see `lastgood.cli.main`. Exits with 1 and one line if the extra `cli` is not installed."""
    try:
        from lastgood.cli import main as run_command
    except ModuleNotFoundError as error:
        reason = why_missing(error, "the command lastgood")
        if reason is None:
            raise
        sys.exit(f"lastgood: {reason}")
    run_command()


if __name__ == "__main__":
    main()
