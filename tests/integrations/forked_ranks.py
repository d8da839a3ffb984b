"""Ranks that a process with its libraries imported forks for one work after another; `rank_asker` asks it."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from lastgood.processes import die_with_parent

RANK_LIMIT_S = 200
SURVIVORS_S = 2.5
"""How long ranks live on after others were killed."""


def fork_rank(one_rank, rank, asked, folder):
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        die_with_parent(parent)
        log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        signal.alarm(RANK_LIMIT_S)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(asked["world"]))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(asked["port"]))
        answer = folder / f"rank-{rank}.json"
        for found in one_rank(rank, asked):  # what it yields last is the answer, kept also when it dies afterwards
            temporary = answer.with_suffix(".tmp")
            temporary.write_text(json.dumps(found))
            temporary.rename(answer)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def serve(one_rank):
    """Read one JSON object a line, {"work", "world", "port", "folder", ...}, and answer with codes and answers.

    With "kill_after_s", the ranks in "kill" are killed so long after the first of them has first answered, and
    the others a little later.
    """
    die_with_parent()
    for line in sys.stdin:
        asked = json.loads(line)
        folder = Path(asked["folder"])
        children = [fork_rank(one_rank, rank, asked, folder) for rank in range(asked["world"])]
        if "kill_after_s" in asked:
            deadline = time.monotonic() + RANK_LIMIT_S
            while not (folder / f"rank-{asked['kill'][0]}.json").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(asked["kill_after_s"])
            for rank in asked["kill"]:
                os.kill(children[rank], signal.SIGKILL)
            time.sleep(SURVIVORS_S)
            for rank in set(range(asked["world"])) - set(asked["kill"]):
                os.kill(children[rank], signal.SIGKILL)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        files = [folder / f"rank-{rank}.json" for rank in range(asked["world"])]
        answers = [json.loads(file.read_text()) if file.exists() else None for file in files]
        print(json.dumps({"codes": codes, "answers": answers}), flush=True)
