"""What integrations with training frameworks share: versions, who has taken a training, how long a window is."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import re
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lastgood.checkpointers.attach.data_cursor import CountedLoader
from lastgood.checkpointers.base import Checkpointer
from lastgood.checkpointers.registry import checkpointer_class
from lastgood.errors import ConfigError, MismatchError
from lastgood.state import Checked

__all__ = [
    "Accumulation",
    "attach_training",
    "check_methods",
    "claim",
    "import_framework",
    "made_checkpointer",
    "put_around",
    "refuse_folder",
    "warn_if_untried",
]

_log = logging.getLogger("lastgood")

_USUAL_INTERVAL = 50

_warned: set[str] = set()
_taken: weakref.WeakKeyDictionary[Any, weakref.ref[Checkpointer]] = weakref.WeakKeyDictionary()


def import_framework(package: str, extra: str) -> Any:
    """The package. Raises ConfigError, naming the extra that brings it, if it cannot be imported."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(f"{package} cannot be imported ({error}); pip install 'lastgood[{extra}]'") from error


def warn_if_untried(package: str, version: str, tried: tuple[str, str]) -> None:
    """Warn, once in a process, if `version` is none of those from the first to the last of `tried` (each ``1.2``)."""
    number, first, last = (_numbers(text) for text in (version, *tried))
    if first <= number <= last or package in _warned:
        return
    _warned.add(package)
    among = f"{tried[0]} to {tried[1]}" if first != last else tried[0]
    _log.warning(
        "%s %s is installed, which this Lastgood was never tried with (tried: %s); its interface is the known one, so "
        "training goes on",
        package,
        version,
        among,
    )


def check_methods(owner: Any, methods: Mapping[str, Sequence[str]], version: str, tried: tuple[str, str]) -> None:
    """Raise ConfigError, naming both sides, if `owner` lacks one of `methods` or a parameter that is relied on."""
    for name, wanted in methods.items():
        method = getattr(owner, name, None)
        found = [] if method is None else list(inspect.signature(method).parameters)
        lacking = [parameter for parameter in wanted if parameter not in found]
        if method is None or lacking:
            what = "is missing" if method is None else f"has no {', '.join(lacking)}"
            package = owner.__module__.partition(".")[0]
            raise ConfigError(
                f"{package} {version} is installed, and {owner.__name__}.{name} {what}: this Lastgood knows the "
                f"interface of {tried[0]} to {tried[1]}; install one of those, or a newer Lastgood"
            )


def made_checkpointer(
    system: str, directory: Path | str, interval_steps: int | None, options: Mapping[str, Any]
) -> Checkpointer:
    """A checkpointer of a known system, which saves every 50 updates if nobody says otherwise.

    Raises ConfigError for options that cannot be.
    """
    if interval_steps is None and options.get("interval_s") is None:
        interval_steps = _USUAL_INTERVAL
    return checkpointer_class(system)(directory, interval_steps=interval_steps, **options)


def claim(training: Any, checkpointer: Checkpointer, what: str) -> None:
    """Note that a framework's object has its checkpointer. Raises ConfigError if it has another one that is in use."""
    known = _taken.get(training)
    before = None if known is None else known()
    if before is not None and before is not checkpointer and before.in_use:
        raise ConfigError(
            f"use_lastgood: this {what} has a {before.name} in {before.directory} already, and one training has one "
            "checkpointer: leave one of the two calls out, or close the first"
        )
    _taken[training] = weakref.ref(checkpointer)


def refuse_folder(directory: Path, own: str | Path | None, what: str) -> None:
    """Raise ConfigError if a framework keeps its own checkpoints in the folder, or removes old ones beside it."""
    if own is not None and Path(own).absolute().resolve() == directory.resolve():
        raise ConfigError(
            f"use_lastgood: {directory} is {what}, where the framework keeps and removes files of its own; give "
            f"Lastgood a folder of its own, as {directory}/lastgood"
        )


def attach_training(checkpointer: Checkpointer, framework: str, own: Any, **given: Any) -> int:
    """Attach, with the framework's own part under its name.

    Raises what `attach` does; of a checkpoint that another framework's training made, the error says so.
    """
    try:
        return checkpointer.attach(**{framework: own}, **given)
    except MismatchError as error:
        if re.search(rf"the checkpoint lacks \[[^\]]*'{framework}'", str(error)):
            error.args = (
                f"{error}; it was not made under {framework}, whose counts and callbacks it lacks: resume it as it was "
                "made, or begin in a new directory from its weights",
            )
        raise


class _PutAround:
    """A method of one object with ours around it, until it is removed."""

    def __init__(self, owner: Any, name: str, ours: Callable[..., Any]) -> None:
        self._owner, self._name = owner, name
        own = getattr(owner, name)

        @functools.wraps(own)
        def called(_: Any, *given: Any, **named: Any) -> Any:
            return ours(own, *given, **named)

        setattr(owner, name, types.MethodType(called, owner))

    def remove(self) -> None:
        """Give the object its own method back."""
        vars(self._owner).pop(self._name, None)


def put_around(owner: Any, name: str, ours: Callable[..., Any]) -> _PutAround:
    """Call ``ours(own, ...)`` in the place of a method, of this object alone; `own` is the method."""
    return _PutAround(owner, name, ours)


class Accumulation(Checked):
    """Of how many batches an update is made; in the middle of an epoch a checkpoint's place depends on it."""

    saved_keys = ("accumulation", "midway")

    def __init__(self, batches: int, data: CountedLoader | None, *, refuse: bool) -> None:
        self.batches = batches
        self.data = data
        self._refuse = refuse

    def state_dict(self) -> dict[str, Any]:
        """The number, and whether it matters."""
        return {"accumulation": self.batches, "midway": self.data is not None and bool(self.data.batches)}

    def check_saved(self, saved: Any, path: str) -> None:
        """Refuse another number in the middle of an epoch."""
        before, now = saved["accumulation"], self.batches
        if self._refuse and saved["midway"] and before != now:
            raise MismatchError(
                f"{path}: the checkpoint lies in the middle of an epoch in which an update was made of {before} "
                f"batches, and now it is made of {now}, so that steps would be others; go on with {before} until the "
                "epoch ends, or choose data_changed='samples' to go on from this place all the same"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load: the number is the framework's."""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
