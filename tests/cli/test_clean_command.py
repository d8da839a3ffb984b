"""`lastgood dcp clean`: what it finds, what it spares, and that checkpoints stay."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lastgood.cli import app
from lastgood.errors import ConfigError, StorageError
from lastgood.storage.objects.commits import find_commits
from lastgood.storage.objects.folder import FolderClient
from lastgood.storage.objects.view import RemoteView
from tests.storage.objects.support.streams import Stream, read, save, send

HOUR_S = 3600.0
ONE = Stream((1, 2, 3), step=7)


def call(*arguments) -> dict:
    result = CliRunner().invoke(app, ["dcp", "clean", "--json", *map(str, arguments)], catch_exceptions=False)
    return json.loads(result.stdout)


def kinds(found: dict) -> list[tuple[str, str, bool]]:
    return [(one["kind"], Path(one["where"]).name, bool(one["spared"])) for one in found["found"]]


def age(folder: Path, hours: float) -> None:
    then = time.time() - hours * HOUR_S
    for path in folder.rglob("*"):
        if path.is_file():
            os.utime(path, (then, then))


def dcp(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_bytes(b"x" * 1000)


@pytest.fixture
def place(tmp_path):
    """A bucket with two jobs, uploads old and new, and folders of DCP."""
    top = tmp_path / "bucket"
    save(FolderClient(top / "a" / "job"), ONE)
    send(FolderClient(top / "a" / "job"), Stream((4, 5), step=8))
    save(FolderClient(top / "b"), ONE)
    dcp(top / "dcp" / "half", "__0_0.distcp", "__1_0.distcp", "notes.txt")
    dcp(top / "dcp" / "half-lastgood", "__0_0-0123456789abcdef.lgs", "lastgood-manifest-0123456789abcdef.json")
    dcp(top / "dcp" / "whole", "__0_0.distcp", ".metadata")
    dcp(top / "dcp" / "without-collectives", "__0_0.distcp", "__0.metadata")
    dcp(top / "slots", "slot-0000.lgs", "slot-0001.lgs")
    age(top, 30)
    send(FolderClient(top / "b"), Stream((6, 7), step=9))
    dcp(top / "dcp" / "young", "__0_0.distcp")
    return top


def names_in(place: Path) -> set[str]:
    return {path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()}


GONE = [
    ("objects without a checkpoint", "job", False),
    ("objects without a checkpoint", "b", True),
    ("half DCP checkpoint", "half", False),
    ("half DCP checkpoint", "half-lastgood", False),
    ("half DCP checkpoint", "young", True),
]


def test_it_says_what_it_would_do_and_does_nothing(place):
    before = names_in(place)
    found = call(place)
    assert kinds(found) == GONE
    assert names_in(place) == before and not found["removed"]
    sizes = {Path(one["where"]).name: (one["objects"], one["bytes"]) for one in found["found"]}
    assert sizes["half"] == (2, 2000) and sizes["job"][0] == 3
    ages = [one["age_s"] / HOUR_S for one in found["found"] if not one["spared"]]
    assert all(29.9 < one < 30.1 for one in ages)


def test_with_yes_it_removes_that_and_no_checkpoint(place):
    before = names_in(place)
    assert kinds(call(place, "--yes")) == GONE
    gone = before - names_in(place)
    assert {name for name in gone if name.startswith("dcp/")} == {
        "dcp/half/__0_0.distcp",
        "dcp/half/__1_0.distcp",
        "dcp/half-lastgood/__0_0-0123456789abcdef.lgs",
        "dcp/half-lastgood/lastgood-manifest-0123456789abcdef.json",
    }
    assert {name.split("/")[0] for name in gone} == {"a", "dcp"}
    for root in ("a/job", "b"):
        view = RemoteView(FolderClient(place / root))
        assert read(view, view.newest()) == ONE.content
    assert kinds(call(place)) == [one for one in GONE if one[2]], "what was spared is left"


def test_less_is_spared_if_that_is_asked_for_but_no_living_upload(place):
    age(place / "dcp" / "young", 0.1)
    found = call(place, "--older-than", 0, "--yes")
    assert ("objects without a checkpoint", "b", True) in kinds(found)
    assert [one["where"] for one in found["found"] if one["spared"]] == [str(place / "b")]
    upload, part = send(FolderClient(place / "b"), Stream((6, 7), step=9))
    from lastgood.storage.objects.upload import commit_parts

    commit_parts(upload, [part])
    assert [name.step for name in find_commits(FolderClient(place / "b"))] == [9, 7]


def test_one_place_that_cannot_be_read_hides_no_other(place):
    commit = next((place / "a" / "job" / "commits").glob("*/*"))
    commit.write_bytes(b"damaged")
    before = names_in(place / "a")
    with pytest.raises(StorageError, match=r"a/job.*does not have the digest"):
        call(place, "--yes")
    assert before <= names_in(place / "a")
    assert not (place / "dcp" / "half" / "__0_0.distcp").exists()


def test_a_person_reads_a_table(place, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    told = CliRunner().invoke(app, ["dcp", "clean", str(place)], catch_exceptions=False).output
    assert "would be removed" in told and "--yes removes it" in told and "stays: it is young" in told


def test_a_folder_that_is_not_there_is_not_made(tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        call(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
