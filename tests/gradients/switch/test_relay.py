"""The user-space switch: what it relays is unchanged, what it copies is what shadows need, and no shadow stalls it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from lastgood import _native
from lastgood.errors import CheckpointError, ConfigError, HostError
from lastgood.gradients.layout.layout import GradientLayout, plan_layout
from lastgood.gradients.switch import relay as switch_module
from lastgood.gradients.switch.faults import CopyFaults, FaultPlan, parse_faults
from lastgood.gradients.switch.forward import CopySettings
from lastgood.gradients.switch.relay import Switch, SwitchLink, parse_link
from lastgood.ports import free_ports
from lastgood.wire.frames import PROOF_BYTES, Wire, prove_trainer
from lastgood.wire.records import FINAL, DType, Record, RecordKind, pack_header
from lastgood.wire.ring_comm import Divide, Place, RingComm
from lastgood.wire.ring_link import RING_GREETING, Hello, listen_ring
from tests.gradients.support.receiving_shadow import ReceivingShadow
from tests.wire.support.answering import prove_peer
from tests.wire.support.ring_helpers import JOB, TOKEN, WAIT_S, together

RANKS, SHADOWS = 3, 2
ELEMENTS = 30_000
SETTINGS = CopySettings(TOKEN, timeout_s=WAIT_S)


def layout_of(elements: int) -> GradientLayout:
    """One vector of parameters in three buckets."""
    third = elements // 3
    sizes = [third, third, elements - 2 * third]
    named = [(f"p{number}", (size,), "float32") for number, size in enumerate(sizes)]
    return plan_layout(named, {}, ranks=RANKS, shadows=SHADOWS, bucket_bytes=4 * third)


LAYOUT = layout_of(ELEMENTS)


def places_of(layout: GradientLayout) -> list[Place]:
    places, start = [], 0
    for one in layout.parameters:
        places.append(Place(start, one.nbytes, one.bucket, one.offset))
        start += one.nbytes
    return places


def proved(stack: ExitStack, address: str, following: socket.socket) -> tuple[socket.socket, socket.socket]:
    """A rank's connection to the switch and the one that the next rank gets, once both know each other."""
    near = stack.enter_context(socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), WAIT_S))

    def answer() -> socket.socket:
        far = stack.enter_context(following.accept()[0])
        prove_peer(Wire(far, "the rank", WAIT_S), TOKEN, RING_GREETING)
        return far

    _, far = together([lambda: prove_trainer(Wire(near, "the switch", WAIT_S), TOKEN, RING_GREETING), answer])  # type: ignore[list-item]
    for one in (near, far):
        one.settimeout(WAIT_S)
    return near, far


class Bed:
    """A ring through a switch with shadows behind it."""

    def __init__(
        self,
        stack: ExitStack,
        settings: CopySettings = SETTINGS,
        incarnation: int = 1,
        *,
        refusing: bool = False,
        swapped: bool = False,
    ) -> None:
        # Ports that are free again for who comes in the place of a shadow, or of a rank.
        ports = free_ports(SHADOWS + RANKS)
        self.shadows = [
            ReceivingShadow(shadow, LAYOUT, TOKEN, JOB, incarnation, ports[shadow]) for shadow in range(SHADOWS)
        ]
        for shadow in self.shadows:
            stack.callback(shadow.close)
            shadow.refusing = refusing
        listeners = [listen_ring("127.0.0.1", port) for port in ports[SHADOWS:]]
        self.addresses = [f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
        links = [SwitchLink("127.0.0.1:0", self.addresses[(rank + 1) % RANKS]) for rank in range(RANKS)]
        listed = [one.address for one in (reversed(self.shadows) if swapped else self.shadows)]
        self.switch = stack.enter_context(Switch(links, listed, settings))
        self.comms = self.open(listeners, incarnation)
        for comm in self.comms:
            stack.callback(comm.close)
        self.plans = [comm.plan(ELEMENTS, DType.float32, places_of(LAYOUT), Divide.BEFORE) for comm in self.comms]

    def open(self, listeners: list[socket.socket], incarnation: int) -> list[RingComm]:
        def make(rank: int) -> RingComm:
            return RingComm(
                rank,
                RANKS,
                listener=listeners[rank],
                next_address=self.switch.addresses[rank],
                token=TOKEN,
                job=JOB,
                epoch=incarnation,
                layout=LAYOUT.digest,
                timeout_s=WAIT_S,
                segment_bytes=4096,
            )

        return together([lambda rank=rank: make(rank) for rank in range(RANKS)])  # type: ignore[misc]

    def step(self, iteration: int) -> bytes:
        """One iteration; what all ranks hold behind it."""
        data = [
            np.random.default_rng([iteration, rank]).standard_normal(ELEMENTS).astype(np.float32)
            for rank in range(RANKS)
        ]

        def run(comm: RingComm) -> None:
            comm.all_reduce(self.plans[comm.rank], data[comm.rank].ctypes.data, iteration)
            comm.end(iteration)

        together([lambda comm=comm: run(comm) for comm in self.comms])  # type: ignore[misc]
        assert all(np.array_equal(data[0], other) for other in data[1:])
        return data[0].tobytes()

    def held(self, iteration: int) -> bytes:
        """What the shadows hold, in the order of the vector."""
        return b"".join(
            self.shadows[one.bucket % SHADOWS].bytes_of(one.bucket, iteration)[one.offset : one.offset + one.nbytes]
            for one in LAYOUT.parameters
        )


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def eventually(true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + WAIT_S
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


# -- copies ------------------------------------------------------------------------------------------------------------


def test_shadows_hold_what_the_ranks_hold(stack: ExitStack) -> None:
    bed = Bed(stack)
    for iteration in range(1, 5):
        whole = bed.step(iteration)
        assert all(shadow.wait(iteration) for shadow in bed.shadows)
        assert bed.held(iteration) == whole
    assert [shadow.refused() for shadow in bed.shadows] == [{}, {}]
    assert sorted({hello.rank for shadow in bed.shadows for hello in shadow.hellos}) == list(range(RANKS))
    # The last copies may be counted a moment after they arrive.
    assert eventually(lambda: bed.switch.counters()["copies"]["sent_bytes"] >= 4 * ELEMENTS * 4)
    counts = bed.switch.counters()
    assert not counts["copies"].get("dropped_records") and not counts["copies"].get("lost_records")
    # The ranks send nothing twice: what went through the links is the ring itself.
    assert counts["relay"]["forward_bytes"] - sum(comm.sent_bytes for comm in bed.comms) < 1000 * RANKS


def test_copies_wait_until_a_shadow_takes_them(stack: ExitStack) -> None:
    bed = Bed(stack, refusing=True)
    whole = bed.step(1)
    assert eventually(lambda: bed.switch.counters()["copies"]["queued_bytes"] > ELEMENTS * 4)
    for shadow in bed.shadows:
        shadow.refusing = False
    assert all(shadow.wait(1) for shadow in bed.shadows)
    assert bed.held(1) == whole


def test_a_slow_shadow_never_stalls_the_relay_and_its_loss_is_counted(stack: ExitStack) -> None:
    bed = Bed(stack, CopySettings(TOKEN, queue_bytes=1 << 16, timeout_s=WAIT_S), refusing=True)
    for iteration in range(1, 21):
        bed.step(iteration)  # each has a timeout of its own; nothing here waits for shadows
    counts = bed.switch.counters()["copies"]
    assert counts["dropped_records"] > 0
    assert counts["queued_bytes"] <= RANKS * SHADOWS * ((1 << 16) + (1 << 20))
    for shadow in bed.shadows:
        shadow.refusing = False
    # Ends of iteration were kept, so the shadows can tell that something is missing for good.
    assert eventually(
        lambda: (
            [shadow.look() for shadow in bed.shadows] != []
            and all((rank, 20) in shadow.ends for shadow in bed.shadows for rank in range(RANKS))
        )
    )
    assert any(shadow.missing(20) for shadow in bed.shadows)
    # And later iterations are whole again, as long as each is taken before the next one.
    for iteration in (21, 22, 23, 24, 25):
        whole = bed.step(iteration)
        assert all(shadow.wait(iteration) for shadow in bed.shadows)
        assert bed.held(iteration) == whole


def test_a_shadow_that_dies_and_comes_again_is_connected_anew(stack: ExitStack) -> None:
    bed = Bed(stack)
    bed.step(1)
    assert bed.shadows[1].wait(1)
    bed.shadows[1].close()
    bed.step(2)
    later = ReceivingShadow(1, LAYOUT, TOKEN, JOB, port=int(bed.shadows[1].address.rpartition(":")[2]))
    stack.callback(later.close)
    assert eventually(lambda: len(later.hellos) == RANKS)
    whole = bed.step(3)
    bed.shadows[1] = later
    assert all(shadow.wait(3) for shadow in bed.shadows)
    assert bed.held(3) == whole


def test_the_last_copies_arrive_behind_the_ranks_end(stack: ExitStack) -> None:
    bed = Bed(stack, refusing=True)
    whole = bed.step(1)
    for comm in bed.comms:
        comm.close()
    for shadow in bed.shadows:
        shadow.refusing = False
    assert all(shadow.wait(1) for shadow in bed.shadows)
    assert bed.held(1) == whole
    assert eventually(lambda: all(row["queued_bytes"] == 0 for row in bed.switch.counters()["now"]))


@pytest.mark.parametrize("epochs", [(1, 2), (7, 1)], ids=["the next one", "the first one of shadows that began anew"])
def test_a_new_life_of_the_job_takes_the_place_of_the_old_one(stack: ExitStack, epochs: tuple[int, int]) -> None:
    bed = Bed(stack, incarnation=epochs[0])
    bed.step(1)
    assert all(shadow.wait(1) for shadow in bed.shadows)
    for comm in bed.comms:
        comm.close()
    host_ports = [address.rpartition(":") for address in bed.addresses]
    listeners = [listen_ring(host, int(port)) for host, _, port in host_ports]
    again = bed.open(listeners, incarnation=epochs[1])
    for comm in again:
        stack.callback(comm.close)
    assert eventually(lambda: {hello.epoch for shadow in bed.shadows for hello in shadow.hellos} == set(epochs))
    # What the old one's copies came to is kept.
    assert eventually(lambda: bed.switch.counters()["copies"]["connections"] == 2 * RANKS * SHADOWS)
    assert eventually(lambda: bed.switch.counters()["copies"]["sent_bytes"] >= ELEMENTS * 4)
    assert all(row["connections"] == 1 for row in bed.switch.counters()["now"])


def test_copies_of_an_old_life_are_given_up(stack: ExitStack) -> None:
    bed = Bed(stack, CopySettings(TOKEN, timeout_s=120.0), refusing=True)
    bed.step(1)
    for comm in bed.comms:
        comm.close()
    listeners = [listen_ring("127.0.0.1", int(address.rpartition(":")[2])) for address in bed.addresses]
    for comm in bed.open(listeners, incarnation=2):
        stack.callback(comm.close)
    # Their records would be refused, and their memory is wanted for the new one's: nobody waits two minutes for them.
    assert eventually(lambda: bed.switch.counters()["copies"].get("lost_records", 0) > 0)
    assert eventually(lambda: bed.switch.counters()["copies"]["queued_bytes"] == 0)


def test_a_straggler_of_an_older_life_takes_nobody_s_place(stack: ExitStack) -> None:
    # A rank of the older life was still on its way into its ring when the new one had begun.
    layout = plan_layout([("p", (4,), "float32")], {}, ranks=1, shadows=1)
    shadow = ReceivingShadow(0, layout, TOKEN, JOB, incarnation=2)
    stack.callback(shadow.close)
    following = stack.enter_context(listen_ring("127.0.0.1"))
    link = SwitchLink("127.0.0.1:0", f"127.0.0.1:{following.getsockname()[1]}")
    switch = stack.enter_context(Switch([link], [shadow.address], SETTINGS))

    def greet(incarnation: int) -> Wire:
        near, beyond = proved(stack, switch.addresses[0], following)
        rank, far = Wire(near, "the switch", WAIT_S), Wire(beyond, "the rank", WAIT_S)
        rank.send_message(**Hello(JOB, incarnation, 0, 2, layout.digest, "host").content())
        far.receive_message("a hello")
        return rank

    new = greet(2)
    assert eventually(lambda: len(shadow.hellos) == 1)
    greet(1)
    time.sleep(0.3)  # nothing shall follow from that, so there is nothing to wait for
    payload = bytes(range(16))
    job = int.from_bytes(bytes.fromhex(JOB)[:8], "little")
    record = Record(RecordKind.GRADIENT, job, 2, 0, 1, 0, DType.float32, 0, 16, _native.crc32c(payload), FINAL)
    end = Record(RecordKind.END, job, 2, 0, 1)
    new.write("a gradient", pack_header(record), payload, pack_header(end))
    assert shadow.wait(1), switch.counters()


def test_a_shadow_in_the_place_of_another_one_gets_nothing(stack: ExitStack, caplog: pytest.LogCaptureFixture) -> None:
    bed = Bed(stack, swapped=True)
    bed.step(1)
    assert eventually(lambda: "is shadow 1 of 2, and stands as 0 of 2 on this switch's list" in caplog.text)
    assert all(shadow.missing(1) for shadow in bed.shadows)
    assert not bed.switch.counters()["copies"].get("sent_records")


# -- the relay ---------------------------------------------------------------------------------------------------------


def test_what_is_no_hello_of_a_ring_is_relayed_unchanged_and_not_copied(stack: ExitStack) -> None:
    echo = stack.enter_context(listen_ring("127.0.0.1"))
    switch = stack.enter_context(
        Switch([SwitchLink("127.0.0.1:0", f"127.0.0.1:{echo.getsockname()[1]}")], ["127.0.0.1:1"], SETTINGS)
    )
    content = np.random.default_rng(5).integers(0, 256, 3_000_001, dtype=np.uint8).tobytes()
    rank, following = proved(stack, switch.addresses[0], echo)

    def serve() -> bytes:
        got = bytearray()
        while data := following.recv(1 << 16):
            got += data
            following.sendall(data[::-1])
        following.close()
        return bytes(got)

    def ask() -> int:
        sender = threading.Thread(target=lambda: (rank.sendall(content), rank.shutdown(socket.SHUT_WR)))
        sender.start()
        count = 0
        while data := rank.recv(1 << 16):
            count += len(data)
        sender.join(WAIT_S)
        return count

    got, count = together([serve, ask])  # type: ignore[list-item]
    assert got == content and count == len(content)
    counts = switch.counters()["relay"]
    assert counts["forward_bytes"] == len(content) == counts["back_bytes"] - PROOF_BYTES
    assert counts["blind_links"] == 1


def test_the_end_of_either_side_is_passed_on_at_once(stack: ExitStack) -> None:
    server = stack.enter_context(listen_ring("127.0.0.1"))
    link = SwitchLink("127.0.0.1:0", f"127.0.0.1:{server.getsockname()[1]}")
    switch = stack.enter_context(Switch([link, link], [], SETTINGS))
    for address, ends_first in zip(switch.addresses, ("rank", "next"), strict=True):
        rank, following = proved(stack, address, server)
        one, other = (rank, following) if ends_first == "rank" else (following, rank)
        one.sendall(b"the last words")
        one.shutdown(socket.SHUT_WR)
        assert b"".join(iter(lambda other=other: other.recv(100), b"")) == b"the last words"
        # The other direction still works.
        other.sendall(b"an answer")
        assert one.recv(100) == b"an answer"


def test_a_next_rank_that_is_not_there_yet_closes_the_connection(stack: ExitStack) -> None:
    target = f"127.0.0.1:{free_ports()[0]}"
    switch = stack.enter_context(Switch([SwitchLink("127.0.0.1:0", target)], [], SETTINGS))
    host, _, port = switch.addresses[0].rpartition(":")
    with socket.create_connection((host, int(port)), WAIT_S) as connection:
        connection.sendall(RING_GREETING + bytes(32))
        assert connection.recv(1) == b""
    assert switch.counters()["relay"]["unreachable_connections"] == 1


def test_a_name_that_nobody_knows_is_not_looked_up_for_each_stranger(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def unknown(*question: object, **_: object) -> list[tuple[object, ...]]:
        asked.append(question)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(switch_module, "_NAME_S", 1000.0)
    switch = stack.enter_context(Switch([SwitchLink("127.0.0.1:0", "next.rank.invalid:1")], [], SETTINGS))
    where = ("127.0.0.1", int(switch.addresses[0].rpartition(":")[2]))
    with monkeypatch.context() as patched:
        for _ in range(3):
            with socket.create_connection(where, WAIT_S) as connection:
                patched.setattr(socket, "getaddrinfo", unknown)
                connection.sendall(RING_GREETING + bytes(32))
                assert connection.recv(1) == b""
            patched.undo()
    assert len(asked) == 1
    assert switch.counters()["relay"]["unreachable_connections"] == 3


def test_a_copy_that_cannot_begin_leaves_the_training_alone(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(switch_module, "Copier", no_thread)
    bed = Bed(stack)
    bed.step(1)
    bed.step(2)
    assert bed.switch.counters()["relay"]["blind_links"] == RANKS
    assert "relayed, and not copied any more" in caplog.text and "can't start new thread" in caplog.text


@pytest.mark.parametrize("name", ["guest", "switch-back"])
def test_a_moment_without_threads_ends_no_link(stack: ExitStack, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    server = stack.enter_context(listen_ring("127.0.0.1"))
    link = SwitchLink("127.0.0.1:0", f"127.0.0.1:{server.getsockname()[1]}")
    switch = stack.enter_context(Switch([link], [], SETTINGS))

    start = threading.Thread.start

    def no_thread(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    for _ in range(10):  # more than a link has places
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", no_thread)
            with pytest.raises(CheckpointError, match="closed the connection before the peer's proof"):
                proved(stack, switch.addresses[0], server)
    assert eventually(lambda: not switch._sockets)
    rank, following = proved(stack, switch.addresses[0], server)
    rank.sendall(b"word")
    assert following.recv(4) == b"word"


def test_silent_connections_lock_no_rank_out(stack: ExitStack) -> None:
    server = stack.enter_context(listen_ring("127.0.0.1"))
    link = SwitchLink("127.0.0.1:0", f"127.0.0.1:{server.getsockname()[1]}")
    switch = stack.enter_context(Switch([link], [], SETTINGS))
    where = ("127.0.0.1", int(switch.addresses[0].rpartition(":")[2]))
    for first in (b"", RING_GREETING + bytes(32)):
        for _ in range(20):
            stack.enter_context(socket.create_connection(where, WAIT_S)).sendall(first)
    strangers = [stack.enter_context(server.accept()[0]) for _ in range(20)]
    rank, following = proved(stack, switch.addresses[0], server)
    rank.sendall(b"word")
    assert following.recv(4) == b"word" and len(strangers) == 20


def test_a_host_that_is_cut_off_does_not_keep_its_link_for_ever(stack: ExitStack) -> None:
    # A host that goes without a word sends no end; nothing else would tell, and a link has eight places.
    bed = Bed(stack)
    bed.step(1)
    assert len(bed.switch._sockets) == 2 * RANKS
    for one in bed.switch._sockets:
        waits = [one.getsockopt(socket.IPPROTO_TCP, option) for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL)]
        tries = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT)
        assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) and waits[0] + waits[1] * tries <= 60


def test_an_address_in_use_is_refused_by_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(HostError, match=address):
            Switch([SwitchLink("127.0.0.1:0", "x:1"), SwitchLink(address, "x:1")], [], SETTINGS)


@pytest.mark.parametrize("text", ["x", "a:1", "a:1=b", "a=b:1", "a:1=b:99999"])
def test_what_is_no_link_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_link(text)


# -- faults ------------------------------------------------------------------------------------------------------------


GRADIENT = Record(RecordKind.GRADIENT, 1, 1, 1, 1)


def test_faults_are_those_of_the_seed() -> None:
    plan = FaultPlan(seed=3, loss=0.2, duplicate=0.2, reorder=0.2, delay=0.2, corrupt=0.2, truncate=0.1)
    content = [bytes([number]) * 50 for number in range(200)]

    def run(stream: str) -> list[object]:
        faults = CopyFaults(plan, stream)
        return [list(faults.befall(GRADIENT, one)) for one in content]

    assert run("a") == run("a")
    assert run("a") != run("b")


def test_each_fault_does_what_it_says() -> None:
    content = [bytes([number]) * 50 for number in range(100)]

    def run(**rates: float) -> list[list[tuple[bytes, float, bool]]]:
        faults = CopyFaults(FaultPlan(**rates), "a")  # type: ignore[arg-type]
        return [[(one.content, one.delay_s, one.cut) for one in faults.befall(GRADIENT, each)] for each in content]

    assert run() == [[(each, 0.0, False)] for each in content]
    assert run(loss=1) == [[]] * 100
    assert run(duplicate=1) == [[(each, 0.0, False)] * 2 for each in content]
    assert [one for group in run(reorder=1) for one in group][:2] == [
        (content[1], 0.0, False),
        (content[0], 0.0, False),
    ]
    end = Record(RecordKind.END, 1, 1, 1, 1)
    assert [one.content for one in CopyFaults(FaultPlan(loss=1), "a").befall(end, b"end")] == [b"end"]
    assert run(delay=1, delay_s=0.5) == [[(each, 0.5, False)] for each in content]
    for each, group in zip(content, run(corrupt=1), strict=True):
        ((changed, _, _),) = group
        differing = int.from_bytes(changed, "big") ^ int.from_bytes(each, "big")
        assert differing.bit_count() == 1
    for each, group in zip(content, run(truncate=1), strict=True):
        ((short, _, cut),) = group
        assert cut and len(short) < 50 and each.startswith(short)


def test_fault_text() -> None:
    assert parse_faults("loss=0.5,seed=7,delay_s=2") == FaultPlan(seed=7, loss=0.5, delay_s=2.0)
    for text in ("loss", "loss=2", "lose=0.1", "seed=x"):
        with pytest.raises(ConfigError):
            parse_faults(text)


@pytest.mark.parametrize("fault", ["loss", "duplicate", "reorder", "delay", "corrupt", "truncate"])
def test_no_fault_gives_a_shadow_wrong_bytes(stack: ExitStack, fault: str) -> None:
    plan = parse_faults(f"{fault}=0.05,delay_s=0.01,seed=11")
    bed = Bed(stack, CopySettings(TOKEN, timeout_s=WAIT_S, faults=plan))
    harmless = fault in ("duplicate", "delay")
    whole = b""
    for iteration in range(1, 4):
        whole = bed.step(iteration)
        for shadow in bed.shadows:
            assert shadow.wait(iteration, WAIT_S if harmless else 0.3) or not harmless
    assert eventually(lambda: bed.switch.counters()["copies"]["faults"] > 0)
    # Asked before: what is late may come between the two.
    missing = [shadow._receiver.missing(3) for shadow in bed.shadows]
    found, at = bed.held(3), 0
    for one in LAYOUT.parameters:
        # A bucket is as it should be, or known to lack something.
        same = found[at : at + one.nbytes] == whole[at : at + one.nbytes]
        assert same or missing[one.bucket % SHADOWS].get(one.bucket), f"{one.name} differs, and nobody knows"
        at += one.nbytes
    if fault == "duplicate":
        assert eventually(lambda: sum(shadow.refused().get("duplicate", 0) for shadow in bed.shadows) > 0)
        assert found == whole
    if fault == "corrupt":
        assert eventually(lambda: any(shadow.refused() for shadow in bed.shadows))
