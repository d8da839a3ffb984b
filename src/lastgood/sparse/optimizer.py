"""Steps of a torch optimizer on the CPU over those elements only that some rank sent (StellaTrain, section 3.3)."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from lastgood._lazy import torch
from lastgood.errors import ConfigError, CorruptCheckpoint, MismatchError
from lastgood.host_memory import fresh_memory, into_huge_pages
from lastgood.sparse.blocks import SparseGradient
from lastgood.sparse.steps import (
    ADAM_MOMENTS,
    ROW,
    SGD_MOMENTS,
    Hyperparameters,
    adam_row,
    check_optimizer,
    read_group,
    sgd_row,
)
from lastgood.sparse.update import Rows, catch_up, type_names, update, update_all

__all__ = ["HISTORY_STEPS", "Mode", "SparseOptimizer"]

Mode = Literal["plain", "lazy"]

HISTORY_STEPS: Final = 1024
"""Steps that a lazy parameter remembers; then all its elements are brought up to date, and it starts anew."""

_ITERATIONS_KEPT: Final = 64  # more than can be in flight


@dataclass(frozen=True)
class _Ready:
    """A parameter and its moments as kernels take them, as long as nobody puts others in their places."""

    flat: torch.Tensor
    state: dict[str, torch.Tensor]
    """Its moments, in `optimizer.state`."""
    moments: list[torch.Tensor]

    def holds(self, stepped: torch.Tensor, state: Mapping[str, Any]) -> bool:
        """Whether what is stepped and `state` are still those."""
        if stepped.data_ptr() != self.flat.data_ptr() or stepped.numel() != self.flat.numel():
            return False
        return stepped.is_contiguous() and all(
            state.get(name) is held and held.data_ptr() == moment.data_ptr()
            for (name, held), moment in zip(self.state.items(), self.moments, strict=True)
        )


@dataclass
class _Track:
    """What one parameter went through. `touched` and `rows` are for lazy steps only."""

    group: int
    iteration: int = -1  # the newest one seen, made or skipped
    steps: int = 0  # made, since this optimizer began
    base: int = 0  # up to this step all elements are up to date
    rows: Rows = field(default_factory=lambda: np.empty((0, ROW)))  # [0, steps - base): those after
    width: int = 0
    touched: torch.Tensor | None = None  # int32, a place each: its last step; None if `base` everywhere
    target: torch.Tensor | None = None
    ready: _Ready | None = None

    def remember(self, row: tuple[float, ...]) -> Rows:
        """All rows after `base`, with this one."""
        count = self.steps - self.base
        if count == len(self.rows):
            grown = np.empty((min(HISTORY_STEPS, max(16, 2 * count)), ROW))
            grown[:count] = self.rows
            self.rows = grown
        self.rows[count] = row
        return self.rows[: count + 1]


class _Step(NamedTuple):
    """A step of one parameter that is to be made."""

    parameter: torch.Tensor
    track: _Track
    ready: _Ready
    state: dict[str, Any]
    """The parameter's part of `optimizer.state`, or what becomes of it."""
    number: int
    """Of Adam's steps; 0 for SGD."""
    row: tuple[float, ...]


class SparseOptimizer:
    """Makes the steps of `optimizer` (SGD, Adam or AdamW) from what ranks sent, without ever having a dense gradient.

    `plain`, as the paper: elements that nobody sent do not move. `lazy`: what the dense optimizer would have done to
    them meanwhile is made up when they are next sent, or by `catch_up`; elements are then what torch's dense optimizer
    makes of the same gradients. SGD: to the bit that of its default kernels. Adam and AdamW: to the bit that of its
    fused kernels (beta1 above 0.5; elements in whole vectors of 16). Its default ones take a square root that may be
    off by its last bit: over 1,000 steps parameters stay within 2e-6 (1 + |p|) of theirs, and moments without L2 decay
    are theirs to the bit. Sums of ranks and steps round the same on all machines, for any number of threads.

    A step is an iteration in which `apply` was called for a parameter with gradients that are finite on all ranks. Any
    other iteration is one in which torch finds no gradient: nothing moves and nothing counts.

    Moments and Adam's `step` stand in `optimizer.state`, in host memory, under torch's names. Hyperparameters are
    those that `param_groups` had at the first `begin` or `apply` of an iteration. Different parameters may be applied
    from several threads at the same time.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, mode: Mode = "plain", threads: int = 1) -> None:
        if mode not in ("plain", "lazy"):
            raise ConfigError(f"the sparse optimizer has no mode {mode!r}; there are: plain, lazy")
        if threads < 1:
            raise ConfigError(f"the sparse optimizer needs at least 1 thread, not {threads}")
        self.optimizer = optimizer
        self.mode = mode
        self.threads = threads
        self._adam = check_optimizer(optimizer)
        self._names = ADAM_MOMENTS if self._adam else SGD_MOMENTS
        self._lock = threading.Lock()
        self._iterations: dict[int, list[Hyperparameters]] = {}
        self._tracks = {
            parameter: _Track(number)
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }

    def begin(self, iteration: int, given: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Read the hyperparameters of `iteration`, unless that was done; or take what `begun` returned for it.

        Ranks whose steps run beside training call this at one place of the loop, so that a schedule changes for all
        of them at the same iteration.
        """
        if given is None:
            self._hyperparameters(iteration)
        else:
            with self._lock:
                self._iterations[iteration] = [Hyperparameters(**group) for group in given]

    def begun(self, iteration: int) -> list[dict[str, Any]]:
        """The hyperparameters of an iteration, group by group, in plain values: for a checkpoint before its steps."""
        return [asdict(group) for group in self._hyperparameters(iteration)]

    def set_target(self, parameter: torch.Tensor, target: torch.Tensor) -> None:
        """Step `target`, a contiguous float32 tensor in host memory, in place of `parameter`."""
        track = self._track(parameter)
        if target.numel() != parameter.numel():
            raise ConfigError(f"a host copy of {target.numel()} elements of a parameter of {parameter.numel()}")
        track.target = _checked_host(target, "a host copy")

    def apply(
        self,
        parameter: torch.Tensor,
        gathered: Sequence[SparseGradient],
        *,
        iteration: int,
        scale: float = 1.0,
        target: torch.Tensor | None = None,
    ) -> bool:
        """Step `parameter` by `scale` times the sum of `gathered`, what each rank sent, in rank order.

        A parameter on a device, or one that is not contiguous, needs a host copy as `target` (here or by `set_target`).
        False, and nothing has changed, if some rank's gradient was not finite. CorruptCheckpoint, and nothing has
        changed, if a block is not valid; MismatchError if blocks are not of this parameter or not alike.
        """
        track = self._track(parameter)
        if target is not None and target is not track.target:
            self.set_target(parameter, target)
        step = self._prepared(parameter, gathered, iteration, scale)
        if step is None:
            track.iteration = iteration
            return False
        flat, moments = step.ready.flat, step.ready.moments
        if self.mode == "lazy":
            self._set_width(track, flat, moments, gathered[0].width)
        rows = track.remember(step.row) if self.mode == "lazy" else np.array([step.row])
        try:
            update(self._adam, flat, moments, gathered, scale, rows, track.base, track.touched, threads=self.threads)
        except ValueError as error:
            raise CorruptCheckpoint(f"iteration {iteration}: {error}") from None
        self._made(step, iteration)
        if self.mode == "lazy" and len(rows) == HISTORY_STEPS:
            self._catch_up(track, flat, moments)
        return True

    def apply_all(
        self, given: Sequence[tuple[torch.Tensor, Sequence[SparseGradient]]], *, iteration: int, scale: float = 1.0
    ) -> None:
        """`apply` of several parameters, each of them once, whose gradients are finite: in one call if steps are plain.

        Raises what `apply` does; nothing has changed then, if steps are plain.
        """
        if self.mode != "plain":
            for parameter, gathered in given:
                self.apply(parameter, gathered, iteration=iteration, scale=scale)
            return
        steps = [self._prepared(parameter, gathered, iteration, scale) for parameter, gathered in given]
        if len({id(parameter) for parameter, _ in given}) < len(given) or None in steps:
            raise ValueError("parameters that come twice, or gradients that are not finite")
        made = [step for step in steps if step is not None]
        tensors = [(step.ready.flat, step.ready.moments, one) for step, (_, one) in zip(made, given, strict=True)]
        rows = np.array([step.row for step in made])
        try:
            update_all(self._adam, tensors, scale, rows, threads=self.threads)
        except ValueError as error:
            raise CorruptCheckpoint(f"iteration {iteration}: {error}") from None
        for step in made:
            self._made(step, iteration)

    def _prepared(
        self, parameter: torch.Tensor, gathered: Sequence[SparseGradient], iteration: int, scale: float
    ) -> _Step | None:
        """What the step of a parameter needs; nothing has changed. None if some rank's gradient was not finite."""
        track = self._track(parameter)
        ready = self._ready(parameter, track)
        flat = self._flat(parameter, track) if ready is None else ready.flat
        self._check(gathered, flat.numel(), iteration, scale, track)
        given = self._hyperparameters(iteration)[track.group]
        if not all(one.finite for one in gathered):
            return None
        needed = self._adam or given.momentum != 0
        if ready is None or (needed and len(ready.moments) < len(self._names)):
            state = self._state(parameter, flat, given)
            held = {name: state[name] for name in self._names if name in state}
            ready = _Ready(flat, held, [moment.view(-1) for moment in held.values()])
            into_huge_pages(flat)  # most steps touch each page of it, and little in each
        else:
            state = self.optimizer.state[parameter]
        number = int(state["step"]) + 1 if self._adam else 0
        row = adam_row(given, number) if self._adam else sgd_row(given, self._begins(parameter, given))
        return _Step(parameter, track, ready, state, number, row)

    def _made(self, step: _Step, iteration: int) -> None:
        """The kernels have made it."""
        track = step.track
        if step.ready is not track.ready:
            self.optimizer.state[step.parameter].update(step.state)
            track.ready = step.ready
        if self._adam:
            step.state["step"].fill_(step.number)
        track.iteration = iteration
        track.steps += 1
        if self.mode == "plain":
            track.base = track.steps

    def catch_up(self, iteration: int | None = None) -> None:
        """Bring all elements up to date, before a checkpoint or an evaluation; plain steps leave nothing to do.

        `iteration`: the last one that was applied. ValueError, and nothing has changed, if a parameter is beyond it.
        """
        if self.mode == "plain":
            return
        for number, track in enumerate(self._tracks.values()):
            if iteration is not None and track.iteration > iteration:
                raise ValueError(f"parameter {number} is at iteration {track.iteration}, beyond {iteration}")
        for parameter, track in self._tracks.items():
            if track.steps > track.base:
                flat = self._flat(parameter, track)
                state = self._state(parameter, flat, None)
                self._catch_up(track, flat, [state[name].view(-1) for name in self._names if name in state])
                self.optimizer.state[parameter].update(state)

    def state_dict(self) -> dict[str, Any]:
        """What `optimizer.state_dict()` does not hold; tensors are this optimizer's own, not copies."""
        parameters = []
        for track in self._tracks.values():
            count = track.steps - track.base
            parameters.append(
                {
                    "iteration": track.iteration,
                    "steps": track.steps,
                    "base": track.base,
                    "width": track.width,
                    "touched": track.touched if count else None,
                    "rows": torch.from_numpy(track.rows[:count].copy()) if count else None,
                }
            )
        return {"format": 1, "mode": self.mode, "adam": self._adam, "parameters": parameters}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as the optimizer whose state this is; `optimizer` gets its own state by its own call.

        MismatchError if it is another format, mode, kind of optimizer, or model.
        """
        for name, own in (("format", 1), ("mode", self.mode), ("adam", self._adam)):
            if state.get(name) != own:
                raise MismatchError(f"state of a sparse optimizer: {name} is {state.get(name)!r}, here it is {own!r}")
        parameters = state["parameters"]
        if len(parameters) != len(self._tracks):
            raise MismatchError(
                f"state of a sparse optimizer: of {len(parameters)} parameters, here are {len(self._tracks)}"
            )
        loaded = [
            _loaded(held, parameter, track, f"state of a sparse optimizer, parameter {number}")
            for number, (held, (parameter, track)) in enumerate(zip(parameters, self._tracks.items(), strict=True))
        ]
        self._tracks = dict(zip(self._tracks, loaded, strict=True))
        self._iterations.clear()

    def _track(self, parameter: torch.Tensor) -> _Track:
        track = self._tracks.get(parameter)
        if track is not None:
            return track
        for number, group in enumerate(self.optimizer.param_groups):
            if any(parameter is one for one in group["params"]):  # a group that was added later
                return self._tracks.setdefault(parameter, _Track(number))
        raise ConfigError(f"a parameter of shape {tuple(parameter.shape)} is in no group of the optimizer")

    def _ready(self, parameter: torch.Tensor, track: _Track) -> _Ready | None:
        """What the last step of this parameter used, if it is all there and nothing else is."""
        ready, stepped = track.ready, parameter if track.target is None else track.target
        if ready is None or stepped.device.type != "cpu":
            return None
        return ready if ready.holds(stepped, self.optimizer.state.get(parameter, {})) else None

    def _flat(self, parameter: torch.Tensor, track: _Track) -> torch.Tensor:
        if track.target is not None:
            return track.target
        return _checked_host(parameter.detach(), "a parameter")

    def _hyperparameters(self, iteration: int) -> list[Hyperparameters]:
        with self._lock:
            found = self._iterations.get(iteration)
            if found is None:
                found = [
                    read_group(group, f"iteration {iteration}, group {number}")
                    for number, group in enumerate(self.optimizer.param_groups)
                ]
                self._iterations[iteration] = found
                while len(self._iterations) > _ITERATIONS_KEPT:
                    del self._iterations[next(iter(self._iterations))]
            return found

    def _check(
        self, gathered: Sequence[SparseGradient], elements: int, iteration: int, scale: float, track: _Track
    ) -> None:
        if iteration <= track.iteration:
            raise ValueError(f"iteration {iteration} of a parameter that is at iteration {track.iteration}")
        if not math.isfinite(scale) or scale <= 0:
            raise ValueError(f"a scale of {scale}")
        if not gathered:
            raise ValueError("blocks of no rank")
        for rank, one in enumerate(gathered):
            if one.elements != elements or one.width != gathered[0].width:
                raise MismatchError(
                    f"rank {rank} sent blocks of {one.width} of a gradient of {one.elements} elements; "
                    f"this parameter has {elements}, and rank 0 sent blocks of {gathered[0].width}"
                )
            if not _well_formed(one):
                one.check(f"iteration {iteration}: rank {rank}")
                raise CorruptCheckpoint(f"iteration {iteration}: rank {rank}: values are on {one.values.device}")

    def _begins(self, parameter: torch.Tensor, given: Hyperparameters) -> bool:
        """Whether SGD's momentum holds nothing yet."""
        return given.momentum != 0 and self.optimizer.state.get(parameter, {}).get("momentum_buffer") is None

    def _state(self, parameter: torch.Tensor, flat: torch.Tensor, given: Hyperparameters | None) -> dict[str, Any]:
        """The parameter's part of `optimizer.state`, with what the step of `given` lacks there; not stored yet.

        A loaded state may lie on the parameter's device, or in another order of memory: this one is on the host.
        """
        state = dict(self.optimizer.state.get(parameter, {}))
        needed = given is not None and (self._adam or given.momentum != 0)
        for name in self._names:
            held = state.get(name)
            if held is None:
                if not needed:
                    state.pop(name, None)
                    continue
                held = fresh_memory(flat.nbytes).view(torch.float32).view(parameter.shape)
            if held.numel() != flat.numel():
                raise MismatchError(f"{name} has {held.numel()} elements, and its parameter {flat.numel()}")
            state[name] = held.to("cpu", torch.float32).contiguous()
        if self._adam:
            step = state.get("step")
            state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu") if step is None else step.cpu()
        return state

    def _set_width(self, track: _Track, flat: torch.Tensor, moments: list[torch.Tensor], width: int) -> None:
        if width != track.width and track.steps > track.base:
            self._catch_up(track, flat, moments)
        places = -(-flat.numel() // width)
        if track.touched is None or track.touched.numel() != places:
            track.touched = torch.full((places,), track.base, dtype=torch.int32, device="cpu")
        track.width = width

    def _catch_up(self, track: _Track, flat: torch.Tensor, moments: list[torch.Tensor]) -> None:
        rows = track.rows[: track.steps - track.base]
        assert track.touched is not None
        catch_up(self._adam, flat, moments, rows, track.base, track.touched, track.width, threads=self.threads)
        track.base = track.steps


def _checked_host(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """Its elements, flat."""
    where = f"{what} of shape {tuple(tensor.shape)}"
    if tensor.device.type != "cpu":
        raise ConfigError(f"{where} is on {tensor.device}: give the sparse optimizer a host copy as target")
    if not tensor.is_contiguous():
        raise ConfigError(f"{where} is not contiguous: give the sparse optimizer a contiguous host copy as target")
    if tensor.dtype != torch.float32:
        raise ConfigError(f"{where} is of {tensor.dtype}: the sparse optimizer steps float32")
    return tensor.detach().view(-1)


def _well_formed(one: SparseGradient) -> bool:
    """Whether its arrays are what native code may read; that looks at what is in them."""
    indices, values = one.indices, one.values
    return (
        indices.dtype == np.uint32
        and indices.ndim == values.dim() == 1
        and values.device.type == "cpu"
        and values.dtype in type_names()
        and values.numel() == len(indices) * one.width
        and (one.finite or not len(indices))
    )


def _loaded(held: Mapping[str, Any], parameter: torch.Tensor, track: _Track, source: str) -> _Track:
    steps, base, width = (int(held[name]) for name in ("steps", "base", "width"))
    loaded = _Track(track.group, int(held["iteration"]), steps, base, width=width, target=track.target)
    count = steps - base
    if not 0 <= count < HISTORY_STEPS or base < 0:
        raise CorruptCheckpoint(f"{source}: {steps} steps, {base} of them made everywhere")
    if not count or held["touched"] is None:
        if held["touched"] is not None or held["rows"] is not None or count:
            raise CorruptCheckpoint(f"{source}: {count} steps are not made everywhere, without all that says where")
        return loaded
    touched, rows = held["touched"], held["rows"]
    places = -(-parameter.numel() // width) if width > 0 else 0
    if touched.dtype != torch.int32 or touched.shape != (places,):
        raise MismatchError(f"{source}: {tuple(touched.shape)} counters of {touched.dtype}, here are {places} places")
    if rows is None or rows.dtype != torch.float64 or rows.shape != (count, ROW):
        raise CorruptCheckpoint(f"{source}: no numbers of {count} steps")
    if places and not base <= int(touched.min()) <= int(touched.max()) <= steps:
        raise CorruptCheckpoint(f"{source}: counters beyond steps {base} to {steps}")
    loaded.touched = touched.to("cpu", copy=True)
    loaded.rows = rows.to("cpu").numpy().copy()
    return loaded
