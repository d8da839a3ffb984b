"""Whether figures over several nodes can be measured as a configuration says. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lastgood.cluster.hostfile import read_hostfile
from lastgood.errors import ConfigError
from lastgood.experiments.config.schema import Config
from lastgood.experiments.config.sections import CheckmateSection, NodesSection
from lastgood.experiments.config.sources import Sources
from lastgood.experiments.records.spec import Parallel
from lastgood.experiments.systems.over_ranks import why_not_over_ranks
from lastgood.workloads.base import WorkloadOptions
from lastgood.workloads.registry import workload_options_class

__all__ = ["ranks_problems"]


def ranks_problems(config: Config, sources: Sources) -> list[str]:
    """What cannot work in the sections of figures over several nodes. What their hosts can do is not known here."""
    found = [*_problems(config, sources, "fig8e", config.fig8e), *_problems(config, sources, "fig8f", config.fig8f)]
    return [*found, *_checkmate_problems(config, sources, config.checkmate)]


def _problems(config: Config, sources: Sources, figure: str, section: NodesSection) -> list[str]:
    if section.ranks < 2:
        return [_one_rank(sources, figure)]
    problems = _system_problems(sources, figure, section, section.model, section.parallel)
    options, wrong = _options(config, sources, (figure, "options"), section.model, section.options)
    problems += wrong
    layers = getattr(options, "layers", section.ranks)
    if section.parallel == "pipeline" and section.ranks > layers:
        text = f"{section.ranks} ranks are as many stages, and {section.model} has {layers} layers; give it more"
        problems.append(sources.problem((figure, "parallel"), text))
    return problems + _hostfile_problems(sources, figure, section)


def _checkmate_problems(config: Config, sources: Sources, section: CheckmateSection) -> list[str]:
    if section.ranks < 2:
        return [_one_rank(sources, "checkmate")]
    problems = []
    for model in section.models:
        problems += _system_problems(sources, "checkmate", section, model, "ddp")
        given = section.options.get(model, {})
        problems += _options(config, sources, ("checkmate", "options", model), model, given)[1]
    problems += _unlike_places(config, sources, section)
    return problems + _hostfile_problems(sources, "checkmate", section)


def _unlike_places(config: Config, sources: Sources, section: CheckmateSection) -> list[str]:
    """Runs that figures share have one record, so they must be of the same hosts and links.

    Measured in pairs of blocks, which Checkmate's figure is not, they share none.
    """
    problems: list[str] = []
    if config.pairs.plan() is not None:
        return problems
    for figure, other in (("fig8e", config.fig8e), ("fig8f", config.fig8f)):
        where = ("checkmate", "options", other.model)
        options = _options(config, sources, where, other.model, section.options.get(other.model, {}))[0]
        theirs = _options(config, sources, (figure, "options"), other.model, other.options)[0]
        own = (section.nodes, section.slots, section.iterations, options)
        shared = own == (other.nodes, other.slots, other.iterations, theirs)
        if other.model not in section.models or other.parallel != "ddp" or not shared:
            continue
        for key in ("hostfile", "ssh_config", "rate"):
            if getattr(section, key) != getattr(other, key):
                text = f"{figure} has another one and shares runs of {other.model}; give one of them other iterations"
                problems.append(sources.problem(("checkmate", key), text))
    return problems


def _one_rank(sources: Sources, figure: str) -> str:
    text = "1 node with 1 slot is one rank, which figure 8 measures; allowed: two ranks or more"
    return sources.problem((figure, "nodes"), text)


def _system_problems(
    sources: Sources, figure: str, section: NodesSection | CheckmateSection, model: str, parallel: Parallel
) -> list[str]:
    reasons = [why_not_over_ranks(model, system, parallel, section.ranks, section.nodes) for system in section.systems]
    return [
        sources.problem((figure, "systems", number), reason)
        for number, reason in enumerate(reasons)
        if reason is not None
    ]


def _options(
    config: Config, sources: Sources, where: tuple[str, ...], model: str, changes: Mapping[str, Any]
) -> tuple[WorkloadOptions | None, list[str]]:
    """The model's options with the section's changes, or what is wrong with them."""
    given = {**config.workload_options(model).model_dump(), **changes}
    try:
        return workload_options_class(model).model_validate(given), []
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        return None, [sources.problem((*where, *detail["loc"]), f"{detail['msg']}; see docs/options.md")]


def _hostfile_problems(sources: Sources, figure: str, section: NodesSection | CheckmateSection) -> list[str]:
    if section.hostfile is None:
        return []
    path = Path(section.hostfile)
    try:
        hosts = read_hostfile(path)
    except ConfigError as error:
        return [sources.problem((figure, "hostfile"), str(error))]
    if [host.slots for host in hosts.hosts] != [section.slots] * section.nodes:
        found = ", ".join(f"{host.name} {host.slots}" for host in hosts.hosts[:8])
        needed = (
            f"needed: {section.nodes} hosts of {section.slots} slots; change `nodes` and `slots`, or name another file"
        )
        text = f"{path} has {len(hosts.hosts)} hosts (slots: {found}); {needed}"
        return [sources.problem((figure, "hostfile"), text)]
    return []
