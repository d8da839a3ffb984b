"""The ring as DDP's hook: trained to the bit as by DDP itself, and what its links carry is what shadows need."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from lastgood.errors import ConfigError, HostError
from lastgood.gradients.layout.layout import plan_layout
from lastgood.gradients.tap.ring_hook import RingReducer
from lastgood.ports import free_ports
from lastgood.wire.records import FINAL, RecordKind
from tests.gradients.support.ddp_bucket import Bucket
from tests.gradients.support.ring_rank import declared_layout
from tests.support.patience import wait_until
from tests.support.warm import WarmProcess
from tests.wire.support.ring_helpers import PROCESS_S, WAIT_S, WireTap, make_ring

RANKS, SHADOWS, STEPS = 2, 2, 3


def train(folder: Path, taps: list[WireTap]) -> list[dict[str, Any]]:
    ports = free_ports(RANKS)
    script = Path(__file__).parents[1] / "support" / "ring_rank.py"
    processes = []
    for rank in range(RANKS):
        following = taps[rank](f"127.0.0.1:{ports[(rank + 1) % RANKS]}")
        arguments = [str(folder), rank, RANKS, ports[rank], following, SHADOWS, STEPS]
        processes.append(WarmProcess([script, *arguments]))
    try:
        for process in processes:
            said, _ = process.communicate(PROCESS_S)
            assert process.returncode == 0, said
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


def test_ddp_trains_to_the_bit_as_without_it_and_the_links_carry_every_gradient(tmp_path: Path) -> None:
    # Two ranks: the sum of two numbers has no order, so DDP's own reduction must give the same bits.
    taps = [WireTap(retry=True) for _ in range(RANKS)]
    results = train(tmp_path, taps)
    by_gloo, by_ring = results[0]["gloo"], results[0]["ring"]
    for rank in range(RANKS):
        for ours, theirs in zip(results[rank]["ring"]["parameters"], by_gloo["parameters"], strict=True):
            assert torch.equal(ours, theirs)
    layout = declared_layout(RANKS, SHADOWS)
    held: dict[tuple[int, int], bytearray] = {}
    ends = []
    for rank, tap in enumerate(taps):
        for record, payload in tap.records():
            if record.kind is RecordKind.END:
                ends.append((rank, record.iteration))
            elif record.flags & FINAL:
                content = held.setdefault((record.iteration, record.bucket), bytearray())
                assert not any(content[record.offset : record.offset + record.length])
                content.extend(bytes(max(0, record.offset + record.length - len(content))))
                content[record.offset : record.offset + record.length] = payload
    assert sorted(ends) == [(rank, step + 1) for rank in range(RANKS) for step in range(STEPS)]
    assert sorted(held) == [(step + 1, bucket) for step in range(STEPS) for bucket in range(len(layout.buckets))]
    # The last pass of each step was reduced; what the pass before had left in .grad was added by DDP before.
    for step in range(STEPS):
        for index, declared in enumerate(layout.parameters):
            sent = held[step + 1, declared.bucket][declared.offset : declared.offset + declared.nbytes]
            assert bytes(sent) == by_ring["gradients"][step][index].numpy().tobytes()
    # Behind the last step rank 1 left, and rank 0 went on.
    error = by_ring["error"]
    assert re.search(f"HostError: rank 0: (sending to|receiving from) rank 1 on {os.uname().nodename} ", error), error


def test_parameters_that_are_not_the_declared_ones_are_refused() -> None:
    layout = plan_layout([("a", (3, 4), "float32")], {}, ranks=2, shadows=1)
    comms = make_ring(2)
    with pytest.raises(ConfigError, match="declares 1 parameters, 0 are given"):
        RingReducer(comms[0], layout, [])
    wrong = torch.nn.Parameter(torch.zeros(3, 5))
    reducer = RingReducer(comms[0], layout, [wrong])
    with pytest.raises(ConfigError, match="a is declared with 48 bytes"):
        reducer._make_plan([wrong], [torch.zeros(15)], torch.zeros(15))
    with pytest.raises(ConfigError, match="int64 on cpu"):
        reducer._make_plan([wrong], [], torch.zeros(15, dtype=torch.int64))
    reducer.close()
    comms[1].close()


def two_reducers(shapes: list[tuple[int, ...]]) -> tuple[list[RingReducer], list[torch.nn.Parameter]]:
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    named = [(str(number), shape, "float32") for number, shape in enumerate(shapes)]
    layout = plan_layout(named, {}, ranks=2, shadows=1)
    return [RingReducer(comm, layout, parameters) for comm in make_ring(2)], parameters


def failure_of(future: torch.futures.Future[torch.Tensor]) -> BaseException:
    wait_until(future.done, "this future, as DDP would for ever", WAIT_S)
    with pytest.raises(Exception) as caught:
        future.value()
    return caught.value


def test_whatever_goes_wrong_comes_out_of_the_future_and_ends_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    reducers, parameters = two_reducers([(5,), (3,)])

    def out_of_memory(*_: object) -> None:
        raise MemoryError("no memory for what is received")

    monkeypatch.setattr(reducers[0]._comm, "all_reduce", out_of_memory)
    future = reducers[0].reduce(Bucket(0, parameters, last=True))
    assert isinstance(failure_of(future), MemoryError)
    with pytest.raises(MemoryError):
        reducers[0].reduce(Bucket(0, parameters, last=True))
    # The other rank learns of it from the connection, not by its timeout.
    assert isinstance(failure_of(reducers[1].reduce(Bucket(0, parameters, last=True))), HostError)
    for reducer in reducers:
        reducer.close()


def test_what_goes_wrong_with_zeros_is_raised_by_the_next_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    reducers, parameters = two_reducers([(5,)])

    def out_of_memory(*_: object) -> None:
        raise MemoryError("no memory for zeros")

    monkeypatch.setattr(reducers[0]._comm, "plan", out_of_memory)
    reducers[0].reduce_zeros(1)
    reducers[0]._worker.submit(int).result(WAIT_S)
    monkeypatch.undo()
    with pytest.raises(MemoryError):
        reducers[0].reduce(Bucket(0, parameters, last=True))
    for reducer in reducers:
        reducer.close()


def test_the_first_error_is_the_one_that_is_raised_again() -> None:
    reducers, parameters = two_reducers([(5,), (3,)])
    reducers[1].close()
    both_are_asked_for = threading.Event()
    reducers[0]._worker.submit(both_are_asked_for.wait, WAIT_S)
    first = reducers[0].reduce(Bucket(0, parameters[1:], last=False))
    second = reducers[0].reduce(Bucket(1, parameters[:1], last=True))
    both_are_asked_for.set()
    why = str(failure_of(first))
    assert "rank 1 on" in why
    failure_of(second)
    with pytest.raises(HostError) as caught:
        reducers[0].reduce(Bucket(0, parameters, last=True))
    assert str(caught.value) == why
    reducers[0].close()


def test_parameters_without_elements_are_reduced_with_the_others() -> None:
    reducers, parameters = two_reducers([(2, 3), (0, 4), (5,)])
    buckets = [Bucket(0, parameters, last=True) for _ in reducers]
    futures = [reducer.reduce(bucket) for reducer, bucket in zip(reducers, buckets, strict=True)]
    for future in futures:
        assert torch.equal(future.wait(), torch.ones(11))
    for reducer in reducers:
        reducer.close()
