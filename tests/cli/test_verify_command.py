"""`lastgood verify` says what a restore and an export would do, of whatever lies in a directory."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from random import Random

import pytest
import torch
import typer
from typer.testing import CliRunner

from lastgood.checkpointers.export.formats import load_exported
from lastgood.checkpointers.recovery import restorable
from lastgood.checkpointers.recovery.recovery import Recovery
from lastgood.cli import app
from lastgood.cli.export import export
from lastgood.cli.verify import verify
from lastgood.errors import LastgoodError, NoGoodCheckpoint
from lastgood.gradients.layout.entries import Entry, Saved
from lastgood.gradients.layout.layout import plan_layout
from lastgood.gradients.shadow.spill_store import SpillCopy, SpillStore
from lastgood.state import state_digest
from lastgood.storage import Verdict, VerdictBook
from tests.storage.support.craft import (
    dense,
    entries,
    layout_json,
    mutated,
    part,
    put,
    put_ranks,
    record,
    stream_of,
    write_slot,
)

ONE = entries(
    model=["o", [[["s", "w"], dense([2, 3])], [["s", "half"], ["T", 0, 8, "float32", [2], [2]]]]],
    plain=["l", [["i", 3], ["f", "3ff0000000000000"], ["t", [["s", "x"], ["n"]]], ["e", [["i", 1], ["i", 2]]]]],
    more=["d", [[["i", 0], ["A", 1, 0, "<f4", [4]]], [["s", "d"], ["D", "int8"]], [["s", "n"], ["N", "<i2", "0100"]]]],
)
BLOCKS = [b"A" * 24, b"B" * 16]
PARTS = [
    (
        entries(
            w=part(dense([4]), [8], [[[4 * rank, 4]]]),
            both=["d", [[["s", "kept"], dense([4], block=1) if rank else ["R", 1, "float32", [4], [1]]]]],
            own=["i", rank],
        ),
        [bytes([65 + rank]) * 16] * (1 + rank),
    )
    for rank in (0, 1)
]


def run(*arguments):
    """Exit code and output of a command; what is no error of Lastgood's is raised."""
    done = CliRunner().invoke(app, [*map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, (SystemExit, LastgoodError)):
        raise done.exception
    return (1 if isinstance(done.exception, LastgoodError) else done.exit_code), done


def does(command, *arguments) -> str | None:
    """Call a command itself; what it says where it fails. What is no error of Lastgood's is raised."""
    try:
        command(*arguments)
    except typer.Exit:
        return "exit 1"
    except LastgoodError as error:
        return f"{type(error).__name__}: {error}"
    return None


def agreed(directory: Path, out: Path) -> bool:
    """Whether verify passes a directory, and an export of it succeeds: both or none."""
    out.unlink(missing_ok=True)
    verified = does(verify, directory, None, 1, True)
    exported = does(export, directory, out, "pt", None, False, 1, True)
    assert (verified is None) == (exported is None), f"verify: {verified}; export: {exported}"
    return verified is None


def restored(directory: Path, state: dict) -> bool:
    try:
        Recovery(directory, 1, (0, 1)).restore(None, state, None)
    except LastgoodError:
        return False
    return True


@pytest.mark.parametrize("seed", range(4))
def test_of_any_layout_verify_says_what_restore_and_export_do(tmp_path, seed):
    random = Random(seed)
    sound = 0
    for number in range(25):
        directory = tmp_path / str(number)
        put(directory, mutated(ONE, random, random.choice((1, 1, 2))), BLOCKS)
        good = agreed(directory, tmp_path / "out")
        sound += good
        matching = load_exported(tmp_path / "out") if good else {"model": {}, "plain": [], "more": {}}
        before = state_digest(matching)
        assert restored(directory, matching) == good
        if not good:
            assert state_digest(matching) == before
        shutil.rmtree(directory)
    assert sound < 25


@pytest.mark.parametrize("seed", range(4))
def test_of_any_ranks_verify_says_what_an_export_does(tmp_path, seed):
    random = Random(100 + seed)
    sound = 0
    for number in range(20):
        job = tmp_path / str(number)
        which = random.randrange(2)
        parts = [
            (mutated(tree, random) if rank == which else tree, blocks) for rank, (tree, blocks) in enumerate(PARTS)
        ]
        good = agreed(put_ranks(job, parts), tmp_path / "out")
        sound += good
        shutil.rmtree(job)
    assert sound < 20


def test_sound_directories_pass(tmp_path):
    put(tmp_path / "one", ONE, BLOCKS)
    assert agreed(tmp_path / "one", tmp_path / "out")
    assert json.loads(run("verify", tmp_path / "one", "--json")[1].stdout)["restore"] == 1
    put_ranks(tmp_path / "two", PARTS)
    assert agreed(tmp_path / "two", tmp_path / "out")
    found = json.loads(run("verify", tmp_path / "two", "--json")[1].stdout)
    assert (found["restore"], found["trouble"]) == (1, [])
    assert [one["step"] for one in found["whole"]] == [1]


def test_a_layout_that_no_restore_takes_is_damage(tmp_path):
    put(tmp_path / "job", entries(w=["T", 3, 0, "float32", [4], [1]]), [b"A" * 16])
    (slot,) = json.loads(run("verify", tmp_path / "job", "--json")[1].stdout)["slots"]
    assert slot["result"] == "damaged"
    assert "block 3" in slot["detail"]


def test_a_layout_of_another_version_is_refused(tmp_path):
    put(tmp_path / "job", entries(w=["n"]), [], layout_version=9)
    code, done = run("verify", tmp_path / "job", "--json")
    (slot,) = json.loads(done.stdout)["slots"]
    assert (code, slot["result"]) == (1, "refused")


def test_the_step_is_the_one_that_a_restore_takes(tmp_path):
    job = tmp_path / "job"
    for slot, (step, tree) in enumerate([(1, ONE), (2, ONE), (3, entries(w=["T", 3, 0, "int8", [1], [1]]))]):
        put(job, tree, BLOCKS, record(step=step, sequence=step), slot=slot)
    VerdictBook(job).judge(2, Verdict(2, False, "spike"))
    code, done = run("verify", job, "--json")
    assert (code, json.loads(done.stdout)["restore"]) == (1, 1)
    state = {"model": {"w": torch.zeros(2, 3), "half": torch.zeros(2)}, "plain": [], "more": {}}
    assert Recovery(job, 1, (0, 1)).restore(None, state, None).step == 1


def test_checkpoints_that_were_all_judged_bad_are_nothing_to_restore(tmp_path):
    put(tmp_path / "job", ONE, BLOCKS)
    VerdictBook(tmp_path / "job").judge(1, Verdict(1, False, "spike"))
    code, done = run("verify", tmp_path / "job", "--json")
    assert code == 1
    assert "judged bad" in json.loads(done.stdout)["trouble"][0]
    with pytest.raises(NoGoodCheckpoint):
        Recovery(tmp_path / "job", 1, (0, 1)).restore(None, {"model": {}, "plain": [], "more": {}}, None)
    assert run("verify", tmp_path / "job", "--step", 1)[0] == 0


def test_ranks_that_hold_no_common_step_or_are_missing_are_nothing_to_restore(tmp_path):
    job = put_ranks(tmp_path / "job", PARTS)
    shutil.rmtree(job / "rank-00001")
    assert not agreed(job, tmp_path / "out")
    put(job / "rank-00001", PARTS[1][0], PARTS[1][1], record(rank=1, world_size=2, step=2))
    assert not agreed(job, tmp_path / "out")


def test_a_rank_alone_needs_those_that_it_left_something_to(tmp_path):
    job = put_ranks(tmp_path / "job", PARTS)
    assert run("verify", job / "rank-00000")[0] == 0
    shutil.rmtree(job / "rank-00001")
    assert run("verify", job / "rank-00000")[0] == 1
    # What needs nobody is verified where it lies.
    alone = put_ranks(tmp_path / "alone", [(ONE, BLOCKS), (ONE, BLOCKS)])
    shutil.rmtree(alone / "rank-00001")
    assert run("verify", alone / "rank-00000")[0] == 0


def test_what_is_no_layout_at_all(tmp_path):
    job = tmp_path / "job"
    put(job, ONE, BLOCKS)
    for meta in (b"", b"[]", b"\xff", b"[" * 5000, layout_json(ONE, [24]), b'{"format":"lastgood-shadow-spill"}'):
        write_slot(job / "slot-0000.lgs", record(), stream_of(BLOCKS), meta)
        assert not agreed(job, tmp_path / "out")


def test_the_rate_is_that_of_the_reading(tmp_path, monkeypatch):
    """The look at what was read imports torch, which takes longer than many a checkpoint."""
    put(tmp_path, ONE, BLOCKS)
    monkeypatch.setattr(restorable, "check_content", lambda *_: time.sleep(0.5))
    (slot,) = (one for one in json.loads(run("verify", tmp_path, "--json")[1].stdout)["slots"] if one["bytes_per_s"])
    assert slot["bytes_per_s"] > slot["stream_bytes"] / 0.5


def test_what_a_shadow_spilled_is_checked_as_the_shadow_does(tmp_path):
    layout = plan_layout([("w", [4], "float32")], {"groups": []}, ranks=1, shadows=1)
    copied = SpillCopy(Saved(epoch=1, iteration=4, step=5))
    copied.buckets[0] = ((Entry(parameter=0, key="parameter", dtype="float32", shape=(4,), nbytes=16),), bytearray(16))
    store = SpillStore(tmp_path / "spills", "ab" * 16, 0)
    store._write_stream(copied, layout)
    meta = store._store.read_meta(store.durable()[0].info)
    store.close()
    assert run("verify", tmp_path / "spills")[0] == 0
    for old, new in (
        (b'"version":1', b'"version":2'),
        (b'"nbytes":16', b'"nbytes":17'),
        (b'"shadow":0', b'"shadow":1'),
    ):
        assert old in meta
        write_slot(tmp_path / "spills" / "slot-0000.lgs", record(), bytes(16), meta.replace(old, new))
        (tmp_path / "spills" / "job.json").unlink(missing_ok=True)
        for other in (tmp_path / "spills").glob("slot-000[1-9].lgs"):
            other.unlink()
        assert run("verify", tmp_path / "spills")[0] == 1
