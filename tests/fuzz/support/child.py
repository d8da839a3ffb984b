"""A process that reads hostile inputs, one after another, and tells what became of them.

``python -m tests.fuzz.support.child``

With no arguments it takes orders, a line of JSON each, on standard input (`Reader.answer`). With
``NAME SEED [COUNT]`` it reads those inputs and shows the whole traceback of what goes wrong.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import logging
import mmap
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import zlib
from pathlib import Path
from typing import Any

from lastgood.errors import LastgoodError
from tests.fuzz.support.registry import DECODERS, Decoder

MODULES = [
    "text_files",
    "messages",
    "checkpoints",
    "object_documents",
    "captures",
    "mirrored",
    "roce",
    "sparse",
    "broken",
]
MOST_CPU_S = 10.0
"""Of one input. Sound ones take a few milliseconds."""
SLACK_BYTES = 64 << 20
FACTOR = 4
MOST_FAULTS = 5
SANITIZED = "LASTGOOD_SANITIZED" in os.environ
"""Memory is not measured then: the sanitizers keep what was freed, and have shadows of everything."""


class TooLong(BaseException):
    """One input took more CPU time than it may."""


def load_decoders() -> None:
    """Register them all."""
    for name in MODULES:
        importlib.import_module(f"tests.fuzz.support.{name}")


def outcome(decoder: Decoder, samples: list[Any], seed: int, folder: Path, *, sound: bool = False) -> tuple[bool, int]:
    """Read the input of `seed`, or a sound sample. Whether it was taken, and its bytes.

    Raises whatever is no LastgoodError, and MemoryError where reading took too much.
    """
    if sound:
        thing = samples[seed]
    else:
        rng = random.Random(seed * 1_000_003 + zlib.crc32(decoder.name.encode()))
        thing = decoder.change(rng, rng.choice(samples))
    nbytes, read = decoder.write(thing, folder)
    before = _high_water_from_now()
    try:
        reached = read()
        if sound and reached is False:
            raise AssertionError("a sound sample does not get through")
        taken = True
    except LastgoodError:
        if sound:
            raise
        taken = False
    if not SANITIZED and (grown := _status("VmHWM") - before) > FACTOR * nbytes + SLACK_BYTES:
        raise MemoryError(f"{grown >> 20} MiB for {nbytes} bytes of input")
    return taken, nbytes


def _high_water_from_now() -> int:
    if SANITIZED:
        return 0
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(key: str) -> int:
    with open("/proc/self/status") as file:  # noqa: PTH123 - thousands of times
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(key))


class Reader:
    """Reads inputs in a folder of its own."""

    def __init__(self, folder: Path, at: mmap.mmap | None = None) -> None:
        self._folder = folder
        self._at = at
        self._samples: dict[str, list[Any]] = {}
        self.most_cpu_s = MOST_CPU_S

    def samples(self, decoder: Decoder) -> list[Any]:
        """Made once."""
        if decoder.name not in self._samples:
            self._samples[decoder.name] = decoder.samples()
        return self._samples[decoder.name]

    def read(self, decoder: Decoder, seed: int, *, sound: bool = False) -> tuple[bool, int]:
        """One input; see `outcome`."""
        samples = self.samples(decoder)
        if self._at is not None:
            self._at[:8] = seed.to_bytes(8, "little")
        folder = self._folder / "input"
        folder.mkdir()
        threads = threading.active_count()
        signal.setitimer(signal.ITIMER_PROF, self.most_cpu_s)
        try:
            found = outcome(decoder, samples, seed, folder, sound=sound)
            if (left := threading.active_count() - threads) > 0:
                raise RuntimeError(f"{left} threads are left")
            return found
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            shutil.rmtree(folder, ignore_errors=True)

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        """Read `count` inputs from seed `first` on, or all sound samples."""
        decoder = DECODERS[order["decoder"]]
        if not self.samples(decoder):
            return {"absent": True, "taken": 0, "faults": [], "cpu_s": 0.0}
        self.most_cpu_s = order["most_cpu_s"]
        sound = order["count"] is None
        seeds = range(len(self.samples(decoder))) if sound else range(order["first"], order["first"] + order["count"])
        faults: list[str] = []
        taken = 0
        begin = time.process_time()
        for seed in seeds:
            try:
                taken += self.read(decoder, seed, sound=sound)[0]
            except (Exception, TooLong) as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{last.filename.rpartition('/src/')[2]}:{last.lineno}"
                faults.append(f"{decoder.name} {seed}: {type(error).__name__}: {str(error)[:300]} ({where})")
                if len(faults) == MOST_FAULTS:
                    break
        gc.collect()
        return {"absent": False, "taken": taken, "faults": faults, "cpu_s": time.process_time() - begin}


def _stop(number: int, frame: object) -> None:
    raise TooLong("it takes too long")


def main() -> int:
    """See above."""
    faulthandler.enable()
    logging.disable(logging.CRITICAL)
    # The test that started this may be killed.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    import torch

    torch.set_num_threads(1)
    load_decoders()
    gc.freeze()  # what was imported stays, and is looked through by no collection
    signal.signal(signal.SIGPROF, _stop)
    if not SANITIZED:
        most = _status("VmSize") + (16 << 30)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    with tempfile.TemporaryDirectory(prefix="lastgood-fuzz-") as name:
        if len(sys.argv) > 1 and not sys.argv[1].startswith("--"):
            reader = Reader(Path(name))
            first = int(sys.argv[2])
            for seed in range(first, first + int((sys.argv[3:] or ["1"])[0])):
                print(seed, *reader.read(DECODERS[sys.argv[1]], seed))
            return 0
        with open(sys.argv[1].removeprefix("--at="), "r+b") as file:  # noqa: PTH123 - of a descriptor
            reader = Reader(Path(name), mmap.mmap(file.fileno(), 8))
        answers = os.fdopen(os.dup(1), "w")
        # Whatever a decoder prints must not pass for an answer.
        os.dup2(2, 1)
        for line in sys.stdin:
            with contextlib.redirect_stdout(sys.stderr):
                answer = reader.answer(json.loads(line))
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
