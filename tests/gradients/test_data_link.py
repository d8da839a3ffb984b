"""A rank's connection for gradients, with a socket in place of the shadow."""

import socket

import pytest

from lastgood.gradients.data_link import DataLink, DataSettings
from lastgood.wire.records import HEADER_BYTES, RecordKind, parse_header


@pytest.fixture
def ends():
    mine, theirs = socket.socketpair()
    theirs.settimeout(20)
    yield mine, theirs
    theirs.close()


def record_from(connection):
    content = b""
    while len(content) < HEADER_BYTES:
        got = connection.recv(HEADER_BYTES - len(content))
        assert got, "the connection ended"
        content += got
    return parse_header(content, "the link")


def test_a_new_connection_says_at_once_what_goes_without_it(ends):
    """The next iteration may never begin: another rank can wait in this one for what the shadow waits for."""
    mine, theirs = ends
    link = DataLink("shadow", 1, 1, 3, DataSettings(pool_bytes=1 << 20, copied_bytes=1 << 16, patience_s=1, stall_s=5))
    try:
        link.begin_iteration(7)
        link.connect(mine.detach())
        said = record_from(theirs)
        assert (said.kind, said.rank, said.iteration) == (RecordKind.END, 3, 7)
        link.begin_iteration(8)
        assert record_from(theirs).iteration == 7
        link.end(8)
        assert record_from(theirs).iteration == 8
    finally:
        link.close()


def test_a_connection_that_is_gone_already_does_no_harm(ends):
    mine, theirs = ends
    theirs.close()
    link = DataLink("shadow", 1, 1, 0, DataSettings(pool_bytes=1 << 20, copied_bytes=1 << 16, patience_s=1, stall_s=5))
    try:
        link.connect(mine.detach())
        link.begin_iteration(1)
        for _ in range(3):
            link.end(1)
    finally:
        link.close()
