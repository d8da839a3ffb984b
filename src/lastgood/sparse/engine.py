"""StellaTrain's engine: gradients leave as sparse blocks while the backward pass runs, and all ranks apply the same.

A layer is one parameter. Its hook fires when its gradient is complete; a thread then adds the residual, compresses, and
hands the block to the exchange, earliest layer first. `step` waits until all ranks' blocks are there, and applies them
inside one call of the optimizer's own `step`, whose hooks a checkpointer waits in: no weight is written outside it.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from lastgood._lazy import torch
from lastgood.errors import CheckpointError, ConfigError, MismatchError, StateError
from lastgood.sparse.buffers import Buffers
from lastgood.sparse.compressors import ValueType
from lastgood.sparse.control.following import Follower
from lastgood.sparse.control.telemetry import Telemetry
from lastgood.sparse.correction import Correction
from lastgood.sparse.engine_options import check_options, least_of
from lastgood.sparse.engine_state import FORMAT, check_engine, pack, spread, spread_velocities, unpack
from lastgood.sparse.host_copies import HostCopies
from lastgood.sparse.layers import digest_of, find_layers, refuse_other_gradients
from lastgood.sparse.optimizer import Mode, SparseOptimizer
from lastgood.sparse.pipeline import Applier, Pipeline
from lastgood.sparse.ranks import Ranks, ranks_of_torch
from lastgood.sparse.schedule import Schedule, Task
from lastgood.sparse.split import split
from lastgood.state import Checked, NewWorld
from lastgood.state.steppers import note_stepper

__all__ = ["Engine"]


class Engine(Checked):
    """Trains `model` by `optimizer` (torch's SGD, Adam or AdamW) on all ranks; each sends a part of its gradient.

    ::

        for batch in engine.batches(checkpointer.data):
            engine.backward(loss(model, batch))
            if engine.step():
                checkpointer.step()

    Give checkpointers `engine` and `engine.optimizer`, which is the optimizer itself. Do not call its `step`.

    Args:
        compression: the share of elements that is not sent; ranks send the rest together.
        compressor: one of `lastgood.sparse.compressors.COMPRESSORS`.
        staleness: 0: `step` applies what was sent in its own iteration. 1: what was sent in the one before, so that
            the exchange lasts as long as the next iteration at no cost.
        partial: with staleness 1, apply also what has arrived already of this iteration. Each rank sees by itself what
            has, so a training does not repeat to the bit.
        values: how values are sent; what rounding loses stays in the residual.
        mode: what happens to elements that nobody sent, as `SparseOptimizer` says.
        accumulate: how many parts `batches` makes of each batch, whose gradients are added up before they are sent.
        buffers: what becomes of the model's buffers (BatchNorm's statistics): after each step all ranks get those of
            the "first" one, as under DistributedDataParallel, or each keeps its "own".
        error_feedback: False throws away what is not sent: for comparisons.
        correction: what is done to gradients before they are compressed (DGC's options); nothing by default.
        telemetry: is told what each iteration took, on all ranks, and brings settings of a controller: `batches` gives
            batches of their sizes then, and all ranks compress as they say.
        least_compression: no setting may have less: room for what is in flight is kept for it [default: 0.9, or
            `compression` if that is less].
        timeout_s: how long any wait for other ranks may last.
        ranks: those of torch.distributed by default.

    All ranks begin with rank 0's weights. Raises ConfigError for what cannot be trained so, MismatchError if ranks
    do not train the same model in the same way, WaitTimeout.
    """

    saved_keys: ClassVar[tuple[str, ...]] = ("format", "iteration", "rank", "ranks", "settings", "layers", "in_flight")

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        compression: float = 0.99,
        compressor: str = "v16",
        staleness: int = 1,
        *,
        partial: bool = False,
        values: ValueType = "float32",
        mode: Mode = "plain",
        accumulate: int = 1,
        buffers: Literal["first", "own"] = "first",
        error_feedback: bool = True,
        correction: Correction | None = None,
        threads: int = 1,
        seed: int = 0,
        timeout_s: float = 30.0,
        telemetry: Telemetry | None = None,
        least_compression: float | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        check_options(staleness, partial, buffers, accumulate, threads, compression, timeout_s)
        least = least_of(compression, least_compression, follows=telemetry is not None)
        self.optimizer = optimizer
        """What checkpointers are given: the optimizer that was given."""
        self._model = model
        self._ranks = ranks_of_torch() if ranks is None else ranks
        self._accumulate = accumulate
        self._timeout_s = timeout_s
        shared = [one for _, one in model.named_buffers()] if buffers == "first" else []
        self._buffers = Buffers(self._ranks, shared, timeout_s)
        self._sparse = SparseOptimizer(optimizer, mode=mode, threads=threads)
        self._correction = correction or Correction()
        self._correction.check(optimizer)
        layers = find_layers(model, optimizer)
        self._copies = HostCopies(layers, self._sparse)
        self._schedule = Schedule(len(layers), staleness, partial=partial)
        self._settings = {
            "compressor": compressor,
            "staleness": staleness,
            "partial": partial,
            "mode": mode,
            "values": values,
            "optimizer": type(optimizer).__name__,
        }
        if self._correction.momentum:  # whose velocity is in the state
            self._settings["velocity"] = f"momentum {self._correction.momentum}, nesterov {self._correction.nesterov}"
        lines = [f"{name}={value}" for name, value in self._settings.items()]
        lines += [f"compression={compression}", f"buffers={buffers}", f"error_feedback={error_feedback}"]
        lines += [f"telemetry={telemetry is not None}", f"least compression {least}", str(self._correction)]
        lines += [layer.line for layer in layers]
        self._ranks.compare("the engine's settings and layers", lines, timeout_s)
        self._begin_alike(shared)
        self._digest = digest_of([], lines)
        self._pipeline = Pipeline(
            layers,
            self._ranks,
            self._schedule,
            self._copies,
            compression=compression,
            least_compression=least,
            compressor=compressor,
            values=values,
            error_feedback=error_feedback,
            correction=self._correction,
            threads=threads,
            seed=seed,
            timeout_s=timeout_s,
        )
        self._applier = Applier(self._pipeline, self._schedule, self._sparse, self._copies, self._ranks.ranks)
        self._follower = None
        if telemetry is not None:
            self._follower = Follower(
                telemetry,
                self._ranks,
                self._pipeline,
                staleness=staleness,
                least_compression=least,
                timeout_s=timeout_s,
            )
        self._share, self._last = 1.0, True
        """Of the batch, by which its loss is multiplied, and whether its last part is the next one."""
        self._passes = 0
        """Backward passes since the last part of a batch."""
        self._taking = self._stepping = False
        self._broken: BaseException | None = None
        self._compared = False
        hook = weakref.WeakMethod(self._complete)
        self._hooks = [
            layer.parameter.register_post_accumulate_grad_hook(functools.partial(_call, hook, layer.number))
            for layer in layers
        ]
        self._hooks.append(optimizer.register_step_pre_hook(functools.partial(_refuse_own_steps, weakref.ref(self))))
        note_stepper(optimizer, self)

    # -- the loop ------------------------------------------------------------------------------------------------------

    def batches(self, data: Iterable[Any]) -> Iterator[Any]:
        """The batches of `data`, each in `accumulate` parts along the first dimension of its tensors.

        Parts differ by one sample at most, and a batch of fewer samples has fewer parts. With `telemetry`, batches
        have the size that the controller gives this rank (what is left of one comes first in the next), and a sample
        counts as much as one of any other rank: call it on all of them. `data` should not end on some ranks only;
        data with a method `take_share` (`lastgood.sparse.control.following.Shares`) is shared out by the sizes.
        """
        follower = self._follower
        sized = ((one, 1.0) for one in data) if follower is None else follower.sized(data, self._schedule)
        for batch, weight in sized:
            parts = split(batch, self._accumulate)
            for number, (part, share) in enumerate(parts):
                self._share, self._last = share * weight, number == len(parts) - 1
                passes = self._passes
                yield part
                if not self._last and self._passes != passes + 1:
                    raise CheckpointError("a part of a batch needs one engine.backward(loss)")
        self._share, self._last = 1.0, True

    def backward(self, loss: torch.Tensor) -> None:
        """In place of ``loss.backward()``: gradients that are complete leave while it runs.

        `loss` is the mean over a batch, or over the part of one that `batches` gave.
        """
        self._refuse_broken()
        self._begin()
        if self._taking:
            raise CheckpointError("engine.backward() twice before engine.step(); add the losses, or use accumulate=")
        if self._follower is not None and not self._passes:
            self._follower.turn(self._schedule.iteration)
        self._passes += 1
        self._taking = self._last
        try:
            if self._last:
                self._buffers.tell(self._schedule.iteration)
            (loss if self._share == 1.0 else loss * self._share).backward()
            if self._taking and self._correction.clip is not None:
                self._pipeline.clip()
                self._begin_missing()
            if self._last:
                self._buffers.tell_again(self._schedule.iteration)
        except BaseException as error:
            self._break(error)
            raise

    def step(self) -> bool:
        """In place of ``optimizer.step()`` and ``zero_grad()``: whether the batch was complete, and so weights changed.

        Raises what the exchange says of a rank that is lost (the engine is of no use then: go on from a checkpoint),
        and WaitTimeout.
        """
        self._refuse_broken()
        if not self._passes:
            raise CheckpointError("engine.step() without engine.backward(loss) before it")
        if not self._taking:
            return False
        try:
            self._step()
        except BaseException as error:
            self._break(error)
            raise
        return True

    def finish(self) -> None:
        """Apply what is in flight, and bring every element up to date: before an evaluation or the training's end.

        All ranks must call it at the same place.
        """
        self._refuse_broken()
        if not self._schedule.idle or self._passes:
            raise CheckpointError("engine.finish() between backward() and step()")
        try:
            self._pipeline.wait_for(self._schedule.in_flight())
            self._update(self._applier.flush)
        except BaseException as error:
            self._break(error)
            raise

    def close(self) -> None:
        """Give back threads, hooks and connections. Safe to call twice."""
        while self._hooks:
            self._hooks.pop().remove()
        self._pipeline.close()
        self._ranks.close()
        if self._follower is not None:
            self._follower.close()
        self._broken = self._broken or CheckpointError("the engine is closed")

    def facts(self) -> dict[str, Any]:
        """What was sent and waited for, for records and tables."""
        facts = getattr(self._pipeline.exchange, "facts", None)
        return {
            "iteration": self._schedule.iteration,
            "compression": self._pipeline.compression,
            "setting": None if self._follower is None else self._follower.setting,
            "waited_s": self._pipeline.waited_s,
            "early_share": self._applier.early / max(1, self._applier.applied),
            "not_finite": {side.layer.name: side.not_finite for side in self._pipeline.sides if side.not_finite},
            "exchange": None if facts is None else facts(),
        }

    # -- the state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Residuals, compressors, the sparse optimizer's counters, and what is in flight, which is waited for.

        Tensors are the engine's own, not copies. Raises StateError in the middle of an iteration, and what a lost rank
        leads to.
        """
        if self._broken is not None:
            raise StateError(f"the sparse engine stopped in iteration {self._schedule.iteration}: {self._broken}")
        if not self._schedule.idle or self._passes:
            raise StateError(
                "a checkpoint between engine.backward() and the end of engine.step(); save only if step() returned True"
            )
        blocks = self._pipeline.in_flight()
        return {
            "format": FORMAT,
            "iteration": self._schedule.iteration,
            "rank": self._ranks.rank,
            "ranks": self._ranks.ranks,
            "settings": dict(self._settings),
            "layers": {
                side.layer.name: {
                    "residual": side.residual,
                    "compressor": side.compressor.state_dict(),
                    "not_finite": side.not_finite,
                    **({} if side.correction is None else {"velocity": side.correction.state_dict()}),
                }
                for side in self._pipeline.sides
            },
            "optimizer": self._sparse.state_dict(),
            # A schedule may have changed since: what is in flight is applied with those of its own iteration.
            "hyperparameters": self._sparse.begun(self._schedule.iteration - 1) if blocks else None,
            "in_flight": pack(blocks, self._pipeline.shapes, self._ranks.ranks) if self._schedule.staleness else None,
            "following": None if self._follower is None else self._follower.state_dict(),
        }

    def check_saved(self, saved: Any, path: str) -> None:
        """Refuse another model, compressor, optimizer or staleness. Another compression is no other training."""
        check_engine(saved, self._settings, self._pipeline.shapes, path)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, before the first backward pass.

        Raises MismatchError, CorruptCheckpoint, CheckpointError.
        """
        self._refuse_late()
        self.check_saved(state, "engine")
        place, own = (state["rank"], state["ranks"]), (self._ranks.rank, self._ranks.ranks)
        if place != own:
            raise MismatchError(
                f"engine: the checkpoint is that of rank {place[0]} of {place[1]}, and this is rank {own[0]} of "
                f"{own[1]}; each rank goes on from its own (from another number of ranks by PCcheck's resume_from)"
            )
        flying = {} if state["in_flight"] is None else unpack(state["in_flight"], self._pipeline.shapes, "engine")
        iteration = int(state["iteration"])
        tasks = {Task(iteration - 1, number): blocks for number, blocks in flying.items()}
        self._schedule.restore(iteration, list(tasks))
        for side in self._pipeline.sides:
            held = state["layers"][side.layer.name]
            side.residual.copy_(held["residual"])
            side.compressor.load_state_dict(held["compressor"])
            side.not_finite = int(held["not_finite"])
            if side.correction is not None:
                side.correction.load_state_dict(held["velocity"])
        self._sparse.load_state_dict(state["optimizer"])
        if state["hyperparameters"] is not None:
            self._sparse.begin(iteration - 1, state["hyperparameters"])
        self._pipeline.restore(tasks, self._ranks.rank)
        following = state.get("following")
        if self._follower is not None and following is not None:
            self._follower.load_state_dict(following)

    def load_from_ranks(self, states: Sequence[Mapping[str, Any]], world: NewWorld) -> None:
        """Go on from what all ranks of a checkpoint had, with another number of ranks; `spread` has the rule.

        Raises as `load_state_dict`.
        """
        self._refuse_late()
        for before, state in enumerate(states):
            self.check_saved(state, f"engine of rank {before}")
        if len(states) == self._ranks.ranks:
            self.load_state_dict(states[self._ranks.rank])
            return
        rank, ranks = self._ranks.rank, self._ranks.ranks
        residuals = spread(states, self._pipeline.shapes, rank, ranks, f"step {world.step}")
        velocities = spread_velocities(states, self._pipeline.shapes, rank, ranks)
        like = states[rank % len(states)]  # whose thresholds it takes
        self._schedule.restore(int(like["iteration"]), [])
        for side in self._pipeline.sides:
            held = like["layers"][side.layer.name]
            side.residual.copy_(residuals[side.layer.name])
            side.compressor.load_state_dict(held["compressor"])
            side.not_finite = int(held["not_finite"])
            if side.correction is not None:
                side.correction.velocity.copy_(velocities[side.layer.name])
        self._sparse.load_state_dict(like["optimizer"])
        self._pipeline.restore({}, rank)

    def _refuse_late(self) -> None:
        self._refuse_broken()
        if self._compared:
            raise CheckpointError("a sparse engine goes on from a checkpoint before its first backward pass only")

    # -- one iteration -------------------------------------------------------------------------------------------------

    def _begin_alike(self, buffers: Sequence[torch.Tensor]) -> None:
        """Begin with rank 0's weights and buffers, as DistributedDataParallel does."""
        tensors = [*self._model.parameters(), *buffers]
        if len(set(self._ranks.gather("weights", digest_of(tensors), self._timeout_s))) > 1:
            self._ranks.of_first("first weights", tensors, self._timeout_s)

    def _begin(self) -> None:
        """Before the first backward pass: a checkpoint may have been restored since this was made."""
        if self._compared:
            return
        # Buffers were changed by a forward pass already.
        digest = digest_of(side.layer.parameter for side in self._pipeline.sides)
        line = f"weights before iteration {self._schedule.iteration}: {digest}"
        self._ranks.compare("the first iteration", [line], self._timeout_s)
        self._copies.refresh()
        groups = self._pipeline.group_elements()
        self._pipeline.exchange = self._ranks.open(groups, self._digest, self._timeout_s)
        self._compared = True

    def _complete(self, number: int) -> None:
        """The gradient of a layer is complete; called in the backward pass."""
        if not self._taking or self._correction.clip is not None:
            return
        if self._schedule.has_begun(number):
            name = self._pipeline.sides[number].layer.name
            raise ConfigError(
                f"{name} got a gradient twice in one backward pass (reentrant activation "
                "checkpointing?); use torch.utils.checkpoint with use_reentrant=False"
            )
        self._pipeline.begin(number)

    def _begin_missing(self) -> None:
        for number in self._schedule.missing():
            self._pipeline.begin(number)

    def _step(self) -> None:
        schedule, iteration = self._schedule, self._schedule.iteration
        self._begin_missing()
        self._pipeline.wait_compressed()
        for side in self._pipeline.sides:
            side.layer.parameter.grad = None
        refuse_other_gradients(self.optimizer)
        self._sparse.begin(iteration)
        due = schedule.due()
        if self._follower is not None:
            self._follower.look(iteration)
        waits = time.perf_counter()
        self._pipeline.wait_for(due)
        self._buffers.hear(iteration)
        waited_s = time.perf_counter() - waits
        apply_s, stalled_s = self._update(lambda: self._applier.apply(due))
        schedule.end()
        if self._follower is not None:
            self._follower.tell(iteration, waited_s, apply_s, stalled_s)
        # All ranks have sent what this step applied, so they have heard the buffers of the iteration before that.
        self._buffers.forget(iteration - 1 - schedule.staleness)
        self._passes, self._taking = 0, False

    def _update(self, write: Any) -> tuple[float, float]:
        """Write weights inside the optimizer's step: its hooks are called, and it finds no gradients of its own.

        Returns the seconds that writing took, and those of hooks.
        """
        began, wrote_s = time.perf_counter(), 0.0

        def closure() -> float:
            nonlocal wrote_s
            writes = time.perf_counter()
            with torch.no_grad():
                write()
            wrote_s = time.perf_counter() - writes
            return 0.0

        self._stepping = True
        try:
            self.optimizer.step(closure)
        finally:
            self._stepping = False
        return wrote_s, time.perf_counter() - began - wrote_s

    def _refuse_broken(self) -> None:
        if self._broken is not None:
            raise CheckpointError(
                f"the engine stopped in iteration {self._schedule.iteration} and cannot go on; restart from a "
                f"checkpoint: {type(self._broken).__name__}: {self._broken}"
            ) from self._broken

    def _break(self, error: BaseException) -> None:
        """Residuals and blocks of the present iteration are half made: nothing may go on from them, nor be saved."""
        self._broken = self._broken or error


def _call(method: weakref.WeakMethod[Any], number: int, parameter: torch.Tensor) -> None:
    del parameter
    found = method()
    if found is not None:
        found(number)


def _refuse_own_steps(engine: weakref.ref[Engine], *given: Any) -> None:
    del given
    found = engine()
    if found is not None and not found._stepping:
        raise CheckpointError("this optimizer's steps are made by the engine: call engine.step() instead of its step()")
