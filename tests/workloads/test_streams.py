"""Streams of batches: what batch i holds depends on the data, the seed and i alone."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood.errors import DataError
from lastgood.workloads.base import Batch, BatchStream
from lastgood.workloads.data.images import open_images
from lastgood.workloads.data.order import EpochOrder
from lastgood.workloads.data.prepare import prepared_dataset
from lastgood.workloads.data.squad import open_squad, read_squad
from lastgood.workloads.data.text_streams import BlockStream, LaneStream
from lastgood.workloads.data.tokens import load_tokens, wordpiece_tokenizer
from tests.workloads.tiny_options import TINY

STREAMS = ["images", "squad", "blocks", "lanes"]


def open_stream(kind: str, data_dir: Path, seed: int = 5) -> BatchStream:
    if kind == "images":
        return open_images(data_dir, None, batch_size=3, image_size=32, classes=10, seed=seed)[0]
    if kind == "squad":
        return open_squad(data_dir, None, batch_size=3, length=48, vocabulary=600, seed=seed)[0]
    tokens, facts = load_tokens(data_dir, None, 600)
    return (BlockStream if kind == "blocks" else LaneStream)(tokens, 3, 20, seed, facts["name"])


def same(left: Batch, right: Batch) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture(scope="module")
def streams(data_dir: Path) -> dict[str, tuple[BatchStream, BatchStream]]:
    """Two streams of each kind, opened apart."""
    return {kind: (open_stream(kind, data_dir), open_stream(kind, data_dir)) for kind in STREAMS}


@pytest.mark.parametrize("kind", STREAMS)
def test_batches_made_ahead_are_the_same_and_go_where_a_restore_goes(kind: str, data_dir: Path) -> None:
    plain, ahead = open_stream(kind, data_dir), open_stream(kind, data_dir)
    ahead.prefetch(pinned=False)
    for _ in range(3):
        assert same(next(ahead), next(plain))
        assert ahead.state_dict() == plain.state_dict()
    for place in (1, 3, 1000):  # back, where it is, forward
        plain.load_state_dict({"consumed": place})
        ahead.load_state_dict({"consumed": place})
        assert same(next(ahead), next(plain)) and same(next(ahead), next(plain))


def test_what_fails_ahead_fails_where_it_is_asked_for() -> None:
    class Short(BatchStream):
        def batch(self, index: int) -> Batch:
            if index == 2:
                raise DataError("no third batch")
            return {"number": torch.tensor(index)}

    stream = Short()
    stream.prefetch(pinned=False)
    assert [int(next(stream)["number"]), int(next(stream)["number"])] == [0, 1]
    for _ in range(2):
        with pytest.raises(DataError, match="no third batch"):
            next(stream)
    stream.load_state_dict({"consumed": 0})
    assert int(next(stream)["number"]) == 0


@pytest.mark.parametrize("kind", STREAMS)
@settings(max_examples=20, deadline=None)
@given(places=st.lists(st.integers(0, 10_000), min_size=1, max_size=4), start=st.integers(0, 10_000))
def test_a_position_that_is_restored_gives_the_same_batches(
    kind: str, streams: dict[str, tuple[BatchStream, BatchStream]], places: list[int], start: int
) -> None:
    one, other = streams[kind]
    one.load_state_dict({"consumed": start})
    expected = [next(one), next(one)]
    assert one.state_dict() == {"consumed": start + 2}
    for place in places:  # whatever was drawn before does not matter
        other.batch(place)
    other.load_state_dict({"consumed": start})
    assert all(same(next(other), batch) for batch in expected)


@pytest.mark.parametrize("kind", STREAMS)
def test_another_seed_gives_other_batches(kind: str, data_dir: Path) -> None:
    assert not same(open_stream(kind, data_dir, seed=1).batch(0), open_stream(kind, data_dir, seed=2).batch(0))


@given(count=st.integers(1, 40), epoch=st.integers(0, 5), seed=st.integers(0, 2**32))
def test_an_epoch_visits_every_item_once(count: int, epoch: int, seed: int) -> None:
    order = EpochOrder(count, seed)
    assert sorted(order.item(epoch * count + place) for place in range(count)) == list(range(count))


@given(count=st.integers(1, 30), size=st.integers(1, 50), index=st.integers(0, 20), seed=st.integers(0, 99))
def test_batches_follow_one_another_across_epochs(count: int, size: int, index: int, seed: int) -> None:
    order = EpochOrder(count, seed)
    places = [order.item(place) for place in range(index * size, (index + 2) * size)]
    assert order.batch(index, size) + order.batch(index + 1, size) == places


@settings(deadline=None)
@given(count=st.integers(4, 300), lanes=st.integers(1, 4), length=st.integers(1, 20), seed=st.integers(0, 99))
def test_lanes_run_on_from_batch_to_batch(count: int, lanes: int, length: int, seed: int) -> None:
    tokens = np.arange(count, dtype=np.int32)
    segments = (count // lanes - 1) // length
    if segments < 1:
        with pytest.raises(DataError, match="longer text"):
            LaneStream(tokens, lanes, length, seed, "numbers")
        return
    stream = LaneStream(tokens, lanes, length, seed, "numbers")
    batches = [stream.batch(index) for index in range(segments)]
    for batch in batches:
        assert torch.equal(batch["labels"][:, :-1], batch["input_ids"][:, 1:])
    for before, after in pairwise(batches):
        assert torch.equal(before["labels"][:, -1], after["input_ids"][:, 0])
    seen = torch.cat([batch["input_ids"] for batch in batches], dim=1)
    assert len(seen.unique()) == seen.numel(), "lanes overlap"
    assert same(stream.batch(segments), batches[0])


def test_blocks_cover_the_text_once_an_epoch() -> None:
    stream = BlockStream(np.arange(103, dtype=np.int32), 5, 10, 0, "numbers")
    seen = torch.cat([stream.batch(index)["input_ids"] for index in range(2)])
    assert sorted(seen.flatten().tolist()) == list(range(100))
    with pytest.raises(DataError, match="longer text"):
        BlockStream(np.arange(9, dtype=np.int32), 1, 10, 0, "numbers")


def test_images_are_bytes_between_paper_and_ink(data_dir: Path) -> None:
    stream = open_stream("images", data_dir)
    batch = stream.batch(0)
    assert batch["images"].shape == (3, 3, 32, 32)
    assert batch["images"].dtype == torch.uint8
    assert batch["labels"].dtype == torch.int64
    assert set(torch.cat([stream.batch(index)["labels"] for index in range(40)]).tolist()) == set(range(10))


def test_a_channel_runs_from_one_colour_to_another_and_never_wraps_around(data_dir: Path) -> None:
    stream: Any = open_stream("images", data_dir)
    for index in range(100):
        images = stream.batch(index)["images"].flatten(2).int()
        for image, item in zip(images, stream._order.batch(index, 3), strict=True):
            darkest_first = stream._grey[item].flatten().argsort(stable=True)
            for channel in image[:, darkest_first]:
                steps = channel.diff()
                assert (steps >= 0).all() or (steps <= 0).all()


@pytest.mark.parametrize("length", [24, 48, 160])
def test_answers_are_where_the_positions_say(length: int, data_dir: Path) -> None:
    folder, _ = prepared_dataset("squad", data_dir)
    questions = read_squad(folder / "train-v1.1.json")
    stream, facts = open_squad(data_dir, None, batch_size=1, length=length, vocabulary=3000, seed=0)
    tokenizer = wordpiece_tokenizer(data_dir, [], facts, 3000)
    order = EpochOrder(len(questions), 0)
    for index in range(300):
        example, batch = questions[order.item(index)], stream.batch(index)
        row = {name: value[0] for name, value in batch.items()}
        start, end = int(row["start_positions"]), int(row["end_positions"])
        assert all(len(row[name]) == length for name in ("input_ids", "attention_mask", "token_type_ids"))
        assert 0 < start <= end < length
        assert row["token_type_ids"][start : end + 1].all()
        assert row["attention_mask"][start : end + 1].all()
        answer = tokenizer.encode(example.context[example.start : example.end]).ids
        assert row["input_ids"][start : end + 1].tolist() == answer[: end - start + 1]
        assert end - start + 1 == len(answer) or end == length - 2, "an answer was cut although there was room"


@pytest.mark.parametrize("name", ["bert", "opt"])
def test_ids_fit_the_vocabulary(name: str, data_dir: Path) -> None:
    vocabulary: Any = TINY[name][0]["vocabulary"]
    stream = open_stream("squad" if name == "bert" else "blocks", data_dir)
    assert max(int(stream.batch(index)["input_ids"].max()) for index in range(50)) < vocabulary
