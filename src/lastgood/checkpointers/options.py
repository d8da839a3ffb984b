"""Options of systems: what each may be given, and how what was given is checked."""

from __future__ import annotations

import difflib
from typing import Any, ClassVar, Protocol

from pydantic import Field, ValidationError

from lastgood.errors import ConfigError
from lastgood.files import local_path
from lastgood.locations import Location
from lastgood.models import HashedOptions

__all__ = ["BaseOptions", "KeepOptions", "check_when_to_save", "made_options"]


class BaseOptions(HashedOptions):
    """Base of every system's options: unknown keys and wrong types are refused, values never change."""

    path_options: ClassVar[tuple[str, ...]] = ()
    """Names of those that are paths: a checkpointer takes relative ones from where the process is when it is made."""
    place_options: ClassVar[tuple[str, ...]] = ()
    """Names of those that are folders or URLs; folders are taken as paths are."""

    def disk_bytes(self, state_bytes: int) -> int:
        """Disk space that this system needs at once for a state of `state_bytes`."""
        return 2 * state_bytes

    def host_bytes(self, state_bytes: int) -> int:
        """Host memory that this system needs beside the training's own, for a state of `state_bytes`."""
        del state_bytes
        return 0


class KeepOptions(BaseOptions):
    """Base of options of systems that keep the newest checkpoints."""

    keep: int = Field(default=2, ge=1)
    """Complete checkpoints kept."""

    def disk_bytes(self, state_bytes: int) -> int:
        """The kept ones, and the one being written."""
        return (self.keep + 1) * state_bytes


class _System(Protocol):
    @property
    def name(self) -> str:
        """For messages."""

    @property
    def Options(self) -> type[BaseOptions]:  # noqa: N802 - as in Checkpointer
        """The class of its options."""


def _problem(found: Any, known: list[str]) -> str:
    """One thing that options' validation found, and what may be meant by a name that there is none of."""
    name = ".".join(map(str, found["loc"]))
    if found["type"] != "extra_forbidden":
        return f"{name}: {found['msg']}"
    # Nobody who means steps is told to give seconds.
    meant = [one for one in known if one != "interval_s"]
    close = difflib.get_close_matches(name, meant, n=1, cutoff=0.5)
    return f"{name}: there is no such option" + (f"; did you mean {close[0]}?" if close else "")


def made_options(system: _System, directory: object, options: BaseOptions | None, given: dict[str, Any]) -> BaseOptions:
    """The options of a checkpointer that was made with an object of them, or with single ones by name.

    Relative paths among them are taken from where the process is now. `directory` is for messages. Raises ConfigError
    for both at once, and for options that do not exist or cannot be.
    """
    if options is not None and given:
        values = ", ".join(f"{name}={value!r}" for name, value in sorted(given.items()))
        raise ConfigError(
            f"{system.name}: give either an object of options or single ones, not both; put all into one, as "
            f"{type(system).__name__}.Options({values})"
        )
    if options is None:
        options = _validated(system, given)
    elif not isinstance(options, system.Options):
        kind = type(system).__name__
        meant = (
            f"; an interval is given by name, as {kind}({str(directory)!r}, interval_steps={options})"
            if isinstance(options, int)
            else f"; make them with {kind}.Options()"
        )
        raise ConfigError(f"{system.name}: options are {type(options).__name__}, not {system.Options.__name__}{meant}")
    paths = {name: getattr(options, name) for name in options.path_options}
    absolute = {name: str(local_path(path)) for name, path in paths.items() if path is not None}
    places = {name: getattr(options, name) for name in options.place_options}
    absolute |= {name: _place(place) for name, place in places.items() if place is not None}
    return options.model_copy(update=absolute) if absolute else options


def _place(named: str) -> str:
    """Raises ConfigError for a URL of another scheme."""
    location = Location.parse(named)
    return str(location if location.scheme == "s3" else location.path)


def _validated(system: _System, given: dict[str, Any]) -> BaseOptions:
    try:
        return system.Options.model_validate(given)
    except ValidationError as error:
        known = [
            "interval_steps",
            "interval_s",
            "readable_by",
            "max_unsaved_s",
            "deadline",
            *system.Options.model_fields,
        ]
        what = "; ".join(_problem(item, known) for item in error.errors())
        raise ConfigError(f"{system.name}: {what} (options: {', '.join(known)})") from error


def check_when_to_save(
    system: str,
    only_interval: int | None,
    interval_steps: int | None,
    interval_s: float | None,
    max_unsaved_s: float | None,
) -> None:
    """Raise ConfigError for an interval or a limit that cannot be; `only_interval` is that of the system's traits."""
    if only_interval == 1 and interval_steps not in (None, 1):
        raise ConfigError(
            f"{system}: interval_steps={interval_steps} is of no use: it follows every step, so each one is a "
            "checkpoint; leave it out"
        )
    if only_interval == 1 and interval_s is not None:
        raise ConfigError(f"{system}: interval_s={interval_s:g} is of no use: every step is a checkpoint; leave it out")
    if interval_s is not None and interval_steps is not None:
        raise ConfigError(
            f"{system}: interval_steps={interval_steps} and interval_s={interval_s:g} both say when to save; leave one "
            "of them out"
        )
    if interval_s is not None and not interval_s > 0:
        raise ConfigError(f"{system}: interval_s must be a number of seconds above 0: {interval_s}")
    if interval_steps is not None and interval_steps < 0:
        raise ConfigError(
            f"{system}: interval_steps must not be negative: {interval_steps}; with interval_steps=0 only "
            "save(step) saves"
        )
    if max_unsaved_s is not None and not max_unsaved_s > 0:
        raise ConfigError(f"{system}: max_unsaved_s must be a number of seconds above 0: {max_unsaved_s}")
