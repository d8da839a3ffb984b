"""Runs over several ranks for real: processes of this machine, and nodes of a testbed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from lastgood.cluster.hostfile import parse_hostfile
from lastgood.cluster.testbed.testbed import why_no_testbed
from lastgood.errors import LaunchError
from lastgood.experiments.formulas.pairs import estimate_pairs
from lastgood.experiments.machine.facts import boot_id
from lastgood.experiments.multirank.order import RankOrder
from lastgood.experiments.records.run import RunRecord
from lastgood.experiments.records.spec import RunSpec
from lastgood.experiments.services.place import Place
from lastgood.experiments.systems.over_ranks import PARTED
from lastgood.workloads.data.prepare import prepare_dataset
from lastgood.workloads.options import BlobOptions
from lastgood.workloads.registry import build_workload
from tests.experiments.support.rank_runs import OPT, Job, proved, spec_of

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="lastgood[deepspeed] is not installed"
)


@pytest.fixture
def job(tmp_path):
    made = Job(tmp_path, tmp_path / "data")
    yield made
    if made.process is not None:
        made.process.kill()
        made.process.wait(60)


def losses_of_one_process(spec: RunSpec, measured: int) -> list[float]:
    """The same training without ranks: each step's gradient is that of both ranks' batches together."""
    workload = build_workload(
        "blob", BlobOptions(megabytes=3), data_dir=Path(), data_path=None, seed=spec.seed, device="cpu"
    )
    losses = []
    for step in range(spec.warmup_steps + measured):
        loss = (workload.loss(workload.data.batch(2 * step)) + workload.loss(workload.data.batch(2 * step + 1))) / 2
        loss.backward()
        workload.optimizer.step()
        workload.optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses[spec.warmup_steps :]


@pytest.mark.slow  # every day the one below is measured in pairs, and proved as well
def test_two_ranks_give_one_proved_record(job):
    before = job.kept / "ranks" / "measure" / "rank-00001.log"
    before.parent.mkdir(parents=True)
    before.write_text("of an attempt that failed")
    record = proved(job, spec_of())
    assert not job.kept.exists()
    assert record.workload.losses == pytest.approx(losses_of_one_process(spec_of(), 4), rel=1e-5)
    assert record.ranks.launcher == "local" and len(record.ranks.hosts) == 1
    # Both write, on one disk.
    assert record.ranks.bytes_per_disk == 2 * record.workload.state_bytes
    assert record.counts.durable == 2 and len(record.clocks.persist_s) == 2
    assert record.clocks.elapsed_s == max(one.elapsed_s for one in record.ranks.ranks)


def test_two_ranks_measure_pairs_of_blocks_together_and_prove_their_state(job):
    before = job.kept / "ranks" / "measure" / "rank-00001.log"
    before.parent.mkdir(parents=True)
    before.write_text("of an attempt that failed")
    spec = spec_of(pairs={"rounds": 2, "half_width": 0.9, "budget_s": 1.0})
    record = proved(job, spec)
    assert not job.kept.exists()
    blocks = record.pairs.blocks
    rounds = blocks[-1].round + 1
    kinds = [list(dict.fromkeys(block.kind for block in blocks if block.round == number)) for number in range(rounds)]
    assert rounds >= 2 and all(set(one) == {"with", "without"} for one in kinds) and kinds[0] == kinds[1][::-1]
    assert all(later.began_s >= one.began_s + one.elapsed_s for one, later in pairwise(blocks))
    # Every rank trained every block; a block of 4 steps at interval 2 has two checkpoints, and all are durable.
    saving = [block for block in blocks if block.kind == "with"]
    assert len(record.workload.losses) == sum(block.steps for block in blocks)
    # Wherever the first block that counts begins.
    first, alone = record.workload.losses[: blocks[0].steps], losses_of_one_process(spec, 60)
    assert any(alone[at : at + len(first)] == pytest.approx(first, rel=1e-5) for at in range(60 - len(first)))
    assert record.ranks.launcher == "local" and len(record.ranks.hosts) == 1
    assert record.clocks.measured_steps == sum(block.steps for block in saving) == 4 * len(saving)
    assert record.counts.started == record.counts.durable == 2 * len(saving)
    assert all(one.counts == record.counts for one in record.ranks.ranks)
    assert len(record.pairs.write_bursts_bytes_per_s) == rounds
    assert estimate_pairs(blocks).ratio > 0


@pytest.mark.slow  # every day test_kills has the arithmetic, and goodput a training that is killed and goes on
def test_a_run_that_is_killed_tells_what_that_took_back(job):
    # Seed 10 has it killed 198 steps' time behind the measurement; how far it comes by then, depends on the machine.
    code, output = job.finish(spec_of(kills=1, proof=False, interval_steps=100, measured_steps=200, seed=10))
    assert code == 0, output
    record = RunRecord.load(job.out)
    (failure,) = record.failures
    # Behind one step of warm-up and the measured ones; a kill may come between a save and the note of its step.
    assert failure.reached_step >= 201 and failure.restored_step >= 201 and failure.restored_step % 100 == 1
    assert failure.lost_steps == max(0, failure.reached_step - failure.restored_step)
    assert failure.losses_equal and failure.restore_s > 0
    assert record.proof is None and record.counts.durable == 2
    assert job.left() == []


@pytest.mark.slow
def test_a_rank_that_fails_before_its_kill_fails_the_run(job):
    process = job.start(spec_of(kills=1, measured_steps=400_000))
    job.ranks()[1].send_signal(signal.SIGKILL)
    assert process.wait(300) == 1
    assert "rank 1 on " in job.log.read_text() and "SIGKILL" in job.log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("system", ["checkfreq", "dcp"])
def test_what_rank_0_writes_is_all_ranks_state_with_batch_norm_too(job, system):
    """The statistics of each rank's own batch differ; DDP gives all of them rank 0's in the next forward pass."""
    prepare_dataset("images", job.data_dir)
    options = {"batch_size": 2, "image_size": 32, "classes": 10}
    record = proved(job, spec_of(system, workload="resnet18", workload_options=options, kills=2))
    assert [failure.losses_equal for failure in record.failures] == [True, True]
    assert any(failure.losses_checked for failure in record.failures)


@pytest.mark.slow
def test_shadows_outlive_kills_and_give_all_of_it_back(job):
    prepare_dataset("wikitext", job.data_dir)
    spec = spec_of("checkmate", workload="opt", workload_options=OPT, interval_steps=1, shadows=2, kills=2)
    record = proved(job, spec)
    assert len(record.shadows) == 2
    for shadow in record.shadows:
        assert shadow.cpu_s > 0 and shadow.peak_rss_bytes > 1 << 20 and shadow.optimizer_s > 0
    # Every gradient arrives once: 4 bytes of each parameter in each measured step.
    assert sum(shadow.received_bytes for shadow in record.shadows) == 4 * 4 * record.workload.parameters
    for failure in record.failures:
        assert failure.losses_equal and 0 <= failure.lost_steps <= 3
    assert record.counts.durable == 4


@pytest.mark.slow
def test_where_rank_0_writes_for_all_the_others_write_nothing(job):
    prepare_dataset("wikitext", job.data_dir)
    record = proved(job, spec_of("checkfreq", workload="opt", workload_options=OPT))
    assert [one.checkpoint_bytes > 0 for one in record.ranks.ranks] == [True, False]
    assert record.counts.durable == 2


@pytest.mark.slow
def test_under_fsdp2_each_rank_keeps_its_shards(job):
    prepare_dataset("wikitext", job.data_dir)
    record = proved(job, spec_of(workload="opt", workload_options=OPT, parallel="fsdp2"))
    whole = 3 * 4 * record.workload.parameters
    assert all(0.4 * whole < one.state_bytes < 0.7 * whole for one in record.ranks.ranks)
    assert record.ranks.bytes_per_disk == sum(one.checkpoint_bytes for one in record.ranks.ranks)


@pytest.mark.slow
def test_under_fsdp2_dcp_saves_with_all_ranks_together(job):
    prepare_dataset("wikitext", job.data_dir)
    record = proved(job, spec_of("dcp", workload="opt", workload_options=OPT, parallel="fsdp2", kills=1))
    assert all(one.checkpoint_bytes > 0 for one in record.ranks.ranks)
    assert record.counts.durable == 2
    assert [failure.losses_equal for failure in record.failures] == [True]


@needs_deepspeed
@pytest.mark.slow  # a smaller one of each runs every day in test_partitioned and integrations/test_deepspeed
@pytest.mark.parametrize("parallel", ["zero3", "pipeline"])
def test_under_deepspeed_each_rank_keeps_its_part(job, parallel):
    prepare_dataset("wikitext", job.data_dir)
    record = proved(job, spec_of(workload="opt", workload_options=OPT, parallel=parallel))
    whole = 3 * 4 * record.workload.parameters
    held = [one.state_bytes for one in record.ranks.ranks]
    assert all(0.3 * whole < one < 0.9 * whole for one in held) and sum(held) > whole
    assert record.workload.state_bytes == max(held)
    assert record.ranks.bytes_per_disk == sum(one.checkpoint_bytes for one in record.ranks.ranks) == sum(held)


@pytest.mark.slow  # every day a lost rank fails a run, and test_ranks (checkpointers) finds states that differ
@pytest.mark.parametrize("system", ["sync", "checkfreq"])
def test_where_rank_0_writes_for_all_another_state_fails_the_ranks_and_is_named(system, tmp_path):
    order = RankOrder(
        spec=spec_of(system),
        phase="measure",
        folder=str(tmp_path / "run"),
        data_dir=str(tmp_path / "data"),
        token="t",
        boot_id=boot_id(),
        parent=os.getpid(),
    )
    here = Place("torchrun", parse_hostfile("here slots=2\n"), None, None)
    program = [
        sys.executable,
        str(Path(__file__).parents[1] / "support" / "differing_rank.py"),
        order.model_dump_json(),
    ]
    fault = f"rank 1's state is not rank 0's, which {system} writes for all"
    with pytest.raises(LaunchError, match=rf"rank [01] on .* ended with exit status 1(?s:.*){fault}"):
        here.start(program, {"OMP_NUM_THREADS": "1"}, tmp_path / "logs", 200, print)


def test_a_rank_that_is_lost_fails_the_run_and_is_named(job):
    process = job.start(spec_of(measured_steps=400_000))
    first, second = job.ranks()
    second.send_signal(signal.SIGKILL)
    assert process.wait(300) == 1
    assert "rank 1 on " in job.log.read_text() and "SIGKILL" in job.log.read_text()
    assert "Traceback" not in job.log.read_text()
    assert not first.is_running() and not job.out.exists() and job.left() == []
    # The scratch folder is gone. All logs are beside the place of the record, and the error names the lost rank's.
    log = job.kept / "ranks" / "measure" / "rank-00001.log"
    assert f"SIGKILL; log: {log}\n" in job.log.read_text()
    assert f"kept until the next one: {job.kept}\n" in job.log.read_text()
    assert "building the workload" in log.read_text() and log.with_name("rank-00000.log").exists()


@pytest.mark.slow
def test_a_run_that_is_ended_from_outside_keeps_its_logs_too(job):
    process = job.start(spec_of(measured_steps=400_000))
    ranks = job.ranks()
    process.send_signal(signal.SIGTERM)
    assert process.wait(200) == 128 + signal.SIGTERM
    assert f"kept until the next one: {job.kept}\n" in job.log.read_text()
    assert len(list(job.kept.glob("ranks/measure/rank-*.log"))) == 2
    assert not any(rank.is_running() for rank in ranks) and job.left() == []


@pytest.mark.slow
def test_no_rank_outlives_a_run_that_is_killed(job):
    process = job.start(spec_of(measured_steps=400_000))
    ranks = job.ranks()
    process.kill()
    process.wait(60)
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert not alive and not job.out.exists()


def test_what_does_not_run_over_ranks_is_refused(job):
    code, output = job.finish(spec_of("gpm"))
    assert code == 2 and "gpm does not run over several ranks" in output
    code, output = job.finish(spec_of(ranks=1, parallel="none"), "--hostfile", "/no/hosts")
    assert code == 2 and "has one rank; leave it out" in output
    code, output = job.finish(spec_of(nodes=2), "--how", "srun")
    assert code == 2 and "--how srun: blob 3 MB ddp 2 pccheck f2 r0 needs --hostfile FILE with the names of 2" in output


def test_a_run_that_has_no_room_is_refused_before_a_rank_starts(job):
    megabytes = psutil.virtual_memory().total // 10**6
    code, output = job.finish(spec_of(workload_options={"megabytes": megabytes}))
    assert code == 1 and "of memory for its 2 ranks, and " in output and "are available" in output
    assert "starting 2 ranks" not in output and job.left() == []


def test_a_testbed_has_no_gpu_of_its_own(job):
    code, output = job.finish(spec_of(nodes=2, device="cuda"))
    assert code == 2 and "nodes of a testbed would share this machine's GPUs" in output


def test_a_hostfile_of_another_size_is_refused(job, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=2\n")
    code, output = job.finish(spec_of(nodes=2), "--hostfile", str(hosts))
    assert code == 2 and "1 hosts with 2 slots in all" in output and "2 hosts and 2 ranks" in output


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize(
    ("system", "how"),
    [
        ("gemini", "ssh"),
        ("checkmate", "ssh"),
        ("pccheck", "torchrun"),
        ("pccheck", "deepspeed"),
        ("pccheck", "openmpi"),
    ],
)
def test_two_nodes_of_a_testbed(system, how, job):
    missing = {"deepspeed": "pdsh", "openmpi": "mpirun"}.get(how)
    if missing is not None and (shutil.which(missing) is None or importlib.util.find_spec("deepspeed") is None):
        pytest.skip(f"{missing}, or lastgood[deepspeed], is not installed")
    reason = why_no_testbed()
    if reason is not None:
        pytest.skip(reason)
    prepare_dataset("wikitext", job.data_dir)
    own = {"shadows": 2, "interval_steps": 1} if system == "checkmate" else {}
    spec = spec_of(system, nodes=2, workload="opt", workload_options=OPT, kills=1, **own)
    record = proved(job, spec, "--rate", "1gbit", "--how", how)
    assert record.ranks.hosts == ["vm1", "vm2"] == [one.host for one in record.ranks.ranks]
    assert record.ranks.link_bits_per_s == 10**9 and record.ranks.launcher == how
    state = record.workload.state_bytes
    assert record.failures[0].losses_equal
    if system == "checkmate":
        # Each rank sends half of the gradients, half of that to the other node's shadow, and a side record.
        gradients = 4 * record.workload.parameters
        assert [one.host for one in record.shadows] == ["vm1", "vm2"] and record.ranks.bytes_per_disk == 0
        assert gradients / 4 <= record.ranks.bytes_per_link < gradients / 4 + 65536
    elif system == "gemini":
        assert record.ranks.bytes_per_disk == 0 and state <= record.ranks.bytes_per_link < 1.1 * state + 65536
    else:
        assert (record.ranks.bytes_per_disk, record.ranks.bytes_per_link) == (2 * state, 0)
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"lgtb-r{job.process.pid}" not in spaces


@needs_deepspeed
@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize("model", ["opt", "bloom"])
@pytest.mark.parametrize("parallel", PARTED)
@pytest.mark.parametrize("system", ["sync", "checkfreq", "gemini", "pccheck"])
def test_deepspeed_on_two_nodes_of_a_testbed(system, parallel, model, job):
    reason = why_no_testbed()
    if reason is not None:
        pytest.skip(reason)
    prepare_dataset("wikitext", job.data_dir)
    options = {name: value for name, value in OPT.items() if model == "opt" or name != "feedforward"}
    spec = spec_of(system, nodes=2, workload=model, workload_options=options, parallel=parallel)
    record = proved(job, spec, "--rate", "1gbit")
    assert record.ranks.hosts == ["vm1", "vm2"] == [one.host for one in record.ranks.ranks]
    held = [one.state_bytes for one in record.ranks.ranks]
    if system == "gemini":
        # The replica, and what describes it; the own copy goes over no link.
        assert record.ranks.bytes_per_disk == 0 and max(held) <= record.ranks.bytes_per_link < max(held) + 65536
        alone = record.storage["communication_s"]
        assert alone["iterations_without"] and alone["without_checkpoint_traffic"] > 0
    else:
        assert (record.ranks.bytes_per_disk, record.ranks.bytes_per_link) == (sum(held), 0)
