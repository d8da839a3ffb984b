"""The configuration: pydantic models are its only schema. What a machine can run is no part of it (plan/load.py).

Needs no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_origin

from pydantic import BaseModel, Field

from lastgood.checkpointers.options import BaseOptions
from lastgood.checkpointers.registry import checkpointer_class
from lastgood.experiments.config.flowcheck_section import FlowcheckSection
from lastgood.experiments.config.sections import (
    CheckmateSection,
    ConcurrencySection,
    DcpSection,
    GoodputSection,
    MemorySection,
    NodesSection,
    PairsSection,
    PersistSection,
    RemoteSection,
    ThreadsSection,
)
from lastgood.experiments.config.stellatrain_section import StellatrainSection
from lastgood.experiments.config.values import (
    Count,
    CountOrZero,
    FolderPath,
    Interval,
    Label,
    Listed,
    ModelName,
    SystemName,
    Systems,
    UserPath,
)
from lastgood.experiments.machine.facts import usable_cores
from lastgood.experiments.records.base import Scale
from lastgood.experiments.systems.papers import PCCHECK
from lastgood.models import FrozenModel
from lastgood.workloads.base import Workload, WorkloadOptions
from lastgood.workloads.registry import build_workload, workload_data_kind, workload_options_class

__all__ = ["SECTIONS", "Config", "DataPaths", "SimpleTest"]


class DataPaths(FrozenModel):
    """Data of the user's own; null takes the small real data that Lastgood prepares."""

    images: UserPath | None = Field(description="a folder of images, one folder per class, or null")
    squad: UserPath | None = Field(description="a question-answering file in SQuAD's format, or null")
    wikitext: UserPath | None = Field(description="a WikiText file or folder, or null")

    def of_workload(self, name: str) -> str | None:
        """The path that workload `name` reads, or None for the data that Lastgood prepares."""
        kind = workload_data_kind(name)
        found: str | None = None if kind is None else getattr(self, kind)
        return found


class SimpleTest(FrozenModel):
    """What `snakemake test_simple` runs."""

    model: ModelName = Field(description="one of the models")
    system: SystemName = Field(description="one of the systems, not none")
    interval: Interval = Field(description="a whole number from 1: steps between checkpoints")
    iterations: Count = Field(description="a whole number, at least twice simple.interval: steps measured")


class Config(FrozenModel):
    """One complete configuration. Relative paths start at the folder in which the workflow works."""

    scale: Scale = Field(description="laptop, gpu or paper: a label; records of different scales never mix")
    machine: Label | None = Field(
        description="at most 64 of a-z, 0-9, dot, dash and underscore; null makes a name from the CPU and the GPU"
    )
    models: Listed[ModelName] = Field(description="a list of models, at least one")
    systems: Systems = Field(description="a list of systems, at least one; none is always measured")
    intervals: Listed[Interval] = Field(description="a list of whole numbers from 1: steps between checkpoints")
    repetitions: Count = Field(description="a whole number from 1: measurements of each cell")
    iterations: Count = Field(description="a whole number from 1: steps measured, at least")
    min_checkpoints: Count = Field(description="a whole number from 1: steps are raised until a run holds as many")
    warmup_iterations: CountOrZero = Field(description="a whole number from 0: steps before the clocks start")
    pairs: PairsSection = Field(
        default_factory=PairsSection, description="measuring blocks with and without checkpoints in turn"
    )
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
    options: dict[SystemName, dict[str, Any]] = Field(description="options by system")
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
    dcp: DcpSection = Field(
        default_factory=DcpSection, description="what the figure of torch's distributed checkpoint measures"
    )
    flowcheck: FlowcheckSection = Field(
        default_factory=FlowcheckSection, description="what FlowCheck's figure measures, panel by panel"
    )
    remote: RemoteSection = Field(
        default_factory=RemoteSection, description="what the figure of checkpoints that leave the machine measures"
    )
    stellatrain: StellatrainSection = Field(
        default_factory=StellatrainSection, description="what StellaTrain's figure measures, panel by panel"
    )

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
        return list(dict.fromkeys([*self.systems, self.simple.system, *more, *self.checkmate.systems, PCCHECK]))

    def workload_options(self, model: str) -> WorkloadOptions:
        """Validated options of `model`."""
        return workload_options_class(model).model_validate(self.workloads.get(model, {}))

    def build_workload(self, model: str) -> Workload:
        """`model` as configured, on the configured data and device, with every generator seeded."""
        from lastgood.state import seed_everything  # needs torch

        seed_everything(self.seed)
        data = self.data.of_workload(model)
        return build_workload(
            model,
            self.workload_options(model),
            data_dir=Path(self.data_dir),
            data_path=None if data is None else Path(data),
            seed=self.seed,
            device=self.device,
        )

    def system_options(self, system: str) -> BaseOptions:
        """Validated options of `system`."""
        return checkpointer_class(system).Options.model_validate(self.options.get(system, {}))


def _sections() -> list[str]:
    kinds = {name: get_origin(field.annotation) or field.annotation for name, field in Config.model_fields.items()}
    return [name for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, BaseModel | dict)]


SECTIONS = _sections()
"""Keys of a configuration whose value is a mapping."""
