"""The optimizer benchmark: shapes, buckets, memory that is refused, and two shards that measure together."""

import contextlib
import json
import math
import os
import socket
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastgood.errors import ConfigError
from lastgood.experiments.optbench import bench
from lastgood.locks import FileLock
from lastgood.ports import free_ports
from lastgood.workloads.optimizer_shapes import MODELS, model_shapes
from tests.suggestions.following import advice, follows, refusal

SMALL = [(40, 5), (40,), (3, 40), (3,), (7,)]
SMALL_BUCKET = 1 << 10


def order(**change):
    settings = {"model": "resnet50", "threads": (1,), "steps": 2, "bucket_bytes": SMALL_BUCKET, **change}
    return bench.BenchOrder(**settings)


@pytest.fixture
def small(monkeypatch, tmp_path):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(bench, "model_shapes", lambda name: SMALL)
    monkeypatch.setattr(
        "lastgood.experiments.machine.lock.machine_lock", lambda: FileLock(tmp_path / "lock", "the test's turn")
    )


@pytest.mark.parametrize(
    "name, millions",
    # Published counts: torchvision's tables; GPT-3's, whose own contexts and vocabulary are these.
    [
        ("resnet50", 25.6),
        ("vgg11", 132.9),
        ("gpt3_medium", 356),
        ("gpt3_large", 760),
        ("gpt3_xl", 1316),
        ("gpt3_6_7B", 6658),
    ],
)
def test_models_are_as_large_as_published(name, millions):
    count = sum(math.prod(shape) for shape in model_shapes(name)) / 1e6
    assert count == pytest.approx(millions, rel=0.005)


def test_unknown_models_are_named():
    assert len(MODELS) == 8
    with pytest.raises(ConfigError, match=r"--model alexnet: unknown; known: resnet50, .*gpt3_6_7B"):
        model_shapes("alexnet")


@given(
    shapes=st.lists(st.lists(st.integers(1, 40), max_size=3).map(tuple), min_size=1, max_size=30),
    bucket_bytes=st.integers(1 << 10, 1 << 14),
)
def test_buckets_hold_every_parameter_once_from_the_last(shapes, bucket_bytes):
    buckets = bench.buckets_of(shapes, bucket_bytes)
    assert [place for bucket in buckets for place in bucket] == list(reversed(range(len(shapes))))
    for bucket in buckets:
        size = sum(math.prod(shapes[place]) * 4 for place in bucket)
        assert bucket and (size <= bucket_bytes or len(bucket) == 1)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("arithmetic", ["cpu", "cuda"])
def test_one_shard(small, optimizer, arithmetic):
    result = bench.run_bench(order(optimizer=optimizer, arithmetic=arithmetic, threads=(1, 2)), pytest.fail)
    assert result.parameters == 370 and result.shards == 1 and result.hosts == [socket.gethostname()]
    assert result.shard_bytes == [370 * 4 * (3 if optimizer == "sgd" else 4)]
    assert [(row.threads, len(row.update_s)) for row in result.rows] == [(1, 2), (2, 2)]
    assert all(0 < min(row.update_s) <= row.median_s <= max(row.update_s) for row in result.rows)


def test_what_does_not_fit_is_refused_before_it_is_made(small, monkeypatch):
    monkeypatch.setattr(bench, "available_memory_bytes", lambda: 370 * 16 - 1)
    monkeypatch.setattr(bench, "_flat", lambda *args: pytest.fail("allocated"))
    with pytest.raises(ConfigError, match=r"needs 5.78 KiB on .*--nodes"):
        bench.run_bench(order(), pytest.fail)


@follows("spread it over more hosts (--nodes), or take a smaller model")
def test_what_does_not_fit_is_spread_or_made_smaller(small, monkeypatch):
    monkeypatch.setattr(bench, "available_memory_bytes", lambda: 370 * 16 - 1)
    message = refusal(lambda: bench.run_bench(order(), pytest.fail))
    advice(message, "take a smaller model")
    with monkeypatch.context() as smaller:
        smaller.setattr(bench, "model_shapes", lambda name: SMALL[1:])
        assert bench.run_bench(order(), pytest.fail) is not None
    advice(message, "--nodes")
    # What a shard does on one of two hosts, of which the other is only said to be there.
    monkeypatch.setattr(bench, "_meeting", lambda world: contextlib.nullcontext())
    other = ("another boot", "another host", 10)
    monkeypatch.setattr(bench, "_everybody", lambda value, world: [value, other if type(value) is tuple else value])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    found = bench.run_bench(order(), pytest.fail)
    assert found is not None and found.hosts == [socket.gethostname(), "another host"]


def test_more_shards_than_buckets_are_refused(small, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "9")
    with pytest.raises(ConfigError, match="9 shards: give smaller buckets"):
        bench.run_bench(order(), pytest.fail)


RANK = """
import sys
from pathlib import Path
from lastgood.experiments.machine import lock
from lastgood.experiments.optbench import bench as optbench
from lastgood.locks import FileLock
from tests.suggestions.following import advice, follows, refusal
optbench.model_shapes = lambda name: [(40, 5), (40,), (3, 40), (3,), (7,)]
lock.machine_lock = lambda: FileLock(Path(sys.argv[3]), "the test's turn")
sys.exit(optbench.main(sys.argv[1:3]))
"""


@pytest.mark.slow
def test_two_shards_make_one_result(tmp_path):
    (port,) = free_ports()
    words = [order().model_dump_json(), str(tmp_path / "result.json"), str(tmp_path / "lock")]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = []
    try:
        for rank in range(2):
            env = {**os.environ, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
            ranks.append(subprocess.Popen([sys.executable, "-c", RANK, *words], env=env))
        assert [rank.wait(240) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(10)
    result = bench.BenchResult.model_validate(json.loads((tmp_path / "result.json").read_text()))
    assert result.shards == 2 and len(result.hosts) == 1
    assert sum(result.shard_bytes) == 370 * 16 and min(result.shard_bytes) > 0
    assert len(result.rows[0].update_s) == 2
