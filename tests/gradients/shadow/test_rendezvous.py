"""Shadows tell each other where they listen."""

import threading
from datetime import timedelta

import pytest

from lastgood.errors import ConfigError, HostError
from lastgood.gradients.shadow.launch_env import Place
from lastgood.gradients.shadow.rendezvous import Rendezvous, ask_addresses
from lastgood.ports import free_ports

WAIT_S = 60.0


def test_all_learn_all_addresses():
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports()[0]), "WORLD_SIZE": "2"}
    found = {}
    meetings = []

    def meet(shadow):
        meetings.append(Rendezvous(environment, Place(shadow, 2, None), WAIT_S))
        found[shadow] = meetings[-1].exchange(shadow, f"host{shadow}:{shadow}")

    threads = [threading.Thread(target=meet, args=(shadow,)) for shadow in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT_S)
    assert found == {0: ["host0:0", "host1:1"], 1: ["host0:0", "host1:1"]}


def test_one_that_does_not_come_is_named():
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports()[0])}
    meeting = Rendezvous(environment, Place(0, 2, None), WAIT_S)
    meeting._store.set_timeout(timedelta(seconds=1))  # of the other one alone: making the store may take longer
    with pytest.raises(HostError, match="shadow 1"):
        meeting.exchange(0, "host0:0")


def test_without_a_store_it_is_refused():
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        Rendezvous({}, Place(0, 1, None), 1.0)
    # With trainers in the same world the store is theirs, and there is none here.
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports()[0]), "WORLD_SIZE": "3"}
    with pytest.raises(HostError, match="no store"):
        Rendezvous(environment, Place(0, 1, 2), 1.0)


@pytest.mark.parametrize("port", ["70000", "0x10"])
def test_a_port_that_is_none_is_refused(port):
    with pytest.raises(ConfigError, match="MASTER_PORT"):
        Rendezvous({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}, Place(0, 1, None), 1.0)


def test_trainers_are_told_so_too():
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:70000"):
        ask_addresses("127.0.0.1", 70000, 1, 1.0)


def test_a_store_that_goes_away_is_named():
    port = free_ports()[0]
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    first = Rendezvous(environment, Place(0, 2, None), WAIT_S)
    second = Rendezvous(environment, Place(1, 2, None), WAIT_S)
    del first
    with pytest.raises(HostError, match=f"127.0.0.1:{port}"):
        second.exchange(1, "host1:1")
