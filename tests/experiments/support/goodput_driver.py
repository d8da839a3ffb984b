"""Several goodput runs in one process, which imports torch once; systems that break their promise are registered too.

Called as: goodput_driver.py JOBS DATA SCRATCH, with JOBS a JSON object of output files to specs. What a run that fails
says goes to its output file with .error behind its name.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from pathlib import Path

import lying_systems

from lastgood.checkpointers import known
from lastgood.checkpointers.baselines.sync import SyncCheckpointer
from lastgood.checkpointers.events import Outcome
from lastgood.checkpointers.torch_files.files import plain_tree
from lastgood.errors import LastgoodError
from lastgood.experiments.goodput.execute import execute_goodput
from lastgood.experiments.records.goodput import GoodputSpec
from lastgood.experiments.runs.logs import logs_beside


class Rarely(SyncCheckpointer):
    """Honest, but saves twice in an incarnation, which comes well beyond its last checkpoint: a later loss is known."""

    name = "rarely"

    def tree(self):
        return plain_tree(dict(self.state))

    def save(self, step):
        event = self._request(step)
        event.outcome = Outcome.SKIPPED
        if len(self.events) <= 2:
            event.bytes_written = self._files.write(step, self.tree())
            event.outcome = Outcome.DURABLE
        event.finished_s = time.perf_counter()


class OldWeights(Rarely):
    """Saves everything as it is, but for the model, which stays the first one."""

    name = "oldweights"
    first = None

    def tree(self):
        tree = super().tree()
        self.first = self.first or copy.deepcopy(tree["model"])
        return {**tree, "model": self.first}


class Forgets(SyncCheckpointer):
    """Restores an older checkpoint than the newest that it called durable."""

    name = "forgets"

    def restore(self, state, step=None):
        return super().restore(state, self._files.steps()[-1])


SYSTEMS = {kind.name: kind for kind in (lying_systems.Stale, lying_systems.Late, Rarely, OldWeights, Forgets)}

if __name__ == "__main__":
    jobs, data_dir, scratch = sys.argv[1:]
    for name, kind in SYSTEMS.items():
        known.BUILT_IN[name] = f"{kind.__module__}:{kind.__name__}"
    for out, spec in json.loads(jobs).items():
        try:
            chosen = GoodputSpec.model_validate(spec)
            logs = logs_beside(Path(out))
            execute_goodput(chosen, Path(data_dir), Path(scratch), logs, lambda stage: None).write(Path(out))
        except LastgoodError as error:
            Path(f"{out}.error").write_text(str(error))
