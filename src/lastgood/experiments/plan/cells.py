"""The cells of figures: every run with all its settings resolved, in the order in which it is made. Needs no torch."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lastgood.checkpointers.registry import checkpointer_class, system_traits
from lastgood.experiments.config.schema import Config
from lastgood.experiments.config.values import BASELINE
from lastgood.experiments.dcp.storages import STORAGES, Storage
from lastgood.experiments.machine.facts import machine_label
from lastgood.experiments.plan.grid import find_root
from lastgood.experiments.plan.variants import (
    Variant,
    checkmate_variants,
    goodput_variants,
    nodes_variants,
    persist_variants,
    throughput_variants,
    variant,
)
from lastgood.experiments.records.base import Spec
from lastgood.experiments.records.dcp import DcpSpec, Medium
from lastgood.experiments.records.goodput import GoodputSpec
from lastgood.experiments.records.optimizer import OptimizerSpec
from lastgood.experiments.records.remote import RemotePart, RemoteSpec
from lastgood.experiments.records.spec import Parallel, RunSpec
from lastgood.experiments.services.object_store import NOT_INSTALLED, find_server_program
from lastgood.experiments.traces.trace import load_trace
from lastgood.workloads.registry import workload_options_class

if TYPE_CHECKING:
    from lastgood.experiments.config.sections import (
        CheckmateSection,
        ConcurrencySection,
        MemorySection,
        NodesSection,
        ThreadsSection,
    )
    from lastgood.experiments.plan.grid import Prediction

__all__ = [
    "PUBLIC_TRACE",
    "dcp_modelled_s",
    "goodput_modelled_s",
    "in_batches",
    "modelled_s",
    "optimizer_modelled_s",
    "plan_checkmate",
    "plan_dcp",
    "plan_goodput",
    "plan_nodes",
    "plan_persist",
    "plan_remote",
    "plan_simple",
    "plan_sweep",
    "plan_throughput",
    "remote_modelled_s",
    "why_no_remote",
]

_log = logging.getLogger("lastgood")
_SERVER_S = 8.0
"""An S3 server's start and end."""
_said: set[str] = set()
"""What was told to be left out."""
PUBLIC_TRACE = Path("evaluation", "fig9", "traces", "a100-spot-64.trace")


_Spec = TypeVar("_Spec", bound=Spec)


def in_batches(specs: Iterable[_Spec], config: Config) -> list[_Spec]:
    """Batch after batch. A batch is one repetition of a workload on so many ranks, with its `none`, of all figures.

    Its order is shuffled, so that a drift of the machine (heat, a filling disk) favours no system, and falls on a run
    and on the `none` that it is compared with alike. Runs in pairs bring their own `none` and need no neighbour: of
    these, each panel's `none` and its systems at the middle interval come first, so that every panel is soon drawn. A
    run's place comes from the configuration and its record's path alone, so that the runs of one figure have the same
    order among those of all figures.
    """
    batches: dict[tuple[str, int, int], list[_Spec]] = {}
    for spec in specs:
        early = _is_early(spec, config)
        batch = ("", -1, 1) if early else (spec.panel, spec.repetition, getattr(spec, "ranks", 1))
        batches.setdefault(batch, []).append(spec)
    ordered = [batches.pop(("", -1, 1), []), *batches.values()]

    def place(spec: _Spec) -> bytes:
        return hashlib.sha256(f"{config.seed}/{spec.record_path()}".encode()).digest()

    return [spec for batch in ordered for spec in sorted(batch, key=place)]


def _is_early(spec: Spec, config: Config) -> bool:
    """Whether a first picture shows it: the first repetition of a system as configured, in pairs, on one rank."""
    if not isinstance(spec, RunSpec) or spec.pairs is None or spec.repetition or spec.system not in config.systems:
        return False
    if spec.ranks > 1:
        return False  # a figure that nobody gets unasked
    middle = sorted(config.intervals)[len(config.intervals) // 2]
    if spec.interval_steps not in (0, middle, system_traits(spec.system).only_interval):
        return False
    return spec.system_options == config.system_options(spec.system).model_dump(mode="json")


def plan_throughput(config: Config) -> list[RunSpec]:
    """Figure 8. Repetitions are the outer loop: what is there after half the time is a complete figure."""
    return _plan_models(config, throughput_variants, config.intervals)


def plan_goodput(config: Config) -> list[RunSpec | GoodputSpec]:
    """Figure 9: runs that its formulas take their terms from (figure 8's, and more), and the measured ones.

    A measured run is a run of the formulas with the failures that it lives through. All of them live through the same.
    """
    section = config.fig9
    intervals = sorted({*config.intervals, *section.intervals})
    specs: list[RunSpec | GoodputSpec] = [*_plan_models(config, goodput_variants, intervals)]
    systems = section.systems or [system for system in config.systems if system != BASELINE]
    path = Path(section.trace) if section.trace else find_root() / PUBLIC_TRACE
    trace = load_trace(path)
    stretch = trace.stretch(section.window_s, section.failures)
    for repetition in range(section.repetitions):
        for model in config.models:
            specs += [
                GoodputSpec(
                    run=_spec(config, variant(config, model, system), interval, repetition),
                    window_s=section.window_s,
                    failures_s=list(stretch.failures_s),
                    trace_name=path.stem,
                    trace_sha256=trace.digest,
                    trace_s=trace.duration_s,
                    trace_failures=trace.failures,
                    stretch_start_s=stretch.start_s,
                    stretch_s=stretch.length_s,
                )
                for system in systems
                for interval in _intervals_of(system, section.intervals)
            ]
    return in_batches(specs, config)


def plan_persist(config: Config) -> list[RunSpec]:
    """Figure 11: a checkpoint after every step, each durable before the next step begins; no `none`."""
    specs: list[RunSpec] = []
    for repetition in range(config.fig11.repetitions):
        for found in persist_variants(config):
            spec = _spec(config, found, 1, repetition)
            changes = {"warmup_steps": 1, "measured_steps": config.fig11.checkpoints, "drain_each": True}
            specs.append(spec.model_copy(update=changes))
    return in_batches(specs, config)


def plan_sweep(
    config: Config, section: ConcurrencySection | ThreadsSection | MemorySection, variants: Sequence[Variant]
) -> list[RunSpec]:
    """Figures 12 to 14: PCcheck in all `variants` at every interval of `section`, and `none`."""
    specs: list[RunSpec] = []
    for repetition in range(section.repetitions):
        specs.append(_paired(config, _spec(config, variant(config, section.model, BASELINE), 0, repetition)))
        specs += [
            _paired(config, _spec(config, found, interval, repetition))
            for found in variants
            for interval in section.intervals
        ]
    return in_batches(specs, config)


def plan_nodes(config: Config, section: NodesSection, figure: str) -> list[RunSpec]:
    """Figures 8e and 8f: as figure 8, over several ranks.

    Cores are shared out among the ranks of a host; those are all ranks if a testbed's nodes are this machine.
    """
    changes = _over_ranks(config, section, section.parallel)
    specs: list[RunSpec] = []
    for repetition in range(section.repetitions):
        for found in nodes_variants(config, section, figure):
            for interval in _intervals_of(found.system, section.intervals):
                spec = _spec(config, found, interval, repetition)
                steps = _steps(config, section.iterations, interval)
                specs.append(_paired(config, spec.model_copy(update={**changes, "measured_steps": steps})))
    return in_batches(specs, config)


def plan_checkmate(config: Config) -> list[RunSpec | OptimizerSpec]:
    """Checkmate's figure: its own checkpoints of each iteration, the others at all intervals, each killed after it.

    Only runs that save each step also take the digest's proof: figures 8e and 8f prove the others, and after every kill
    losses are compared. No pairs of blocks: Checkmate sends gradients in every step, and what a step costs on both
    sides is counted over one stretch.
    """
    section = config.checkmate
    specs: list[RunSpec | OptimizerSpec] = []
    for repetition in range(section.repetitions):
        for model in section.models:
            for found in checkmate_variants(config, model):
                for interval in _intervals_of(found.system, section.intervals):
                    spec = _spec(config, found, interval, repetition)
                    own = {
                        **_over_ranks(config, section, "ddp"),
                        "measured_steps": _steps(config, section.iterations, interval),
                        "kills": section.kills if interval else 0,
                        "proof": spec.proof and (system_traits(found.system).only_interval == 1 or not section.kills),
                    }
                    specs.append(spec.model_copy(update=own))
        specs.append(_optimizer_spec(config, repetition))
    return in_batches(specs, config)


def plan_dcp(config: Config) -> list[DcpSpec]:
    """The figure of torch's distributed checkpoint: every storage on every number of ranks, on disk and on S3.

    What needs the S3 server, or a package, that is not installed is left out, and a line reports it.
    """
    section = config.dcp
    places: list[tuple[Medium, list[str], list[int], list[int]]] = [
        ("disk", section.storages, section.thread_counts, section.ranks),
        ("s3", section.s3_storages, section.s3_thread_counts, section.s3_ranks),
    ]
    specs = []
    for repetition in range(section.repetitions):
        for medium, names, counts, all_ranks in places:
            for storage in (one for one in STORAGES if one.name in names):
                if medium == "s3" and not _can_on_s3(storage):
                    continue
                threads = counts if "thread_count" in storage.defaults(medium) else [None]
                for count in threads:
                    options = {} if count is None else {"thread_count": count}
                    specs += [
                        DcpSpec(
                            machine=config.machine or machine_label(),
                            scale=config.scale,
                            operation="save-and-load",
                            model=section.model,
                            state="model" if storage.tensors_only else section.state,
                            spread=section.spread,
                            backend="nccl" if config.device == "cuda" else "gloo",
                            medium=medium,
                            storage=storage.name,
                            storage_options=storage.resolved(options, medium),
                            ranks=ranks,
                            iterations=section.iterations,
                            warmup=section.warmup,
                            seed=config.seed,
                            repetition=repetition,
                        )
                        for ranks in all_ranks
                    ]
    return in_batches(specs, config)


def plan_remote(config: Config) -> list[RemoteSpec]:
    """The figure of checkpoints that leave the machine: a run for each part. None if nothing can be sent from here."""
    if why_no_remote() is not None:
        return []
    section = config.remote
    with_dcp = all(_can_on_s3(storage) for storage in STORAGES if storage.name == section.dcp_storage)
    common = {
        "machine": config.machine or machine_label(),
        "scale": config.scale,
        "width": section.width,
        "layers": section.layers,
        "batch": section.batch,
        "threads": max(1, config.thread_count - 1),  # a core for who sends
        "rounds": section.rounds,
        "seed": config.seed,
    }
    own: dict[RemotePart, dict[str, Any]] = {
        "training": {
            "steps": section.steps,
            "interval_steps": section.interval,
            "remote_every": section.every,
            "dcp_storage": section.dcp_storage if with_dcp else None,
        },
        "return": {"ranks": section.ranks, "other_ranks": section.other_ranks},
        "bytes": {},
    }
    return [
        RemoteSpec.model_validate({**common, **settings, "part": part, "repetition": repetition})
        for repetition in range(section.repetitions)
        for part, settings in own.items()
    ]


def why_no_remote() -> str | None:
    """Why nothing can be sent to an S3 server here, with what to do; None if it can."""
    lastgood = next(storage for storage in STORAGES if storage.name == "lastgood")
    return lastgood.missing("s3") or (None if find_server_program() else NOT_INSTALLED)


def _can_on_s3(storage: Storage) -> bool:
    """Whether all is installed; says once what is not."""
    reason = storage.missing("s3")
    if reason is None and find_server_program() is None:
        reason = NOT_INSTALLED
    if reason is not None and reason not in _said:
        _said.add(reason)
        _log.warning("dcp on S3 is left out: %s", reason)
    return reason is None


def _optimizer_spec(config: Config, repetition: int) -> OptimizerSpec:
    bench = config.checkmate.optimizer
    return OptimizerSpec(
        machine=config.machine or machine_label(),
        scale=config.scale,
        model=bench.model,
        optimizer=bench.optimizer,
        threads=tuple(bench.threads),
        shadows=tuple(bench.shadows),
        updates=bench.updates,
        repetition=repetition,
    )


def _over_ranks(config: Config, section: NodesSection | CheckmateSection, parallel: Parallel) -> dict[str, Any]:
    """What is different for a run over several ranks."""
    beside = section.ranks if section.hostfile is None else section.slots
    threads = max(1, config.thread_count // beside)
    return {"ranks": section.ranks, "nodes": section.nodes, "parallel": parallel, "threads": threads}


def plan_simple(config: Config) -> list[RunSpec]:
    """The one run of the smoke test."""
    simple = config.simple
    spec = _spec(config, variant(config, simple.model, simple.system), simple.interval, 0)
    steps = _steps(config, simple.iterations, simple.interval)
    return [spec.model_copy(update={"measured_steps": steps, "proof": True})]


def _plan_models(
    config: Config, variants: Callable[[Config, str], list[Variant]], intervals: Sequence[int]
) -> list[RunSpec]:
    specs: list[RunSpec] = []
    for repetition in range(config.repetitions):
        for model in config.models:
            specs += [
                _paired(config, _spec(config, found, interval, repetition))
                for found in variants(config, model)
                for interval in _intervals_of(found.system, intervals)
            ]
    return in_batches(specs, config)


def _spec(config: Config, found: Variant, interval: int, repetition: int) -> RunSpec:
    return RunSpec(
        machine=config.machine or machine_label(),
        scale=config.scale,
        workload=found.model,
        workload_options=found.workload.model_dump(mode="json"),
        system=found.system,
        system_options=found.options.model_dump(mode="json"),
        method=checkpointer_class(found.system).METHOD,
        interval_steps=interval,
        warmup_steps=config.warmup_iterations,
        measured_steps=_steps(config, config.iterations, interval),
        proof=found.system != BASELINE and (config.proof == "every" or repetition == 0),
        device=config.device,
        threads=config.thread_count,
        seed=config.seed + repetition,
        repetition=repetition,
        data=config.data.of_workload(found.model),
        shadows=config.checkmate.shadows if system_traits(found.system).helper == "shadows" else 0,
    )


def _paired(config: Config, spec: RunSpec) -> RunSpec:
    """The same run in pairs of blocks, if the configuration asks for them."""
    plan = config.pairs.plan()
    if plan is None:
        return spec
    steps = _steps(config, config.pairs.steps, spec.interval_steps)
    return spec.model_copy(update={"pairs": plan, "measured_steps": steps})


def _intervals_of(system: str, intervals: Sequence[int]) -> Sequence[int]:
    """Those of `intervals` at which `system` is measured: nothing else than 1 makes sense of Checkmate."""
    only = system_traits(system).only_interval
    return intervals if only is None else [only]


def _steps(config: Config, least: int, interval: int) -> int:
    """Enough for the checkpoints asked for, in whole intervals: steps after the last would dilute what they cost."""
    steps = max(least, config.min_checkpoints * interval)
    return -(-steps // interval) * interval if interval else steps


def modelled_s(spec: RunSpec, prediction: Prediction) -> float:
    """Start-up, steps, the copy and the write of every checkpoint one after the other, proof: an upper estimate."""
    if spec.pairs is not None:
        alone = spec.model_copy(update={"pairs": None, "warmup_steps": 0, "proof": False, "kills": 0})
        block_s = modelled_s(alone, prediction) - prediction.startup_s
        calm_s = 2 * block_s * spec.pairs.rounds
        # So many rounds are measured in any case.
        least_s = block_s * spec.pairs.rounds
        without = spec.model_copy(update={"pairs": None, "measured_steps": 1, "interval_steps": 0})
        return modelled_s(without, prediction) + max(least_s, min(calm_s, 1.5 * spec.pairs.budget_s))
    steps = spec.warmup_steps + spec.measured_steps
    seconds: float = prediction.startup_s + steps * prediction.step_s.get(spec.workload, prediction.other_step_s)
    if spec.interval_steps:
        options = workload_options_class(spec.workload).model_validate(spec.workload_options)
        checkpoints = steps // spec.interval_steps
        state_bytes = options.state_bytes()
        seconds += checkpoints * state_bytes * (1 / prediction.persist_bytes_per_s + 1 / prediction.copy_bytes_per_s)
        if prediction.state_bytes_per_s is not None:
            seconds += state_bytes / prediction.state_bytes_per_s * (2 if spec.proof else 1)
    return seconds + (spec.kills + spec.proof) * prediction.proof_s


def goodput_modelled_s(spec: GoodputSpec, prediction: Prediction) -> float:
    """Start-up, the window, and another process for each failure and the last look."""
    return prediction.startup_s + spec.window_s + (len(spec.failures_s) + 1) * prediction.proof_s


def optimizer_modelled_s(spec: OptimizerSpec, prediction: Prediction) -> float:
    """Start-up, and at each point the updates and two more to warm up, each as long as a step."""
    step_s = prediction.step_s.get(spec.panel, prediction.other_step_s)
    return prediction.startup_s + len(spec.threads) * len(spec.shadows) * (spec.updates + 2) * step_s


def remote_modelled_s(spec: RemoteSpec, prediction: Prediction) -> float:
    """Start-up of server and processes, and each way as long as its steps, or as its state takes to be sent."""
    step_s = prediction.step_s.get(spec.part, prediction.other_step_s)
    sent_s = 12.0 * spec.layers * spec.width**2 / prediction.persist_bytes_per_s
    processes = {"training": 1, "return": spec.ranks + spec.rounds * (3 * spec.ranks + spec.other_ranks), "bytes": 1}
    steps = {
        "training": 4 * spec.rounds * (spec.steps + 2 * spec.interval_steps),
        "return": 4 * spec.rounds,
        "bytes": 3 * (spec.rounds + 2),
    }
    sends = {
        "training": 2 * spec.rounds * (1 + spec.steps / (spec.interval_steps * spec.remote_every)),
        "return": 4.0 * spec.rounds,
        "bytes": 3.0 * (spec.rounds + 2),
    }
    run_s = steps[spec.part] * step_s + sends[spec.part] * sent_s
    return _SERVER_S + prediction.startup_s * (1 + processes[spec.part] / 2) + run_s


def dcp_modelled_s(spec: DcpSpec, prediction: Prediction) -> float:
    """Start-up of each rank, and each save or load as long as a step; on S3 the server starts, and its bound is met."""
    step_s = prediction.step_s.get(spec.model, prediction.other_step_s)
    on_s3 = spec.medium == "s3"
    iteration_s = (4 if on_s3 else 2) * step_s
    server_s = _SERVER_S if on_s3 else 0.0
    return server_s + prediction.startup_s * (1 + spec.ranks / 2) + (spec.warmup + spec.iterations) * iteration_s
