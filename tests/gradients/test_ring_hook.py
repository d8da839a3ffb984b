"""The ring as DDP's hook: trained to the bit as by DDP itself, and what its links carry is what shadows need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lastgood.errors import CheckpointError, ConfigError
from lastgood.gradients.layout import plan_layout
from lastgood.gradients.ring_hook import RingReducer
from lastgood.ports import free_ports
from lastgood.wire.records import FINAL, RecordKind
from tests.gradients.ring_rank import declared_layout
from tests.wire.ring_helpers import WireTap, make_ring

RANKS, SHADOWS, STEPS = 2, 2, 3


def train(folder: Path, taps: list[WireTap]) -> list[dict[str, Any]]:
    ports = free_ports(RANKS)
    script = Path(__file__).with_name("ring_rank.py")
    processes = []
    for rank in range(RANKS):
        following = taps[rank](f"127.0.0.1:{ports[(rank + 1) % RANKS]}")
        arguments = [str(folder), rank, RANKS, ports[rank], following, SHADOWS, STEPS]
        processes.append(subprocess.Popen([sys.executable, script, *map(str, arguments)], stderr=subprocess.PIPE))
    try:
        for process in processes:
            _, said = process.communicate(timeout=120)
            assert process.returncode == 0, said.decode()
    finally:
        for process in processes:
            process.kill()
            process.communicate()
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


class _Bucket:
    """What DDP hands to its hook."""

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        self._parameter, self._buffer = parameter, torch.zeros(parameter.numel())

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def parameters(self) -> list[torch.nn.Parameter]:
        return [self._parameter]

    def gradients(self) -> list[torch.Tensor]:
        return [self._buffer]

    def buffer(self) -> torch.Tensor:
        return self._buffer


@pytest.mark.parametrize("zeros", [False, True])
def test_an_unexpected_error_ends_the_ring_and_no_backward_pass_waits_for_ever(
    monkeypatch: pytest.MonkeyPatch, zeros: bool
) -> None:
    layout = plan_layout([("a", (3, 4), "float32")], {}, ranks=2, shadows=1)
    comms = make_ring(2)
    parameter = torch.nn.Parameter(torch.zeros(3, 4))
    reducer = RingReducer(comms[0], layout, [parameter])

    def breaks(*_: object) -> None:
        raise ZeroDivisionError("a fault of the ring's own")

    monkeypatch.setattr(comms[0], "all_reduce", breaks)
    bucket: Any = _Bucket(parameter)
    if zeros:
        reducer.reduce_zeros(1)
        reducer._worker.submit(lambda: None).result(20)
    else:
        future = reducer.reduce(bucket)
        reducer._worker.submit(lambda: None).result(20)
        assert future.done()
        with pytest.raises(Exception, match="a fault of the ring's own"):
            future.wait()
    with pytest.raises(CheckpointError, match=r"the ring cannot go on: .*; restart the ranks"):
        reducer.reduce(bucket)
    reducer.close()
    comms[1].close()
