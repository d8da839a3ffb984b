"""The one thread that changes a shadow's values: it applies, puts seeds in their place, compares, and copies."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING

from lastgood.errors import LastgoodError
from lastgood.gradients.shadow.actions import Apply, Check, Commit, Copy, Work
from lastgood.gradients.shadow.memory import ShadowMemory, tensor_bytes
from lastgood.gradients.shadow.spill_store import SpillCopy

if TYPE_CHECKING:
    from lastgood.gradients.shadow.core import ShadowCore

__all__ = ["ShadowWorker"]

_log = logging.getLogger("lastgood.shadow")
_TICK_S = 0.2


class ShadowWorker:
    """Does what the state asks for (`next_work`), one bucket at a time, without the core's lock."""

    def __init__(self, core: ShadowCore) -> None:
        self._core = core
        self._copy: SpillCopy | None = None

    def run(self) -> None:
        """Work until the core ends."""
        core = self._core
        if core.settings.cpus:
            os.sched_setaffinity(0, core.settings.cpus)
        while True:
            with core.change:
                work = None
                while not core.ending:
                    if not core.paused and not core.readers:
                        work = core.state.next_work()
                        core.flow()
                        if work is not None:
                            break
                    core.change.wait(_TICK_S)
                if work is None:
                    return
                core.working = True
            why = self._do(work)
            with core.change:
                core.working = False
                if why is None:
                    before = core.state.applied
                    core.state.done(work)
                    if isinstance(work, Apply):
                        core.counters.applied_iterations += core.state.applied - before
                else:
                    _log.error("bucket %d, iteration %d: %s", work.bucket, work.iteration, why)
                    core.state.failed(work, why)
                if isinstance(work, Copy):
                    self._spill_if_whole()
                core.flow()

    def _do(self, work: Work) -> str | None:
        """Do one piece of work; say what failed, if something did."""
        core = self._core
        memory = core.memory
        assert memory is not None
        try:
            if isinstance(work, Apply):
                began = time.perf_counter()
                memory.apply(work.bucket, work.iteration, work.step.rule, frozenset(work.step.absent))
                core.counters.optimizer_s += time.perf_counter() - began
                core.counters.applied_buckets += 1
            elif isinstance(work, Commit):
                memory.commit(work.bucket)
            elif isinstance(work, Check):
                core.counters.checks += 1
                found = memory.checksum(work.bucket)
                if found != work.checksum:
                    core.counters.diverged += 1
                    return f"its checksum is {found:08x}, the trainers' is {work.checksum:08x}; it is not their model"
            else:
                self._copy_bucket(memory, work)
        except Exception as error:  # whatever it is, this thread must go on: trainers send the bucket anew
            if not isinstance(error, (LastgoodError, RuntimeError, ValueError, MemoryError)):
                _log.exception("bucket %d, iteration %d: unexpected", work.bucket, work.iteration)
            return str(error) or repr(error)
        return None

    def _copy_bucket(self, memory: ShadowMemory, work: Copy) -> None:
        core = self._core
        core.spills()
        with core.change:
            saved = core.state.saved_at(work.iteration)
            if self._copy is None or self._copy.saved != saved:  # another life has an iteration of this number as well
                self._copy = SpillCopy(saved, core.state.spill_keeps, sides=core.sides.all_of(work.iteration))
            copy = self._copy
        held = list(memory.value(work.bucket).tensors())
        content = bytearray()
        for entry, tensor in held:
            if entry.nbytes:
                content += tensor_bytes(tensor)
        copy.buckets[work.bucket] = (tuple(entry for entry, _ in held), content)

    def _spill_if_whole(self) -> None:
        core = self._core
        iteration = core.state.spill_copied
        copy = self._copy
        if iteration is None or copy is None or copy.saved.iteration != iteration or core.layout is None:
            return
        self._copy = None
        core.spills().write(copy, core.layout, self._spilled)

    def _spilled(self, iteration: int, error: str | None) -> None:
        core = self._core
        with core.change:
            core.counters.spills += error is None
            core.counters.spill_errors += error is not None
            core.state.spill_over(iteration, error)
            core.flow()
