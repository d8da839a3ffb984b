"""Whether hosts have room for a run over ranks, before any rank starts."""

from __future__ import annotations

import re
import shutil

import psutil
import pytest

from lastgood.cluster.hostfile import Hostfile, parse_hostfile
from lastgood.errors import HostError
from lastgood.experiments.multirank.capacity import Need, Room, check_room, judge_room, needs_of
from lastgood.experiments.plan.machine_checks import PROCESS_BYTES
from lastgood.experiments.records.spec import RunSpec
from lastgood.experiments.services.place import Place
from lastgood.units import GIB, MIB
from tests.experiments.support.rank_runs import OPT, spec_of

TWO = parse_hostfile("a slots=2\nb slots=1\n")
STATE = 300 * 10**6


def spec(system: str = "pccheck", **changed: object) -> RunSpec:
    sized = {"workload_options": {"megabytes": 300}, "ranks": 3, "nodes": 2, **changed}
    return spec_of(system, **sized)


def disks(found: RunSpec, hosts: Hostfile = TWO) -> list[int]:
    return [need.disk_bytes for need in needs_of(found, hosts).values()]


def test_each_rank_that_writes_needs_its_slots():
    slots = 1 + 2  # one in flight, two kept
    options = {"max_in_flight": 1, "keep": 2, "chunk_bytes": 65536}
    assert disks(spec(system_options=options)) == [2 * slots * STATE, slots * STATE]
    # Written once by the three of them together, and all of it on each host's disk, as far as is certain.
    assert disks(spec(system_options={**options, "replicated": "ddp"})) == [
        2 * slots * 100 * 10**6,
        slots * 100 * 10**6,
    ]
    assert disks(spec("sync", system_options={"keep": 1})) == [2 * STATE, 0], "rank 0 writes for all"
    assert disks(spec("none")) == [0, 0]


def test_memory_is_that_of_processes_training_and_system():
    model = 2 * STATE  # at least: the state, and gradients of what is trained
    pool = {"pool_bytes": 64 * MIB, "chunk_bytes": 65536}
    a, b = needs_of(spec(system_options=pool), TWO).values()
    assert a.memory_bytes == 2 * b.memory_bytes
    assert PROCESS_BYTES + STATE + 64 * MIB <= b.memory_bytes < PROCESS_BYTES + model + 64 * MIB
    _, on_gpu = needs_of(spec(system_options=pool, device="cuda"), TWO).values()
    assert on_gpu.memory_bytes == PROCESS_BYTES + 64 * MIB
    first, other = needs_of(spec("checkfreq"), parse_hostfile("a slots=1\nb slots=2\n")).values()
    assert first.memory_bytes - other.memory_bytes / 2 == STATE, "only rank 0 has a snapshot"
    one = parse_hostfile("a slots=1\nb slots=1\n")
    buffers = spec("gemini", ranks=2, system_options={"replicas": 2})
    (a, _) = needs_of(buffers, one).values()
    assert a.memory_bytes > PROCESS_BYTES + 4 * STATE, "its own, a snapshot of it, and two areas of the other's"


def test_shards_count_with_their_share():
    of = {"workload": "opt", "workload_options": OPT, "parallel": "fsdp2", "system_options": {"pool_bytes": 1 << 20}}
    (shards,) = needs_of(spec_of(**of, ranks=4), parse_hostfile("a slots=4\n")).values()
    (whole,) = needs_of(spec_of(**{**of, "parallel": "ddp"}, ranks=4), parse_hostfile("a slots=4\n")).values()
    assert shards.disk_bytes == pytest.approx(whole.disk_bytes / 4, rel=0.01)
    assert shards.memory_bytes < whole.memory_bytes


def room(kernel: str = "k", memory: int = 100 * GIB, disk: int = 100 * GIB, device: int = 1) -> Room:
    return Room(kernel=kernel, memory_bytes=memory, folder="/data", disk=device, disk_bytes=disk)


def said(needs: dict[str, Need], rooms: dict[str, Room]) -> str:
    with pytest.raises(HostError) as caught:
        judge_room(spec(), needs, rooms)
    return str(caught.value)


def test_what_is_lacking_is_said_with_host_need_and_what_is_there():
    needs = {"a": Need(2, 10 * GIB, 10 * GIB), "b": Need(1, 5 * GIB, 5 * GIB)}
    judge_room(spec(), needs, {"a": room("k"), "b": room("l")})
    judge_room(spec(), needs, {"a": room("k", memory=10 * GIB, disk=10 * GIB), "b": room("l")})
    text = said(needs, {"a": room("k", memory=10 * GIB - 1), "b": room("l", disk=4 * GIB)})
    assert "a: blob 300 MB ddp 3 pccheck f2 r0 needs at least 10 GiB of memory for its 2 ranks, and 10 GiB are" in text
    assert "b: " in text and "needs at least 5 GiB of disk for its rank, and 4 GiB are free in /data" in text


def test_hosts_that_share_a_machine_or_a_disk_need_it_together():
    needs = {"a": Need(2, 10 * GIB, 10 * GIB), "b": Need(1, 5 * GIB, 5 * GIB)}
    tight = {"memory": 14 * GIB, "disk": 14 * GIB}
    judge_room(spec(), needs, {"a": room("k", **tight), "b": room("l", **tight)})
    text = said(needs, {"a": room(**tight), "b": room(**tight)})
    assert text.count("a, b (one machine): ") == 2 and "15 GiB of memory for its 3 ranks" in text
    text = said(needs, {"a": room(**tight), "b": room(**tight, device=2)})
    assert "memory" in text and "disk" not in text


def test_this_machine_is_really_asked(tmp_path):
    here = Place("torchrun", parse_hostfile("here slots=2\n"), None, None)
    lines: list[str] = []
    small = spec_of(workload_options={"megabytes": 1}, system_options={"pool_bytes": 1 << 20, "chunk_bytes": 65536})
    check_room(small, here, tmp_path / "not" / "there yet", lines.append)
    before = shutil.disk_usage(tmp_path).free
    megabytes = before // 10**6
    options = {"pool_bytes": 1 << 20, "chunk_bytes": 65536}
    memory = psutil.virtual_memory().total
    big = spec_of(workload_options={"megabytes": max(megabytes, memory // 10**6)}, system_options=options)
    with pytest.raises(HostError) as caught:
        check_room(big, here, tmp_path, lines.append)
    assert "here: " in str(caught.value) and " of memory for its 2 ranks" in str(caught.value)
    after = shutil.disk_usage(tmp_path).free
    # Another process may write or remove files meanwhile.
    here_free = rf" of disk for its 2 ranks, and ([\d.]+) GiB are free in {re.escape(str(tmp_path.resolve()))}"
    said_free = re.search(here_free, str(caught.value))
    assert said_free is not None, caught.value
    assert 0.95 * min(before, after) <= float(said_free[1]) * GIB <= 1.05 * max(before, after)
    assert lines == []
