"""How long `import lastgood` takes, and the help of the command, beside a Python that imports nothing."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from harness import Limit, Report, command_line, interleaved, judge, main

GOALS_S = {"import lastgood": 0.2, "lastgood --help": 1.0}
PROGRAMS = {
    "nothing": ["-c", "pass"],
    "import lastgood": ["-c", "import lastgood"],
    "lastgood --help": ["-m", "lastgood", "--help"],
}


def measure(options: argparse.Namespace, folder: Path) -> Report:
    del folder
    found: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for number, name in interleaved(list(PROGRAMS), options.rounds + 1, options.seed):
        began = time.perf_counter()
        subprocess.run([sys.executable, *PROGRAMS[name]], check=True, stdout=subprocess.DEVNULL, timeout=120)
        if number:  # the first round reads the files
            found[name].append(time.perf_counter() - began)
    report = Report(settings={"python": sys.version.split()[0]}, results={"seconds": found})
    bare = min(found["nothing"])
    for name, goal in GOALS_S.items():
        seconds = min(found[name]) - bare
        report.limits.append(
            Limit(name, "s", seconds, goal, judge(seconds, at_most=goal), "least, without Python's own")
        )
    return report


if __name__ == "__main__":
    main(command_line(__doc__, rounds=10), measure, __file__)
