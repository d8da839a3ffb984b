"""Answering tests of a ring's ways in the place of a rank."""

from __future__ import annotations

import errno
import socket
import threading
import time

import pytest

from lastgood.gradients.switch import check as switch_check
from lastgood.gradients.switch.check import Checked, answer_checks, check_link
from lastgood.gradients.switch.relay import SwitchLink
from lastgood.ports import free_ports
from lastgood.wire.ring_link import listen_ring
from tests.wire.support.ring_helpers import TOKEN, WAIT_S


class Exhausted(socket.socket):
    """A listener in a process that has no descriptors left, for a moment."""

    failed = False

    def accept(self) -> tuple[socket.socket, object]:
        if not self.failed:
            self.failed = True
            raise OSError(errno.EMFILE, "too many open files")
        return super().accept()


def test_a_moment_without_descriptors_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch_check, "listen_ring", lambda *where: Exhausted(fileno=listen_ring(*where).detach()))
    address = f"127.0.0.1:{free_ports(1)[0]}"
    stop = threading.Event()
    good: list[int] = []
    answering = threading.Thread(target=lambda: good.append(answer_checks(address, TOKEN, stop, WAIT_S)))
    answering.start()
    try:
        checked = Checked("", False, "nobody was asked")
        while not checked.good and answering.is_alive():
            time.sleep(0.02)  # it may not listen yet
            checked = check_link(SwitchLink(address, address), TOKEN, WAIT_S)
        assert checked.good, checked.found
    finally:
        stop.set()
        answering.join(WAIT_S)
    assert good == [1]
