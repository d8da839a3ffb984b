"""What is chosen of what several shadows hold."""

import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastgood.errors import ConfigError, CorruptCheckpoint, MismatchError, NoCheckpoint
from lastgood.gradients.layout.entries import Entry, Saved
from lastgood.gradients.protocol.client import _scratch, check_set, choose, signs_of_loss
from lastgood.gradients.protocol.connection import connect_shadow
from lastgood.gradients.protocol.messages import CHUNK_BYTES, PROTOCOL_VERSION, Hello, Status
from lastgood.wire.frames import Wire
from tests.wire.support.answering import prove_peer

LAYOUT = "b" * 64


def status(shadow, shadows=2, memory=(), durable=(), layout=LAYOUT):
    return Status(
        shadow=shadow,
        shadows=shadows,
        job="a" * 32,
        epoch=1,
        layout=layout,
        whole=True,
        applied=0,
        have=0,
        memory=tuple(memory),
        durable=tuple(durable),
        refused={},
    )


saves = st.sets(st.builds(Saved, epoch=st.integers(1, 3), iteration=st.integers(1, 6), step=st.integers(1, 3)))


@given(st.lists(st.tuples(saves, saves), min_size=1, max_size=4), st.none() | st.integers(1, 3))
def test_only_what_all_hold_in_one_place_is_chosen_and_the_newest_of_it(held, step):
    statuses = [status(place, len(held), memory, durable) for place, (memory, durable) in enumerate(held)]
    common = {("memory", saved) for saved in held[0][0] if all(saved in memory for memory, _ in held)} | {
        ("durable", saved) for saved in held[0][1] if all(saved in durable for _, durable in held)
    }
    common = {(source, saved) for source, saved in common if step in (None, saved.step)}
    if not common:
        with pytest.raises(NoCheckpoint):
            choose(statuses, step)
        return
    choice = choose(statuses, step)
    assert (choice.source, choice.saved) in common
    newest = max((saved.epoch, saved.iteration) for _, saved in common)
    assert (choice.saved.epoch, choice.saved.iteration) == newest
    if ("memory", choice.saved) in common:
        assert choice.source == "memory"


def test_states_of_two_layouts_are_never_mixed():
    saved = Saved(epoch=1, iteration=1, step=1)
    with pytest.raises(NoCheckpoint, match="different layouts"):
        choose([status(0, memory=[saved]), status(1, memory=[saved], layout="c" * 64)])


def test_a_spill_that_all_hold_is_chosen_though_their_memory_is_of_two_layouts():
    """A life that brought another layout has ended before every shadow had taken it."""
    saved, newer = Saved(epoch=1, iteration=1, step=1), Saved(epoch=1, iteration=2, step=2)
    first = status(0, durable=[saved])
    second = status(1, memory=[newer], durable=[saved], layout="c" * 64)
    choice = choose([first, second])
    assert (choice.source, choice.saved) == ("durable", saved)


def test_a_life_that_ends_before_its_first_step_is_complete_leaves_no_sign_of_loss():
    first = Saved(epoch=1, iteration=1, step=1)
    assert signs_of_loss([status(0, memory=[first]), status(1)]) == []
    assert signs_of_loss([status(0, layout=None), status(1, layout=None)]) == []


@pytest.mark.parametrize(
    ("first", "second", "sign"),
    [
        ({"memory": [3]}, {"epoch": 0, "job": None, "layout": None}, "shadow 1 has been started again"),
        ({}, {"promised": 3}, "shadow 1 knows that step 3 was complete on all"),
        ({"durable": [4]}, {}, "shadow 0 has spilled step 4"),
    ],
)
def test_signs_that_a_complete_step_was_lost(first, second, sign):
    answers = []
    for shadow, told in enumerate((first, second)):
        saved = {
            name: (Saved(epoch=1, iteration=1, step=one),)
            for name in ("memory", "durable")
            for one in told.get(name, ())
        }
        answers.append(status(shadow).model_copy(update={**told, **saved}))
    (found,) = signs_of_loss(answers)
    assert found.startswith(sign)


def test_shadows_must_be_all_and_in_their_order():
    check_set([status(0), status(1)], ["a:1", "b:2"])
    for wrong in ([status(1), status(0)], [status(0), status(0)], [status(0, 3), status(1, 3)]):
        with pytest.raises(MismatchError, match="in their order"):
            check_set(wrong, ["a:1", "b:2"])


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:0", "host:70000", "host:x"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(ConfigError, match="HOST:PORT"):
        connect_shadow(address, b"x" * 32, Hello(role="asker"), 1.0)


@pytest.mark.parametrize("fields", [{}, {"fenced": None}], ids=["first", "last"])
def test_a_shadow_of_version_1_is_told_by_how_it_refuses_the_greeting(fields):
    """As it did, from its first day to its last: the proof fails at the greeting, and a frame says so."""
    refusals = []

    def serve():
        connection, _ = server.accept()
        wire = Wire(connection, "127.0.0.1:50000", 60.0)
        try:
            prove_peer(wire, b"x" * 32, b"lastgood shadow 1\n")
        except MismatchError as error:
            refusals.append(str(error))
            wire.send_message(kind="refused", why=str(error), **fields)
        wire.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        thread = threading.Thread(target=serve)
        thread.start()
        said = (
            f"{address} speaks version 1 of the shadows' protocol, this side version {PROTOCOL_VERSION}: use the same"
        )
        with pytest.raises(MismatchError, match=said):
            connect_shadow(address, b"x" * 32, Hello(role="asker"), 60.0)
        thread.join(60)
    assert refusals == ["127.0.0.1:50000 does not speak this protocol"]


def test_what_a_shadow_declares_is_bounded_also_where_nobody_wants_it():
    entry = Entry(parameter=3, key="exp_avg", dtype="float32", shape=(1 << 60,), nbytes=1 << 62)
    with pytest.raises(CorruptCheckpoint, match="4611686018427387904 bytes for exp_avg of parameter 3"):
        _scratch(entry)
    half = entry.model_copy(update={"nbytes": CHUNK_BYTES + 1})
    assert [len(view) for view in _scratch(half)] == [CHUNK_BYTES, 1]
