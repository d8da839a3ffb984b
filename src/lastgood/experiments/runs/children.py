"""Forked children: how they are started, and how their reports are received. runs/execute.py says why they fork."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from lastgood.errors import LastgoodError, WaitTimeout
from lastgood.processes import die_with_parent
from lastgood.workloads.registry import workload_module

__all__ = ["SILENCE_S", "call_in_child", "hear_child", "import_before_fork", "start_child"]

Report = Callable[[str], None]

SILENCE_S = 900.0
"""A child that reports nothing for this long is ended."""
_END_S = 60.0


def import_before_fork(workload: str) -> None:
    """Import what children of a run of `workload` need.

    numpy's OpenBLAS would start threads at import; a fork must not lose them.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    importlib.import_module("torch")
    importlib.import_module("torch._dynamo")  # every optimizer imports it when it is made, a second for each child
    importlib.import_module(workload_module(workload))
    if threading.active_count() > 1:
        names = ", ".join(thread.name for thread in threading.enumerate())
        raise LastgoodError(f"cannot fork: threads are running already ({names}); start runs through `lastgood run`")


def call_in_child(name: str, function: Callable[..., Any], arguments: tuple[Any, ...], report: Report) -> Any:
    """Call `function(*arguments, report)` in a forked child and return its result.

    Raises LastgoodError with the child's own message if it fails, its exit code if it dies, or WaitTimeout if it falls
    silent.
    """
    process, ours = start_child(name, function, arguments)
    try:
        return _listen(name, ours, process, report)
    finally:
        if process.is_alive():
            process.kill()
        process.join(_END_S)
        ours.close()


def start_child(name: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, Connection]:
    """Fork a child that calls `function(*arguments, report)`; returns the process and what it says.

    It says ``("stage", text)`` for each report, and then ``("result", value)`` or ``("error", text)``.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, os.getpid(), function, arguments), name=name)
    sys.stdout.flush()
    sys.stderr.flush()
    process.start()
    theirs.close()
    return process, ours


def hear_child(name: str, process: Any, pipe: Connection, stage: str) -> tuple[str, Any]:
    """The next thing that a child of `start_child` says. Raises LastgoodError with its exit code if it died."""
    try:
        kind, content = pipe.recv()
    except (EOFError, OSError):  # OSError: it died while sending a message
        process.join(_END_S)
        raise LastgoodError(f"{name} died while {stage}, exit code {process.exitcode}") from None
    return kind, content


def _listen(name: str, pipe: Connection, process: Any, report: Report) -> Any:
    stage = "starting"
    while True:
        if not pipe.poll(SILENCE_S):
            raise WaitTimeout(f"{name} said nothing for {SILENCE_S:.0f} s while {stage}; ended it")
        kind, content = hear_child(name, process, pipe, stage)
        if kind == "stage":
            stage = content
            report(content)
        elif kind == "error":
            raise LastgoodError(f"{name} failed while {stage}: {content}")
        else:
            return content


def _child(pipe: Connection, parent: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    die_with_parent(parent)
    try:
        result = function(*arguments, lambda stage: pipe.send(("stage", stage)))
        pipe.send(("result", result))
        # No tidy end: nothing that was promised to be durable may depend on one.
        os.kill(os.getpid(), signal.SIGKILL)
    except LastgoodError as error:
        pipe.send(("error", str(error)))
    except BaseException as error:  # whatever it is, the parent must hear of it, and the log must show where
        traceback.print_exc()
        pipe.send(("error", f"{type(error).__name__}: {error}"))
