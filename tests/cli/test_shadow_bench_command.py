"""`lastgood shadow bench`: what it prints, and what it refuses by name."""

import json

import pytest
from typer.testing import CliRunner

from lastgood.cli import app
from lastgood.errors import ConfigError
from lastgood.experiments.optbench import bench
from lastgood.locks import FileLock

SMALL = ["shadow", "bench", "--model", "vgg11", "--steps", "2", "--bucket", "1KiB"]


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(bench, "model_shapes", lambda name: [(40, 5), (40,)])
    monkeypatch.setattr(
        "lastgood.experiments.machine.lock.machine_lock", lambda: FileLock(tmp_path / "lock", "the test's turn")
    )


def test_json_holds_all_that_was_measured():
    outcome = CliRunner().invoke(app, [*SMALL, "--threads", "1,2", "--json"], catch_exceptions=False)
    found = bench.BenchResult.model_validate(json.loads(outcome.stdout))
    assert [row.threads for row in found.rows] == [1, 2]
    assert found.order.steps == 2 and found.order.bucket_bytes == 1024 and found.parameters == 240


def test_a_table_for_people():
    outcome = CliRunner().invoke(app, [*SMALL, "--threads", "1", "--optimizer", "sgd"], catch_exceptions=False)
    told = " ".join(outcome.stdout.split())
    assert "vgg11, 0.0 million parameters in 1 buckets on 1 shards: fused sgd, arithmetic of cpu" in told
    assert outcome.exit_code == 0


@pytest.mark.parametrize(
    "words, message",
    [
        (["--model", "alexnet"], "--model alexnet: unknown; known: resnet50"),
        (["--threads", "1,x"], "--threads 1,x: write numbers"),
        (["--threads", "0"], "--threads 0: write numbers"),
        (["--bucket", "12 parsecs"], "--bucket: not a size"),
        (["--bucket", "1"], "--bucket: Input should be greater"),
        (["--optimizer", "lion"], "--optimizer: Input should be 'sgd', 'adam' or 'adamw'"),
        (["--steps", "0"], "--steps: Input should be greater"),
    ],
)
def test_refuses_by_name(words, message):
    with pytest.raises(ConfigError, match=message):
        CliRunner().invoke(app, [*SMALL, *words], catch_exceptions=False)
