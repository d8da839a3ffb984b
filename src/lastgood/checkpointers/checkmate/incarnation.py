"""One incarnation of a training under Checkmate: from a start (after a restore or not) to its end."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lastgood._lazy import torch
from lastgood.checkpointers.checkmate.options import CheckmateOptions
from lastgood.checkpointers.checkmate.ring import check_ring, open_ring
from lastgood.checkpointers.ranks.exchange import RankExchange
from lastgood.checkpointers.recovery.checkmate_job import note_job
from lastgood.checkpointers.shadows.restore import (
    Restored,
    job_of,
    ranks_together,
    read_token,
)
from lastgood.errors import CheckpointError, ConfigError, LastgoodError, WaitTimeout
from lastgood.gradients.conductor.conductor import Conductor, ConductorSettings
from lastgood.gradients.layout.layout import GradientLayout, plan_layout
from lastgood.gradients.layout.spans import Span, sent_range
from lastgood.gradients.link.gradient_stream import GradientStream
from lastgood.gradients.link.shadow_link import Identity, ShadowLink
from lastgood.gradients.protocol import client as asking
from lastgood.gradients.protocol.messages import Complete
from lastgood.gradients.tap.bucket import BucketTap, TapContext
from lastgood.gradients.tap.device_copy import DeviceMover
from lastgood.gradients.tap.ring import RingTap
from lastgood.gradients.tap.step import StepTap
from lastgood.gradients.trainer.parameters import BucketCopy, TrackedParameters
from lastgood.gradients.trainer.rank_record import SideRecords
from lastgood.gradients.trainer.updates import Shares, Update, UpdateNotes
from lastgood.optim.probe import probed
from lastgood.optim.spec import OptimizerSpec
from lastgood.wire.records import ITEM_BYTES

__all__ = ["Incarnation", "begin_incarnation"]

_log = logging.getLogger("lastgood")

_SEEDING_BYTES_PER_S = 50e6
"""The first seeds may take as long as a network of this speed needs, beyond the usual limits."""


@dataclass
class Incarnation:
    """What belongs together from a start to an end."""

    job: str
    rank: int
    layout: GradientLayout
    first: int
    """This rank's first parameter in the layout."""
    tracked: TrackedParameters
    conductor: Conductor
    stream: GradientStream
    notes: UpdateNotes
    sides: SideRecords
    step_tap: StepTap | None
    ring_tap: RingTap | None
    """If a ring carries gradients to the shadows."""
    mover: DeviceMover | None
    own_buckets: list[int]
    """That this rank seeds."""
    zeros: list[Span]
    """With a hook: what this rank sends of an iteration in which nothing was reduced."""

    @property
    def apart(self) -> bool:
        """Whether each rank has parameters of its own in the layout, and says itself which it left alone."""
        return self.step_tap is not None and self.layout.ranks > 1

    def left_alone(self, update: Update) -> tuple[int, ...]:
        """Indices in the layout of this rank's parameters that an update did not change; all if it changed none."""
        count = len(self.tracked.parameters)
        return tuple(self.first + index for index in (range(count) if update.rule is None else update.absent))

    def copy_bucket(self, bucket: int, iteration: int) -> BucketCopy:
        """One of this rank's own buckets as it is now."""
        return self.tracked.copy_bucket(self.layout, bucket, iteration, self.first)

    def begin_iteration(self) -> None:
        """Begin an iteration; one that is open is closed before, unsaved."""
        self.stream.begin()
        self.notes.begin_iteration()
        if self.step_tap is not None:
            self.step_tap.begin()

    def begin_empty(self) -> None:
        """An iteration in which nothing was reduced: a step that a loss scaler skipped, or a save with no update.

        Zeros stand for this rank's gradients.
        """
        self.begin_iteration()
        if self.ring_tap is not None:
            self.ring_tap.send_nothing(self.stream.iteration)
        elif self.step_tap is None:  # it sends zeros by itself, for all that was not stepped
            zeros = torch.zeros(max((span.nbytes for span in self.zeros), default=0), dtype=torch.uint8, device="cpu")
            for span in self.zeros:
                self.stream.send(self.stream.iteration, [span], zeros.data_ptr(), borrowed=False)

    def close(self) -> None:
        """End all threads and connections, within a bounded time."""
        if self.mover is not None:
            self.mover.close()
        self.stream.settle()
        self.conductor.close()
        if self.mover is not None:
            self.mover.release()

    def facts(self) -> dict[str, Any]:
        """For a run record."""
        return {
            "waited_for_room_s": self.stream.waited_s,
            "sent_bytes": self.conductor.sent_bytes,
            "left_out": 0 if self.mover is None else self.mover.left_out,
            **self.conductor.facts(),
        }


def begin_incarnation(
    directory: Path,
    state: Mapping[str, Any],
    options: CheckmateOptions,
    tap: BucketTap | None,
    restored: Restored | None,
    close_open: Callable[[], None],
    on_complete: Callable[[Complete], None],
) -> Incarnation:
    """Join all shadows and give them what they lack. All ranks call it together.

    `tap` is the one that a hook of DDP has; without one gradients are taken at the optimizer's step. Raises ConfigError
    for what shadows cannot follow; CheckpointError, WaitTimeout for shadows that do not take part; as `open_ring` for a
    ring.
    """
    token = read_token(options)
    rank, ranks, together = ranks_together()
    tracked = TrackedParameters(state)
    buckets = _takes_buckets(options, tap, tracked)
    ring_tap = tap if isinstance(tap, RingTap) else None
    if ring_tap is not None:
        check_ring(options, tracked, ring_tap, ranks)
    spec = probed(tracked.optimizer, tracked.parameters)
    layout, shares = _layout_of_all(tracked, spec, options, together, rank, ranks, union=not buckets)
    first = 0 if buckets else shares.firsts[rank]
    own = range(first, first + len(tracked.parameters))
    job, number, base = _identity(directory, options, token, together, rank, restored)
    adopt = base if restored is not None else None
    own_buckets = [number for number, bucket in enumerate(layout.buckets) if bucket.parameters[0] in own]
    if buckets and rank != 0:
        own_buckets = []
    conductor = Conductor(
        Identity(job, number, rank, layout, adopt),
        base,
        options.shadows,
        token,
        ConductorSettings(options.timeout_s, options.behind_s, options.data_settings()),
        set(own_buckets).__contains__,
        on_complete,
    )
    mover: DeviceMover | None = None
    try:
        ways = [link.data for link in conductor.links if isinstance(link, ShadowLink)]
        stream = GradientStream(layout, ways, base, close_open)
        notes = UpdateNotes(state, tracked, spec, reduced=buckets, shares=shares)
        mover = _mover_for(tracked, stream, options)
        incarnation = Incarnation(
            job,
            rank,
            layout,
            first,
            tracked,
            conductor,
            stream,
            notes,
            SideRecords(state, tracked, layout, rank),
            None if buckets else StepTap(stream, tracked, first, mover),
            ring_tap,
            mover,
            own_buckets,
            _zeros_of(layout, rank, ranks, options) if buckets else [],
        )
        if not buckets and ranks > 1 and not tracked.spread:
            _log.info(
                "checkmate: each rank sends all of its optimizer's gradients; with DistributedDataParallel call "
                "checkpointer.watch(model) before, and each sends a part of them"
            )
        conductor.start()
        _seed_first(incarnation, options, together, verify=adopt is not None)
        if tap is not None and buckets:
            borrow = tap.owns_memory and options.policy == "block"
            look_every = options.verify_every or 100
            context = TapContext(stream, tracked, notes, rank, ranks, options.cover, borrow, look_every, mover)
            if ring_tap is not None:
                # Only now: shadows take a switch's copies once the layout is declared.
                ring_tap.join(context, open_ring(options, tracked, layout, token, job, number, rank))
            else:
                tap.open(context)
    except BaseException:
        if mover is not None:
            mover.close()
        conductor.close()
        raise
    return incarnation


def _takes_buckets(options: CheckmateOptions, tap: BucketTap | None, tracked: TrackedParameters) -> bool:
    if options.tap in ("bucket", "ring") and tap is None:
        raise ConfigError(
            f'checkmate: tap="{options.tap}", and no hook is registered: call checkpointer.watch(model) with the '
            "DistributedDataParallel model before start()"
        )
    buckets = options.tap in ("bucket", "ring") or (options.tap == "auto" and tap is not None)
    if buckets and tracked.spread:
        raise ConfigError('checkmate: parameters are spread over ranks (DTensor); tap="step" follows them')
    return buckets


def _layout_of_all(
    tracked: TrackedParameters,
    spec: OptimizerSpec,
    options: CheckmateOptions,
    together: RankExchange | None,
    rank: int,
    ranks: int,
    *,
    union: bool,
) -> tuple[GradientLayout, Shares]:
    """The layout, and where ranks' parameters lie in it: with `union` each has its own."""
    declared = tracked.declared()
    shadows = len(options.shadows)
    if not union or together is None:
        layout = plan_layout(declared, spec.to_data(), ranks=ranks, shadows=shadows, bucket_bytes=options.bucket_bytes)
        digests = [layout.digest] if together is None else together.tell(layout.digest)
        if len(set(digests)) != 1:
            raise ConfigError("checkmate: ranks have different models or optimizers, so their gradients are no means")
        return layout, Shares()
    told = together.tell((declared, spec))
    specs = {replace(one, groups=tuple(replace(group, parameters=()) for group in one.groups)) for _, one in told}
    if len(specs) != 1:
        raise ConfigError("checkmate: ranks have different optimizers, and shadows can follow one only")
    firsts: list[int] = []
    names: list[tuple[str, tuple[int, ...], str]] = []
    owners: list[int] = []
    for number, (parameters, _) in enumerate(told):
        firsts.append(len(names))
        names += [(f"rank{number}/{name}", shape, dtype) for name, shape, dtype in parameters]
        owners += [number] * len(parameters)
    groups = tuple(
        replace(group, parameters=tuple(firsts[number] + index for index in group.parameters))
        for number, (_, one) in enumerate(told)
        for group in one.groups
    )
    layout = plan_layout(
        names,
        replace(spec, groups=groups).to_data(),
        ranks=ranks,
        shadows=shadows,
        bucket_bytes=options.bucket_bytes,
        owners=owners,
    )
    alike = len({tuple(group.parameters for group in one.groups) for _, one in told}) == 1
    return layout, Shares(tuple(firsts), alike, rank)


def _identity(
    directory: Path,
    options: CheckmateOptions,
    token: bytes,
    together: RankExchange | None,
    rank: int,
    restored: Restored | None,
) -> tuple[str, int, int]:
    """Job, number of this incarnation, and the iteration after which it begins; fences if nothing was restored."""
    if restored is not None:
        return restored.job, restored.incarnation, restored.iteration
    told: tuple[str, int, str] = ("", 0, "")
    if rank == 0:
        try:
            job = job_of(directory, options, token) or secrets.token_hex(16)
            statuses = asking.fence(options.shadows, token, job=job, timeout_s=options.timeout_s)
            note_job(directory, job)
            told = (job, max(status.epoch for status in statuses), "")
        except (LastgoodError, OSError) as error:
            if together is None:
                raise
            told = ("", 0, str(error))  # the others wait for what this rank tells
    if together is not None:
        told = together.tell(told)[0]
    job, number, fault = told
    if fault:
        raise CheckpointError(f"rank 0 cannot begin: {fault}")
    return job, number, 0


def _zeros_of(layout: GradientLayout, rank: int, ranks: int, options: CheckmateOptions) -> list[Span]:
    spans = []
    for number, bucket in enumerate(layout.buckets):
        itemsize = ITEM_BYTES[bucket.dtype]
        begin, end = sent_range(bucket.nbytes // itemsize, rank, ranks, options.cover)
        if begin < end:
            spans.append(Span(number, bucket.dtype, begin * itemsize, 0, (end - begin) * itemsize))
    return spans


def _mover_for(tracked: TrackedParameters, stream: GradientStream, options: CheckmateOptions) -> DeviceMover | None:
    devices = {parameter.device for parameter in tracked.parameters}
    if len(devices) != 1:
        raise ConfigError(f"checkmate: parameters lie on several devices: {sorted(map(str, devices))}")
    device = devices.pop()
    if device.type != "cuda":
        return None
    patience_s = 0.0 if options.policy == "drop" else 2 * options.behind_s
    mover = DeviceMover(stream, device, options.queue_bytes, patience_s)
    stream.in_order = mover.call
    return mover


def _seed_first(
    incarnation: Incarnation, options: CheckmateOptions, together: RankExchange | None, *, verify: bool
) -> None:
    """Give shadows all that they lack; if they kept their state, let them compare it with the training's."""
    conductor = incarnation.conductor
    base = incarnation.stream.iteration
    fault = ""
    try:
        conductor.wait_connected(options.timeout_s)
        own_bytes = sum(incarnation.layout.buckets[bucket].nbytes for bucket in incarnation.own_buckets)
        deadline = time.monotonic() + options.timeout_s + 4 * own_bytes / _SEEDING_BYTES_PER_S
        given: set[int] = set()
        while wanted := conductor.wanted_seeds(
            options.seed_bytes_per_step, lambda b: incarnation.layout.buckets[b].nbytes
        ):
            for shadow, bucket in wanted:
                conductor.seed(shadow, incarnation.copy_bucket(bucket, base))
                given.add(bucket)
            conductor.wait_seeded(max(0.1, deadline - time.monotonic()))
            if time.monotonic() > deadline:
                raise WaitTimeout(f"shadows did not take the first seeds: {wanted}")
        conductor.wait_whole(options.timeout_s + max(0.0, deadline - time.monotonic()))
        for bucket in incarnation.own_buckets:
            if verify and bucket not in given:
                conductor.verify(incarnation.layout.shadow_of(bucket), incarnation.copy_bucket(bucket, base))
    except (LastgoodError, OSError) as error:
        if together is None:
            raise
        fault = str(error)
    if together is not None:
        for number, why in enumerate(together.tell(fault)):
            if why:
                raise CheckpointError(f"rank {number} cannot begin: {why}")
