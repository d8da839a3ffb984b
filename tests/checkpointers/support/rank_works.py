"""How a script of `RankPool` is spoken to: one JSON object a line, answered by one line.

An object holds ``work`` (the name of one of the script's functions), ``rank``, ``world``, ``meeting`` (a file by which
the ranks meet) and what the function takes. The answer is ``{"ok": ...}`` or ``{"error": kind and text}``.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lastgood.processes import die_with_parent, keep_stdout

WAIT_S = 120.0


def answer_works(works: Mapping[str, Callable[..., Any]], **environment: str) -> None:
    """Take the part of any rank of any world until standard input ends, with these variables in the environment."""
    die_with_parent()
    keep_stdout()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", **environment)
    for line in sys.stdin:
        asked = json.loads(line)
        work, meeting = works[asked.pop("work")], Path(asked.pop("meeting"))
        cuda = asked.get("device", "cpu") != "cpu"
        if cuda:
            torch.cuda.set_device(asked["rank"])
        try:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if cuda else "gloo",
                init_method=f"file://{meeting}",
                rank=asked["rank"],
                world_size=asked["world"],
                timeout=datetime.timedelta(seconds=WAIT_S),
            )
            answer = {"ok": work(**asked)}
            dist.barrier()
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        print(json.dumps(answer), flush=True)
