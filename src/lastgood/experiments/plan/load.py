"""Loading a configuration: parsed and checked, so that all that cannot work is refused before any job starts.

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lastgood.checkpointers.registry import checkpointer_class
from lastgood.errors import ConfigError
from lastgood.experiments.config.schema import Config
from lastgood.experiments.config.sources import Sources, show_errors
from lastgood.experiments.config.values import BASELINE
from lastgood.experiments.config.yaml_file import load_files, merged, with_current_keys
from lastgood.experiments.plan.machine_checks import check_machine, pool_problems
from lastgood.experiments.plan.node_checks import ranks_problems
from lastgood.workloads.registry import workload_options_class

__all__ = ["load_config", "parse_config"]


def load_config(configfile: Path, overrides: Mapping[str, Any] | None = None) -> Config:
    """Read `configfile`, apply `overrides` (as `parse_overrides` reads them) and check all of it and this machine.

    Raises one ConfigError that names every wrong key with its source, its value and what is allowed.
    """
    config, sources = parse_config(configfile, overrides)
    check_machine(config, sources)
    return config


def parse_config(configfile: Path, overrides: Mapping[str, Any] | None = None) -> tuple[Config, Sources]:
    """Read and check a configuration without looking at this machine. Raises ConfigError, see `load_config`."""
    given = with_current_keys(overrides or {}, "--config")
    files = load_files(configfile)
    values: dict[str, Any] = {}
    for changes in (*(changes for _, changes in files), given):
        values = merged(values, changes)
    sources = Sources(files, given)
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(show_errors(error, Config, sources))) from None
    problems = [
        *_option_problems(config, "workloads", config.used_models, sources),
        *_option_problems(config, "options", config.used_systems, sources),
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
