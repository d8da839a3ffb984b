"""What an optimizer is, apart from the numbers that change from step to step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal, cast

from lastgood._lazy import torch
from lastgood.errors import ConfigError, CorruptCheckpoint
from lastgood.optim.checked_data import MAX_GROUPS, MAX_PARAMETERS, Reader

__all__ = ["ALL_LANES", "Arithmetic", "GroupSpec", "Implementation", "Kind", "OptimizerSpec"]

Kind = Literal["sgd", "adam", "adamw"]
Implementation = Literal["fused", "foreach", "single"]
Arithmetic = Literal["cpu", "cuda"]

ALL_LANES: Final = 0xFF
"""Every element is contracted into FMA if a kernel's source lets the compiler choose."""

_KINDS: Final = ("sgd", "adam", "adamw")
_IMPLEMENTATIONS: Final = ("fused", "foreach", "single")
_ARITHMETICS: Final = ("cpu", "cuda")
_DTYPES: Final[Mapping[str, tuple[str, ...]]] = {
    "cpu": ("float32", "float64", "bfloat16", "float16"),
    "cuda": ("float32", "float64", "bfloat16"),
}


@dataclass(frozen=True)
class GroupSpec:
    """One parameter group: its parameters, by their places in the model's list, and its flags.

    `lanes` and `scaled_lanes` (without and with a loss scale in the kernel) say which elements a device's compiler
    contracted into FMA if the source leaves it to it (`lastgood.optim.probe`): bits 0 to 3 for the four elements of
    a CUDA thread over aligned tensors, bits 4 to 7 over others.
    """

    parameters: tuple[int, ...]
    amsgrad: bool = False
    maximize: bool = False
    nesterov: bool = False
    lanes: int = ALL_LANES
    scaled_lanes: int = ALL_LANES


@dataclass(frozen=True)
class OptimizerSpec:
    """A torch optimizer, as a shadow must repeat it: which one, in which implementation, by whose arithmetic.

    `threads` are the trainer's intra-op threads: torch's CPU kernels for 16-bit parameters cut a tensor by them, and
    the ends of the parts round otherwise.
    """

    kind: Kind
    implementation: Implementation
    arithmetic: Arithmetic
    groups: tuple[GroupSpec, ...]
    threads: int
    torch_version: str

    @property
    def needs_alignment(self) -> bool:
        """Whether results depend on how the device's tensors were aligned, so that rules must tell."""
        return any(lanes not in (0, ALL_LANES) for group in self.groups for lanes in (group.lanes, group.scaled_lanes))

    @property
    def needs_powers(self) -> bool:
        """Whether rules must carry the betas' powers, since fused CUDA kernels compute them by the device's own pow."""
        return self.kind != "sgd" and self.arithmetic == "cuda" and self.implementation == "fused"

    def group_of(self) -> dict[int, int]:
        """The group of each parameter's place."""
        return {place: number for number, group in enumerate(self.groups) for place in group.parameters}

    def to_data(self) -> dict[str, Any]:
        """As JSON data."""
        groups = [
            {
                "runs": _to_runs(group.parameters),
                "amsgrad": group.amsgrad,
                "maximize": group.maximize,
                "nesterov": group.nesterov,
                "lanes": [group.lanes, group.scaled_lanes],
            }
            for group in self.groups
        ]
        return {
            "kind": self.kind,
            "implementation": self.implementation,
            "arithmetic": self.arithmetic,
            "groups": groups,
            "threads": self.threads,
            "torch": self.torch_version,
        }

    @classmethod
    def from_data(cls, data: Any) -> OptimizerSpec:
        """What `to_data` wrote. Raises CorruptCheckpoint for anything else, naming the key."""
        keys = ("kind", "implementation", "arithmetic", "groups", "threads", "torch")
        reader = Reader(data, "an optimizer", keys)
        groups = tuple(_read_group(row) for row in reader.rows("groups", MAX_GROUPS))
        places = [place for group in groups for place in group.parameters]
        if len(places) > MAX_PARAMETERS or len(set(places)) != len(places):
            raise reader.bad("groups", f"at most {MAX_PARAMETERS} parameters, each in one group")
        spec = cls(
            kind=cast(Kind, reader.choice("kind", _KINDS)),
            implementation=cast(Implementation, reader.choice("implementation", _IMPLEMENTATIONS)),
            arithmetic=cast(Arithmetic, reader.choice("arithmetic", _ARITHMETICS)),
            groups=groups,
            threads=reader.count("threads", 1, 65536),
            torch_version=reader.text("torch", 64),
        )
        if spec.kind == "sgd" and any(group.amsgrad for group in groups):
            raise reader.bad("groups", "without amsgrad, which SGD has not")
        if spec.kind != "sgd" and any(group.nesterov for group in groups):
            raise reader.bad("groups", "without nesterov, which Adam has not")
        return spec

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor] | None = None) -> OptimizerSpec:
        """The spec of a live optimizer; `parameters` is the list that places count in (default: the groups' own order).

        For CUDA, `lastgood.optim.probe.probed` is the call to make. Raises ConfigError, naming it, for an
        optimizer, flag, device or dtype whose steps a shadow could not repeat to the bit.
        """
        if type(optimizer) not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
            name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
            raise ConfigError(
                f"a shadow cannot repeat {name}: use torch.optim.SGD, Adam or AdamW itself, or another checkpointer"
            )
        held = [p for group in optimizer.param_groups for p in group["params"]]
        listed = held if parameters is None else list(parameters)
        place_of = {id(p): place for place, p in enumerate(listed)}
        missing = [number for number, p in enumerate(held) if id(p) not in place_of]
        if missing:
            raise ConfigError(f"parameter {missing[0]} of the optimizer is not in the list of the model's parameters")
        device = _common(f"parameters on {p.device.type}" for p in held).removeprefix("parameters on ")
        if device not in _ARITHMETICS:
            raise ConfigError(f"a shadow repeats steps of CPU and CUDA, not of {device}")
        spec = cls(
            kind=_kind(optimizer),
            implementation=cast(Implementation, _common(_implementation(g) for g in optimizer.param_groups)),
            arithmetic=cast(Arithmetic, device),
            groups=tuple(_group_spec(group, place_of) for group in optimizer.param_groups),
            threads=torch.get_num_threads(),
            torch_version=str(torch.__version__)[:64],
        )
        known = _DTYPES["cpu" if device == "cpu" else "cuda"]
        for number, p in enumerate(held):
            dtype = str(p.dtype).removeprefix("torch.")
            if dtype not in known:
                raise ConfigError(
                    f"parameter {number} of the optimizer is {dtype}; on {device} a shadow repeats {', '.join(known)}"
                )
        return spec


def _common(values: Any) -> str:
    found = sorted(set(values))
    if len(found) != 1:
        what = "; ".join(found) or "no parameter at all"
        raise ConfigError(f"a shadow needs one kind of step for all groups of the optimizer, and there are: {what}")
    return str(found[0])


def _kind(optimizer: torch.optim.Optimizer) -> Kind:
    if isinstance(optimizer, torch.optim.SGD):
        return "sgd"
    return cast(Kind, _common("adamw" if g["decoupled_weight_decay"] else "adam" for g in optimizer.param_groups))


def _implementation(group: Mapping[str, Any]) -> Implementation:
    """The one that torch's step takes for this group."""
    if group["fused"]:
        return "fused"
    foreach = group["foreach"]
    if foreach is None and group["fused"] is None:
        from torch.optim.optimizer import _default_to_fused_or_foreach

        _, foreach = _default_to_fused_or_foreach(group["params"], False, use_fused=False)
        # Adam's foreach kernels take no learning rate on the device.
        if "betas" in group and isinstance(group["lr"], torch.Tensor):
            foreach = False
    return "foreach" if foreach else "single"


def _group_spec(group: Mapping[str, Any], place_of: Mapping[int, int]) -> GroupSpec:
    for flag, why in (
        ("differentiable", "its steps are a part of the graph"),
        ("capturable", "its bias corrections are computed on the device"),
    ):
        if group.get(flag):
            raise ConfigError(f"a shadow cannot repeat an optimizer with {flag}=True: {why}; leave the flag out")
    for key in ("betas", "eps", "weight_decay", "momentum", "dampening"):
        value = group.get(key, 0.0)
        if any(isinstance(one, torch.Tensor) for one in (value if isinstance(value, tuple) else (value,))):
            raise ConfigError(f"a shadow takes {key} of a parameter group as numbers; only lr may be a tensor")
    return GroupSpec(
        parameters=tuple(place_of[id(p)] for p in group["params"]),
        amsgrad=bool(group.get("amsgrad", False)),
        maximize=bool(group["maximize"]),
        nesterov=bool(group.get("nesterov", False)),
    )


def _to_runs(places: Sequence[int]) -> list[list[int]]:
    """Places as runs of [first, count]: most groups hold neighbours."""
    if not places:
        return []
    breaks = [i for i, (a, b) in enumerate(pairwise(places), 1) if b != a + 1]
    return [[places[a], b - a] for a, b in pairwise([0, *breaks, len(places)])]


def _read_group(data: Any) -> GroupSpec:
    reader = Reader(data, "a group of an optimizer", ("runs", "amsgrad", "maximize", "nesterov", "lanes"))
    lanes = reader.rows("lanes", 2)
    if len(lanes) != 2 or not all(type(one) is int and 0 <= one <= ALL_LANES for one in lanes):
        raise reader.bad("lanes", f"two integers from 0 to {ALL_LANES}")
    places: list[int] = []
    for run in reader.rows("runs", MAX_PARAMETERS):
        if not isinstance(run, list) or len(run) != 2 or any(type(one) is not int for one in run):
            raise reader.bad("runs", "pairs of integers")
        first, count = run
        if first < 0 or count < 1 or max(first, len(places)) + count > MAX_PARAMETERS:
            raise CorruptCheckpoint(f"a group of an optimizer: runs name more than {MAX_PARAMETERS} parameters")
        places.extend(range(first, first + count))
    flags = (reader.flag("amsgrad"), reader.flag("maximize"), reader.flag("nesterov"))
    return GroupSpec(tuple(places), *flags, *lanes)
