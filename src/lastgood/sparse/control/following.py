"""How one rank's engine follows a controller: what it measures, and the setting that holds, the same for all ranks.

Ranks agree through the store of torch.distributed, in iterations that all of them know: in the first of each
`AGREE_EVERY` a rank shows which settings it has heard of, and four iterations later the newest that all have shown
holds, for all of them. By then all have shown, since none is two iterations ahead of another: nobody waits, and what
goes over the network for it does so beside the training.
"""

from __future__ import annotations

import json
import resource
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import psutil

from lastgood._lazy import torch
from lastgood.errors import CorruptCheckpoint, MismatchError
from lastgood.sparse.control.controller import InForce, Setting
from lastgood.sparse.control.objective import MOST_COMPRESSION, batch_weights
from lastgood.sparse.control.portions import Portions
from lastgood.sparse.control.telemetry import TELEMETRY_VERSION, Join, Measured, Telemetry
from lastgood.sparse.split import samples_of
from lastgood.sparse.tasks import results
from lastgood.text import parse_json

if TYPE_CHECKING:
    from lastgood.sparse.pipeline import Pipeline
    from lastgood.sparse.ranks import Ranks
    from lastgood.sparse.schedule import Schedule

__all__ = ["AGREE_EVERY", "Follower", "Shares", "energy_kept"]

AGREE_EVERY = 8
"""Iterations."""
_HEARS, _HOLDS = 2, 4
"""Iterations after ranks have shown what they know: when it is read, and when it holds."""
_LOOK_EVERY = 50
"""Iterations between two passes over all residuals, and two looks at the machine's memory."""
_MOST_SHOWN_BYTES = 64 << 10


@runtime_checkable
class Shares(Protocol):
    """Data that all ranks share, which gives each its part of what they take together in an iteration."""

    def take_share(self, samples: Sequence[int] | None) -> Any:
        """This rank's part, if the ranks take so many samples each; None: as many as they would without a setting."""


class Follower:
    """Of one engine. Used in the training's thread."""

    def __init__(
        self,
        telemetry: Telemetry,
        ranks: Ranks,
        pipeline: Pipeline,
        *,
        staleness: int,
        least_compression: float,
        timeout_s: float,
    ) -> None:
        self._telemetry, self._ranks, self._timeout_s = telemetry, ranks, timeout_s
        self._pipeline, self._least_compression = pipeline, least_compression
        self._in_force = InForce(ranks.ranks)
        self._portions = Portions()
        self._turned = -1
        self._pool = ThreadPoolExecutor(1, "lastgood-settings") if ranks.ranks > 1 else None
        self._shown: Future[None] | None = None
        self._heard: Future[list[str]] | None = None
        self._shown_before: str | None = None
        self._samples = 0
        self._largest = 0
        self._began: float | None = None
        self._sent_bytes, self._sending_s = 0, 0.0
        self._room_bytes = 0
        self._energy: tuple[float, float] | None = None
        job = ranks.gather("telemetry", secrets.token_hex(16), timeout_s)[0]
        telemetry.join(
            Join(
                version=TELEMETRY_VERSION,
                job=job,
                rank=ranks.rank,
                ranks=ranks.ranks,
                host=ranks.host[:255],
                elements=sum(shape.elements for shape in pipeline.shapes),
                value_bytes=pipeline.value_bytes,
                staleness=staleness,
                compression=pipeline.compression,
                least_compression=least_compression,
            )
        )

    @property
    def setting(self) -> Setting | None:
        """That holds; None: as the training was begun."""
        return self._in_force.current

    def close(self) -> None:
        """End. Safe to call twice."""
        self._telemetry.close()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    # -- which setting holds -------------------------------------------------------------------------------------------

    def turn(self, iteration: int) -> None:
        """Before an iteration, on all ranks: another setting may hold from it on. Raises WaitTimeout."""
        if iteration == self._turned:
            return
        self._turned = iteration
        phase = iteration % AGREE_EVERY
        if phase == 0:
            self._show(iteration)
        elif phase == _HEARS and self._pool is not None and self._shown is not None:
            self._heard = self._pool.submit(self._ranks.shown, _key(iteration - phase), self._timeout_s)
        elif phase == _HOLDS:
            self._agree(iteration)

    def _show(self, iteration: int) -> None:
        for setting in self._telemetry.heard():
            # Others may be told it too, but all engines have the same limits.
            least = min(setting.samples) >= 1 and setting.compression >= self._least_compression
            if least and setting.compression <= MOST_COMPRESSION:
                self._in_force.offer(setting)
        if self._pool is not None:
            marks = json.dumps(self._in_force.shown(iteration + _HOLDS))
            self._shown = self._pool.submit(self._ranks.show, _key(iteration), marks)

    def _agree(self, iteration: int) -> None:
        if self._pool is None:
            shown = [self._in_force.shown(iteration)]
        elif self._heard is None or self._shown is None:
            return  # this training began in between
        else:
            results([self._shown], self._timeout_s, "the store to take which settings this rank knows")
            (texts,) = results([self._heard], 2 * self._timeout_s, "the settings that all ranks know")
            self._shown = self._heard = None
            if self._shown_before is not None:  # all have read it, since they have shown another one
                self._pool.submit(self._ranks.show_no_more, self._shown_before)
            self._shown_before = _key(iteration - _HOLDS)
            shown = [_marks(text, rank) for rank, text in enumerate(texts)]
        self._follow(self._in_force.agree(iteration, shown))

    def _follow(self, setting: Setting | None) -> None:
        if setting is not None and setting.compression != self._pipeline.compression:
            self._pipeline.compress_by(setting.compression)

    # -- batches -------------------------------------------------------------------------------------------------------

    def sized(self, data: Iterable[Any], schedule: Schedule) -> Iterator[tuple[Any, float]]:
        """This rank's batches, of the size that holds, and by what the mean loss of each is to be multiplied.

        With that each sample counts as much as any other, of whatever rank it is.
        """
        shares = data if isinstance(data, Shares) else None
        own = iter(data) if shares is None else iter(())
        rank = self._ranks.rank
        while True:
            self.turn(schedule.iteration)
            sizes = None if self.setting is None else self.setting.samples
            try:
                if shares is not None:
                    batch = shares.take_share(sizes)
                else:
                    batch = self._portions.take(own, None if sizes is None else sizes[rank])
            except StopIteration:
                return
            self._samples = samples_of(batch)
            self._began = time.perf_counter()
            yield batch, 1.0 if sizes is None else batch_weights(sizes)[rank]

    # -- what is measured ----------------------------------------------------------------------------------------------

    def look(self, iteration: int) -> None:
        """Between compressing and updating: now and then, a pass over all residuals, and what was sent of them."""
        if iteration % _LOOK_EVERY == 1:
            self._energy = energy_kept((side.residual for side in self._pipeline.sides), self._pipeline.sent_values())

    def tell(self, iteration: int, waited_s: float, apply_s: float, stalled_s: float) -> None:
        """After an iteration: what it waited for others, updated weights, and waited for a checkpointer."""
        sent_bytes, sending_s = self._pipeline.traffic()
        began, self._began = self._began, None
        sent, sending = sent_bytes - self._sent_bytes, sending_s - self._sending_s
        self._sent_bytes, self._sending_s = sent_bytes, sending_s
        if began is None:
            return  # its batch was not drawn through the engine: nobody knows its size
        took_s = time.perf_counter() - began
        energy, self._energy = self._energy or (None, None), None
        self._telemetry.tell(
            Measured(
                worker=self._ranks.rank,
                iteration=iteration,
                samples=max(1, self._samples),
                compute_s=min(max(took_s - waited_s - stalled_s, 1e-6), 86_400.0),
                waited_s=min(waited_s, 86_400.0),
                sent_bytes=max(0, sent),
                sending_s=min(max(0.0, sending), 86_400.0),
                setting_number=0 if self.setting is None else self.setting.number,
                memory_bytes=self._memory_bytes(iteration),
                memory_room_bytes=self._room_bytes,
                apply_s=min(apply_s, 86_400.0),
                compression=self._pipeline.compression,
                energy_kept=energy[0],
                residual_age_iterations=energy[1],
                not_finite=sum(side.not_finite for side in self._pipeline.sides),
            )
        )

    def _memory_bytes(self, iteration: int) -> int:
        """The peak of the process, or of its device, if this batch is the largest so far: no other one took more."""
        device = self._pipeline.sides[0].layer.parameter.device
        looks = not self._room_bytes or iteration % _LOOK_EVERY == 0
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(device)
            self._room_bytes = torch.cuda.mem_get_info(device)[1] if looks else self._room_bytes
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            self._room_bytes = peak + psutil.virtual_memory().available if looks else self._room_bytes
        if self._samples < self._largest:
            return 0
        self._largest = self._samples
        return peak

    # -- the state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The setting that holds, and the place in a batch."""
        setting = self.setting
        return {
            "setting": None if setting is None else setting.model_dump(mode="json"),
            "data": self._portions.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there. Raises CorruptCheckpoint, and MismatchError for a setting that this engine cannot keep."""
        held = state["setting"]
        setting = None
        if held is not None:
            try:
                setting = Setting.model_validate(held)
            except ValueError as error:
                raise CorruptCheckpoint(f"engine: the checkpoint's setting of a controller is none: {error}") from error
            if len(setting.samples) != self._ranks.ranks or setting.compression < self._least_compression:
                raise MismatchError(
                    f"engine: the checkpoint's setting is of {len(setting.samples)} ranks and compression "
                    f"{setting.compression}; here are {self._ranks.ranks}, and the least compression is "
                    f"{self._least_compression}"
                )
        self._in_force = InForce(self._ranks.ranks, setting)
        self._follow(setting)
        self._portions.load_state_dict(state["data"])


def energy_kept(residuals: Iterable[torch.Tensor], sent: Iterable[torch.Tensor]) -> tuple[float, float] | None:
    """The share of the squares that was sent, and the age of what was not, in iterations; None if all is 0.

    The age is a mean by Little's law: what lies in the residual over what leaves it in one iteration, in magnitudes.
    Each residual and what was sent of it make the gradient and the residual of before.
    """
    squares = [0.0, 0.0]
    magnitudes = [0.0, 0.0]
    for place, tensors in enumerate((sent, residuals)):
        for one in tensors:
            wide = one.float()
            squares[place] += float(torch.linalg.vector_norm(wide, 2)) ** 2
            magnitudes[place] += float(torch.linalg.vector_norm(wide, 1))
    if not 0 < sum(squares) < float("inf") or not magnitudes[0]:
        return None
    return squares[0] / sum(squares), min(magnitudes[1] / magnitudes[0], 1e12)


def _key(iteration: int) -> str:
    return f"settings known in iteration {iteration}"


def _marks(text: str, rank: int) -> list[str]:
    found = parse_json(text, f"what rank {rank} knows of settings", most_bytes=_MOST_SHOWN_BYTES)
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise CorruptCheckpoint(f"rank {rank} shows something else than settings that it knows")
    return found
