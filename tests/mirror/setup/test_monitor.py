"""Mirrors on a real testbed: every frame both ways, once, where it should be; and gone again."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from lastgood.cli import app
from lastgood.cluster.testbed.monitor import Monitor
from lastgood.cluster.testbed.net import in_namespace, links_in, listed, namespace_of, namespaces, run_program
from lastgood.cluster.testbed.state import state_folder
from lastgood.cluster.testbed.testbed import Testbed, why_no_testbed
from lastgood.errors import ConfigError, HostError
from lastgood.mirror.capture.interface import InterfaceSource
from lastgood.mirror.setup.check import check_mirror
from lastgood.units import MIB

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def bed() -> Iterator[Testbed]:
    reason = why_no_testbed()
    if reason is not None:
        pytest.skip(reason)
    # With a rate limit: mirrors must live beside it.
    with Testbed.up(3, name=f"m{os.getpid()}", rate="1gbit", guarded=True) as made:
        yield made


def kernel_state(bed: Testbed) -> list[object]:
    space = namespace_of(bed.name, "br")
    qdiscs = sorted((one["dev"], one["kind"]) for one in listed("tc", "-n", space, "-json", "qdisc", "show"))
    filters = [run_program("tc", "-n", space, "filter", "show", "dev", node, "ingress") for node in bed.node_names]
    inside = [sorted(links_in(namespace_of(bed.name, node))) for node in bed.node_names]
    return [qdiscs, sorted(links_in(space)), filters, inside]


def all_good(bed: Testbed, monitor: Monitor, count: int = 40) -> bool:
    rows = check_mirror(bed, monitor, count=count)
    assert [(row.watched, row.way) for row in rows] == [(n, w) for n in monitor.watched for w in ("sent", "received")]
    return all(row.good and not row.dropped and not row.link_dropped for row in rows)


def test_all_of_a_watched_node_both_ways_and_undone_without_a_trace(bed: Testbed) -> None:
    before = kernel_state(bed)
    monitor = bed.mirror(["vm1"], "vm3")
    assert monitor.interfaces == ("mir0",)
    assert all_good(bed, monitor, 200)
    copies = {one.way: one.frames for one in bed.count_mirrored("vm3")}
    assert min(copies.values()) >= 200
    # Again, and with more: what is there is not made anew, so nothing that passes is missed.
    bed.mirror(["vm1"], "vm3")
    more = bed.mirror(["vm1", "vm2"], "vm3")
    still = {one.way: one.frames for one in bed.count_mirrored("vm3") if one.watched == "vm1"}
    assert all(still[way] >= copies[way] for way in copies)
    assert all_good(bed, more)
    # And with less.
    assert [one.watched for one in check_mirror(bed, bed.mirror(["vm2"], "vm3"), count=10)] == ["vm2", "vm2"]
    assert bed.unmirror("vm3") and not bed.unmirror("vm3")
    assert kernel_state(bed) == before and bed.monitors() == ()


@pytest.mark.slow  # every day the one link of both directions
def test_a_link_for_each_direction_and_two_monitors_of_one_port(bed: Testbed) -> None:
    before = kernel_state(bed)
    split = bed.mirror(["vm1"], "vm3", split=True)
    other = bed.mirror(["vm1"], "vm2")
    assert split.interfaces == ("mir0", "mir1")
    assert all_good(bed, split) and all_good(bed, other)
    assert bed.unmirror("vm2")
    joined = bed.mirror(["vm1"], "vm3")
    assert all_good(bed, joined)
    bed.unmirror("vm3")
    assert kernel_state(bed) == before


@pytest.mark.slow
def test_restarts_of_watched_node_and_monitor_bring_the_mirror_back(bed: Testbed) -> None:
    before = kernel_state(bed)
    monitor = bed.mirror(["vm1"], "vm3")
    bed.kill("vm1")
    with pytest.raises(HostError, match="vm1 sent is not mirrored to vm3 now"):
        bed.count_mirrored("vm3")
    bed.restart("vm1")
    assert all_good(bed, monitor)
    bed.kill("vm3")
    with pytest.raises(HostError, match="not mirrored"):
        bed.count_mirrored("vm3")
    bed.restart("vm3")
    assert all_good(bed, monitor)
    bed.unmirror("vm3")
    assert kernel_state(bed) == before


def test_a_check_sees_what_is_missing(bed: Testbed) -> None:
    monitor = bed.mirror(["vm1"], "vm3")
    space = namespace_of(bed.name, "br")
    # The link to the monitor is down: tc still copies, and nothing arrives.
    run_program("ip", "-n", space, "link", "set", "mon-vm3-0", "down")
    rows = check_mirror(bed, monitor, count=20, timeout_s=1.0)
    assert [row.seen for row in rows] == [0, 0] and not any(row.good for row in rows)
    assert sum(row.dropped for row in rows) >= 40, "tc counts what it cannot give on"
    run_program("ip", "-n", space, "link", "set", "mon-vm3-0", "up")
    assert all_good(bed, monitor)
    bed.unmirror("vm3")


def test_what_cannot_be_mirrored_is_refused(bed: Testbed) -> None:
    for watched, to, words in ((["vm3"], "vm3", "other nodes"), ([], "vm3", "other nodes"), (["vm9"], "vm3", "vm9")):
        with pytest.raises(ConfigError, match=words):
            bed.mirror(watched, to)
    with pytest.raises(ConfigError, match="mirrors nothing"):
        bed.count_mirrored("vm3")


def test_the_commands_of_the_docs(bed: Testbed) -> None:
    def run(*words: str) -> Result:
        return CliRunner().invoke(app, ["mirror", *words, "--testbed", bed.name])

    assert isinstance(run("check").exception, ConfigError), "nothing is mirrored yet"
    assert run("setup", "--watch", "vm1", "--to", "vm3").exit_code == 0
    checked = run("check", "--interface", "mir0", "--count", "20", "--json")
    assert checked.exit_code == 0, checked.output
    assert [(row["way"], row["seen"], row["good"]) for row in json.loads(checked.stdout)] == [
        ("sent", 20, True),
        ("received", 20, True),
    ]
    assert isinstance(run("check", "--interface", "mir1").exception, ConfigError)
    assert all(row["frames"] >= 20 for row in json.loads(run("check", "--counters", "--json").stdout))
    assert run("setup", "--to", "vm3", "--undo").exit_code == 0
    assert bed.monitors() == ()


def test_a_testbed_that_is_taken_down_leaves_nothing_of_its_mirror() -> None:
    """`lastgood testbed down`, with two mirrors there: no link, filter or record stays; a new one has none."""
    reason = why_no_testbed()
    if reason is not None:
        pytest.skip(reason)
    name = f"d{os.getpid()}"

    def left() -> list[object]:
        """What this machine has of it: namespaces, links, and the folder."""
        links = [one["ifname"] for one in listed("ip", "-json", "link")]
        actions = [one for one in listed("tc", "-json", "actions", "list", "action", "mirred") if one.get("actions")]
        return [namespaces(name), links, actions, state_folder(name)]

    before = left()
    with Testbed.up(3, name=name, guarded=True) as made:
        made.mirror(["vm1"], "vm3", split=True)
        made.mirror(["vm1", "vm3"], "vm2")
        assert {one.frames for one in made.count_mirrored("vm3")} and len(made.monitors()) == 2
        done = CliRunner().invoke(app, ["testbed", "down", "--name", name])
        assert done.exit_code == 0, done.output
        assert left() == before
        with pytest.raises(ConfigError, match="taken down"):
            made.mirror(["vm2"], "vm3")
    with Testbed.up(3, name=name, guarded=True) as again:
        assert again.monitors() == ()
        assert "mir0" not in links_in(namespace_of(name, "vm3"))
        with pytest.raises(ConfigError, match="mirrors nothing"):
            again.count_mirrored("vm3")
    assert left() == before


def exchange(bed: Testbed, node: str, sent: dict[str, bytes]) -> None:
    """TCP between a node and the machine: each side sends its bytes at once, and gets the other's."""

    def run(connection: socket.socket, mine: bytes, theirs: bytes) -> None:
        writing = threading.Thread(target=connection.sendall, args=(mine,))
        writing.start()
        got = bytearray()
        while len(got) < len(theirs):
            got += connection.recv(1 << 20) or pytest.fail("cut")
        writing.join(30)
        assert got == theirs

    listener = socket.create_server((bed.host_address, 0))
    space = namespace_of(bed.name, node)
    near = in_namespace(space, lambda: socket.create_connection(listener.getsockname()[:2], 10))
    far, _ = listener.accept()
    with listener, near, far:
        far.settimeout(30)
        near.settimeout(30)
        other = threading.Thread(target=run, args=(far, sent["received"], sent["sent"]))
        other.start()
        run(near, sent["sent"], sent["received"])
        other.join(30)
        assert not other.is_alive()


@pytest.mark.parametrize("split", [pytest.param(False, marks=pytest.mark.slow), True])
def test_tcp_is_complete_and_no_acknowledgement_comes_before_its_data(bed: Testbed, split: bool) -> None:
    monitor = bed.mirror(["vm1"], "vm3", split=split)
    rng = np.random.default_rng(1)
    sent = {"sent": rng.bytes(8 << 20), "received": rng.bytes(8 << 20)}
    first, *also = monitor.interfaces
    space = namespace_of(bed.name, "vm3")
    frames: list[bytes] = []
    times: list[int] = []
    with closing(in_namespace(space, lambda: InterfaceSource(first, also=also, ring_bytes=64 * MIB))) as source:
        exchange(bed, "vm1", sent)
        while batch := source.read(4096, 0.3):
            times += batch.table["time_ns"].tolist()
            frames += [bytes(batch.frame(number)) for number in range(len(batch))]
        counters = source.counters()
    assert counters["kernel_dropped"] == counters["truncated"] == 0 and counters["bytes"] > 16 << 20
    seen = {way: bytearray() for way in sent}
    waiting: dict[str, dict[int, bytes]] = {way: {} for way in sent}
    begin: dict[str, int] = {}
    node = socket.inet_aton(bed.address("vm1"))
    assert times == sorted(times)
    for frame in frames:
        if frame[12:14] != b"\x08\x00" or frame[23] != 6:
            continue
        way, other = ("sent", "received") if frame[26:30] == node else ("received", "sent")
        start = 14 + (frame[14] & 15) * 4
        sequence, acknowledged = struct.unpack_from(">II", frame, start + 4)
        payload = frame[start + (frame[start + 12] >> 4) * 4 : 14 + struct.unpack_from(">H", frame, 16)[0]]
        if frame[start + 13] & 2:  # SYN
            begin[way] = sequence + 1
            continue
        place = (sequence - begin[way]) & 0xFFFFFFFF
        if payload:  # two processors may send at once: pieces are put together by their places
            waiting[way][place] = payload
        while early := [at for at in waiting[way] if at <= len(seen[way])]:
            for at in early:
                piece = waiting[way].pop(at)
                seen[way][at : at + len(piece)] = piece
        if len(seen[other]) < len(sent[other]):  # at the end FIN counts as a byte
            assert (acknowledged - begin[other]) & 0xFFFFFFFF <= len(seen[other])
    assert seen == {way: bytearray(content) for way, content in sent.items()}
    bed.unmirror("vm3")
