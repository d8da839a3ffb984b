"""How the ranks of an exchange find each other through a store of torch.distributed, and what goes wrong then."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from lastgood.errors import CheckpointError, ConfigError, HostError, WaitTimeout
from lastgood.ports import free_ports
from lastgood.sparse import meeting
from lastgood.sparse.exchange import Exchange
from lastgood.sparse.meeting import about, find_place_in
from tests.sparse.support.rings import WAIT_S, equal, gradient, together
from tests.support.warm import WarmProcess

PROCESS_S = 240.0
"""For what a process does that is still to be started, and to import torch."""


def test_ranks_meet_twice_by_one_store() -> None:
    store = dist.HashStore()
    for _ in range(2):
        found = together([partial(find_place_in, store, rank, 3, WAIT_S, "127.0.0.1") for rank in range(3)])
        assert [place.rank for place in found] == [0, 1, 2]
        assert len({place.token for place in found}) == len({place.job for place in found}) == 1
        assert len(found[0].token) == 64
        opened = together([partial(Exchange.open, [100], {}, place=place, join_timeout_s=WAIT_S) for place in found])
        futures = [exchange.submit(0, 0, gradient(100, 3, rank)) for rank, exchange in enumerate(opened)]
        for future in futures:
            assert all(equal(one, gradient(100, 3, rank)) for rank, one in enumerate(future.result(WAIT_S)))
        together([exchange.close for exchange in opened])
    again = together([partial(find_place_in, store, rank, 2, WAIT_S, "127.0.0.1") for rank in range(2)])
    assert again[0].incarnation == 3 and again[0].token != found[0].token
    for place in again:
        place.listener.close()


def test_ranks_that_do_not_come_are_named() -> None:
    with pytest.raises(WaitTimeout, match=r"waited 0\.3 s for rank 1, 3 to begin"):
        store = dist.HashStore()
        together([partial(find_place_in, store, 2, 4, 0.3, "127.0.0.1")])
        find_place_in(store, 0, 4, 0.3, "127.0.0.1")


def test_a_rank_that_cannot_listen_is_named_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = meeting._listen

    def listen(host: str) -> object:
        if host == "broken":
            raise HostError("this machine cannot listen on broken:0")
        return plain(host)

    monkeypatch.setattr(meeting, "_listen", listen)
    store = dist.HashStore()
    hosts = ["127.0.0.1", "broken", "127.0.0.1"]
    found = together([partial(find_place_in, store, rank, 3, WAIT_S, host) for rank, host in enumerate(hosts)])
    assert [type(error) for error in found] == [HostError] * 3
    assert "rank 1: this machine cannot listen on broken:0" in str(found[0])


def test_a_host_that_is_none_of_this_machines_is_listened_for_everywhere() -> None:
    with meeting._listen("192.0.2.1") as listener:
        assert listener.getsockname()[0] in ("0.0.0.0", "::")


def test_a_store_that_fails_is_an_error_of_ours() -> None:
    store = dist.HashStore()
    store.set("lastgood/sparse/made/0", "no number")
    with pytest.raises(CheckpointError, match=r"rank 0: torch\.distributed's store fails"):
        find_place_in(store, 0, 2, 1.0, "127.0.0.1")


def test_the_own_address_is_the_one_that_reaches_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert meeting._own_host(0) == meeting._own_host(1) == "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "no such host")
    with pytest.raises(HostError, match=r"no way to rank 0 at no such host \(MASTER_ADDR\)"):
        meeting._own_host(1)


def test_settings_are_plain_and_few() -> None:
    assert about([3, 4], {"compressor": "v16"})["elements"] == 7
    for settings in ({"a": object()}, {"a": "x" * 300}, {str(number): 1 for number in range(65)}):
        with pytest.raises(ConfigError, match="settings of an exchange"):
            about([1], settings)  # type: ignore[arg-type]


RANK = """
import sys, time
import torch.distributed as dist
from lastgood.sparse.exchange import Exchange
from tests.sparse.support.rings import equal, gradient

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
with Exchange.open([100_000], {"compressor": "topk"}, timeout_s=60.0) as exchange:
    for iteration in range(100):
        if iteration == 3:
            print("exchanging", flush=True)
            sys.stdin.readline()
        results = exchange.submit(iteration, 0, gradient(100_000, 1000, rank)).result(60.0)
        assert all(equal(one, gradient(100_000, 1000, other)) for other, one in enumerate(results))
"""


def test_processes_meet_by_torch_distributed_and_the_death_of_one_is_named_on_the_other(tmp_path: Path) -> None:
    ranks, log = 2, tmp_path / "log"
    port = free_ports()[0]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with log.open("wb") as errors:
        started = [
            WarmProcess(["-c", RANK], subprocess.PIPE, stderr=errors, env={**environment, "RANK": str(rank)})
            for rank in range(ranks)
        ]
    try:
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == "exchanging\n"
        assert started[0].stdin is not None
        started[0].stdin.write("\n")
        started[0].stdin.flush()
        time.sleep(0.2)
        begin = time.monotonic()
        started[1].send_signal(signal.SIGKILL)
        started[0].communicate(PROCESS_S)
        assert started[0].returncode == 1
        last = log.read_text().strip().splitlines()[-1]
        assert re.search("CheckpointError: rank 1 on .*(closed the connection|the connection broke)", last), last
        assert time.monotonic() - begin < 45, "long before the timeout"
    finally:
        for process in started:
            process.kill()
            process.wait(PROCESS_S)
