"""Segments on their way to a store that is slow, or fails: bounded memory, an end, and no thread that is left."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from lastgood.errors import StorageError, WaitTimeout
from lastgood.files import ReadableBy
from lastgood.integrations.dcp.object_items import send_stream
from lastgood.integrations.dcp.slot_items import SlotOptions
from lastgood.state import Layout
from lastgood.storage.objects.folder import FolderClient
from lastgood.storage.objects.format import CommitName
from lastgood.units import MIB

NAME = CommitName(bytes(range(16)), 1, 0)
SEGMENT = 8 * MIB
COUNT = 7
WAIT_S = 20


class SlowClient(FolderClient):
    """Takes a segment when it is told to, and fails when it is told to."""

    def __init__(self, root):
        super().__init__(root)
        self.go, self.fails, self.begun = threading.Event(), False, 0

    def create(self, key, *content):
        self.begun += 1
        assert self.go.wait(WAIT_S)
        if self.fails:
            raise StorageError(f"{key}: no")
        super().create(key, *content)


class Stream:
    """So many pieces, and how much of them was asked for."""

    on_device = False

    def __init__(self):
        self.meta = torch.arange(100, dtype=torch.uint8)
        self.layout = Layout(["d", []], (COUNT * SEGMENT - 100,), 0)
        self.nbytes = self.layout.stream_bytes + 100
        self.given = 0

    def buffers(self):
        left = self.layout.stream_bytes
        while left:
            piece = torch.full((min(MIB, left),), left // MIB % 250, dtype=torch.uint8)
            self.given, left = self.given + piece.numel(), left - piece.numel()
            yield piece
        yield self.meta


def options(**changes):
    return SlotOptions(
        **{"writer_threads": 2, "pool_bytes": 1, "timeout_s": WAIT_S, "allow": (), **changes},
        readable_by=ReadableBy.OWNER,
    )


def settled(count):
    """What `count` gives once it does not change any more."""
    found = -1
    while found != (now := count()):
        found = now
        time.sleep(0.3)
    return found


@pytest.fixture
def small_segments(monkeypatch):
    monkeypatch.setattr("lastgood.integrations.dcp.object_items.segment_bytes_for", lambda _: SEGMENT)


@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_two_segments_more_than_threads_are_ahead_of_the_store(tmp_path, threads):
    client, stream, sent = SlowClient(tmp_path), Stream(), []
    given = options(writer_threads=threads)
    sender = threading.Thread(target=lambda: sent.append(send_stream(client, NAME, 0, 1, stream, given)))
    sender.daemon = True
    sender.start()
    held = (threads + 2) * SEGMENT  # one waits for a thread, one is gathered
    assert held <= settled(lambda: stream.given) <= held + MIB
    assert client.begun == threads
    client.go.set()
    sender.join(WAIT_S)
    ((upload, part),) = sent
    assert upload.segments == COUNT + 1  # the layout is in the last one
    assert upload.sent_bytes == stream.nbytes
    assert part.nbytes > 0


@pytest.mark.usefixtures("small_segments")
def test_a_store_that_fails_ends_it_before_all_is_read(tmp_path):
    client, stream = SlowClient(tmp_path), Stream()
    client.fails = True
    client.go.set()
    with pytest.raises(StorageError, match=r"segments/.*: no"):
        send_stream(client, NAME, 0, 1, stream, options())
    assert stream.given < 5 * SEGMENT
    assert not [one for one in threading.enumerate() if one.name.startswith("lastgood-dcp-send")]


@pytest.mark.usefixtures("small_segments")
def test_a_store_that_takes_nothing_is_not_waited_for_for_ever(tmp_path):
    client, stream = SlowClient(tmp_path), Stream()
    timer = threading.Timer(2.0, client.go.set)  # threads that have begun are waited for
    timer.start()
    with pytest.raises(WaitTimeout, match=r"waited 1 s for a segment to be taken"):
        send_stream(client, NAME, 0, 1, stream, options(timeout_s=1.0))
    timer.join(WAIT_S)
