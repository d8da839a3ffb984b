"""`lastgood plan` with a look at the machine that stands still in its middle, or fails there, without torch.

With the command's words as arguments it is the command; with the number of a process, that one's look at the machine.
Files in the folder that the environment names say how it goes.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lastgood.cli import main
from lastgood.experiments.machine.facts import machine_label
from lastgood.experiments.records.spec import RunSpec
from lastgood.experiments.runs import probe
from lastgood.locks import FileLock

FOLDER = "LASTGOOD_TEST_STAGED_PROBE"
TURN = "turn"
"""The lock that stands for the machine's."""
BEGUN = "begun"
"""Holds the number of the process that looks, once it is in the middle."""
GOES_ON = "goes on"
"""If it is there, the look comes to its end."""
FULL = "full"
"""If it is there, the disk is."""


def look_in_stages(chosen: Sequence[RunSpec], data_dir: Path, scratch: Path) -> probe.Probe:
    """In place of the true one."""
    del data_dir
    folder = Path(os.environ[FOLDER])
    if (folder / FULL).exists():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    (folder / "new").write_text(str(os.getpid()))
    (folder / "new").rename(folder / BEGUN)
    for _ in range(600):
        if (folder / GOES_ON).exists():
            break
        time.sleep(0.1)
    return probe.Probe(
        machine=machine_label(),
        scratch=str(scratch.absolute()),
        device=chosen[0].device,
        threads=chosen[0].threads,
        options={spec.workload: spec.workload_options for spec in chosen},
        build_s={spec.workload: 1.0 for spec in chosen},
        step_s={spec.workload: 0.5 for spec in chosen},
        persist_bytes_per_s=1e9,
        disturbed=False,
    )


if __name__ == "__main__":
    probe.machine_lock = lambda: FileLock(Path(os.environ[FOLDER], TURN), "the test's turn")
    probe._look = look_in_stages
    if sys.argv[1] == "plan":
        probe.__name__ = "tests.experiments.support.staged_probe"
        sys.argv[0] = "lastgood"
        main()
    else:
        probe.main()
