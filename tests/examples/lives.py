"""Runs examples again and again in forks of a process that has their libraries: `python lives.py EXAMPLE...`.

Reads a JSON object a line: {"example", "directory", "steps", "told", "log", "signal", "at", "after_s"}. `example` is
the folder's name below examples/. The fork writes each step's loss to the file `told`, and sends itself the signal
`after_s` after step `at` (or its first one, if it began behind that), whatever it is doing then.
Answers with its exit code, and a digest of what its training ended with (null if that was killed).
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from lastgood.processes import die_with_parent
from lastgood.state import state_digest

LIMIT_S = 120
PACE_S = 0.01
"""A step is no shorter, so that signals come in the middle of steps, and of saves."""


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{path.parent.name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def live(example: ModuleType, asked: dict[str, Any]) -> str:
    # A training with a second thread would have OpenMP begun before the next fork; one is enough for these.
    torch.set_num_threads(1)
    due = asked.get("signal")

    def told(step: int, loss: float) -> None:
        with Path(asked["told"]).open("a") as file:
            file.write(f"{step} {float(loss).hex()}\n")
        nonlocal due
        if due and step >= asked["at"]:
            timer = threading.Timer(asked["after_s"], os.kill, (os.getpid(), due))
            timer.daemon = True
            timer.start()
            due = None
        time.sleep(PACE_S)

    arguments = ["--directory", asked["directory"], "--steps", str(asked["steps"])]
    return state_digest(example.main(arguments, told))


def fork(example: ModuleType, asked: dict[str, Any]) -> dict[str, Any]:
    parent, answer = os.getpid(), Path(asked["log"]).with_suffix(".json")
    child = os.fork()
    if not child:
        code = 1
        try:
            die_with_parent(parent)
            os.chdir(Path(asked["log"]).parent)
            log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            signal.alarm(LIMIT_S)
            answer.write_text(json.dumps({"digest": live(example, asked)}))
            code = 0
        except SystemExit as end:  # by SIGTERM; what the interpreter does at its end is done here
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            atexit._run_exitfuncs()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    digest = json.loads(answer.read_text())["digest"] if answer.exists() else None
    return {"code": code, "digest": digest}


def main() -> None:
    die_with_parent()
    examples = {path.parent.name: loaded(path) for path in map(Path, sys.argv[1:])}
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print("answer " + json.dumps(fork(examples[asked["example"]], asked)), flush=True)


if __name__ == "__main__":
    main()
