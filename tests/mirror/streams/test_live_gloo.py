"""Real trainings over Gloo: what docs/wire-format.md says holds for the installed torch, and nothing is missing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.mirror.support import live
from tests.mirror.support.frames import read, read_pcap
from tests.mirror.support.plain.gloo import GlooParser
from tests.mirror.support.rebuild import ALLGATHER, ALLREDUCE, BARRIER, BROADCAST, collectives
from tests.mirror.support.training import make

SAMPLES = Path(__file__).parents[1] / "samples"
STEPS = 4
CAP_BYTES = int(0.002 * (1 << 20))


def check_training(
    pcap: Path,
    truth: dict[str, np.ndarray],
    ranks: int,
    *,
    rebuilt_before: int = 1,
    used_first: int = 0,
    unused: bool = False,
    bfloat16: bool = False,
) -> None:
    """Rebuild everything from the frames of rank 0's port, and compare it with the truth to the bit.

    The buckets are rebuilt before step `rebuilt_before`; a map of used parameters comes before the buckets of the first
    `used_first` steps, and with `unused` after those of all steps.
    """
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

    def used() -> None:
        one = next(row)
        content = one.reduced(0, addresses, [4 * len(trainable)])
        assert one.prefix == ALLREDUCE and content == np.full(len(trainable), ranks, np.int32).tobytes()

    buckets = initial_buckets(trainable, sizes) if unused else [trainable]
    for step in range(STEPS):
        if step == rebuilt_before and not unused:
            order = np.frombuffer(broadcast(), np.int32).tolist()
            assert sorted(order[:-1]) == list(range(len(trainable)))
            counts = np.frombuffer(broadcast(), np.int32).tolist()
            assert len(counts) == order[-1] > 1 and sum(counts) == len(trainable)
            ends = np.cumsum(counts).tolist()
            buckets = [[trainable[at] for at in order[end - n : end]] for n, end in zip(counts, ends, strict=True)]
        before = "init" if step == 0 else f"after.{step - 1}"
        assert broadcast() == joined(before, floats)
        assert broadcast() == joined(before, integers)
        if step < used_first:
            used()
        for bucket in buckets:
            one = next(row)
            assert one.prefix == ALLREDUCE
            nbytes = sum(sizes[name] for name in bucket)
            wanted = joined(f"grad.{step}", bucket)
            if bfloat16:
                halves = np.frombuffer(wanted, np.uint16).reshape(-1, 2)
                assert not halves[:, 0].any(), "a gradient is what was on the wire"
                nbytes, wanted = nbytes // 2, halves[:, 1].tobytes()
            assert one.reduced(0, addresses, [nbytes], 2 if bfloat16 else 4) == wanted
        if unused:
            used()
    rest = list(row)
    assert {one.prefix for one in rest} <= {BARRIER}, "nothing else"


def initial_buckets(names: list[str], sizes: dict[str, int]) -> list[list[str]]:
    """Module order, each closed when it reaches the cap, the last one first."""
    buckets: list[list[str]] = [[]]
    for name in names:
        if sum(sizes[one] for one in buckets[-1]) >= CAP_BYTES:
            buckets.append([])
        buckets[-1].append(name)
    return buckets[::-1]


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


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.skipif(not live.can_run(), reason="needs root, to make network namespaces")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"accumulate": True, "hook": "bf16"}, {"bfloat16": True}),
        ({"ddp": {"bucket_cap_mb": 0.002, "static_graph": True}}, {"rebuilt_before": 2, "used_first": 1}),
        ({"ddp": {"bucket_cap_mb": 0.002, "find_unused_parameters": True}}, {"unused": True}),
    ],
    ids=["accumulation and bfloat16", "static graph", "unused parameters"],
)
def test_settings_of_ddp_change_the_row_as_is_written(tmp_path, options, expected):
    live.train(tmp_path, 2, STEPS, options)
    check_training(tmp_path / "capture.pcap", dict(np.load(tmp_path / "truth.npz")), 2, **expected)
