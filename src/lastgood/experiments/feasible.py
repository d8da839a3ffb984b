"""Whether this machine can run a configuration at all: cores, GPU, memory, and the disk under the scratch folder.

Only what is certain to fail is refused: every estimate here is a lower bound.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from lastgood.errors import ConfigError
from lastgood.experiments.machine import (
    CudaDevice,
    cuda_devices,
    free_bytes,
    is_tmpfs,
    memory_bytes,
    mount_of,
    nearest_folder,
    usable_cores,
)
from lastgood.units import MIB, format_bytes

if TYPE_CHECKING:
    from lastgood.experiments.config import Config, Sources

__all__ = ["check_machine"]

_PROCESS_BYTES = 400 * MIB
"""What a process with torch and transformers holds before it has built a model."""


def check_machine(config: Config, sources: Sources) -> None:
    """Refuse what this machine cannot run. Raises one ConfigError with a line for each problem."""
    problems: list[str] = []
    cores = usable_cores()
    if config.thread_count > cores:
        text = f"{config.threads} threads on {cores} cores; allowed: 1 to {cores}, or null for all"
        problems.append(sources.problem(("threads",), text))
    devices = cuda_devices() if config.device == "cuda" else ()
    if config.device == "cuda" and not devices:
        text = "'cuda': this machine shows no CUDA device (nvidia-smi, libcuda.so.1 and /proc/driver/nvidia were asked)"
        problems.append(sources.problem(("device",), f"{text}; allowed here: cpu"))
    scratch_problem = _scratch_problem(config)
    if scratch_problem:
        problems.append(sources.problem(("scratch",), scratch_problem))
    else:
        problems += _disk_problems(config, sources)
    problems += _memory_problems(config, sources, devices)
    if problems:
        raise ConfigError("\n".join(problems))


def _scratch_problem(config: Config) -> str:
    folder = config.scratch_folder
    near = nearest_folder(folder)
    if not near.is_dir():
        return f"{str(folder)!r}: {near} is not a folder; allowed: a folder on the disk to measure"
    if is_tmpfs(folder):
        mount = mount_of(folder)
        return (
            f"{str(folder)!r} lies in memory ({mount.filesystem} at {mount.point}), where nothing is durable and no "
            "disk is measured; allowed: a folder on a disk"
        )
    if not os.access(near, os.W_OK | os.X_OK):
        return f"{str(folder)!r}: this user may not write to {near}; allowed: a folder that you may write to"
    return ""


def _pairs(config: Config) -> list[tuple[str, str]]:
    """Every model with every system that it runs with."""
    figure = [(model, system) for model in config.models for system in config.systems]
    return list(dict.fromkeys([*figure, (config.simple.model, config.simple.system)]))


def _disk_problems(config: Config, sources: Sources) -> list[str]:
    free = free_bytes(config.scratch_folder)
    needs = {
        (model, system): config.system_options(system).disk_bytes(config.workload_options(model).state_bytes())
        for model, system in _pairs(config)
    }
    too_big = {pair: need for pair, need in needs.items() if need > free}
    if not too_big:
        return []
    (model, system), need = max(too_big.items(), key=lambda item: item[1])
    text = (
        f"{str(config.scratch_folder)!r} has {format_bytes(free)} free, and {model} with {system} needs "
        f"{format_bytes(need)}{_and_others(len(too_big))}; choose another folder, a smaller model or a lower keep"
    )
    return [sources.problem(("scratch",), text)]


def _memory_problems(config: Config, sources: Sources, devices: tuple[CudaDevice, ...]) -> list[str]:
    host = memory_bytes()
    card = devices[0].memory_bytes if devices else None
    problems: list[str] = []
    too_big: dict[tuple[str, str], int] = {}
    for model, system in _pairs(config):
        workload = config.workload_options(model)
        state = workload.state_bytes()
        training = state + 4 * workload.parameters()  # the gradients lie beside the state
        need = _PROCESS_BYTES + config.system_options(system).host_bytes(state)
        if config.device == "cpu":
            need += training
        if need > host:
            too_big[model, system] = need
        if card is not None and training > card and system == config.systems[0]:
            text = f"{model} needs {format_bytes(training)} for state and gradients; the GPU has {format_bytes(card)}"
            problems.append(sources.problem(("workloads", model), f"{text}; make the model smaller"))
    if too_big:
        (model, system), need = max(too_big.items(), key=lambda item: item[1])
        text = (
            f"{model} with {system} needs {format_bytes(need)} of memory{_and_others(len(too_big))}; this machine has "
            f"{format_bytes(host)}; make the model smaller"
        )
        problems.append(sources.problem(("workloads", model), text))
    return problems


def _and_others(count: int) -> str:
    return f" (and {count - 1} more of the pairs do not fit either)" if count > 1 else ""
