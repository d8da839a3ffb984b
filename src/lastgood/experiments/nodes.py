"""Whether figures over several nodes can be measured as a configuration says. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from lastgood.cluster.hostfile import read_hostfile
from lastgood.errors import ConfigError
from lastgood.experiments.figure_sections import NodesSection
from lastgood.experiments.ranks import why_not_over_ranks
from lastgood.workloads.registry import workload_options_class

if TYPE_CHECKING:
    from lastgood.experiments.config import Config, Sources

__all__ = ["ranks_problems"]


def ranks_problems(config: Config, sources: Sources) -> list[str]:
    """What cannot work in the sections of figures 8e and 8f. What their hosts can do is not known here."""
    return [*_problems(config, sources, "fig8e", config.fig8e), *_problems(config, sources, "fig8f", config.fig8f)]


def _problems(config: Config, sources: Sources, figure: str, section: NodesSection) -> list[str]:
    if section.ranks < 2:
        text = "1 node with 1 slot is one rank, which figure 8 measures; allowed: two ranks or more"
        return [sources.problem((figure, "nodes"), text)]
    problems = []
    for number, system in enumerate(section.systems):
        reason = why_not_over_ranks(section.model, system, section.parallel, section.ranks, section.nodes)
        if reason is not None:
            problems.append(sources.problem((figure, "systems", number), reason))
    given = {**config.workload_options(section.model).model_dump(), **section.options}
    try:
        options = workload_options_class(section.model).model_validate(given)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        where = (figure, "options", *(part for part in detail["loc"]))
        problems.append(sources.problem(where, f"{detail['msg']}; see docs/options.md"))
    else:
        layers = getattr(options, "layers", section.ranks)
        if section.parallel == "pipeline" and section.ranks > layers:
            text = f"{section.ranks} ranks are as many stages, and {section.model} has {layers} layers; give it more"
            problems.append(sources.problem((figure, "parallel"), text))
    if section.hostfile is not None:
        problems += _hostfile_problems(sources, figure, section, Path(section.hostfile))
    return problems


def _hostfile_problems(sources: Sources, figure: str, section: NodesSection, path: Path) -> list[str]:
    try:
        hosts = read_hostfile(path)
    except ConfigError as error:
        return [sources.problem((figure, "hostfile"), str(error))]
    if [host.slots for host in hosts.hosts] != [section.slots] * section.nodes:
        found = ", ".join(f"{host.name} {host.slots}" for host in hosts.hosts[:8])
        needed = f"needed: {section.nodes} hosts of {section.slots} slots"
        text = f"{path} has {len(hosts.hosts)} hosts (slots: {found}); {needed}"
        return [sources.problem((figure, "hostfile"), text)]
    return []
