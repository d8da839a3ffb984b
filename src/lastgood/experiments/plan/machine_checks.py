"""Whether this machine can run a configuration at all: cores, GPU, memory, and the disk under the scratch folder.

Only what is certain to fail is refused: every estimate here is a lower bound.
"""

from __future__ import annotations

import os
from pathlib import Path

from lastgood.checkpointers.registry import why_unavailable
from lastgood.cluster.hostfile import read_hostfile
from lastgood.errors import ConfigError
from lastgood.experiments.config.schema import Config
from lastgood.experiments.config.sources import Sources
from lastgood.experiments.machine.facts import CudaDevice, cuda_devices, free_bytes, memory_bytes, usable_cores
from lastgood.experiments.plan.variants import BLOB, Variant, all_variants, pool_bytes
from lastgood.experiments.systems.papers import PCCHECK
from lastgood.mounts import lies_in_memory, mount_of, nearest_folder
from lastgood.units import MIB, format_bytes

__all__ = ["PROCESS_BYTES", "check_machine", "pool_problems"]

PROCESS_BYTES = 400 * MIB
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
    for system, reason in why_unavailable([config.simple.system]).items():
        problems.append(sources.problem(("simple", "system"), f"{system!r} cannot run here: {reason}"))
    if config.hostfile is not None:
        try:
            read_hostfile(Path(config.hostfile))
        except ConfigError as error:
            problems.append(sources.problem(("hostfile",), str(error)))
    if problems:
        raise ConfigError("\n".join(problems))


def _scratch_problem(config: Config) -> str:
    folder = config.scratch_folder
    near = nearest_folder(folder)
    if not near.is_dir():
        return f"{str(folder)!r}: {near} is not a folder; allowed: a folder on the disk to measure"
    if lies_in_memory(folder):
        mount = mount_of(folder)
        return (
            f"{str(folder)!r} lies in memory ({mount.filesystem} at {mount.point}), where nothing is durable and no "
            "disk is measured; allowed: a folder on a disk"
        )
    if not os.access(near, os.W_OK | os.X_OK):
        return f"{str(folder)!r}: this user may not write to {near}; allowed: a folder that you may write to"
    return ""


def pool_problems(config: Config, sources: Sources) -> list[str]:
    """Pools of figure 14 that PCcheck cannot work with: a chunk is copied while another is written."""
    options = config.system_options(PCCHECK).model_dump()
    state = config.workload_options(config.fig14.model).state_bytes()
    least = 2 * int(options["chunk_bytes"])
    problems = []
    for number, share in enumerate(config.fig14.pool_shares):
        pool = pool_bytes(config, share)
        if pool is not None and pool < least:
            text = (
                f"{share}: {format_bytes(pool)} of {config.fig14.model}'s {format_bytes(state)}; a pool holds at least "
                f"two chunks, {format_bytes(least)}; allowed: from {least / state:.3g}, or make "
                f"options.{PCCHECK}.chunk_bytes smaller"
            )
            problems.append(sources.problem(("fig14", "pool_shares", number), text))
    return problems


def _disk_problems(config: Config, sources: Sources) -> list[str]:
    free = free_bytes(config.scratch_folder)
    problems: list[str] = []
    for key, variants in _by_key(config).items():
        needs = [(found.options.disk_bytes(found.workload.state_bytes()), _name(found)) for found in variants]
        too_big = [pair for pair in needs if pair[0] > free]
        if not too_big:
            continue
        need, name = max(too_big)
        text = (
            f"{str(config.scratch_folder)!r} has {format_bytes(free)} free, and {name} needs "
            f"{format_bytes(need)}{_and_others(len(too_big))}; choose another folder, a smaller model or a lower keep"
        )
        if key[0] == "workloads":
            problems.append(sources.problem(("scratch",), text))
        else:
            problems.append(sources.problem(key, f"scratch {text}, or leave the largest out"))
    return problems


def _memory_problems(config: Config, sources: Sources, devices: tuple[CudaDevice, ...]) -> list[str]:
    host = memory_bytes()
    card = devices[0].memory_bytes if devices else None
    problems: list[str] = []
    for key, variants in _by_key(config).items():
        too_big: list[tuple[int, str]] = []
        on_card: list[tuple[int, str]] = []
        for found in variants:
            state = found.workload.state_bytes()
            training = state + found.workload.gradient_bytes()
            need = PROCESS_BYTES + found.options.host_bytes(state)
            if config.device == "cpu":
                need += training
            if need > host:
                too_big.append((need, _name(found)))
            if card is not None and training > card:
                on_card.append((training, _model_name(found)))
        advice = "make the model smaller" if key[0] == "workloads" else "leave the largest out"
        if on_card and card is not None:
            training, name = max(on_card)
            text = f"{name} needs {format_bytes(training)} for state and gradients; the GPU has "
            problems.append(sources.problem(key, f"{text}{format_bytes(card)}; {advice}"))
        if too_big:
            need, name = max(too_big)
            text = f"{name} needs {format_bytes(need)} of memory{_and_others(len(too_big))}; this machine has "
            problems.append(sources.problem(key, f"{text}{format_bytes(host)}; {advice}"))
    return problems


def _by_key(config: Config) -> dict[tuple[str, ...], list[Variant]]:
    """All that is measured, by the key to change if it does not fit."""
    found: dict[tuple[str, ...], list[Variant]] = {}
    for one in all_variants(config):
        alike = found.setdefault(one.key, [])
        if one not in alike:
            alike.append(one)
    return found


def _model_name(found: Variant) -> str:
    return f"a state of {format_bytes(found.workload.state_bytes())}" if found.model == BLOB else found.model


def _name(found: Variant) -> str:
    return f"{_model_name(found)} with {found.system}"


def _and_others(count: int) -> str:
    return f" (and {count - 1} more of the pairs do not fit either)" if count > 1 else ""
