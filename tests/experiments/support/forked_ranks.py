"""Forks ranks of runs from one process that has imported torch, transformers and DeepSpeed, which takes long.

Run as: forked_ranks.py. Reads one JSON object a line, {"order", "world", "port", "logs"}, forks `world` ranks that do
what `lastgood.experiments.multirank.process` does with the order, and prints {"codes": [...]}: their exit codes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from pathlib import Path

os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")

import deepspeed  # noqa: F401
import transformers.models.bloom.modeling_bloom
import transformers.models.opt.modeling_opt  # noqa: F401

import lastgood.experiments.runs.measure
import lastgood.workloads.causal  # noqa: F401
from lastgood.experiments.multirank import process as rank_main
from lastgood.processes import die_with_parent

RANK_LIMIT_S = 300


def fork_rank(rank: int, asked: dict) -> int:
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        log = os.open(Path(asked["logs"]) / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        signal.alarm(RANK_LIMIT_S)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(asked["world"]))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(asked["port"]))
        order = {**asked["order"], "parent": os.getppid()}
        code = rank_main.main([json.dumps(order)])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    die_with_parent()
    for line in sys.stdin:
        asked = json.loads(line)
        children = [fork_rank(rank, asked) for rank in range(asked["world"])]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps({"codes": codes}), flush=True)


if __name__ == "__main__":
    main()
