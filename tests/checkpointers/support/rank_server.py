"""Forks ranks of small trainings, so that torch is imported once. Run as: rank_server.py, told what to do on stdin.

A line of JSON on its standard input, ``{"socket": PATH}``, forks a process that connects there and does what it is
told, one call after another. All end with this process, and this one with the test's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from multiprocessing.connection import Client
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "crash" / "support"))

import torch
import torch._dynamo
from small_training import SmallTraining

from lastgood import PCcheck
from lastgood.checkpointers.pccheck.loss_watch import Judgement
from lastgood.processes import die_with_parent

os.environ["LASTGOOD_JOB_TOKEN"] = "a token of the tests"

WIDTH = 32


class Rank:
    """What a rank can be told."""

    def __init__(self) -> None:
        self.training = None
        self.checkpointer = None
        self.faults = contextlib.ExitStack()

    def attach(self, directory, rank, resume_step=None, init=None, step_bytes=0, keys=None, **knobs):
        torch.set_num_threads(1)
        os.environ.update(keys or {})  # of a bucket
        if init is not None:
            os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
            torch.distributed.init_process_group(
                "gloo", init_method=f"file://{init}", rank=rank, world_size=knobs.pop("ranks")
            )
        else:
            knobs["rank"] = rank
        self.training = SmallTraining(WIDTH, seed=5)
        torch.manual_seed(100 + rank)  # every rank has another state
        self.training.step()  # the optimizer has its moments, so that slots are made at the start
        self.training.plain.update({"step": 0})
        self.checkpointer = PCcheck(directory, interval_steps=0, chunk_bytes=16384, **knobs)
        self.checkpointer.events_kept = None
        state = {name: part for name, part in self.training.state.items() if name != "rng"}
        step = self.checkpointer.attach(resume_step=resume_step, **state)
        self._attached = self.checkpointer._attachment
        return step, self.training.digest() if step else ""

    def use_token(self, token):
        """What LASTGOOD_JOB_TOKEN is from here on."""
        os.environ["LASTGOOD_JOB_TOKEN"] = token

    def save(self, step=None):
        """Train a step and save it; returns its number, its digest, and how long the save took."""
        self.training.step()
        self._attached.progress.step = self.training.step_number
        digest = self.training.digest()
        number = self.training.step_number if step is None else step
        began = time.perf_counter()
        self.checkpointer.save(number)
        return number, digest, time.perf_counter() - began

    def skip_step(self):
        """Train a step and do not save it."""
        self.training.step()
        self._attached.progress.step = self.training.step_number
        return self.training.step_number

    def drain(self, timeout_s=60.0):
        self.checkpointer.drain(timeout_s)

    def events(self):
        return [(event.step, event.outcome.value, event.error or "") for event in self.checkpointer.events]

    def wait_for_event(self, step, outcome, timeout_s=60.0):
        """Wait until the checkpoint of `step` has ended; returns its error."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = [event for event in self.events() if event[0] == step and event[1] != "pending"]
            if found:
                assert found[-1][1] == outcome, found
                return found[-1][2]
            time.sleep(0.01)
        raise AssertionError(f"step {step} did not end in {timeout_s} s: {self.events()}")

    def verdict(self, step, ok, reason=""):
        return self.checkpointer.verdict(step, ok, reason)

    def losses_say(self, step, ok, reason):
        """As the watch of losses would."""
        held = self.checkpointer
        held._judging.follow(held._opened(), held._job, [Judgement(step, ok, reason, False)])

    def is_bad(self, step):
        store = self.checkpointer._store
        return any(info.step == step and store.book().is_bad(info.sequence) for info in store.committed())

    def latest(self):
        return self.checkpointer.latest()

    def committed(self):
        """(incarnation, step) of what is whole here."""
        return [(info.incarnation, info.step) for info in self.checkpointer._store.committed()]

    def everywhere(self):
        return [(info.incarnation, info.step) for info in self.checkpointer._store.everywhere()]

    def lose_patience(self, timeout_s):
        """Use another agreement_timeout_s from here on; a life begins with one that a busy machine keeps."""
        job = self.checkpointer._job
        job._settings = dataclasses.replace(job._settings, agreement_timeout_s=timeout_s)
        job._member._silence_s = timeout_s / 2
        if job._coordinator is not None:
            job._coordinator._silence_s = timeout_s / 2

    def trouble(self):
        return self.checkpointer._job.trouble()

    def hang_disk(self, release):
        """The next checkpoint's data are not flushed until the file `release` is there; its slot is made void first."""
        from fault_tools import ANY, HANG, fault

        self.faults.enter_context(fault("flush", "slot-", HANG, skip=1, release=release, hits=ANY))

    def wait_for_hang(self, timeout_s=60.0):
        """Until the disk has met what `hang_disk` set."""
        from fault_tools import _hits

        deadline = time.monotonic() + timeout_s
        while not _hits():
            assert time.monotonic() < deadline, f"the disk was not flushed in {timeout_s} s"
            time.sleep(0.01)

    def break_disk(self, error, call="write"):
        from fault_tools import ANY, FOR_EVER, fault

        self.faults.enter_context(fault(call, "slot-", error, times=FOR_EVER, hits=ANY))

    def mend_disk(self):
        self.faults.close()

    def remote(self, timeout_s=60.0):
        """What the remote tier has done, once it has nothing more to do."""
        tier = self.checkpointer._beside.tier
        tier.drain(timeout_s)
        facts = tier.facts()
        return facts["sent"], facts["replaced"], facts["failed"], tier._status.last_error

    def lose_remote_patience(self, seconds):
        self.checkpointer._beside.tier._patience_s = seconds

    def hold_remote(self, where, release):
        """From here on uploads wait before `where`, a method of PartUpload, until the file `release` is there."""
        from lastgood.storage.objects.upload import PartUpload

        real = getattr(PartUpload, where)

        def held(upload, *arguments):
            Path(f"{release}.reached").touch()
            deadline = time.monotonic() + 60.0
            while not Path(release).exists():
                assert time.monotonic() < deadline, f"{release} did not come"
                time.sleep(0.01)
            return real(upload, *arguments)

        setattr(PartUpload, where, held)

    def wrong_clock(self, seconds):
        true = time.time
        time.time = lambda: true() + seconds

    def all_reduce(self):
        torch.distributed.all_reduce(torch.zeros(1))

    def close(self):
        self.checkpointer.close()


def serve(path, server):
    die_with_parent(server)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with Client(path, "AF_UNIX") as told:
        told.send(os.getpid())
        rank = Rank()
        while True:
            try:
                name, arguments, options = told.recv()
            except EOFError:
                break
            try:
                told.send((True, getattr(rank, name)(*arguments, **options)))
            except Exception as error:
                told.send((False, f"{type(error).__name__}: {error}"))
    os._exit(0)


def main():
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel takes care of what is left of them
    print("ready", flush=True)
    server = os.getpid()
    for line in sys.stdin:
        if os.fork() == 0:
            try:
                serve(json.loads(line)["socket"], server)
            finally:
                os._exit(1)


if __name__ == "__main__":
    main()
