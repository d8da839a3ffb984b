"""A group of commands, each of which refuses a URL if it asks for a path, and takes `--quiet`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from lastgood.cli._output import be_quiet
from lastgood.files import local_path

__all__ = ["App"]

_Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

_QUIET = "quiet"
_Quiet = Annotated[bool, typer.Option("--quiet", help="No notices and no progress on stderr; errors are still said.")]


class App(typer.Typer):
    """As `typer.Typer`. A path that is a URL is a ConfigError before the command begins: it would be a folder here.

    Every command has the option `--quiet`, but for those that hand on options to another program.
    """

    # Typer's own arguments are passed on as they are, whatever they will be in its next version.

    def command(self, *args: Any, **kwargs: Any) -> _Decorator:  # type: ignore[override]
        """As `Typer.command`."""
        register = super().command(*args, **kwargs)
        if "context_settings" in kwargs:
            return lambda function: register(_refusing_urls(function))
        return lambda function: register(_with_quiet(_refusing_urls(function)))

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


def _with_quiet(function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function, eval_str=True)
    if _QUIET in signature.parameters:  # registered before, under another name
        return function

    @functools.wraps(function)
    def told(*args: Any, **kwargs: Any) -> Any:
        be_quiet(kwargs.pop(_QUIET, False))
        return function(*args, **kwargs)

    quiet = inspect.Parameter(_QUIET, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_Quiet)
    told.__signature__ = signature.replace(  # type: ignore[attr-defined]  # what Typer makes options of
        parameters=[*signature.parameters.values(), quiet]
    )
    return told
