"""Two parsers that must give the same."""

from __future__ import annotations

from lastgood.mirror.streams.messages import Parser
from tests.mirror.support.frames import Captured, Messages, batches

__all__ = ["compare"]


def compare(first: Parser, second: Parser, frames: list[Captured], size: int) -> None:
    """Feed both, and compare all tables, contents, texts and counters after each batch."""
    found = (Messages(), Messages())
    parsers = (first, second)
    for batch in [*batches(frames, size), None]:
        given = [parser.finish() if batch is None else parser.feed(batch) for parser in parsers]
        ours, theirs = given
        assert ours.opened == theirs.opened and ours.closed == theirs.closed
        assert ours.resynced == theirs.resynced and ours.refused == theirs.refused
        assert ours.heads.tolist() == theirs.heads.tolist()
        assert ours.lost.tolist() == theirs.lost.tolist()
        fields = ["flow", "message", "offset", "nbytes"]
        assert ours.pieces[fields].tolist() == theirs.pieces[fields].tolist()
        for messages, parsed in zip(found, given, strict=True):
            messages.add(parsed)
    for key, message in found[0].all.items():
        other = found[1].all[key]
        assert (message.known, message.content) == (other.known, other.content)
    assert first.counters() == second.counters()
