"""A group of commands, each of which refuses a URL where it asks for a path."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from lastgood.files import local_path

__all__ = ["App"]

_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class App(typer.Typer):
    """As `typer.Typer`. A path that is a URL is a ConfigError before the command begins: it would be a folder here."""

    # Typer's own arguments are passed on as they are, whatever they will be in its next version.

    def command(self, *args: Any, **kwargs: Any) -> _Decorator:  # type: ignore[override]
        """As `Typer.command`."""
        register = super().command(*args, **kwargs)
        return lambda function: register(_refusing_urls(function))

    def callback(self, *args: Any, **kwargs: Any) -> _Decorator:  # type: ignore[override]
        """As `Typer.callback`."""
        register = super().callback(*args, **kwargs)
        return lambda function: register(_refusing_urls(function))


def _refusing_urls(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for value in kwargs.values():
            for one in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(one, Path):
                    local_path(one)
        return function(*args, **kwargs)

    return checked
