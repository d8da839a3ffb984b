"""The small file of verdicts: whole or as before, bounded, never believed when damaged."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
from slot_helpers import commit, content_of, give, open_store, save

from lastgood.errors import MismatchError, StorageError
from lastgood.storage import Verdict, VerdictBook, verdicts
from lastgood.storage import format as fmt


def test_round_trip(tmp_path: Path) -> None:
    book = VerdictBook(tmp_path)
    assert not book.is_bad(3) and book.highest_sequence == -1
    book.judge(3, Verdict(30, ok=False, reason="ä" * 600))
    book.judge(4, Verdict(40, ok=True))
    assert [book.count_restart(9, 90, 90) for _ in range(3)] == [0, 1, 2]
    again = VerdictBook(tmp_path)
    assert again.verdicts == book.verdicts and again.verdicts[4] == Verdict(40, True)
    assert set(again.verdicts[3].reason) == {"ä"} and 50 < len(again.verdicts[3].reason) < 600
    assert (again.restarts, again.reached, again.highest_sequence) == ({9: (90, 3)}, 90, 9)
    assert again.is_bad(3) and not again.is_bad(4)
    again.forget_restarts(100)
    forgotten = VerdictBook(tmp_path)
    assert (forgotten.restarts, forgotten.reached) == ({}, 100)


@pytest.mark.parametrize("text", ["\ud800", "a\udcff" * 400, "\ud83d\ude00"])
def test_a_reason_that_no_file_can_hold_is_written_readably(tmp_path: Path, text: str) -> None:
    """An entry of a state, or a directory, may be called so: the file must be read again, with all else in it."""
    book = VerdictBook(tmp_path)
    book.judge(3, Verdict(30, ok=False))
    book.judge(4, Verdict(40, ok=False, reason=f"state.{text} is wrong"))
    again = VerdictBook(tmp_path)
    assert again.is_bad(3) and again.is_bad(4) and again.verdicts == book.verdicts
    assert "\\ud" in again.verdicts[4].reason
    assert again.take_back(4, f"state.{text} is wrong")


def test_restarts_are_those_of_a_step(tmp_path: Path) -> None:
    """Also those of a checkpoint that was written anew, under another sequence."""
    book = VerdictBook(tmp_path)
    assert [book.count_restart(1, 10, 10), book.count_restart(1, 10, 10), book.count_restart(5, 10, 7)] == [0, 1, 2]
    assert (book.failed_restarts(5, 10), book.failed_restarts(8, 10), book.failed_restarts(8, 11)) == (3, 3, 0)
    assert book.reached == 10, "it never falls"


def test_a_file_from_before_steps_were_counted_is_read(tmp_path: Path) -> None:
    old = {"format": "lastgood-verdicts", "version": 1, "verdicts": [], "restarts": [{"sequence": 4, "count": 2}]}
    (tmp_path / "verdicts.json").write_bytes(fmt.seal_json(old))
    book = VerdictBook(tmp_path)
    assert (book.failed_restarts(4, 10), book.failed_restarts(5, 10), book.reached) == (2, 0, -1)
    assert book.count_restart(4, 10, 20) == 2
    assert VerdictBook(tmp_path).restarts == {4: (10, 3)}


@pytest.mark.parametrize(
    "harm",
    [
        lambda text: text.replace(b'"ok": false', b'"ok": true'),
        lambda text: text[: len(text) // 2],
        lambda _: b"",
        lambda _: b"[]",
        lambda _: b"\xff\x00",
        lambda _: b" " * (2 << 20),
        lambda _: fmt.seal_json({"format": "another", "version": 1}),
        lambda _: fmt.seal_json({"format": "lastgood-verdicts", "version": 1, "verdicts": [{}], "restarts": []}),
    ],
)
def test_a_damaged_book_is_said_and_not_believed(tmp_path: Path, harm, caplog: pytest.LogCaptureFixture) -> None:
    VerdictBook(tmp_path).judge(3, Verdict(30, ok=False))
    path = tmp_path / "verdicts.json"
    path.write_bytes(harm(path.read_bytes()))
    book = VerdictBook(tmp_path)
    assert not book.is_bad(3)
    assert "verdicts.json is damaged" in caplog.text
    book.judge(5, Verdict(50, ok=False))
    assert VerdictBook(tmp_path).is_bad(5)


def test_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "verdicts.json").write_bytes(fmt.seal_json({"format": "lastgood-verdicts", "version": 2}))
    with pytest.raises(MismatchError, match=r"verdicts.json: format version 2"):
        VerdictBook(tmp_path)


def test_a_write_that_fails_holds_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, content: bytes, *, mode: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    book = VerdictBook(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(verdicts, "write_atomically", refuse)
        with pytest.raises(StorageError, match=r"verdicts.json: writing.*No space"):
            book.judge(3, Verdict(30, ok=False))
    assert book.is_bad(3) and not VerdictBook(tmp_path).is_bad(3)
    book.judge(4, Verdict(40, ok=True))
    assert VerdictBook(tmp_path).is_bad(3), "the next write brings it along"


def test_entries_are_bounded(tmp_path: Path) -> None:
    book = VerdictBook(tmp_path)
    book.judge(1, Verdict(1, ok=False, reason="\U0001f4a5" * 500))  # twelve bytes each as JSON
    longest = book.verdicts[1].reason
    assert longest
    book.verdicts = {number: Verdict(number, ok=False, reason=longest) for number in range(2000)}
    book.restarts = {number: verdicts.Restarts(number, number) for number in range(2000)}
    book.judge(2000, Verdict(2000, ok=False))
    again = VerdictBook(tmp_path)
    assert sorted(again.verdicts) == list(range(2001 - 1024, 2001))
    assert book.path.stat().st_size < 1 << 20
    json.loads(book.path.read_bytes())


def test_a_sequence_is_never_given_twice(tmp_path: Path) -> None:
    """Also where the record of the checkpoint that was judged is gone: its slot was voided and grew."""
    with open_store(tmp_path) as store:
        save(store, 1, 100)
        write = store.begin(2, 100)
        store.judge(write.sequence, Verdict(2, ok=False))
        judged = write.sequence
        write.abort()
        store.reserve(200_000)
    with open_store(tmp_path) as store:
        write = store.begin(3, 100)
        give(write, content_of(3, 100))
        commit(write)
        assert write.sequence > judged
        assert not store.book().is_bad(store.committed()[0].sequence)
