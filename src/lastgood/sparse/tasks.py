"""A few threads that run tasks, those of the earliest iteration and layer first, and waits that end."""

from __future__ import annotations

import heapq
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future, wait
from typing import Any, TypeVar

from lastgood.errors import CheckpointError, WaitTimeout
from lastgood.sparse.schedule import Task

__all__ = ["Tasks", "results"]

Result = TypeVar("Result")

_CLOSE_S = 10.0


class Tasks:
    """Runs callables in `threads` threads, the smallest task first. They are daemons, and end with `close`."""

    def __init__(self, threads: int, name: str = "sparse") -> None:
        self._queue: list[tuple[Task, int, Callable[[], Any], Future[Any]]] = []
        self._changed = threading.Condition()
        self._number = 0
        self._closed = False
        self._arriving: queue.SimpleQueue[_Arriving | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True) for number in range(threads)
        ]
        self._name = name
        self._arrivals: threading.Thread | None = None
        """Waits for what works need, so that the others wait for nothing."""
        for thread in self._threads:
            thread.start()

    def submit(
        self, task: Task, work: Callable[[], Result], arrives: Callable[[], object] | None = None
    ) -> Future[Result]:
        """Run `work` when its turn comes; what it raises is the future's. Raises CheckpointError after `close`.

        `arrives` returns when what it needs is there, which comes in the order of these calls: no thread is kept from
        other tasks until then.
        """
        future: Future[Result] = Future()
        with self._changed:
            if self._closed:
                raise CheckpointError("the engine is closed")
            if arrives is None:
                self._push(task, work, future)
                return future
            if self._arrivals is None:
                self._arrivals = threading.Thread(target=self._wait, name=f"{self._name}-arrivals", daemon=True)
                self._threads.append(self._arrivals)
                self._arrivals.start()
            self._arriving.put((task, work, future, arrives))
        return future

    def _push(self, task: Task, work: Callable[[], Any], future: Future[Any]) -> None:
        self._number += 1
        heapq.heappush(self._queue, (task, self._number, work, future))
        self._changed.notify()

    def _wait(self) -> None:
        while (item := self._arriving.get()) is not None:
            self._pass_on(*item)
            del item  # as in `_run`

    def _pass_on(self, task: Task, work: Callable[[], Any], future: Future[Any], arrives: Callable[[], object]) -> None:
        try:
            arrives()
        except BaseException as error:  # as in `_run`
            future.set_exception(error)
            return
        with self._changed:
            if not self._closed:
                self._push(task, work, future)
                return
        _cancel(future)

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Cancel what has not begun, and wait for what has, for a bounded time. Safe to call twice."""
        with self._changed:
            self._closed = True
            waiting, self._queue = self._queue, []
            self._changed.notify_all()
        for _, _, _, future in waiting:
            _cancel(future)
        self._arriving.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    if self._closed:
                        return
                    self._changed.wait()
                _, _, work, future = heapq.heappop(self._queue)
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = work()
            except BaseException as error:  # whatever it is, whoever waits must hear of it
                future.set_exception(error)
            else:
                future.set_result(result)
            del work, future  # they hold a gradient, which an idle thread must not keep


_Arriving = tuple[Task, Callable[[], Any], Future[Any], Callable[[], object]]


def _cancel(future: Future[Any]) -> None:
    future.cancel()
    future.set_running_or_notify_cancel()  # or nobody who waits would hear of it


def results(futures: Iterable[Future[Result]], timeout_s: float, what: str) -> list[Result]:
    """What all of them come to, in their order; the first that fails ends the wait.

    Raises that one's error, CheckpointError if it was cancelled, and WaitTimeout, naming `what`, after `timeout_s`.
    """
    wanted = list(futures)
    done, late = wait(wanted, timeout_s, "FIRST_EXCEPTION")
    for future in wanted:
        if future in done:
            try:
                future.result()
            except CancelledError:
                raise CheckpointError(f"{what}: the engine was closed") from None
    if late:
        raise WaitTimeout(f"waited {timeout_s:g} s for {what}: {len(late)} of {len(wanted)} are not finished")
    return [future.result() for future in wanted]
