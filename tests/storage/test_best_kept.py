"""Checkpoints that stay because they are the best, beside the newest ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slot_helpers import open_store, save, steps

from lastgood.errors import ConfigError
from lastgood.storage.format import seal_json, unseal_json
from lastgood.storage.verdicts import VERDICT_FILE, Measured, VerdictBook


@given(
    losses=st.lists(st.one_of(st.none(), st.sampled_from([1.0, 2.0, 3.0, -1.0])), min_size=1, max_size=9),
    keep=st.integers(1, 2),
    best=st.integers(1, 3),
    less=st.booleans(),
)
@settings(max_examples=12, deadline=None)
def test_what_stays(tmp_path_factory, losses, keep, best, less):
    """Against a plain list of all that there ever was, each measured as soon as it was durable."""
    folder = tmp_path_factory.mktemp("slots")
    rule = (best, "loss", less)
    with open_store(folder, slots=1 + keep + best, keep=keep, keep_best=rule) as store:
        known = {}
        for step, loss in enumerate(losses, 1):
            assert save(store, step, 100) == "durable"
            if loss is not None:
                store.measure(store.newest_sequence(), Measured(step, "loss", loss))
                known[step] = loss if less else -loss
            order = sorted(known, key=lambda one: (known[one], -one))[:best]
            assert [info.step for info in store.best()] == order
            newest = range(step, max(0, step - keep), -1)
            assert {*order, *newest} <= {*steps(store)}
    assert {one.step for one in VerdictBook(folder).metrics.values()} == {*order}


def test_slots_are_there_for_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"slots at least keep \+ 2 of the best \+ 1"):
        open_store(tmp_path, slots=4, keep=2, keep_best=(2, "loss", True))


def test_a_metric_of_what_is_in_progress(tmp_path: Path) -> None:
    with open_store(tmp_path, slots=4, keep=1, keep_best=(1, "loss", True)) as store:
        write = store.begin(1, 100)
        store.measure(write.sequence, Measured(1, "loss", 0.5))
        assert store.best() == []
        write.abort()
        assert save(store, 2, 100) == "durable"
        store.measure(store.newest_sequence(), Measured(2, "loss", 0.7))
        assert [info.step for info in store.best()] == [2]


@pytest.mark.parametrize("value", ["0.5", True, None, [1]])
def test_a_book_with_another_kind_of_value_is_damaged(tmp_path: Path, value: object, caplog) -> None:
    with open_store(tmp_path, slots=4, keep=1, keep_best=(1, "loss", True)) as store:
        assert save(store, 1, 100) == "durable"
        store.measure(store.newest_sequence(), Measured(1, "loss", 0.5))
    path = tmp_path / VERDICT_FILE
    described = unseal_json(path.read_bytes())
    described["metrics"][0]["value"] = value
    path.write_bytes(seal_json(described))
    assert VerdictBook(tmp_path).metrics == {}
    assert "no verdict on any checkpoint is known" in caplog.text


def test_a_book_without_metrics_is_written_as_ever(tmp_path: Path) -> None:
    book = VerdictBook(tmp_path)
    book.measure({})
    assert "metrics" not in json.dumps(unseal_json((tmp_path / VERDICT_FILE).read_bytes()))
