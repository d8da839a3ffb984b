"""Configurations of the S3 connector's benchmarks, read without Hydra."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastgood.errors import ConfigError
from lastgood.experiments.dcp_runs.sweep import read_sweep

DDP_LOAD = """
defaults: [aws/dynamodb, _self_]
s3:
  region: ???
  uri: ???
epochs: 4
hydra:
  mode: MULTIRUN
  sweeper:
    params:
      +model: vit-base, T0_3B
      +backend: gloo, nccl
      +world_size: 8
      +checkpoint.storage: disk, s3
      +checkpoint.suffix: ???
"""


@pytest.fixture
def ddp_load(tmp_path):
    path = tmp_path / "dcp_ddp_load.yaml"
    path.write_text(DDP_LOAD)
    return path


def test_lists_are_a_product_and_what_is_missing_must_be_given(ddp_load):
    with pytest.raises(
        ConfigError, match=r"checkpoint\.suffix is not given \(\?\?\?\): write checkpoint\.suffix=VALUE"
    ):
        read_sweep(ddp_load, ["path=/nvme"])
    with pytest.raises(ConfigError, match=r"s3\.(uri|region) is not given"):
        read_sweep(ddp_load, ["path=/nvme", "checkpoint.suffix=a"])
    with pytest.raises(ConfigError, match=r"say where, with path=FOLDER"):
        read_sweep(ddp_load, ["checkpoint.suffix=a", "checkpoint.storage=disk"])
    given = ["+path=/nvme", "checkpoint.suffix=a", "s3.uri=s3://bucket/x", "s3.region=eu-west-1"]
    sweep = read_sweep(ddp_load, given)
    assert (sweep.operation, sweep.ddp) == ("load", True)
    assert sweep.unused == ["defaults: aws/dynamodb", "hydra.mode"]
    assert len(sweep.runs) == 8
    disk, s3 = sweep.runs[0], sweep.runs[1]
    assert disk == {
        "model": "vit-base",
        "backend": "gloo",
        "world_size": 8,
        "storage": "disk",
        "suffix": "a",
        "iterations": 4,
        "uri": "/nvme",
    }
    assert (s3["storage"], s3["uri"], s3["region"]) == ("s3", "s3://bucket/x", "eu-west-1")


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["modle=L7b"], r"modle: unknown; known: s3\.region"),
        (["epochs"], r"'epochs' is not KEY=VALUE"),
        (["epochs=1", "+epochs=2"], r"epochs is given twice"),
        (["world_size=" + ",".join(map(str, range(2000)))], r"16000 combinations; 10000 at most"),
    ],
)
def test_wrong_overrides_are_refused_by_name(ddp_load, overrides, message):
    with pytest.raises(ConfigError, match=message):
        read_sweep(ddp_load, overrides)


@pytest.mark.parametrize(
    "text, message",
    [
        ("hydra: 3", "hydra: int in place of a mapping"),
        ("defaults: {a: b}", "defaults: dict in place of a list"),
        ("hydra: {sweeper: {params: [a]}}", "params: list in place of a mapping"),
        ("{", "dcp_ddp_load.yaml"),
        ("- a", "holds list"),
    ],
)
def test_files_that_are_no_configuration_are_refused(ddp_load, text, message):
    ddp_load.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_sweep(ddp_load)


@given(
    models=st.lists(st.sampled_from(["L7b", "L13b", "T0_3B"]), min_size=1, max_size=3, unique=True),
    counts=st.lists(st.integers(1, 64), min_size=1, max_size=3, unique=True),
)
def test_every_combination_comes_once(tmp_path_factory, models, counts):
    path = tmp_path_factory.mktemp("sweep") / "dcp_fsdp.yaml"
    lists = f"+model: '{', '.join(models)}', +thread_count: '{','.join(map(str, counts))}'"
    path.write_text(f"epochs: 1\nhydra: {{sweeper: {{params: {{+checkpoint.storage: disk, +path: /x, {lists}}}}}}}\n")
    sweep = read_sweep(path)
    assert not sweep.ddp
    found = [(run["model"], run["thread_count"]) for run in sweep.runs]
    assert sorted(found) == sorted((model, count) for model in models for count in counts)
