"""The configuration: pydantic models are its only schema, and all that cannot work is refused before any job starts.

A configuration is one file (config/laptop.yaml is the default), what it changes in the file that it names as its `base`
(config/default.yaml has all defaults), and overrides from the command line (``--config models=vgg16 intervals=1,10``),
which win. Needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

from pydantic import AfterValidator, BaseModel, Field, ValidationError
from pydantic.fields import FieldInfo

from lastgood.checkpointers.base import BaseOptions
from lastgood.checkpointers.registry import checkpointer_class
from lastgood.errors import ConfigError
from lastgood.experiments.config.sections import (
    CheckmateSection,
    ConcurrencySection,
    GoodputSection,
    MemorySection,
    NodesSection,
    PersistSection,
    ThreadsSection,
)
from lastgood.experiments.config.values import (
    BASELINE,
    SWEPT,
    Count,
    CountOrZero,
    Distinct,
    FolderPath,
    Interval,
    Label,
    ModelName,
    Part,
    Split,
    SystemName,
    UserPath,
    nearest,
    with_baseline,
)
from lastgood.experiments.machine.facts import usable_cores
from lastgood.experiments.plan.machine_checks import check_machine, pool_problems
from lastgood.experiments.plan.node_checks import ranks_problems
from lastgood.experiments.records.spec import Scale
from lastgood.text import parse_yaml, read_bytes
from lastgood.workloads.base import WorkloadOptions
from lastgood.workloads.registry import workload_data_kind, workload_options_class

__all__ = [
    "BASELINE",
    "Config",
    "DataPaths",
    "SimpleTest",
    "Sources",
    "load_config",
    "load_files",
    "load_yaml",
    "parse_config",
    "parse_overrides",
    "show_errors",
]

_MOST_BYTES = 1 << 20
_MOST_FILES = 8
"""A file, its base, the base of that, and so on."""


# -- models --------------------------------------------------------------------------------------------------------


class DataPaths(Part):
    """Data of the user's own; null takes the small real data that Lastgood prepares."""

    images: UserPath | None = Field(description="a folder of images, one folder per class, or null")
    squad: UserPath | None = Field(description="a question-answering file in SQuAD's format, or null")
    wikitext: UserPath | None = Field(description="a WikiText file or folder, or null")

    def of_workload(self, name: str) -> str | None:
        """The path that workload `name` reads, or None for the data that Lastgood prepares."""
        kind = workload_data_kind(name)
        found: str | None = None if kind is None else getattr(self, kind)
        return found


class SimpleTest(Part):
    """What `snakemake test_simple` runs."""

    model: ModelName = Field(description="one of the models")
    system: SystemName = Field(description="one of the systems, not none")
    interval: Interval = Field(description="a whole number from 1: steps between checkpoints")
    iterations: Count = Field(description="a whole number, at least twice simple.interval: steps measured")


class Config(Part):
    """One complete configuration. Relative paths start at the folder in which the workflow works."""

    scale: Scale = Field(description="laptop, gpu or paper: a label; records of unlike scales never mix")
    machine: Label | None = Field(
        description="at most 64 of a-z, 0-9, dot, dash and underscore; null makes a name from the CPU and the GPU"
    )
    models: Annotated[list[ModelName], Split, Distinct, Field(min_length=1)] = Field(
        description="a list of models, at least one"
    )
    systems: Annotated[list[SystemName], Split, Distinct, Field(min_length=1), AfterValidator(with_baseline)] = Field(
        description="a list of systems, at least one; none is always measured"
    )
    intervals: Annotated[list[Interval], Split, Distinct, Field(min_length=1)] = Field(
        description="a list of whole numbers from 1: steps between checkpoints"
    )
    repetitions: Count = Field(description="a whole number from 1: measurements of each cell")
    iterations: Count = Field(description="a whole number from 1: steps measured, at least")
    min_checkpoints: Count = Field(description="a whole number from 1: steps are raised until a run holds as many")
    warmup_iterations: CountOrZero = Field(description="a whole number from 0: steps before the clocks start")
    proof: Literal["every", "first"] = Field(
        description="every or first: which repetitions of a cell prove their restore"
    )
    device: Literal["cpu", "cuda"] = Field(description="cpu or cuda")
    threads: Count | None = Field(description="a whole number from 1 to the number of cores; null takes all cores")
    seed: CountOrZero = Field(description="a whole number from 0; repetition r trains with seed + r")
    scratch: FolderPath | None = Field(description="a folder on the disk to measure; null is ./scratch")
    data_dir: FolderPath = Field(description="a folder for the data that Lastgood prepares")
    data: DataPaths = Field(description="paths of your own data")
    workloads: dict[ModelName, dict[str, Any]] = Field(description="options by model")
    knobs: dict[SystemName, dict[str, Any]] = Field(description="options by system")
    results_dir: FolderPath = Field(description="a folder for run records")
    figures_dir: FolderPath = Field(description="a folder for figures")
    hostfile: UserPath | None = Field(
        default=None, description="a DeepSpeed hostfile, as `snakemake provision` needs it, or null"
    )
    simple: SimpleTest = Field(description="what test_simple runs")
    fig9: GoodputSection = Field(description="what figure 9 measures")
    fig11: PersistSection = Field(description="what figure 11 measures")
    fig12: ConcurrencySection = Field(description="what figure 12 measures")
    fig13: ThreadsSection = Field(description="what figure 13 measures")
    fig14: MemorySection = Field(description="what figure 14 measures")
    fig8e: NodesSection = Field(description="what figure 8e measures, over several nodes")
    fig8f: NodesSection = Field(description="what figure 8f measures, over several nodes")
    checkmate: CheckmateSection = Field(description="what Checkmate's figure measures, over several nodes")

    @property
    def scratch_folder(self) -> Path:
        """Where runs keep their checkpoints."""
        return Path(self.scratch or "scratch")

    @property
    def thread_count(self) -> int:
        """Threads that a run computes with."""
        return usable_cores() if self.threads is None else self.threads

    @property
    def used_models(self) -> list[str]:
        """Models of the figures and of test_simple that have options of their own, each once."""
        sweeps = [self.fig12.model, self.fig13.model, self.fig14.model, self.fig8e.model, self.fig8f.model]
        return list(dict.fromkeys([*self.models, self.simple.model, *sweeps, *self.checkmate.models]))

    @property
    def used_systems(self) -> list[str]:
        """Systems of the figures and of test_simple, each once."""
        more = [*(self.fig9.systems or []), *(self.fig11.systems or []), *self.fig8e.systems, *self.fig8f.systems]
        return list(dict.fromkeys([*self.systems, self.simple.system, *more, *self.checkmate.systems, SWEPT]))

    def workload_options(self, model: str) -> WorkloadOptions:
        """Validated options of `model`."""
        return workload_options_class(model).model_validate(self.workloads.get(model, {}))

    def system_options(self, system: str) -> BaseOptions:
        """Validated options of `system`."""
        return checkpointer_class(system).Options.model_validate(self.knobs.get(system, {}))


def _sections() -> list[str]:
    """Keys whose value is a mapping: an overlay or override changes the entries it names and keeps the others."""
    kinds = {name: get_origin(field.annotation) or field.annotation for name, field in Config.model_fields.items()}
    return [name for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, BaseModel | dict)]


_SECTIONS = _sections()


# -- loading -------------------------------------------------------------------------------------------------------


def load_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds one mapping. Raises ConfigError, naming the file and the line."""
    found = parse_yaml(read_bytes(path, _MOST_BYTES), str(path), most_bytes=_MOST_BYTES)
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: holds {type(found).__name__} where a mapping of keys to values is needed")
    return found


def load_files(configfile: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Read `configfile` and the files below it; each names the next as its `base`, relative to its own folder.

    Returns each file's path and values, without `base`; the lowest comes first, and each changes what those before it
    say. Raises ConfigError, naming the file, if one cannot be read, names itself through others, or there are too many.
    """
    files: list[tuple[Path, dict[str, Any]]] = []
    path, named_by = configfile, ""
    while True:
        try:
            values = load_yaml(path)
        except ConfigError as error:
            raise ConfigError(f"{named_by}{error}") from error.__cause__
        if any(path.samefile(earlier) for earlier, _ in files):
            raise ConfigError(f"{named_by}{path} is this file, or has this file as its own base")
        has_base = "base" in values
        base = values.pop("base", None)
        files.insert(0, (path, values))
        if not has_base:
            return files
        if not isinstance(base, str) or not base or "\0" in base:
            raise ConfigError(f"{path}: base: {base!r} is not the name of a file")
        named_by = f"{path}: base: "
        path = path.parent / base
        if len(files) == _MOST_FILES:
            raise ConfigError(f"{named_by}{base}: more than {_MOST_FILES} files, each the base of another")


def parse_overrides(entries: Iterable[str]) -> dict[str, Any]:
    """Turn ``["models=vgg16", "intervals=1,10"]`` into a mapping; values are YAML.

    Raises ConfigError for an entry without ``=``, a key that is no top-level name, or a key that is given twice.
    """
    found: dict[str, Any] = {}
    for entry in entries:
        key, equals, text = entry.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", key):
            section, _, rest = key.partition(".")
            hint = f"; for a key inside a section write {section}='{{{rest}: VALUE}}'" if section in _SECTIONS else ""
            raise ConfigError(f"--config: {entry!r} is not KEY=VALUE with a top-level key{hint}")
        if key in found:
            raise ConfigError(f"--config: {key} is given twice; put several values into one: {key}=A,B")
        found[key] = parse_yaml(text, f"--config: {key}={text[:200]}", most_bytes=_MOST_BYTES)
    return found


def load_config(configfile: Path, overrides: Mapping[str, Any] | None = None) -> Config:
    """Read `configfile`, apply `overrides` (see `parse_overrides`) and check all of it, this machine included.

    Raises one ConfigError that names every wrong key with its source, its value and what is allowed.
    """
    config, sources = parse_config(configfile, overrides)
    check_machine(config, sources)
    return config


class Sources:
    """Which source a value came from, for messages."""

    def __init__(self, files: Sequence[tuple[Path, Mapping[str, Any]]], overrides: Mapping[str, Any]) -> None:
        """`files` as `load_files` returns them: the last one is the file that the user named."""
        self._files = files
        self._overrides = overrides

    def overridden(self, location: tuple[str | int, ...]) -> bool:
        """Whether the value at `location` was given on the command line."""
        given = _look_up(self._overrides, location)
        # A section that both sources have is merged, and its faults lie in its entries.
        merged = isinstance(given, Mapping) and any(
            isinstance(_look_up(values, location), Mapping) for _, values in self._files
        )
        return given is not _ABSENT and not merged

    def problem(self, location: tuple[str | int, ...], text: str) -> str:
        """One line of a message: source, key and what is wrong."""
        source = "--config" if self.overridden(location) else str(self._file_of(location))
        return f"{source}: {_dotted(location)}: {text}"

    def _file_of(self, location: tuple[str | int, ...]) -> Path:
        """The last file that gives `location`; the user's own if none does."""
        holding = [path for path, values in self._files if _look_up(values, location) is not _ABSENT]
        return holding[-1] if holding else self._files[-1][0]


_ABSENT = object()


def _look_up(values: Any, location: tuple[str | int, ...]) -> Any:
    """The value at `location`; where the way there ends in something that is no mapping, that."""
    for key in location:
        if not isinstance(values, Mapping):
            break
        if key not in values:
            return _ABSENT
        values = values[key]
    return values


def parse_config(configfile: Path, overrides: Mapping[str, Any] | None = None) -> tuple[Config, Sources]:
    """Read and check a configuration without looking at this machine. Raises ConfigError, see `load_config`."""
    given = dict(overrides or {})
    files = load_files(configfile)
    values: dict[str, Any] = {}
    for changes in (*(changes for _, changes in files), given):
        values = _merge(values, changes)
    sources = Sources(files, given)
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(show_errors(error, Config, sources))) from None
    problems = [
        *_option_problems(config, "workloads", config.used_models, sources),
        *_option_problems(config, "knobs", config.used_systems, sources),
    ]
    if config.simple.system == BASELINE:
        problems.append(sources.problem(("simple", "system"), f"{BASELINE} takes no checkpoint that could be restored"))
    if config.simple.iterations < 2 * config.simple.interval:
        changed = "interval" if sources.overridden(("simple", "interval")) else "iterations"
        text = f"{config.simple.iterations} iterations are less than twice the interval, {config.simple.interval}"
        problems.append(sources.problem(("simple", changed), text))
    problems = problems or [*pool_problems(config, sources), *ranks_problems(config, sources)]
    if problems:
        raise ConfigError("\n".join(problems))
    return config, sources


def _merge(base: Any, change: Any) -> Any:
    if not isinstance(base, Mapping) or not isinstance(change, Mapping):
        return change
    return {**base, **{key: _merge(base.get(key), value) for key, value in change.items()}}


def _option_problems(config: Config, section: str, used: list[str], sources: Sources) -> list[str]:
    """What the Options models refuse: in every entry that is given, and in the defaults of those used without one."""
    given: dict[str, dict[str, Any]] = getattr(config, section)
    problems: list[str] = []
    for name in dict.fromkeys([*given, *used]):
        model = workload_options_class(name) if section == "workloads" else checkpointer_class(name).Options
        try:
            model.model_validate(given.get(name, {}))
        except ValidationError as error:
            problems += show_errors(error, model, sources, (section, name))
    return problems


# -- messages ------------------------------------------------------------------------------------------------------


def show_errors(
    error: ValidationError, model: type[BaseModel], sources: Sources, prefix: tuple[str | int, ...] = ()
) -> list[str]:
    """One line for each thing that pydantic refused: source, key, value, and what is allowed."""
    lines: dict[str, None] = {}
    for detail in error.errors(include_url=False, include_context=False):
        inner = tuple(part for part in detail["loc"] if part != "[key]")
        location = (*prefix, *inner)
        owner, field = _find_field(model, inner)
        known = list(owner.model_fields)
        if detail["type"] == "extra_forbidden":
            name = str(inner[-1])
            text = f"unknown key{nearest(name, known)}; known: {', '.join(known) or 'no keys at all'}"
        elif detail["type"] == "missing":
            text = f"is missing; allowed: {_allowed(field)}"
        else:
            message = detail["msg"].removeprefix("Value error, ")
            text = f"{detail['input']!r}: {message[:1].lower()}{message[1:]}"
            if "known: " not in message:
                text += f"; allowed: {_allowed(field)}"
        lines[sources.problem(location, text)] = None
    return list(lines)


def _find_field(model: type[BaseModel], location: tuple[str | int, ...]) -> tuple[type[BaseModel], FieldInfo | None]:
    """The model that holds the last named key of `location`, and that key's field if it has one."""
    owner = model
    field: FieldInfo | None = None
    for key in location:
        found = owner.model_fields.get(str(key))
        if found is None:
            return owner, None
        field = found
        inner = field.annotation
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            break
        if key != location[-1]:
            owner = inner
    return owner, field


def _allowed(field: FieldInfo | None) -> str:
    if field is None:
        return "see docs/workflow.md"
    if field.description:
        return field.description
    kind = field.annotation.__name__ if isinstance(field.annotation, type) else str(field.annotation)
    words = (("ge", "at least"), ("gt", "more than"), ("le", "at most"), ("lt", "less than"))
    bounds = [f"{word} {getattr(rule, name)}" for rule in field.metadata for name, word in words if hasattr(rule, name)]
    return ", ".join([_KINDS.get(kind, kind.replace("typing.", "")), *bounds])


_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}


def _dotted(location: tuple[str | int, ...]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
