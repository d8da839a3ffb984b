"""Systems that do not keep what they promise, run as `lastgood run` does it.

Called as: lying_systems.py NAME SPEC OUT DATA SCRATCH
"""

from __future__ import annotations

import copy
import sys
import time
from pathlib import Path

from lastgood.checkpointers import known
from lastgood.checkpointers.baselines.sync import SyncCheckpointer
from lastgood.checkpointers.events import Outcome
from lastgood.checkpointers.torch_files.files import plain_tree
from lastgood.experiments.records.spec import RunSpec
from lastgood.experiments.runs.execute import execute
from lastgood.experiments.runs.logs import logs_beside


class Stale(SyncCheckpointer):
    """Saves the first state again and again, under the current step's name."""

    name = "stale"
    first = None

    def save(self, step):
        self.first = self.first or copy.deepcopy(plain_tree(dict(self.state)))
        event = self._request(step)
        event.bytes_written = self._files.write(step, self.first)
        event.finished_s = time.perf_counter()
        event.outcome = Outcome.DURABLE


class Late(SyncCheckpointer):
    """Says durable at once, and writes when it is closed."""

    name = "late"

    def save(self, step):
        event = self._request(step)
        event.finished_s = time.perf_counter()
        event.outcome = Outcome.DURABLE

    def latest(self):
        return self.events[-1].step if self.events else super().latest()

    def close(self):
        if self._state is not None and self.events:
            self._files.write(self.events[-1].step, plain_tree(dict(self.state)))
        super().close()


class Unfinished(SyncCheckpointer):
    """Returns from drain() with a checkpoint still pending."""

    name = "unfinished"

    def save(self, step):
        self._request(step)


if __name__ == "__main__":
    name, spec, out, data_dir, scratch = sys.argv[1:]
    kinds = {kind.name: kind for kind in (Stale, Late, Unfinished)}
    known.BUILT_IN[name] = f"{__name__}:{kinds[name].__name__}"
    logs = logs_beside(Path(out))
    record = execute(RunSpec.model_validate_json(spec), Path(data_dir), Path(scratch), logs, lambda stage: None)
    record.write(Path(out))
