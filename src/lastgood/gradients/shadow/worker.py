"""The one thread that changes a shadow's values: it applies, puts seeds in their place, compares, and copies."""

from __future__ import annotations

import logging
import os
import time

from lastgood.errors import LastgoodError
from lastgood.gradients.shadow.actions import Apply, Check, Commit, Copy, Work
from lastgood.gradients.shadow.body import ShadowBody
from lastgood.gradients.shadow.memory import ShadowMemory, tensor_bytes
from lastgood.gradients.shadow.spill_store import SpillCopy

__all__ = ["ShadowWorker"]

_log = logging.getLogger("lastgood.shadow")
_TICK_S = 0.2


class ShadowWorker:
    """Does what the state asks for (`next_work`), one bucket at a time, without the body's lock."""

    def __init__(self, body: ShadowBody) -> None:
        self._body = body
        self._copy: SpillCopy | None = None

    def run(self) -> None:
        """Work until the shadow ends."""
        body = self._body
        if body.settings.cpus:
            os.sched_setaffinity(0, body.settings.cpus)
        while True:
            with body.change:
                work = None
                while not body.ending:
                    if not body.paused and not body.readers:
                        work = body.state.next_work()
                        body.flow()
                        if work is not None:
                            break
                    body.change.wait(_TICK_S)
                if work is None:
                    return
                body.working = True
            why = self._do(work)
            with body.change:
                body.working = False
                if why is None:
                    before = body.state.held.applied
                    body.state.done(work)
                    if isinstance(work, Apply):
                        body.counters.applied_iterations += body.state.held.applied - before
                else:
                    _log.error("bucket %d, iteration %d: %s", work.bucket, work.iteration, why)
                    body.state.failed(work, why)
                if isinstance(work, Copy):
                    self._spill_if_whole()
                body.flow()

    def _do(self, work: Work) -> str | None:
        """Do one piece of work; say what failed, if something did."""
        body = self._body
        memory = body.memory
        assert memory is not None
        try:
            if isinstance(work, Apply):
                began = time.perf_counter()
                memory.apply(work.bucket, work.iteration, work.step.rule, frozenset(work.step.absent))
                body.counters.optimizer_s += time.perf_counter() - began
                body.counters.applied_buckets += 1
            elif isinstance(work, Commit):
                memory.commit(work.bucket)
            elif isinstance(work, Check):
                body.counters.checks += 1
                found = memory.value(work.bucket).checksum()
                if found != work.checksum:
                    body.counters.diverged += 1
                    return f"its checksum is {found:08x}, the trainers' is {work.checksum:08x}; it is not their model"
            else:
                self._copy_bucket(memory, work)
        except Exception as error:  # whatever it is, this thread must go on: trainers send the bucket again
            if not isinstance(error, (LastgoodError, RuntimeError, ValueError, MemoryError)):
                _log.exception("bucket %d, iteration %d: unexpected", work.bucket, work.iteration)
            return str(error) or repr(error)
        return None

    def _copy_bucket(self, memory: ShadowMemory, work: Copy) -> None:
        body = self._body
        body.spills()
        with body.change:
            saved = body.state.saved_at(work.iteration)
            if (
                self._copy is None or self._copy.saved != saved
            ):  # another incarnation has an iteration of this number as well
                self._copy = SpillCopy(saved, body.state.spill.keep, sides=body.sides.all_of(work.iteration))
            copy = self._copy
        held = list(memory.value(work.bucket).tensors())
        content = bytearray()
        for entry, tensor in held:
            if entry.nbytes:
                content += tensor_bytes(tensor)
        copy.buckets[work.bucket] = (tuple(entry for entry, _ in held), content)

    def _spill_if_whole(self) -> None:
        body = self._body
        iteration = body.state.spill.all_copied
        copy = self._copy
        if iteration is None or copy is None or copy.saved.iteration != iteration or body.layout is None:
            return
        self._copy = None
        body.spills().write(copy, body.layout, self._spilled)

    def _spilled(self, iteration: int, error: str | None) -> None:
        body = self._body
        with body.change:
            body.counters.spills += error is None
            body.counters.spill_errors += error is not None
            body.state.spill_over(iteration, error)
            body.flow()
