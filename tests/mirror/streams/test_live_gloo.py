"""Real trainings over Gloo: what docs/wire-format.md says holds for the installed torch, and nothing is missing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lastgood.mirror.streams.gloo import GlooParser
from tests.mirror.support import live
from tests.mirror.support.frames import read, read_pcap
from tests.mirror.support.rebuild import ALLGATHER, ALLREDUCE, BARRIER, BROADCAST, collectives
from tests.mirror.support.training import make

SAMPLES = Path(__file__).parents[1] / "samples"
STEPS = 4
CAP_BYTES = int(0.002 * (1 << 20))


def check_training(pcap: Path, truth: dict[str, np.ndarray], ranks: int) -> None:
    """Rebuild everything from the frames of rank 0's port, and compare it with the truth to the bit."""
    addresses = [live.address(rank) for rank in range(ranks)]
    parser = GlooParser()
    found = read(parser, read_pcap(pcap), 500)
    assert not found.resynced
    assert {message.known.count(2) for message in found.all.values()} == {0}
    assert len(found.flows) == 2 * (ranks - 1), "a connection with each other rank"
    model, _, _ = make()
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    buffers = [name for name, _ in model.named_buffers()]
    assert frozen and buffers
    floats = [name for name in buffers if truth[f"init.{name}"].dtype == np.float32]
    integers = [name for name in buffers if name not in floats]
    sizes = {name: truth[f"init.{name}"].nbytes for name in [*trainable, *frozen, *buffers]}

    def joined(kind: str, names: list[str]) -> bytes:
        return b"".join(truth[f"{kind}.{name}"].tobytes() for name in names)

    row = iter(collectives(found, addresses[0]))

    def broadcast() -> bytes:
        one = next(row)
        assert one.prefix == BROADCAST
        return one.broadcast()

    first = next(row)
    assert first.prefix == ALLGATHER
    counted = b"".join(bytes(message.content) for message in next(iter(first.sent.values())))[:8]
    assert int.from_bytes(counted, "little") == len(trainable)
    shapes = [model.get_parameter(name) for name in trainable]
    numbers = [number for one in shapes for number in (*one.shape, *one.stride())]
    assert broadcast() == np.array(numbers, np.int64).tobytes()
    names = [name for name, _ in model.named_parameters()]
    assert broadcast() == joined("init", names + floats)
    assert broadcast() == joined("init", integers)

    buckets = [trainable]
    for step in range(STEPS):
        if step == 1:
            order = np.frombuffer(broadcast(), np.int32).tolist()
            assert sorted(order[:-1]) == list(range(len(trainable)))
            counts = np.frombuffer(broadcast(), np.int32).tolist()
            assert len(counts) == order[-1] > 1 and sum(counts) == len(trainable)
            ends = np.cumsum(counts).tolist()
            buckets = [[trainable[at] for at in order[end - n : end]] for n, end in zip(counts, ends, strict=True)]
        before = "init" if step == 0 else f"after.{step - 1}"
        assert broadcast() == joined(before, floats)
        assert broadcast() == joined(before, integers)
        for bucket in buckets:
            one = next(row)
            assert one.prefix == ALLREDUCE
            reduced = one.reduced(0, addresses, [sum(sizes[name] for name in bucket)])
            assert reduced == joined(f"grad.{step}", bucket)
    rest = list(row)
    assert {one.prefix for one in rest} <= {BARRIER}, "nothing else"


@pytest.mark.parametrize("ranks", [2, 3])
def test_kept_captures_give_every_gradient_and_the_states_at_the_start(ranks):
    truth = dict(np.load(SAMPLES / f"gloo-{ranks}.npz"))
    check_training(SAMPLES / f"gloo-{ranks}.pcap.xz", truth, ranks)


@pytest.mark.root
@pytest.mark.skipif(not live.can_run(), reason="needs root, to make network namespaces")
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_training_of_the_installed_torch_puts_on_the_wire_what_is_written(tmp_path, ranks):
    live.train(tmp_path, ranks, STEPS)
    check_training(tmp_path / "capture.pcap", dict(np.load(tmp_path / "truth.npz")), ranks)
