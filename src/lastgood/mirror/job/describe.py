"""Makes a job description of a training's own objects."""

from __future__ import annotations

import contextlib
import copy
import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from lastgood._lazy import torch
from lastgood.errors import ConfigError
from lastgood.mirror.job.columns import MAX_STEPS, Column
from lastgood.mirror.job.description import Backend, DataPosition, DdpSettings, JobDescription, TensorInfo
from lastgood.mirror.job.factory import Training
from lastgood.mirror.job.rules import Change, ClipSettings, PowerTable, Rules, ScalerSettings, Varying
from lastgood.optim.probe import probed
from lastgood.optim.rule import GroupRule
from lastgood.optim.spec import OptimizerSpec
from lastgood.optim.trainer import DevicePowers
from lastgood.units import MIB

__all__ = ["DEFAULT_STEPS", "ddp_settings", "describe"]

DEFAULT_STEPS: Final = 100_000
_NUMBERS: Final = ("lr", "eps", "weight_decay", "momentum", "dampening")
_UNSEEN: Final = (
    "module",
    "device_ids",
    "output_device",
    "dim",
    "process_group",
    "check_reduction",
    "batched_grad_copy",
)
"""Arguments of DistributedDataParallel that change nothing on the wire, as does gradient_as_bucket_view."""


def describe(
    training: Training, *, ranks: int, backend: Backend | None = None, steps: int = DEFAULT_STEPS
) -> JobDescription:
    """Describe a training before its first step. `steps`: for how many the schedule is told.

    Its scheduler and optimizer are copied before they are stepped ahead. Raises ConfigError, naming it, for what a
    mirror node could not repeat.
    """
    model = _unwrapped(training.model)
    parameters = [_info("parameter", name, one, one.requires_grad) for name, one in model.named_parameters()]
    buffers = list(_buffers(model))
    optimizer = training.optimizer
    places = {id(one): index for index, one in enumerate(model.parameters())}
    held = [one for group in optimizer.param_groups for one in group["params"]]
    foreign = [number for number, one in enumerate(held) if id(one) not in places]
    if foreign:
        raise ConfigError(f"parameter {foreign[0]} of the optimizer is none of the model: DDP would not reduce it")
    spec = probed(optimizer)
    if optimizer.state:
        raise ConfigError("the optimizer has a state: a job is described before its first step, and before a restore")
    if not 1 <= steps <= MAX_STEPS:
        raise ConfigError(f"--steps is from 1 to {MAX_STEPS}, not {steps}")
    return JobDescription(
        name=training.name[:200],
        torch=str(torch.__version__)[:64],
        parameters=tuple(parameters),
        buffers=tuple(buffers),
        optimizer=spec.to_data(),
        optimized=tuple(places[id(one)] for one in held),
        rules=_rules(training, spec, steps),
        ddp=ddp_settings(_ddp_arguments(training), bool(buffers)),
        ranks=ranks,
        backend=backend or Backend(),
        reductions_per_step=training.reductions_per_step,
        data=DataPosition(start=training.batches_consumed, per_step=training.batches_per_step),
    )


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    wrapper = torch.nn.parallel.DistributedDataParallel
    if isinstance(model, wrapper):
        inner = model.module
        assert isinstance(inner, torch.nn.Module)
        return inner
    return model


def _info(what: str, name: str, tensor: torch.Tensor, trainable: bool, persistent: bool = True) -> TensorInfo:
    if tensor.layout is not torch.strided:
        raise ConfigError(f"{what} {name} is {tensor.layout}; a mirror node knows dense ones only")
    try:
        return TensorInfo(
            name=name,
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            dtype=str(tensor.dtype).removeprefix("torch."),
            trainable=trainable,
            persistent=persistent,
        )
    except ValueError as error:
        raise ConfigError(f"{what} {name} cannot be described: {error}") from error


def _buffers(model: torch.nn.Module) -> Iterator[TensorInfo]:
    kept = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        yield _info("buffer", name, buffer, False, name in kept)


# -- DDP ---------------------------------------------------------------------------------------------------------------


def _ddp_arguments(training: Training) -> dict[str, Any]:
    found = dict(training.ddp)
    model = training.model
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        default_first = torch.distributed._DEFAULT_FIRST_BUCKET_BYTES  # type: ignore[attr-defined]
        own = {
            "find_unused_parameters": model.find_unused_parameters,
            "static_graph": model.static_graph,
            "mixed_precision": model.mixed_precision,
            "bucket_cap_mb_list": [one / MIB for one in getattr(model, "bucket_bytes_cap_list", ())] or None,
        }
        if (
            getattr(model, "_bucket_config", None) is None
            or model._bucket_config.first_bucket_bytes_cap != default_first
        ):
            own["bucket_cap_mb"] = model.bucket_bytes_cap / MIB
        forward = getattr(model, "forward_sync_buffers", getattr(model, "broadcast_buffers", True))
        if not forward:
            own.setdefault("broadcast_buffers", False)
        found = own | found
    return found


def ddp_settings(arguments: Mapping[str, Any], buffers: bool = True) -> DdpSettings:
    """Settings of the keyword arguments of DistributedDataParallel, and `hook`. Raises ConfigError for others."""
    given = {key: value for key, value in arguments.items() if value is not None}
    cap = given.pop("bucket_cap_mb", None)
    cap_list = given.pop("bucket_cap_mb_list", None) or ()
    if cap_list:
        cap = max(cap_list)
    init_buffers = forward = bool(given.pop("broadcast_buffers", True))
    if "forward_sync_buffers" in given:
        forward, init_buffers = bool(given.pop("forward_sync_buffers")), True
    hook = given.pop("hook", "none")
    if hook not in ("none", "fp16", "bf16"):
        raise ConfigError(f"communication hook {hook!r}: a mirror node reads plain gradients, fp16 and bf16")
    settings: dict[str, Any] = {
        "find_unused_parameters": bool(given.pop("find_unused_parameters", False)),
        "static_graph": bool(given.pop("static_graph", False)),
        "hook": hook,
        "init_sync": bool(given.pop("init_sync", True)),
        "init_buffers": init_buffers,
        "forward_buffers": forward and buffers,
        "cap_list": tuple(int(one * MIB) for one in cap_list),
    }
    if cap is not None:
        settings["cap"] = settings["first_cap"] = int(cap * MIB)
    for key in ("gradient_as_bucket_view", *_UNSEEN):
        given.pop(key, None)
    for key, value in given.items():
        if value not in (False, None, []):
            known = inspect.signature(torch.nn.parallel.DistributedDataParallel.__init__).parameters
            what = (
                "changes the traffic in a way that is not read here" if key in known else "is none of DDP's arguments"
            )
            raise ConfigError(f"DistributedDataParallel({key}={str(value)[:80]}): {what}")
    return DdpSettings(**settings)


# -- rules -------------------------------------------------------------------------------------------------------------


def _rules(training: Training, spec: OptimizerSpec, steps: int) -> Rules:
    optimizer, scheduler = training.optimizer, training.scheduler
    initial = [GroupRule.of(group) for group in optimizer.param_groups]
    numbers, states = _Series(), _Series()
    if scheduler is not None:
        fresh = dict(_leaves(scheduler.state_dict()))
        with _stepped_ahead(optimizer, scheduler):
            for step in range(steps):
                for group, rule in enumerate(map(GroupRule.of, optimizer.param_groups)):
                    numbers.note(step, _group_numbers(group, rule))
                if (step + 1) % training.steps_per_schedule == 0:
                    scheduler.step()
                # A state after the first step that is not a fresh one's is a change, too.
                if step == 0:
                    states.note(-1, fresh.items())
                states.note(step, _leaves(scheduler.state_dict()))
    table = _Columns()
    varying = [
        Varying(group=group, key=key, column=table.add(values)) for (group, key), values in numbers.changed(steps)
    ]
    changes = [
        Change(path=path, column=table.add(list(map(_number_of, values[1:]))))
        for path, values in states.changed(steps, first=-1)
        if all(isinstance(value, (int, float, torch.Tensor)) for value in values)
    ]
    return Rules(
        initial=tuple(rule.to_data() for rule in initial),
        columns=tuple(table.columns),
        varying=tuple(varying),
        steps=None if scheduler is None else steps,
        scheduler="" if scheduler is None else type(scheduler).__qualname__[:200],
        scheduler_changes=tuple(changes),
        clip=_clip(training),
        scaler=_scaler(training),
        powers=tuple(_powers(spec, initial, training.optimizer, steps)),
    )


def _group_numbers(group: int, rule: GroupRule) -> Iterator[tuple[tuple[Any, ...], float]]:
    """((group, key), value) for each number that a scheduler may change."""
    for key in _NUMBERS:
        yield (group, key), getattr(rule, key)
    yield (group, "beta1"), rule.betas[0]
    yield (group, "beta2"), rule.betas[1]


class _Series:
    """Values by key and step; those that never change are kept once."""

    def __init__(self) -> None:
        self._first: dict[tuple[Any, ...], Any] = {}
        self._all: dict[tuple[Any, ...], list[Any]] = {}
        self._begin: int | None = None

    def note(self, step: int, values: Iterable[tuple[tuple[Any, ...], Any]]) -> None:
        if self._begin is None:
            self._begin = step
        for key, value in values:
            first = self._first.setdefault(key, value)
            if key in self._all:
                self._all[key].append(value)
            elif type(value) is not type(first) or _number_of(value) != _number_of(first):
                self._all[key] = [first] * (step - self._begin) + [value]

    def changed(self, steps: int, first: int = 0) -> Iterator[tuple[Any, list[Any]]]:
        """Keys whose values changed, with the values of all steps; a key that came later or went is none."""
        for key, values in self._all.items():
            if len(values) == steps - first:
                yield key, values


def _number_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return float(value)
    return int(value) if isinstance(value, bool) else value


class _Columns:
    """Columns, each kept once."""

    def __init__(self) -> None:
        self.columns: list[Column] = []
        self._known: dict[tuple[str, str], int] = {}

    def add(self, values: list[Any]) -> int:
        column = Column.of(values)
        number = self._known.setdefault((column.dtype, column.base64), len(self.columns))
        if number == len(self.columns):
            self.columns.append(column)
        return number


@contextlib.contextmanager
def _stepped_ahead(optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LRScheduler) -> Iterator[None]:
    """Step the scheduler as one likes; afterwards both are as they were."""
    if not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler) or isinstance(
        scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau
    ):
        raise ConfigError(
            f"{type(scheduler).__name__}: its steps do not follow from their number, so a mirror node cannot repeat it"
        )
    kept = copy.deepcopy(scheduler.state_dict())
    groups = [{key: copy.deepcopy(one[key]) for key in one if key != "params"} for one in optimizer.param_groups]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a scheduler that steps before its optimizer
            yield
    finally:
        scheduler.load_state_dict(kept)
        for group, numbers in zip(optimizer.param_groups, groups, strict=True):
            group.update(numbers)


def _leaves(tree: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, (*path, key))
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield from _leaves(value, (*path, index))
    elif isinstance(tree, (int, float, torch.Tensor)):
        yield path, tree.clone() if isinstance(tree, torch.Tensor) else tree


def _clip(training: Training) -> ClipSettings | None:
    if training.clip_norm is not None and training.clip_value is not None:
        raise ConfigError("gradients are clipped by norm and by value; a mirror node repeats one clipping")
    if training.clip_norm is not None:
        return ClipSettings(kind="norm", limit=float(training.clip_norm), norm_type=float(training.clip_norm_type))
    if training.clip_value is not None:
        return ClipSettings(kind="value", limit=float(training.clip_value))
    return None


def _scaler(training: Training) -> ScalerSettings | None:
    scaler = training.scaler
    if scaler is None or not scaler.is_enabled():
        return None
    state = scaler.state_dict()
    return ScalerSettings(
        scale=float(state["scale"]),
        growth_factor=float(state["growth_factor"]),
        backoff_factor=float(state["backoff_factor"]),
        growth_interval=int(state["growth_interval"]),
        growth_tracker=int(state["_growth_tracker"]),
    )


def _powers(
    spec: OptimizerSpec, initial: Sequence[GroupRule], optimizer: torch.optim.Optimizer, steps: int
) -> Iterator[PowerTable]:
    """Powers of all betas, by the device, until they are zero."""
    if not spec.needs_powers:
        return
    device = str(optimizer.param_groups[0]["params"][0].device)
    asked = DevicePowers(device)
    for wide in (False, True):
        betas = {
            beta
            for group, rule in zip(optimizer.param_groups, initial, strict=True)
            if any(one.dtype == torch.float64 for one in group["params"]) is wide
            for beta in rule.betas
        }
        for beta in sorted(betas):
            values: list[float] = []
            while len(values) < MAX_STEPS and (not values or values[-1] not in (0.0, 1.0)):
                rows = asked.rows((beta, beta), torch.float64 if wide else torch.float32, [len(values) + 1])
                values.append(rows[0][1])
                if len(values) >= steps and not wide:
                    break
            yield PowerTable(beta=beta, wide=wide, powers=Column.of(values))
