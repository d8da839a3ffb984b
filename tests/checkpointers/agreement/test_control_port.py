"""The coordinator's port and its ranks without a training: strangers, garbage, tokens, ranks that do not come."""

from __future__ import annotations

import os
import random
import resource
import select
import socket
import threading
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood.checkpointers.agreement.address import Address, check_control, find_address
from lastgood.checkpointers.agreement.channel import Channel, open_channel
from lastgood.checkpointers.agreement.coordinator import Coordinator
from lastgood.checkpointers.agreement.decide import Fate, Report, Wanted
from lastgood.checkpointers.agreement.member import Member
from lastgood.checkpointers.pccheck.options import PCcheckOptions
from lastgood.checkpointers.pccheck.system import PCcheck
from lastgood.errors import CheckpointError, ConfigError, CorruptCheckpoint, MismatchError, WaitTimeout
from lastgood.ports import free_ports
from lastgood.processes import die_with_parent
from lastgood.wire.frames import HEADER_BYTES, message_frame
from tests.support import patience

TOKEN = b"a secret of the tests"
SILENCE_S = 60.0
"""More than a busy machine keeps a thread waiting: who is silent for so long counts as lost."""
WAIT_S = 60


class Port:
    """A coordinator and where it is."""

    def __init__(self, world, choose=None):
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.coordinator = Coordinator(listener, TOKEN, world, SILENCE_S, choose)
        self.members = []

    def member(self, rank, world, token=TOKEN, port=None):
        heard = []
        report = Report(rank, world, f"host{rank}", f"/d/{rank}", None, wanted=Wanted())
        address = Address("127.0.0.1", port or self.port, token)
        member = Member(address, report, SILENCE_S, heard.append, lambda *verdict: heard.append(verdict))
        self.members.append(member)
        return member, heard

    def running(self, world):
        """A life of `world` ranks."""
        both = [self.member(rank, world) for rank in range(world)]
        offers = [member.wait_for_offer(0, WAIT_S) for member, _ in both]
        for (member, _), offer in zip(both, offers, strict=True):
            member.answer(offer)
        assert [
            member.wait_for_offer(offer.number, WAIT_S) for (member, _), offer in zip(both, offers, strict=True)
        ] == [None] * world
        assert len({(offer.job_id, offer.incarnation) for offer in offers}) == 1
        return both

    def end(self):
        for member in self.members:
            member.close(5)
        self.coordinator.close(0.0)


@pytest.fixture
def port():
    made = []

    def make(world, choose=None):
        made.append(Port(world, choose))
        return made[-1]

    yield make
    for one in made:
        one.end()


def wait_until(true, what, seconds=WAIT_S):
    patience.wait_until(true, what, seconds)


def wait_to_hear(member, words):
    """Until this is what a member says that is wrong."""
    wait_until(lambda: words in member.trouble()[0], f"a member to hear that {words}")


def test_a_step_is_global_once_all_have_committed_it(port):
    both = port(3).running(3)
    for rank in (2, 0):
        both[rank][0].committed(10)
    time.sleep(0.2)
    assert not any(heard for _, heard in both)
    both[1][0].committed(10)
    wait_until(lambda: all(heard for _, heard in both), "the fate of step 10")
    assert {(heard[0].step, heard[0].fate) for _, heard in both} == {(10, Fate.GLOBAL)}
    both[1][0].void(20, Fate.SKIPPED, "no place")
    both[2][0].judge((1, 10), False, "a spike")
    wait_until(lambda: all(len(heard) == 3 for _, heard in both), "a skip and a verdict")
    for _, heard in both:
        assert next(one for one in heard if one != heard[0] and not isinstance(one, tuple)).why == (
            "rank 1 on host1: no place"
        )
        assert ((1, 10), False, "a spike", False) in heard


def test_what_rank_0_chooses_all_hear_with_the_fate(port):
    asked = []

    def choose(step):
        asked.append(step)
        return step == 20

    both = port(2, choose).running(2)
    both[1][0].void(5, Fate.SKIPPED, "no place")
    for step in (10, 20, 30):
        for member, _ in both:
            member.committed(step)
    wait_until(lambda: all(len(heard) == 4 for _, heard in both), "four fates")
    assert asked == [10, 20, 30], "of those that all hold, once each"
    for _, heard in both:
        assert [(one.step, one.chosen) for one in heard] == [(5, False), (10, False), (20, True), (30, False)]


def test_a_missing_rank_is_named_in_bounded_time(port):
    one = port(3)
    member, _ = one.member(0, 3)
    wait_to_hear(member, "did not come")
    with pytest.raises(WaitTimeout, match=r"ranks? 1, 2 did not come.*world_size=1"):
        member.wait_for_offer(0, 0.1)
    with pytest.raises(WaitTimeout, match=rf"127.0.0.1:{one.port}"):
        member.wait_for_offer(0, 0.1)


def test_where_nobody_listens_that_is_said():
    (free,) = free_ports()
    member = Member(
        Address("127.0.0.1", free, TOKEN), Report(1, 2, "h", "/d", None), SILENCE_S, print, lambda *verdict: None
    )
    wait_to_hear(member, "refused")
    with pytest.raises(WaitTimeout, match=rf"rank 1 of 2.*127.0.0.1:{free} cannot be reached.*refused"):
        member.wait_for_offer(0, 0.1)
    member.close(5)


def test_a_training_may_have_more_than_a_thousand_files_open():
    """Such as `select` refuses: the member would fail where it had only to wait, and with it all further saves."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    (free,) = free_ports()
    with ExitStack() as files:
        files.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while files.enter_context(Path(os.devnull).open("rb")).fileno() < 1100:
            pass
        member = Member(
            Address("127.0.0.1", free, TOKEN), Report(1, 2, "h", "/d", None), SILENCE_S, print, lambda *verdict: None
        )
        files.callback(member.close, 5)
        for _ in range(2):  # it has slept in between
            with pytest.raises(WaitTimeout, match=rf"127.0.0.1:{free} cannot be reached.*refused"):
                member.wait_for_offer(0, 1.0)


def test_a_rank_with_another_token_is_refused_and_does_not_count(port):
    one = port(2)
    first, _ = one.member(0, 2)
    stranger, _ = one.member(1, 2, token=b"another job's")
    wait_to_hear(stranger, "does not know this job's token")
    with pytest.raises(WaitTimeout, match="does not know this job's token: it is another job's"):
        stranger.wait_for_offer(0, 0.1)
    wait_to_hear(first, "did not come")
    with pytest.raises(WaitTimeout, match="rank 1 did not come"):
        first.wait_for_offer(0, 0.1)


def test_a_rank_of_another_world_is_refused(port):
    one = port(2)
    member, _ = one.member(1, 4)
    with pytest.raises(MismatchError, match=r"rank 1 on host1.*4 ranks.*rank 0 that it has 2"):
        member.wait_for_offer(0, WAIT_S)


def test_a_foreign_program_at_the_port_is_no_coordinator():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(MismatchError, match="another program listens there"):
            open_channel("127.0.0.1", server.getsockname()[1], TOKEN, WAIT_S)
        thread.join(WAIT_S)


def test_a_silent_program_at_the_port_is_not_waited_for_long():
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(WaitTimeout, match=r"0.3 s.*prove itself"):
        open_channel("127.0.0.1", server.getsockname()[1], TOKEN, 0.3)


def test_a_second_process_of_a_rank_and_a_late_one_are_refused(port):
    one = port(2)
    first, _ = one.member(0, 2)
    wait_to_hear(first, "rank 1 did not come")
    second, _ = one.member(0, 2)
    wait_to_hear(second, "has joined")
    with pytest.raises(WaitTimeout, match=r"rank 0 on host0 \(/d/0\) has joined as this rank already"):
        second.wait_for_offer(0, 0.1)
    second.close(5)
    both = port(2)
    both.running(2)
    late, _ = both.member(1, 2)
    wait_to_hear(late, "is running already")
    with pytest.raises(WaitTimeout, match="this incarnation of the job is running already; end all its ranks"):
        late.wait_for_offer(0, 0.1)


def test_a_process_of_a_dead_life_is_refused_for_good(port):
    one = port(1)
    ((old, _),) = one.running(1)
    one.coordinator.close(0.0)
    wait_until(lambda: old.trouble()[0], "the loss to be noticed")
    new = Port(1)
    try:
        new.running(1)
        old.address = Address("127.0.0.1", new.port, TOKEN)
        wait_until(lambda: "an incarnation of the job that is over" in old.trouble()[0], "the refusal")
    finally:
        new.end()


def test_a_rank_that_leaves_is_named_with_its_reason(port):
    (first, _), (second, _) = port(2).running(2)
    second.close(5, why="RuntimeError: out of memory")
    wait_until(lambda: first.trouble()[0], "the loss to be told")
    assert "rank 1 on host1 is missing (it failed: RuntimeError: out of memory)" in first.trouble()[0]


# -- strangers ---------------------------------------------------------------------------------------------------------


def still_works(one):
    """A life can begin and go on at the port."""
    ((member, heard),) = one.running(1)
    member.committed(1)
    wait_until(lambda: heard, "a fate after the strangers")


def test_garbage_at_the_port_disturbs_nobody(port, caplog):
    one = port(1)
    chance = random.Random(7)
    frame = message_frame({"kind": "lastgood agreement 2", "nonce": "00" * 32})
    contents = [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01" + os.urandom(200),
        frame[:10],
        frame[: HEADER_BYTES - 1] + b"\xff" + frame[HEADER_BYTES:],
        message_frame({"kind": "join"}),
        message_frame({"kind": "lastgood agreement 2"}),
        message_frame({"kind": "lastgood agreement 2", "nonce": 5}),
        message_frame({"kind": "x" * 5000}),
        frame + message_frame({"proof": "00"}),
        frame + frame,
        b"",
    ]
    for _ in range(60):
        spoilt = bytearray(frame)
        spoilt[chance.randrange(len(spoilt))] ^= 1 << chance.randrange(8)
        contents.append(bytes(spoilt))
    for content in contents:
        with socket.create_connection(("127.0.0.1", one.port), WAIT_S) as stranger, suppress(OSError):
            stranger.sendall(content)
    still_works(one)
    refused = [line for line in caplog.messages if "control port" in line]
    assert 0 < len(refused) <= 20
    assert any("does not speak this protocol" in line or "no frame of this protocol" in line for line in refused)


def test_many_silent_strangers_leave_room(port):
    one = port(1)
    strangers = [socket.create_connection(("127.0.0.1", one.port), WAIT_S) for _ in range(60)]
    still_works(one)
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize("error", [RecursionError("deep"), KeyError("kind"), MemoryError()], ids=repr)
def test_whatever_a_rank_brings_ends_its_connection_only(port, monkeypatch, error, caplog):
    """A message that nobody thought of."""
    one = port(2)
    (first, heard), (second, _) = one.running(2)
    hear, failed = Coordinator._hear, []

    def odd(coordinator, guest, message):
        if message.get("kind") == "committed" and not failed:
            failed.append(message)
            raise error
        hear(coordinator, guest, message)

    monkeypatch.setattr(Coordinator, "_hear", odd)
    second.committed(1)
    wait_until(lambda: failed, "the message")
    wait_until(lambda: "control port" in caplog.text, "a line in the log")
    assert one.coordinator._thread.is_alive()
    for member in (first, second):  # which connects anew by itself
        member.committed(2)
    wait_until(lambda: any(said.step == 2 for said in heard), "a fate after that")


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300), st.booleans())
def test_no_bytes_break_a_channel_or_are_taken_for_a_message(content, behind_a_message):
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname(), WAIT_S)
        ours, _ = server.accept()
    with closing(theirs), closing(ours):
        if behind_a_message:
            theirs.sendall(message_frame({"kind": "ping"}))
        theirs.sendall(content)
        theirs.shutdown(socket.SHUT_WR)
        channel = Channel(ours, "a stranger")
        messages = []
        with pytest.raises((CheckpointError, CorruptCheckpoint)):
            while True:
                messages += channel.receive()
        assert messages in ([], [{"kind": "ping"}])


def test_fields_of_proved_members_are_checked_too(port):
    one = port(1)
    for message in (
        {"kind": "join"},
        {"kind": "join", "rank": -1},
        {"kind": "resume", "rank": 1 << 40},
        {"kind": "committed", "step": 1},
        {"kind": ["list"]},
        {},
    ):
        channel = open_channel("127.0.0.1", one.port, TOKEN, WAIT_S)
        channel.send(**message)
        deadline = time.monotonic() + WAIT_S
        with pytest.raises(CheckpointError, match=r"closed|broke"):
            while time.monotonic() < deadline:
                list(channel.receive())
                time.sleep(0.01)
        channel.close()
    still_works(one)


def test_a_forked_child_holds_neither_the_port_nor_the_connections(port, monkeypatch):
    """As a data loader's worker does that outlives the training."""
    import multiprocessing

    def work(parent):
        die_with_parent(parent)
        time.sleep(600)  # until it is killed

    one = port(1)
    one.running(1)
    worker = multiprocessing.get_context("fork").Process(target=work, args=(os.getpid(),))
    worker.start()
    try:
        wait_until(
            lambda: (
                not [
                    held
                    for held in psutil.Process(worker.pid).net_connections()
                    if one.port in (held.laddr + held.raddr)
                ]
            ),
            "the child to let go of the port and the connections",
        )
        one.end()
        monkeypatch.setenv("LASTGOOD_JOB_TOKEN", TOKEN.decode())
        _, listener = find_address(f"127.0.0.1:{one.port}", 0, WAIT_S)  # as soon as the child has run
        listener.close()
    finally:
        worker.kill()
        worker.join(WAIT_S)


def test_options_of_before_keep_the_names_of_their_records():
    dumped = PCcheckOptions().model_dump(mode="json")
    assert not dumped.keys() & {"control", "join_timeout_s", "agreement_timeout_s"}
    assert (dumped["rank"], dumped["world_size"]) == (0, 1)
    given = PCcheckOptions(control="off", agreement_timeout_s=5, rank=1, world_size=2)
    assert PCcheckOptions.model_validate(given.model_dump()) == given
    assert given.model_dump()["control"] == "off"


# -- addresses ---------------------------------------------------------------------------------------------------------


def test_a_port_in_use_is_named_in_bounded_time(monkeypatch):
    monkeypatch.setenv("LASTGOOD_JOB_TOKEN", TOKEN.decode())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(CheckpointError, match=rf"rank 0 cannot listen on 127.0.0.1:{number}.*in use.*free port"):
            find_address(f"127.0.0.1:{number}", 0, 0.3)


def test_a_port_is_taken_as_soon_as_it_is_free(monkeypatch):
    monkeypatch.setenv("LASTGOOD_JOB_TOKEN", TOKEN.decode())
    taken = socket.create_server(("127.0.0.1", 0))
    number = taken.getsockname()[1]
    threading.Timer(0.3, taken.close).start()
    address, listener = find_address(f"127.0.0.1:{number}", 0, WAIT_S)
    assert (address.port, address.token) == (number, TOKEN)
    listener.close()


def test_the_token_is_needed_and_comes_from_the_environment_or_a_private_file(monkeypatch, tmp_path):
    monkeypatch.delenv("LASTGOOD_JOB_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="LASTGOOD_JOB_TOKEN"):
        find_address("127.0.0.1:1234", 1, 0.1)
    monkeypatch.setenv("LASTGOOD_JOB_TOKEN", TOKEN.decode())
    address, listener = find_address("127.0.0.1:1234", 1, 0.1)
    assert (address.token, listener) == (TOKEN, None)
    assert "secret" not in str(address) + repr(address)
    path = tmp_path / "token"
    path.write_text("another secret of 32 bytes length\n")
    path.chmod(0o600)
    monkeypatch.setenv("LASTGOOD_JOB_TOKEN_FILE", str(path))
    assert find_address("127.0.0.1:1234", 1, 0.1)[0].token == b"another secret of 32 bytes length"
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        find_address("127.0.0.1:1234", 1, 0.1)


@pytest.mark.parametrize("token", ["abcdef", "fifteen letters"])
def test_a_token_that_can_be_guessed_is_refused_and_not_repeated(token, monkeypatch):
    monkeypatch.setenv("LASTGOOD_JOB_TOKEN", token)
    with pytest.raises(
        ConfigError, match=rf"LASTGOOD_JOB_TOKEN: a token has 16 to 4096 bytes, not {len(token)}"
    ) as told:
        find_address("127.0.0.1:1234", 1, 0.1)
    assert token not in str(told.value)


def test_a_token_is_no_option():
    with pytest.raises(ValueError, match="control holds a token") as told:
        check_control("127.0.0.1:1234/a secret of the tests")
    assert "a secret of the tests" not in str(told.value)
    with pytest.raises(ConfigError, match="control holds a token") as told:
        PCcheck("/tmp/nowhere", control="127.0.0.1:1234/a secret of the tests")
    assert "a secret of the tests" not in str(told.value)


def test_who_connects_is_shown_nothing_to_try_tokens_with(port):
    """The coordinator proves itself only to whoever has proved himself."""
    one = port(1)
    nonce = b"n" * 32
    with socket.create_connection(("127.0.0.1", one.port), WAIT_S) as stranger:
        stranger.settimeout(WAIT_S)
        stranger.sendall(message_frame({"kind": "lastgood agreement 2", "nonce": nonce.hex()}))
        channel = Channel(stranger, "the coordinator")
        (answer,) = receive_some(channel)
        assert answer.keys() == {"kind", "nonce"}
        channel.send(kind="proof", proof=bytes(32).hex())
        assert receive_some(channel) == [{"kind": "refused", "why": "another token"}]


def receive_some(channel):
    while not (found := list(channel.receive())):
        assert select.select([channel], [], [], WAIT_S)[0]
    return found


def test_a_member_of_another_version_is_told(port):
    one = port(1)
    with socket.create_connection(("127.0.0.1", one.port), WAIT_S) as stranger:
        stranger.sendall(message_frame({"kind": "lastgood agreement 1", "nonce": "00" * 32}))
        (answer,) = receive_some(Channel(stranger, "the coordinator"))
        assert answer["kind"] == "refused"


@pytest.mark.parametrize("control", ["", "host", "host:", ":1", "host:0", "host:70000", "host:x", "host:123456"])
def test_addresses_that_are_none_are_refused(control):
    with pytest.raises(ValueError, match="HOST:PORT"):
        check_control(control)
