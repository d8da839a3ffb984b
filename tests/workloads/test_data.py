"""Prepared data, users' own data, and the command `lastgood data`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lastgood.errors import ConfigError, DataError
from lastgood.workloads.data import bible
from lastgood.workloads.data.images import open_images
from lastgood.workloads.data.prepare import DATASETS, prepare_dataset, prepared_dataset
from lastgood.workloads.data.squad import find_squad, open_squad, read_squad
from lastgood.workloads.data.store import MANIFEST, check_folder, make_folder, read_manifest
from lastgood.workloads.data.tokens import find_wikitext, load_tokens, wordpiece_tokenizer

# -- prepared folders --------------------------------------------------------------------------------------------------


def fill(folder: Path) -> None:
    (folder / "a.bin").write_bytes(b"abc")


def make(folder: Path, recipe: int = 1, fill: Any = fill) -> Any:
    return make_folder(folder, fill, name="t/a", source="a test", licence="none", recipe=recipe)


def test_a_folder_is_made_once_and_again_for_a_new_recipe(tmp_path: Path) -> None:
    first = make(tmp_path / "t" / "a")
    stamp = (tmp_path / "t" / "a" / "a.bin").stat().st_mtime_ns
    assert make(tmp_path / "t" / "a") == first
    assert (tmp_path / "t" / "a" / "a.bin").stat().st_mtime_ns == stamp
    assert make(tmp_path / "t" / "a", recipe=2).recipe == 2
    assert [path.name for path in (tmp_path / "t").iterdir()] == ["a"]


def test_a_failed_fill_leaves_nothing(tmp_path: Path) -> None:
    def broken(folder: Path) -> None:
        (folder / "half.bin").write_bytes(b"x")
        raise DataError("no text")

    with pytest.raises(DataError, match="no text"):
        make(tmp_path / "t" / "a", fill=broken)
    assert list((tmp_path / "t").iterdir()) == []


def test_two_at_once_do_no_harm(tmp_path: Path) -> None:
    def beaten(folder: Path) -> None:
        fill(folder)
        make(tmp_path / "t" / "a")  # another process is quicker

    assert make(tmp_path / "t" / "a", fill=beaten).files["a.bin"].bytes == 3
    assert [path.name for path in (tmp_path / "t").iterdir()] == ["a"]


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "t" / "a").mkdir(parents=True)
    (tmp_path / "t" / "a" / "stray").write_bytes(b"")
    with pytest.raises(DataError, match="move them away"):
        make(tmp_path / "t" / "a")
    (tmp_path / "t" / "a" / "stray").unlink()
    make(tmp_path / "t" / "a")
    assert check_folder(tmp_path / "t" / "a") == []


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"files": 3}', "\udcff"])
def test_a_damaged_manifest_is_named(tmp_path: Path, text: str) -> None:
    make(tmp_path / "t" / "a")
    (tmp_path / "t" / "a" / MANIFEST).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=r"manifest\.json"):
        read_manifest(tmp_path / "t" / "a")
    assert check_folder(tmp_path / "t" / "a")
    assert make(tmp_path / "t" / "a").files


def test_a_manifest_that_leads_out_of_its_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "t" / "a"
    make(folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"] = {"../../etc": manifest["files"]["a.bin"]}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="leads out"):
        read_manifest(folder)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file/t/a: cannot be made"):
        make(tmp_path / "file" / "t" / "a")


@pytest.mark.parametrize("kind", DATASETS)
def test_preparing_twice_gives_the_same_sums(kind: str, data_dir: Path, tmp_path: Path) -> None:
    assert prepare_dataset(kind, tmp_path).sha256 == prepared_dataset(kind, data_dir)[1].sha256


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="images, squad, wikitext"):
        prepare_dataset("audio", tmp_path)


def test_a_file_that_is_cut_short_is_seen_when_it_is_opened(data_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(data_dir / "squad", tmp_path / "squad")
    path = tmp_path / "squad" / "kjv" / "train-v1.1.json"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(DataError, match=r"train-v1\.1\.json: missing or cut short.*--force"):
        prepared_dataset("squad", tmp_path)


# -- the text and its questions ----------------------------------------------------------------------------------------


def test_the_text_is_whole() -> None:
    books = bible.read_books()
    assert [books[0].name, books[-1].name, len(books)] == ["Genesis", "Revelation", 66]
    assert sum(len(book.chapters) for book in books) == 1189
    text = bible.wikitext(books)
    assert text.startswith(" \n = Genesis = \n \n = = Chapter 1 = = \n")
    assert len(text) > 4_000_000
    assert not any(
        digit in passage for book in books for chapter in book.chapters for passage in chapter for digit in "0123456789"
    )


def test_questions_have_their_answers_in_place(data_dir: Path) -> None:
    questions = read_squad(data_dir / "squad" / "kjv" / "train-v1.1.json")
    assert len(questions) > 3000
    assert all(question.context[question.start : question.end].strip() for question in questions)
    assert "What did God say?" in {question.question for question in questions}


# -- tokenizers --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_tokenizers_are_the_same_in_another_process(data_dir: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from lastgood.workloads.data.tokens import load_tokens\n"
        "from lastgood.workloads.data.squad import open_squad\n"
        "load_tokens(Path(sys.argv[1]), None, 1000)\n"
        "open_squad(Path(sys.argv[1]), None, batch_size=1, length=32, vocabulary=1000, seed=0)\n"
    )
    sums = []
    for copy in ("one", "two"):
        shutil.copytree(data_dir / "squad", tmp_path / copy / "squad")
        shutil.copytree(data_dir / "wikitext", tmp_path / copy / "wikitext")
        subprocess.run([sys.executable, "-c", code, str(tmp_path / copy)], check=True)
        sums.append({path.name: read_manifest(path).sha256 for path in (tmp_path / copy / "tokens").iterdir()})
    assert len(sums[0]) == 2
    assert sums[0] == sums[1]


def test_tokens_are_the_text(data_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(" = Title = \n Grüße, 世界! \n" * 50, encoding="utf-8")
    ids, facts = load_tokens(tmp_path / "cache", path, 600)
    from tokenizers import Tokenizer

    (cache,) = (tmp_path / "cache" / "tokens").iterdir()
    assert Tokenizer.from_file(str(cache / "tokenizer.json")).decode(ids.tolist()) == path.read_text(encoding="utf-8")
    assert facts["source"] == str(path)
    again, _ = load_tokens(tmp_path / "cache", path, 600)
    assert np.array_equal(ids, again)
    assert check_folder(cache) == []


def test_a_damaged_tokenizer_is_named(data_dir: Path, tmp_path: Path) -> None:
    facts = {"name": "x", "sha256": "0" * 64}
    wordpiece_tokenizer(tmp_path, ["some words"], facts, 600)
    (cache,) = (tmp_path / "tokens").iterdir()
    (cache / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer\.json: not a tokenizer"):
        wordpiece_tokenizer(tmp_path, ["some words"], facts, 600)


# -- users' own data ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["wiki.train.tokens", "wiki.train.raw", "wikitext-2/wiki.train.tokens"])
def test_wikitext_is_found(place: str, tmp_path: Path) -> None:
    path = tmp_path / place
    path.parent.mkdir(exist_ok=True)
    path.write_text("text")
    assert find_wikitext(tmp_path) == path
    assert find_wikitext(path) == path


@pytest.mark.parametrize(("content", "message"), [(b"", "empty"), (b" \n", "empty"), (b"ab\xff", "byte 2")])
def test_a_text_that_is_none_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "wiki.train.tokens").write_bytes(content)
    with pytest.raises(DataError, match=rf"wiki\.train\.tokens.*{message}"):
        load_tokens(tmp_path / "cache", tmp_path, 600)


def squad_file(path: Path, **entry: Any) -> Path:
    qas = [{"id": "q1", "question": "Who?", "answers": [{"text": "Ada", "answer_start": 4}], **entry}]
    content = {"version": "1.1", "data": [{"title": "t", "paragraphs": [{"context": "Yes Ada did.", "qas": qas}]}]}
    path.write_text(json.dumps(content))
    return path


def test_squad_of_both_versions_is_read(tmp_path: Path) -> None:
    squad_file(tmp_path / "train-v1.1.json")
    (question,) = read_squad(find_squad(tmp_path))
    assert question.context[question.start : question.end] == "Ada"
    impossible = squad_file(tmp_path / "v2.json", answers=[], is_impossible=True)
    stream, facts = open_squad(tmp_path, impossible, batch_size=2, length=24, vocabulary=600, seed=0)
    batch = stream.batch(0)
    assert batch["start_positions"].tolist() == batch["end_positions"].tolist() == [0, 0]
    assert facts["source"] == str(impossible)


@pytest.mark.parametrize(
    "entry",
    [
        {"answers": [{"text": "Ada", "answer_start": 5}]},
        {"answers": [{"text": "Ada", "answer_start": -8}]},
        {"answers": [{"text": "Ada", "answer_start": 10**9}]},
        {"answers": [{"text": "Ada", "answer_start": True}]},
        {"answers": [{"text": "Ada", "answer_start": "4"}]},
        {"answers": [{"text": "", "answer_start": 4}]},
        {"answers": []},
        {"answers": None},
        {"answers": [7]},
        {"question": None},
    ],
)
def test_a_wrong_question_is_named(entry: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"mine\.json: question 'q1'"):
        read_squad(squad_file(tmp_path / "mine.json", **entry))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"data": 1}', '{"data": []}', '{"data": [1]}', "[" * 100_000])
def test_a_file_that_is_not_squad_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(text)
    with pytest.raises(DataError, match=r"mine\.json"):
        read_squad(tmp_path / "mine.json")


def image_folder(root: Path, below: str = "train") -> Path:
    rng = np.random.default_rng(0)
    for number, name in enumerate(("n01", "n02", "n03")):
        (root / below / name).mkdir(parents=True)
        for index in range(2):
            pixels = rng.integers(0, 256, (40 + 9 * number, 50, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / below / name / f"{name}_{index}.JPEG")
    return root


@pytest.mark.parametrize("below", ["train", ""])
def test_an_image_folder_is_read(below: str, tmp_path: Path) -> None:
    image_folder(tmp_path / "imagenet", below)
    stream, facts = open_images(tmp_path, tmp_path / "imagenet", batch_size=4, image_size=32, classes=3, seed=0)
    batches = [next(stream) for _ in range(3)]
    assert batches[0]["images"].shape == (4, 3, 32, 32)
    assert batches[0]["images"].dtype == torch.uint8
    labels = torch.cat([batch["labels"] for batch in batches])
    assert sorted(labels.tolist()) == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    stream.load_state_dict({"consumed": 1})
    assert torch.equal(next(stream)["images"], batches[1]["images"])
    assert "6 images, 3 classes" in facts["source"]


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "imagenet" / "n01").mkdir(parents=True)
    for path in (tmp_path / "imagenet", tmp_path / "nowhere"):
        with pytest.raises(DataError, match=r"expected an ImageNet-style folder"):
            open_images(tmp_path, path, batch_size=1, image_size=32, classes=3, seed=0)


def test_a_broken_image_is_named(tmp_path: Path) -> None:
    root = image_folder(tmp_path / "imagenet")
    for path in root.rglob("*.JPEG"):
        path.write_bytes(path.read_bytes()[:60])
    stream, _ = open_images(tmp_path, root, batch_size=1, image_size=32, classes=3, seed=0)
    with pytest.raises(DataError, match=r"\.JPEG: not a readable image"):
        stream.batch(0)
