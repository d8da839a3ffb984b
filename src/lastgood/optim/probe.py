"""Whether this machine's CUDA optimizers compute as the shadow's native code does: asked of the device itself.

Kernels leave some contractions into FMA to the compiler, and it decides them differently for the elements of one CUDA
thread, for builds and for devices. So a trainer makes a few steps of a small optimizer like its own, and a shadow that
would not come to the same bits is refused before training begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from lastgood._lazy import torch
from lastgood.errors import ConfigError
from lastgood.optim.dense import DenseOptimizer
from lastgood.optim.host_step import torch_class
from lastgood.optim.rule import GroupRule, UpdateRule
from lastgood.optim.spec import ALL_LANES, GroupSpec, Kind, OptimizerSpec
from lastgood.optim.trainer import DevicePowers

__all__ = ["Probe", "find_lanes", "probed", "run_on_device"]

_ELEMENTS: Final = 1 << 12
_ELEMENTS_16_BIT: Final = 1 << 19
"""Behind a rounding to 16 bits one in some ten thousand elements shows how the operations before it were rounded."""
_STEPS: Final = 4
_SCALE: Final = 3.0


@dataclass(frozen=True)
class Probe:
    """A small optimizer like a trainer's: one group, two parameters, inputs that any machine can make."""

    kind: Kind
    implementation: str
    group: GroupSpec
    dtype: str
    scaled: bool
    """Whether the kernel divides by a loss scale."""
    dampened: bool = False
    """SGD: with dampening, which nesterov rules out."""
    elements: int = 0
    """Of each parameter; 0 for as many as its dtype needs."""

    @property
    def counts(self) -> tuple[int, int]:
        """Elements of the two parameters: whole vectors, and not."""
        wide = self.dtype in ("float32", "float64")
        count = self.elements or (_ELEMENTS if wide else _ELEMENTS_16_BIT)
        return count, count - 1

    def rule(self, powers: Sequence[tuple[int, float, float]]) -> UpdateRule:
        """The numbers of every step: parameter and decayed gradient of one size, so that a rounding shows."""
        adam = self.kind != "sgd"
        numbers = GroupRule(
            lr=0.013,
            betas=(0.9, 0.98) if adam else (0.0, 0.0),
            eps=1e-6 if adam else 0.0,
            weight_decay=0.37,
            momentum=0.0 if adam else 0.83,
            dampening=0.29 if self.dampened else 0.0,
            powers=tuple(powers),
        )
        return UpdateRule((numbers,), grad_scale=_SCALE if self.scaled else None)

    def start(self) -> list[torch.Tensor]:
        """Parameters before the first step, on the CPU."""
        return [self._values(number, count) for number, count in enumerate(self.counts)]

    def gradients(self, step: int) -> list[torch.Tensor]:
        """Gradients of step `step` (from 0), on the CPU."""
        return [self._values(100 * (step + 1) + number, count) for number, count in enumerate(self.counts)]

    def _values(self, seed: int, count: int) -> torch.Tensor:
        """Full mantissas, from a quarter to four, of both signs."""
        words = np.random.Generator(np.random.PCG64(seed)).integers(0, 1 << 32, size=count, dtype=np.uint64)
        magnitude = (0x3E800000 + (words & 0x01FFFFFF)).astype(np.uint32)
        sign = (words & 0x80000000).astype(np.uint32)
        values: torch.Tensor = torch.from_numpy((magnitude | sign).view(np.float32)).to(getattr(torch, self.dtype))
        return values


Tensors = dict[str, "torch.Tensor"]
"""A parameter's state under torch's keys, and itself as `param`."""

States = list[list[Tensors]]
"""After each step, of each parameter."""


def run_on_device(probe: Probe, device: str) -> States:
    """What torch itself makes of the probe there."""
    weights = [w.to(device) for w in probe.start()]
    rule = probe.rule(())
    numbers, flags = rule.groups[0], probe.group
    which: dict[str, Any] = {
        "lr": numbers.lr,
        "weight_decay": numbers.weight_decay,
        "maximize": flags.maximize,
        "fused": probe.implementation == "fused",
        "foreach": probe.implementation == "foreach",
    }
    if probe.kind == "sgd":
        which |= {"momentum": numbers.momentum, "dampening": numbers.dampening, "nesterov": flags.nesterov}
    else:
        which |= {"betas": numbers.betas, "eps": numbers.eps, "amsgrad": flags.amsgrad}
    optimizer = torch_class(probe.kind)(weights, **which)
    found: States = []
    for step in range(_STEPS):
        for weight, gradient in zip(weights, probe.gradients(step), strict=True):
            weight.grad = gradient.to(device)
        if probe.scaled:
            optimizer.grad_scale = torch.full((), _SCALE, device=device)
            optimizer.found_inf = torch.zeros((), device=device)
        optimizer.step()
        found.append([_copied(w, optimizer.state[w]) for w in weights])
    return found


def probed(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor] | None = None) -> OptimizerSpec:
    """`OptimizerSpec.of`, with what the optimizer's own device answers. Costs a CUDA trainer some tenths of a second.

    Raises ConfigError if the device's steps are none that the shadow's code can repeat.
    """
    spec = OptimizerSpec.of(optimizer, parameters)
    if spec.arithmetic == "cpu":
        return spec
    device = str(optimizer.param_groups[0]["params"][0].device)
    powers = DevicePowers(device)
    groups = []
    for number, (group, live) in enumerate(zip(spec.groups, optimizer.param_groups, strict=True)):
        dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in live["params"]})
        lanes = [ALL_LANES, ALL_LANES]
        for scaled in (False, True) if spec.implementation == "fused" else (False,):
            answers = set()
            for dtype in dtypes:
                probe = Probe(spec.kind, spec.implementation, group, dtype, scaled, live.get("dampening", 0) != 0)
                answers.add(find_lanes(probe, lambda probe: run_on_device(probe, device), powers))
            if len(answers) > 1:
                raise ConfigError(
                    f"group {number} mixes {', '.join(dtypes)}, whose kernels round differently on this device; "
                    "give each dtype a group of its own"
                )
            lanes[scaled] = answers.pop()
        groups.append(replace(group, lanes=lanes[0], scaled_lanes=lanes[1]))
    return replace(spec, groups=tuple(groups))


def find_lanes(probe: Probe, reference: Callable[[Probe], States], powers: DevicePowers) -> int:
    """The lanes with which native code makes what `reference` made. Raises ConfigError if none do."""
    wanted = reference(probe)
    contracted = _run_here(probe, ALL_LANES, powers, wanted)
    lanes = ALL_LANES
    if not _equal(contracted, wanted):
        separate = _run_here(probe, 0, powers, wanted)
        lanes = 0
        for part in (0, 1):
            rows = [tuple(side[part] for side in sides) for sides in zip(contracted, separate, wanted, strict=True)]
            lanes |= _lane(rows, part == 0) << (4 * part)
        if not _equal(_run_here(probe, lanes, powers, wanted), wanted):
            flags = [name for name in ("amsgrad", "maximize", "nesterov") if getattr(probe.group, name)]
            what = " ".join([probe.implementation, probe.kind, probe.dtype, *flags])
            raise ConfigError(
                f"steps of {what} of torch {torch.__version__} on this device are none that a shadow can repeat to the "
                "bit: use foreach=True, or another checkpointer, and please tell us the device"
            )
    return lanes


def _lane(steps: Sequence[tuple[Tensors, ...]], even: bool) -> int:
    """Four bits: which lanes of a parameter are contracted, from rows of contracted, separate and wanted tensors.

    If both are right, the compiler's habit: contracted.
    """
    found = 0
    count = steps[0][0]["param"].numel()
    lane_of = torch.arange(count) % 4 if even else torch.arange(count) // 512 % 4

    def alike(side: Tensors, wanted: Tensors, here: torch.Tensor) -> bool:
        return all(torch.equal(_bits(side[key])[here], _bits(wanted[key])[here]) for key in wanted if key != "step")

    for lane in range(4):
        here = lane_of == lane
        contracted = all(alike(side, wanted, here) for side, _, wanted in steps)
        if contracted or not all(alike(side, wanted, here) for _, side, wanted in steps):
            found |= 1 << lane
    return found


def _run_here(probe: Probe, lanes: int, powers: DevicePowers, wanted: States) -> States:
    """Native code's steps, each from what the device had before it: a difference then shows where it was made."""
    group = replace(probe.group, parameters=(0, 1), lanes=lanes, scaled_lanes=lanes)
    spec = OptimizerSpec(probe.kind, probe.implementation, "cuda", (group,), 1, "")  # type: ignore[arg-type] # known implementations only
    weights = probe.start()
    optimizer = DenseOptimizer(spec, weights, (0, 0), places=(0, 1))
    real = torch.float64 if probe.dtype == "float64" else torch.float32
    found: States = []
    for step in range(_STEPS):
        if step > 0:
            for weight, before in zip(weights, wanted[step - 1], strict=True):
                weight.copy_(before["param"])
            held = [{key: t for key, t in before.items() if key != "param"} for before in wanted[step - 1]]
            optimizer.load_state(held)
        rows = powers.rows(probe.rule(()).groups[0].betas, real, [step + 1]) if spec.needs_powers else []
        optimizer.step(list(probe.gradients(step)), probe.rule(rows))
        found.append([_copied(w, state) for w, state in zip(weights, optimizer.state(), strict=True)])
    return found


def _copied(weight: torch.Tensor, state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {key: tensor.detach().cpu().clone() for key, tensor in {"param": weight, **state}.items()}


def _equal(one: States, other: States) -> bool:
    return all(
        torch.equal(_bits(here[key]), _bits(there[key]))
        for ones, others in zip(one, other, strict=True)
        for here, there in zip(ones, others, strict=True)
        for key in here
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
