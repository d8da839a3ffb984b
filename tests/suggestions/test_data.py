"""Suggestions about prepared data: it is damaged in a way, and the command that is named makes it whole."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from lastgood.cli import app
from lastgood.workloads.data.images import open_images
from lastgood.workloads.data.prepare import prepare_dataset
from lastgood.workloads.data.store import MANIFEST
from tests.suggestions.following import advice, follows, hear, refusal

DATA = Path("data")
FOLDER = DATA / "images" / "digits"


def lastgood(line: str) -> None:
    done = CliRunner().invoke(app, shlex.split(line))
    assert done.exit_code == 0, done.output


def opened() -> None:
    open_images(DATA, None, batch_size=2, image_size=32, classes=10, seed=0)


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """In a folder of its own, where `lastgood data prepare` makes data/ as it does by itself."""
    monkeypatch.chdir(tmp_path)
    lastgood("data prepare images")


def no_numbers() -> None:
    (FOLDER / "images.npy").write_bytes(b"\0" * (FOLDER / "images.npy").stat().st_size)


def other_numbers() -> None:
    pixels = np.load(FOLDER / "images.npy")
    np.save(FOLDER / "images.npy", pixels.reshape(-1).view(np.uint8))
    mend_manifest()


def mend_manifest() -> None:
    manifest = json.loads((FOLDER / MANIFEST).read_text())
    manifest["files"]["images.npy"]["bytes"] = (FOLDER / "images.npy").stat().st_size
    (FOLDER / MANIFEST).write_text(json.dumps(manifest))


def cut_short() -> None:
    (FOLDER / "labels.npy").write_bytes(b"")


def leads_out() -> None:
    manifest = json.loads((FOLDER / MANIFEST).read_text())
    manifest["files"]["../images.npy"] = manifest["files"].pop("images.npy")
    (FOLDER / MANIFEST).write_text(json.dumps(manifest))


def no_manifest() -> None:
    (FOLDER / MANIFEST).write_text("{}")


@pytest.mark.parametrize("damage", [no_numbers, other_numbers, cut_short, leads_out])
@follows(
    "{}: cannot be read: {}; run `lastgood data prepare --force`",
    "{}: not images and their labels; run `lastgood data prepare --force`",
    "{}: missing or cut short; run `{} --force`",
    "{}: file name {} leads out of the folder; run `{} --force`",
    one_of_them=True,
)
def test_damaged_data(prepared, damage):
    damage()
    lastgood(advice(refusal(opened), r"run `lastgood (data prepare --force)`") + " images")
    opened()


def test_a_damaged_manifest(prepared):
    """Whose text is a part of others."""
    no_manifest()
    lastgood(advice(refusal(opened), r"run `lastgood (data prepare --force)`") + " images")
    opened()


@follows("run lastgood data prepare")
def test_no_data_yet(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def said() -> str:
        found = CliRunner().invoke(app, ["doctor", "--json"]).stdout
        return next(f"{one['found']}: {one['to_do']}" for one in json.loads(found) if one["what"] == "data")

    lastgood(advice(hear(said()), r"run lastgood (data prepare)") + " images")
    assert said() == "data: "


@follows("{}: cannot be made: {}; choose a folder with --data-dir")
def test_a_folder_that_cannot_be_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("data").write_text("a file of the user's")
    message = refusal(lambda: prepare_dataset("images", DATA))
    lastgood(f"data prepare images {advice(message, '--data-dir')} elsewhere")
    assert (Path("elsewhere") / "images" / "digits" / MANIFEST).is_file()
