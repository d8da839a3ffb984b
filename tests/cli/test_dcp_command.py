"""`lastgood dcp`: saves and loads over ranks by every storage, under torchrun, and what is refused."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from lastgood.cli import app
from lastgood.errors import ConfigError, CorruptCheckpoint, HostError, LaunchError, NoCheckpoint
from lastgood.experiments.dcp.storages import STORAGES
from lastgood.experiments.records.dcp import DcpRecord
from lastgood.experiments.services import place
from lastgood.ports import free_ports
from tests.cli.support.dcp_command import SMALL, dcp, own_lock, record_of, warm_ranks

__all__ = ["own_lock", "warm_ranks"]


@pytest.mark.parametrize(
    "storage",
    [
        pytest.param(storage.name, marks=() if storage.name in ("disk", "lastgood") else pytest.mark.slow)
        for storage in STORAGES
        if storage.disk is not None
    ],
)
def test_every_storage_gives_back_what_it_took_on_one_rank_and_on_two(tmp_path, storage):
    given = ("--storage", storage, *SMALL, "--record", tmp_path / "record.json")
    suffix = dcp(tmp_path, "save-and-load", *given, "--world-size", 2).stdout.splitlines()[-1]
    record = record_of(tmp_path)
    saved, loaded = record.iterations
    assert (saved.operation, loaded.operation, loaded.equal) == ("save", "load", True)
    assert saved.digest == loaded.digest
    assert record.suffix == suffix
    assert record.state_bytes <= saved.nbytes < 1.2 * record.state_bytes + 65536
    assert loaded.nbytes == record.state_bytes
    for one in record.iterations:
        for rank in one.ranks:
            assert rank.plan_s + rank.gather_s + rank.transfer_s + rank.finish_s == pytest.approx(rank.total_s)
    # One process reads what two wrote.
    again = ("--suffix", suffix, "--world-size", 1, *SMALL[2:], "--record", tmp_path / "record.json")
    assert dcp(tmp_path, "load", *again).stdout.splitlines()[-1] == suffix
    assert record_of(tmp_path).iterations[0].equal is True
    assert record_of(tmp_path).spec.ranks == 1
    assert not list((tmp_path / "s").iterdir())  # nothing is left of the runs


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("--fsdp", "1", "--async", "thread", "--state", "full"), marks=pytest.mark.slow),
        ("--ddp", "--planner-cache", "--no-sync-files"),
        pytest.param(("--async", "process", "--thread_count", "2"), marks=pytest.mark.slow),
    ],
    ids=["fsdp1 by a thread", "ddp with cached plans", "fsdp2 by a process"],
)
def test_the_ways_to_spread_and_to_save(tmp_path, arguments):
    settings = ("--model", "T0_3B-2MB", "--iterations", "2", "--warmup", "0", "--world-size", "2")
    done = dcp(tmp_path, "save-and-load", *settings, *arguments, "--record", tmp_path / "record.json")
    record = record_of(tmp_path)
    assert [one.equal for one in record.iterations] == [None, True, None, True]
    assert len({one.digest for one in record.iterations}) == 2  # each iteration saves other contents
    if "--no-sync-files" in arguments:
        assert not record.durable
        assert "files were not flushed" in " ".join(done.output.split())
    if "--async" in arguments:
        assert all(rank.stall_s <= rank.total_s for one in record.iterations for rank in one.ranks)


@pytest.mark.slow
def test_hybrid_shards_come_back_on_another_number_of_ranks(tmp_path):
    given = (*SMALL, "--world-size", 4, "--sharding", "hybrid", "--replicas", 2)
    suffix = dcp(tmp_path, "save", *given).stdout.splitlines()[-1]
    for spread in (("--fsdp", 2), ("--fsdp", 1), ("--ddp",)):
        again = ("--suffix", suffix, "--world-size", 3, *spread, *SMALL[2:], "--record", tmp_path / "record.json")
        dcp(tmp_path, "load", *again)
        assert record_of(tmp_path).iterations[0].equal is True


def torchrun(ranks, tmp_path, command, *arguments):
    (port,) = free_ports()
    launcher = ["-m", "torch.distributed.run", "--nnodes=1", f"--nproc_per_node={ranks}", f"--master_port={port}"]
    words = ["-m", "lastgood", "dcp", command, "--backend", "gloo", "--uri", str(tmp_path / "at"), *arguments]
    return subprocess.run([sys.executable, *launcher, *words], capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.slow
def test_torchrun_starts_the_ranks_if_it_is_asked(tmp_path):
    record = tmp_path / "record.json"
    done = torchrun(2, tmp_path, "save-and-load", *SMALL, "--record", str(record))
    assert done.returncode == 0, done.stderr[-3000:]
    found = DcpRecord.load(record)
    assert (found.spec.ranks, found.suffix) == (2, done.stdout.splitlines()[-1])
    assert [one.equal for one in found.iterations] == [None, True]
    assert [path.name for path in (tmp_path / "at").iterdir()] == [found.suffix]  # one suffix, rank 0's


@pytest.mark.slow
def test_torchrun_names_the_rank_that_failed_and_why(tmp_path):
    suffix = dcp(tmp_path, "save", *SMALL).stdout.splitlines()[-1]
    (data,) = (tmp_path / "at" / suffix / "iteration-0").glob("*.distcp")
    data.unlink()
    done = torchrun(1, tmp_path, "load", "--suffix", suffix, *SMALL[2:])
    assert done.returncode != 0
    cause = rf"(?s)rank 0 on {re.escape(socket.gethostname())}: .*__0_0\.distcp"
    own, _, summary = done.stderr.partition("Root Cause")
    assert "lastgood: rank 0 on " in own
    assert re.search(cause, own)
    assert re.search(cause, summary)


def test_a_load_of_other_contents_is_told(tmp_path):
    suffix = dcp(tmp_path, "save", *SMALL).stdout.splitlines()[-1]
    (data,) = (tmp_path / "at" / suffix / "iteration-0").glob("*.distcp")
    content = bytearray(data.read_bytes())
    place = len(content) // 2
    content[place] ^= 1
    data.write_bytes(content)
    again = ("--suffix", suffix, *SMALL[2:], "--record", tmp_path / "record.json")
    done = dcp(tmp_path, "load", *again)
    assert "DIFFERENT" in done.stdout
    assert "a load did not give what was saved" in " ".join(done.output.split())
    assert record_of(tmp_path).iterations[0].equal is False


def test_a_rank_that_fails_is_named_with_its_cause(tmp_path):
    suffix = dcp(tmp_path, "save", *SMALL).stdout.splitlines()[-1]
    (data,) = (tmp_path / "at" / suffix / "iteration-0").glob("*.distcp")
    data.unlink()
    with pytest.raises(LaunchError, match=r"rank \d on .* ended with exit status 1") as caught:
        dcp(tmp_path, "load", "--suffix", suffix, *SMALL[2:], "--world-size", 2)
    (line,) = [line for line in str(caught.value).splitlines() if "__0_0.distcp" in line]
    cause = r"DCP failed on rank (0, 1|0|1): FileNotFoundError: \[Errno 2\] .*iteration-0/__0_0\.distcp'"
    assert re.search(f"{cause}$", line)
    logs = "".join(path.read_text() for path in (tmp_path / "l").rglob("*.log"))
    assert re.search(cause, logs) and "Traceback" not in logs


@pytest.mark.slow
def test_old_checkpoints_go_and_all_stay_if_asked(tmp_path):
    many = ("--model", "L7b-2MB", "--iterations", "2", "--warmup", "1")
    last = dcp(tmp_path, "save", *many, "--suffix", "a").stdout.splitlines()[-1]
    assert last == "a"
    assert [path.name for path in (tmp_path / "at" / "a").glob("iteration*")] == ["iteration-2"]
    dcp(tmp_path, "save", *many, "--suffix", "b", "--keep-all")
    assert len(list((tmp_path / "at" / "b").glob("iteration*"))) == 3


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (("--storage", "floppy"), ConfigError, r"--storage floppy: unknown; known: disk, fsspec, hf, lastgood, s3"),
        (("--storage", "hf", "--sync-files"), ConfigError, r"does not use --sync-files; it uses: --thread-count"),
        (("--storage", "hf", "--state", "full"), ConfigError, r"--state full: storage hf keeps tensors only"),
        (("--thread-count", "0"), ConfigError, r"--thread-count 0: from 1"),
        (("--ddp", "--fsdp", "1"), ConfigError, r"--ddp and --fsdp"),
        (("--fsdp", "3"), ConfigError, r"--fsdp 3: 1 or 2"),
        (("--replicas", "2"), ConfigError, r"--replicas is for --sharding hybrid"),
        (("--sharding", "hybrid", "--world-size", "3"), ConfigError, r"3 ranks are not 2 groups"),
        (("--sharding", "hybrid", "--ddp", "--world-size", "4"), ConfigError, r"hybrid is for FSDP"),
        (("--model", "L8b"), ConfigError, r"--model L8b: unknown; known: L7b"),
        (("--async", "later"), ConfigError, r"--async: .*'thread' or 'process'"),
        (("--iterations", "0"), ConfigError, r"--iterations: .*greater than or equal to 1"),
        (("--suffix", "../up"), ConfigError, r"--suffix '\.\./up': a name of"),
        (("--uri", "gs://bucket/x"), ConfigError, r"--uri gs://bucket/x"),
        (("--uri", "s3://bucket"), ConfigError, r"--uri s3://bucket: has a bucket and no prefix"),
        (("--uri", "s3://bucket/x", "--storage", "hf"), ConfigError, r"storage hf does not write buckets; these do: "),
        (("--storage", "s3torchconnector"), ConfigError, r"s3torchconnector does not write folders; these do: disk"),
        (("--uri", "s3://bkt/x", "--sync-files"), ConfigError, r"lastgood does not use --sync-files in a bucket"),
        (("--region", "eu-west-1"), ConfigError, r"--region beside the folder .*: a folder has none"),
        (("--endpoint-url", "http://h"), ConfigError, r"--endpoint-url beside the folder"),
        (("--server", "server"), ConfigError, r"--server beside the folder"),
        (("--uri", "s3://bkt/x", "--server", "s", "--region", "r"), ConfigError, r"--server beside --region or"),
        (("--part-size", "8"), ConfigError, r"storage disk does not use --part-size"),
        (("--model", "L70b"), HostError, r"needs at least .* of memory for its rank, and .* are available"),
    ],
)
def test_what_cannot_be_is_refused_by_name(tmp_path, arguments, error, message):
    with pytest.raises(error, match=message):
        dcp(tmp_path, "save", *arguments)
    assert not (tmp_path / "at").exists()


def test_a_suffix_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    dcp(tmp_path, "save", *SMALL, "--suffix", "mine")
    with pytest.raises(NoCheckpoint, match=r"other: no checkpoint of `lastgood dcp save`; suffixes in .*: mine$"):
        dcp(tmp_path, "load", "--suffix", "other")


def test_a_description_that_somebody_edited_is_refused(tmp_path):
    dcp(tmp_path, "save", *SMALL, "--suffix", "mine")
    path = tmp_path / "at" / "mine" / "lastgood-dcp.json"
    found = json.loads(path.read_text())
    found["spec"]["model"] = "../../etc/passwd"
    path.write_text(json.dumps(found))
    with pytest.raises(NoCheckpoint, match=r"lastgood-dcp\.json.*model"):
        dcp(tmp_path, "load", "--suffix", "mine")


@pytest.mark.slow
def test_newload_takes_the_newest_and_looks_first(tmp_path):
    dcp(tmp_path, "save", *SMALL, "--suffix", "old")
    dcp(tmp_path, "save", *SMALL, "--suffix", "new")
    done = dcp(tmp_path, "newload", *SMALL[2:])
    assert done.stdout.splitlines()[-1] == "new"
    assert "2 suffixes in" in " ".join(done.output.split())
    (data,) = (tmp_path / "at" / "new" / "iteration-0").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(CorruptCheckpoint, match=r"__0_0\.distcp"):
        dcp(tmp_path, "newload", *SMALL[2:])


@pytest.mark.slow
def test_newload_tries_again_what_fails(tmp_path, monkeypatch):
    dcp(tmp_path, "save", *SMALL, "--suffix", "mine")
    (data,) = (tmp_path / "at" / "mine" / "iteration-0").glob("*.distcp")
    hidden, start, starts = data.with_name("hidden"), place._start, []

    def hide_at_first(program, env, log):
        starts.append(program)
        if len(starts) == 1:
            data.rename(hidden)
        elif hidden.exists():
            hidden.rename(data)
        return start(program, env, log)

    monkeypatch.setattr(place, "_start", hide_at_first)
    done = dcp(tmp_path, "newload", *SMALL[2:], "--retries", "1")
    assert "attempt 1 of 2 failed: rank 0" in " ".join(done.output.split())
    assert "1 of 1 loads equal" in done.output
    assert len(starts) == 2
    starts.clear()
    with pytest.raises(LaunchError, match="rank 0"):
        dcp(tmp_path, "newload", *SMALL[2:], "--retries", "0")


@pytest.mark.slow
def test_a_configuration_of_the_s3_connector_is_measured_as_it_is(tmp_path):
    configuration = tmp_path / "dcp_fsdp_save.yaml"
    configuration.write_text(FSDP_SAVE)
    where = ("--scratch", tmp_path / "s", "--logs", tmp_path / "l", "--warmup", 0, "--records", tmp_path / "records")
    given = (f"+path={tmp_path / 'at'}", "checkpoint.storage=disk", "backend=gloo", "epochs=1", "world_size=1")
    words = ["dcp", "benchmark", configuration, *given, "model=L7b-2MB", "thread_count=1,2", *where]
    done = CliRunner().invoke(app, list(map(str, words)), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert (
        "not used: defaults: hydra/callbacks/collate_results, defaults: aws/dynamodb, hydra.mode, hydra.sweep" in said
    )
    found = [DcpRecord.load(path).spec for path in sorted((tmp_path / "records").iterdir())]
    assert [spec.storage_options for spec in found] == [
        {"thread_count": 1, "sync_files": False},
        {"thread_count": 2, "sync_files": False},
    ]
    assert {(spec.spread, spec.sharding, spec.model, spec.iterations) for spec in found} == {
        ("fsdp2", "full", "L7b-2MB", 1)
    }


FSDP_SAVE = """
defaults:
  - hydra/callbacks/collate_results
  - aws/dynamodb
  - _self_
s3:
  region: ???
  uri:
epochs: 4
hydra:
  mode: MULTIRUN
  sweep: {dir: somewhere}
  sweeper:
    params:
      +model: L7b, L13b
      +backend: nccl
      +world_size: 8
      +thread_count: 8
      +checkpoint.storage: disk, s3
      +checkpoint.sharding_strategy: full
      +checkpoint.sync_files: false
"""


def test_wait_ends_by_itself(tmp_path):
    began = time.monotonic()
    assert "idle for 0.01 minutes" in dcp(tmp_path, "wait", "--duration", "0.01").output
    assert 0.5 < time.monotonic() - began < 30
    with pytest.raises(ConfigError, match=r"--duration 0\.0: minutes"):
        dcp(tmp_path, "wait", "--duration", "0")
