"""What a process of a run of remote checkpoints does: it trains and sends, or comes back.

``python -m lastgood.experiments.remote_runs.rank ORDER`` is one rank; `execute` has set RANK, WORLD_SIZE, MASTER_ADDR
and MASTER_PORT.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import async_save

from lastgood.checkpointers.pccheck.options import PCcheckOptions
from lastgood.checkpointers.pccheck.system import PCcheck
from lastgood.checkpointers.remote.status import read_status
from lastgood.errors import LastgoodError, WaitTimeout
from lastgood.experiments.ceilings.bucket import bucket_burst
from lastgood.experiments.dcp.places import BucketPlace
from lastgood.experiments.dcp.storages import storage_named
from lastgood.experiments.records.remote import WAYS, ComingBack, RemoteSpec, SentCheckpoint, TrainingBlock, Way
from lastgood.experiments.remote_runs.models import Trained, changed_bytes, make_model, take_step
from lastgood.experiments.remote_runs.order import RemoteOrder, RemoteResult, Task
from lastgood.files import PRIVATE, write_result
from lastgood.processes import die_with_parent
from lastgood.state import state_digest
from lastgood.storage.objects.format import SEGMENT_BYTES
from lastgood.storage.objects.upload import UPLOAD_THREADS
from lastgood.text import parse_model
from lastgood.units import MIB

__all__ = ["main", "run_task"]

LIMIT_S: Final = 600.0
"""For one wait: of ranks for each other, and for a checkpoint to be sent."""
_LEFT_STEPS: Final = 3
"""Of the job that others come back to."""
_TELLING: Final = 2
"""Checkpoints after which it is known what does not change."""


Report = Callable[[str], None]


def run_task(order: RemoteOrder, report: Report) -> RemoteResult:
    """Do what the order says, together with the other ranks if there are several. Raises LastgoodError."""
    torch.set_num_threads(order.spec.threads)
    with _joined():
        return _TASKS[order.task](order, report)


@contextmanager
def _joined() -> Iterator[None]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_S))
    try:
        yield
    finally:
        dist.destroy_process_group()


def _remote(order: RemoteOrder, url: str) -> dict[str, Any]:
    access = order.access
    return {"remote": url, "remote_region": access.region, "remote_endpoint_url": access.endpoint_url}


# -- training ----------------------------------------------------------------------------------------------------------


def _train(order: RemoteOrder, report: Report) -> RemoteResult:
    """All ways in turn, in another order each round, so that a drift of the machine favours none."""
    spec = order.spec
    state_bytes = _state_bytes(spec)
    raw, blocks = [], []
    for number in range(spec.rounds):
        raw.append(_burst(order, state_bytes))
        ways = [way for way in WAYS["training"] if way != "async-save" or spec.dcp_storage is not None]
        random.Random(f"{spec.seed}/{spec.repetition}/{number}").shuffle(ways)
        for way in ways:
            report(f"round {number + 1} of {spec.rounds}: {way}")
            blocks.append(_block(order, way, f"{way}-{number}"))
    return RemoteResult(state_bytes=state_bytes, raw=raw, training=blocks)


def _block(order: RemoteOrder, way: Way, name: str) -> TrainingBlock:
    spec, url = order.spec, f"{order.url}/{name}"
    model, optimizer = make_model("all", spec.width, spec.layers, spec.seed)
    saver: _Saver
    if way == "async-save":
        saver = _Dcp(order, url, model, optimizer)
    elif way == "alone":
        saver = _Saver()
    else:
        remote = {} if way == "tier-off" else {**_remote(order, url), "remote_every": spec.remote_every}
        folder = Path(order.folder) / name
        ckpt = PCcheck(folder, PCcheckOptions.model_validate(remote), interval_steps=spec.interval_steps)
        saver = _PCcheck(ckpt, model, optimizer)
    done_s = [time.perf_counter()]
    lags: list[tuple[int, float]] = []

    def steps(count: int) -> None:
        for _ in range(count):
            take_step(model, optimizer, spec.batch)
            saver.step()
            done_s.append(time.perf_counter())
            newest = saver.newest()
            if newest is not None:
                lags.append((len(done_s) - 1 - newest, done_s[-1] - done_s[newest]))

    steps(2 * spec.interval_steps)  # slots are made
    saver.settle()
    sent_before = saver.counts()[0]
    lags.clear()
    began = time.perf_counter()
    steps(spec.steps)
    elapsed = time.perf_counter() - began
    saver.finish()
    drain = time.perf_counter() - began - elapsed
    sent, failed = saver.counts()
    return TrainingBlock(
        way=way,
        steps_per_s=spec.steps / elapsed,
        drain_s=drain,
        durable_steps_per_s=spec.steps / (elapsed + drain),
        lag_steps=[lag for lag, _ in lags],
        lag_s=[lag for _, lag in lags],
        sent=sent - sent_before,
        failed=failed,
    )


class _Saver:
    """How a training is saved; this one saves nothing."""

    def step(self) -> None:
        """After each step."""

    def newest(self) -> int | None:
        """Step of the newest checkpoint in S3, 0 before the first; None if none goes there."""
        return None

    def settle(self) -> None:
        """Wait until nothing is in progress on the disk."""

    def finish(self) -> None:
        """Wait until all that is due is where it goes, and end."""

    def counts(self) -> tuple[int, int]:
        """Checkpoints that came to S3, and that failed, so far."""
        return 0, 0


class _PCcheck(_Saver):
    def __init__(self, ckpt: PCcheck, model: Any, optimizer: Any) -> None:
        self._ckpt = ckpt
        ckpt.attach(model=model, optimizer=optimizer)

    def step(self) -> None:
        self._ckpt.step()

    def newest(self) -> int | None:
        facts = self._ckpt.storage_facts().get("remote")
        return None if facts is None else facts["step"] or 0

    def settle(self) -> None:
        self._ckpt.drain(LIMIT_S)

    def finish(self) -> None:
        self._ckpt.drain(LIMIT_S)
        self._ckpt.close()  # what is due in S3 is sent first

    def counts(self) -> tuple[int, int]:
        status = read_status(self._ckpt.directory)
        return (0, 0) if status is None else (status.sent, status.failed)


class _Dcp(_Saver):
    """torch's async_save into the bucket, as often as PCcheck's tier sends; one at a time, as torch asks for."""

    def __init__(self, order: RemoteOrder, url: str, model: Any, optimizer: Any) -> None:
        assert order.spec.dcp_storage is not None
        self._storage = storage_named(order.spec.dcp_storage, "s3")
        self._place = BucketPlace(url, order.access)
        self._every = order.spec.interval_steps * order.spec.remote_every
        self._model, self._optimizer = model, optimizer
        self._steps = self._newest = self._sent = 0
        self._saving: tuple[int, Any] | None = None

    def step(self) -> None:
        self._steps += 1
        self._look()
        if self._steps % self._every:
            return
        self._wait()
        writer = self._storage.writer(self._place.below(f"step-{self._steps}"), self._storage.resolved({}, "s3"))
        state = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
        self._saving = (self._steps, async_save(state, storage_writer=writer))

    def newest(self) -> int | None:
        self._look()
        return self._newest

    def finish(self) -> None:
        self._wait()

    def counts(self) -> tuple[int, int]:
        return self._sent, 0

    def _look(self) -> None:
        if self._saving is not None and self._saving[1].done():
            self._wait()

    def _wait(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            saving[1].result(timeout=LIMIT_S)
            self._newest = saving[0]
            self._sent += 1


# -- bytes -------------------------------------------------------------------------------------------------------------


def _bytes(order: RemoteOrder, report: Report) -> RemoteResult:
    spec, found, largest = order.spec, [], 0
    for way in WAYS["bytes"]:
        report(f"bytes: {way}")
        model, optimizer = make_model(cast("Trained", way), spec.width, spec.layers, spec.seed)
        options = PCcheckOptions.model_validate({**_remote(order, f"{order.url}/{way}"), "remote_every": 1})
        ckpt = PCcheck(Path(order.folder) / way, options, interval_steps=1)
        ckpt.attach(model=model, optimizer=optimizer)
        before = (0, 0)
        for number in range(1, _TELLING + spec.rounds + 1):
            take_step(model, optimizer, spec.batch)
            ckpt.step()
            ckpt.drain(LIMIT_S)
            facts = _sent(ckpt, number)
            now = (facts["sent_bytes"], facts["kept_bytes"])
            sent, kept = (one - other for one, other in zip(now, before, strict=True))
            before = now
            found.append(
                SentCheckpoint(
                    way=way,
                    number=number,
                    state_bytes=sent + kept,
                    changed_bytes=changed_bytes(model),
                    sent_bytes=sent,
                )
            )
            largest = max(largest, sent + kept)
        ckpt.close()
    return RemoteResult(state_bytes=largest, checkpoints=found)


def _sent(ckpt: PCcheck, number: int) -> dict[str, Any]:
    """What the tier says once so many checkpoints have come to S3. Raises WaitTimeout."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        facts: dict[str, Any] = ckpt.storage_facts()["remote"]
        if facts["failed"] or facts["replaced"]:
            raise LastgoodError(f"{facts['place']}: a checkpoint was not sent; its log says why")
        if facts["sent"] >= number:
            return facts
        if time.monotonic() > deadline:
            raise WaitTimeout(f"waited {LIMIT_S:.0f} s for checkpoint {number} to come to {facts['place']}")
        time.sleep(0.01)


# -- coming back -------------------------------------------------------------------------------------------------------


def _leave(order: RemoteOrder, report: Report) -> RemoteResult:
    """Train some steps, and leave a checkpoint of the last one on the disk and in S3."""
    spec = order.spec
    model, optimizer = make_model("all", spec.width, spec.layers, spec.seed)
    options: dict[str, Any] = {**_remote(order, order.url), "remote_every": _LEFT_STEPS, "replicated": _replicated()}
    ckpt = PCcheck(Path(order.folder), PCcheckOptions.model_validate(options), interval_steps=1)
    ckpt.attach(model=model, optimizer=optimizer)
    for _ in range(_LEFT_STEPS):
        take_step(model, optimizer, spec.batch)
        ckpt.step()
        ckpt.drain(LIMIT_S)
    ckpt.close()
    state_bytes = _state_bytes(spec)
    raw = [_burst(order, state_bytes) for _ in range(spec.rounds)] if dist.get_rank() == 0 else []
    dist.barrier()
    report("the job is left")
    return RemoteResult(state_bytes=state_bytes, digest=_digest(model, optimizer), raw=raw)


def _return(order: RemoteOrder, report: Report) -> RemoteResult:
    """Come back in a fresh process, and take a step."""
    spec, way = order.spec, order.way
    assert way is not None
    model, optimizer = make_model("all", spec.width, spec.layers, spec.seed + 1)
    access = order.access
    where: dict[str, Any]
    if way == "other-ranks":
        where = {
            "resume_from": order.url,
            "remote_region": access.region,
            "remote_endpoint_url": access.endpoint_url,
        }
    else:
        where = {**_remote(order, order.url), "remote_every": _LEFT_STEPS}
    options = PCcheckOptions.model_validate({**where, "replicated": _replicated()})
    ckpt = PCcheck(Path(order.folder), options, interval_steps=1_000_000)
    dist.barrier()
    began = time.perf_counter()
    step = ckpt.attach(model=model, optimizer=optimizer)
    attach_s = time.perf_counter() - began
    equal = _digest(model, optimizer) == order.digest
    dist.barrier()
    began = time.perf_counter()
    take_step(model, optimizer, spec.batch)
    ckpt.step()
    step_s = time.perf_counter() - began
    ckpt.close()
    report(f"{way}: step {step} after {attach_s:.3f} s")
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (attach_s, step_s, step, equal))
    back = ComingBack(
        way=way,
        ranks=len(every),
        attach_s=max(one[0] for one in every),
        step_s=max(one[1] for one in every),
        restored_step=min(one[2] for one in every),
        equal=all(one[3] for one in every),
    )
    return RemoteResult(returns=[back])


def _replicated() -> str:
    """All ranks hold the same, so each writes a part of it."""
    return "ddp" if dist.get_world_size() > 1 else "none"


def _digest(model: Any, optimizer: Any) -> str:
    return state_digest({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def _state_bytes(spec: RemoteSpec) -> int:
    return changed_bytes(make_model("all", spec.width, spec.layers, spec.seed)[0])


def _burst(order: RemoteOrder, nbytes: int) -> tuple[float, float]:
    """Plain puts and gets of as many bytes, in objects like the tier's segments."""
    size = max(MIB, min(SEGMENT_BYTES, nbytes // UPLOAD_THREADS))
    return bucket_burst(f"{order.url}/raw", order.access.options(), nbytes, size, UPLOAD_THREADS)


_TASKS: Final[dict[Task, Callable[[RemoteOrder, Report], RemoteResult]]] = {
    "training": _train,
    "bytes": _bytes,
    "leave": _leave,
    "return": _return,
}


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    """One rank's process. 0, or an error's exit code with its message on standard error."""
    (text,) = sys.argv[1:] if arguments is None else arguments
    order = parse_model(RemoteOrder, text, "not an order for a rank", most_bytes=MIB)
    die_with_parent(order.parent)
    try:
        result = run_task(order, _say)
        if int(os.environ["RANK"]) == 0:
            write_result(Path(order.result), result.model_dump_json().encode(), mode=PRIVATE)
    except LastgoodError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
