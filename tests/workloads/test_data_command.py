"""The command `lastgood data`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from typer.testing import CliRunner

from lastgood.cli.data import app
from lastgood.workloads.data.prepare import DATASETS
from lastgood.workloads.data.tokens import wordpiece_tokenizer


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout


def test_list_prepare_check(tmp_path: Path) -> None:
    where = ("--data-dir", str(tmp_path / "my data"))
    code, text = run("list", "--json", *where)
    assert code == 0
    assert {row["kind"]: row["state"] for row in json.loads(text)} == dict.fromkeys(DATASETS, "missing")
    assert run("check", *where)[0] == 1

    assert run("prepare", *where)[0] == 0
    assert run("prepare", *where)[0] == 0
    assert run("check", *where)[0] == 0
    code, text = run("list", "--json", *where)
    assert {row["state"] for row in json.loads(text)} == {"prepared"}
    assert run("list", *where)[0] == 0


def test_check_sees_one_flipped_byte_and_prepare_mends_it(data_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(data_dir / "images", tmp_path / "images")
    path = tmp_path / "images" / "digits" / "images.npy"
    content = bytearray(path.read_bytes())
    content[5000] ^= 1
    path.write_bytes(content)
    code, text = run("check", "images", "--json", "--data-dir", str(tmp_path))
    assert code == 1
    (found,) = json.loads(text)
    assert "images.npy: sha256" in found["problems"][0]
    states = {row["kind"]: row["state"] for row in json.loads(run("list", "--json", "--data-dir", str(tmp_path))[1])}
    assert states["images"] == "damaged"
    assert run("prepare", "images", "--force", "--data-dir", str(tmp_path))[0] == 0
    assert run("check", "images", "--data-dir", str(tmp_path))[0] == 0


def test_check_looks_at_cached_tokenizers_too(data_dir: Path, tmp_path: Path) -> None:
    for kind in DATASETS:
        shutil.copytree(data_dir / kind, tmp_path / kind)
    wordpiece_tokenizer(tmp_path, ["some words"], {"name": "x", "sha256": "0" * 64}, 600)
    assert run("check", "--data-dir", str(tmp_path))[0] == 0
    (cache,) = (tmp_path / "tokens").iterdir()
    (cache / "tokenizer.json").unlink()
    code, text = run("check", "--data-dir", str(tmp_path))
    assert code == 1
    assert "tokenizer.json: missing" in text


def test_an_unknown_kind_is_bad_usage(tmp_path: Path) -> None:
    assert run("prepare", "audio", "--data-dir", str(tmp_path))[0] == 2
    assert run("check", "audio", "--data-dir", str(tmp_path))[0] == 2
