"""What stands for a shadow where only its gradients matter: the real hello, and the real native receiver behind it."""

from __future__ import annotations

import socket
import threading
import time

import numpy as np

from lastgood import _native
from lastgood.errors import CheckpointError
from lastgood.gradients.layout.layout import GradientLayout
from lastgood.gradients.protocol.messages import GREETING, Hello, Refused, Welcome, parse_message
from lastgood.wire.frames import Wire
from tests.wire.support.answering import prove_peer
from tests.wire.support.ring_helpers import WAIT_S

SLOTS = 4


class ReceivingShadow:
    """Shadow number `shadow` of `layout.shadows`. While `refusing`, nobody is welcome."""

    def __init__(
        self, shadow: int, layout: GradientLayout, token: bytes, job: str, incarnation: int = 1, port: int = 0
    ) -> None:
        self._shadow, self._layout, self._token, self._job = shadow, layout, token, job
        self.refusing = False
        self.hellos: list[Hello] = []
        self.ends: set[tuple[int, int]] = set()
        self.closed: list[str] = []
        owned = layout.buckets_of(shadow)
        self._memory = {
            bucket: [np.zeros(layout.buckets[bucket].nbytes, np.uint8) for _ in range(SLOTS)] for bucket in owned
        }
        self._receiver = _native.Receiver(
            int.from_bytes(bytes.fromhex(job)[:8], "little"),
            incarnation,
            [(bucket, layout.buckets[bucket].nbytes, int(layout.buckets[bucket].dtype)) for bucket in owned],
            [[self._memory[bucket][slot].ctypes.data for bucket in owned] for slot in range(SLOTS)],
            owner=self._memory,
        )
        self._server = socket.create_server(("127.0.0.1", port))
        self._server.settimeout(0.1)
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._stop.is_set():
            try:
                connection, _ = self._server.accept()
            except TimeoutError:
                continue
            wire = Wire(connection, "the switch", WAIT_S)
            try:
                prove_peer(wire, self._token, GREETING)
                hello = parse_message(wire.receive_message("a hello"), "the switch")
                assert isinstance(hello, Hello)
                if self.refusing:
                    wire.send_message(**Refused(why="nothing is declared yet").content())
                    wire.close()
                    continue
                self.hellos.append(hello)
                wire.send_message(
                    **Welcome(
                        shadow=self._shadow,
                        shadows=self._layout.shadows,
                        job=self._job,
                        epoch=hello.epoch,
                        layout=self._layout.digest,
                        gradient_slots=SLOTS,
                    ).content()
                )
            except CheckpointError:
                wire.close()
                continue
            if hello.role == "data":
                self._receiver.add(connection.fileno(), hello.rank)
            wire.close()

    def wait(self, iteration: int, seconds: float = WAIT_S) -> bool:
        """Whether all gradients and all ends of an iteration have come, within `seconds`."""
        deadline = time.monotonic() + seconds
        ranks = range(self._layout.ranks)
        while time.monotonic() < deadline:
            self.look()
            if not self._lacks(iteration) and all((rank, iteration) in self.ends for rank in ranks):
                return True
        return False

    def look(self) -> None:
        """Take what the receiver has to tell."""
        for event in self._receiver.poll(0.02):
            if event.kind == "end":
                self.ends.add((event.rank, event.iteration))
            elif event.kind == "closed":
                self.closed.append(event.cause)

    def _lacks(self, iteration: int) -> bool:
        return any(self._receiver.missing(iteration).values())

    def missing(self, iteration: int) -> bool:
        """Whether gradients of an iteration are missing now."""
        self.look()
        return self._lacks(iteration)

    def bytes_of(self, bucket: int, iteration: int) -> bytes:
        """A bucket's gradients."""
        return self._memory[bucket][iteration % SLOTS].tobytes()

    def refused(self) -> dict[str, int]:
        """Records that were refused, by cause."""
        return self._receiver.refused()

    def close(self) -> None:
        """End everything."""
        self._stop.set()
        self._thread.join(WAIT_S)
        self._server.close()
        self._receiver.close(5.0)
