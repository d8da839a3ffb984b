"""The summary in the terms of MLPerf Storage: its numbers by hand, and each rule kept and broken."""

from __future__ import annotations

import datetime

import pytest

from lastgood.errors import ConfigError
from lastgood.experiments.dcp_runs.mlperf import summarize
from lastgood.units import GIB
from tests.experiments.support.dcp_records import iteration_of, record_of, spec_of
from tests.experiments.support.records import make_record
from tests.suggestions.following import follows, hear, refusal

BEGIN = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.timezone.utc)
SIZE = 105 * GIB
LARGE = make_record().where.model_copy(update={"memory_bytes": 1024 * GIB})


def made(operation, seconds, **spec):
    """A record whose iterations' slowest ranks take `seconds`; those of a save-and-load alternate."""
    given = {"model": "llama3-8b", "state": "full", "ranks": 8, "iterations": 10, "warmup": 0, **spec}
    kinds = ("save", "load") if operation == "save-and-load" else (operation,)
    iterations = [
        iteration_of(kind, 1, one, warmup=number < given["warmup"], equal=True if kind == "load" else None)
        for number, one in enumerate([1.0] * given["warmup"] + seconds)
        for kind in kinds
    ]
    return record_of(spec_of(operation=operation, **given), state_bytes=SIZE, iterations=iterations)


def pair(*, gap_s=10.0, save=None, load=None, spec=None):
    """A save and the load after it, which keep all rules but that all checkpoints are read; changed where said."""
    spec = spec or {}
    half = spec.get("iterations", 10) // 2
    first = made("save", [100.0] * (spec.get("iterations", 10) - half) + [50.0] * half, **spec)
    second = made("load", [25.0] * spec.get("iterations", 10), **spec)
    first = first.model_copy(update={"started_at": BEGIN.isoformat(), "wall_s": 1000.0, **(save or {})})
    began = BEGIN + datetime.timedelta(seconds=1000 + gap_s)
    second = second.model_copy(update={"started_at": began.isoformat(), "suffix": first.suffix, **(load or {})})
    return first, second


def broken(summary):
    return {rule.name: rule.found for rule in summary.broken}


def test_the_numbers_are_means_of_each_checkpoints_rate_in_gib():
    summary = summarize(*pair())
    assert summary.metric["save_checkpoint_io_mean_GB_per_second"] == pytest.approx((1.05 + 2.1) / 2)
    assert summary.metric["save_checkpoint_io_stdev_GB_per_second"] == pytest.approx(0.525)
    assert summary.metric["save_checkpoint_duration_mean_seconds"] == 75
    assert summary.metric["load_checkpoint_io_mean_GB_per_second"] == pytest.approx(4.2)
    assert summary.metric["checkpoint_size_GB"] == 105
    assert (summary.num_accelerators, summary.num_hosts) == (8, 1)
    assert "not an MLPerf result" in summary.model_dump_json()


def test_a_run_by_the_rules_breaks_only_what_the_suite_does_otherwise():
    assert broken(summarize(*pair())) == {"every checkpoint that was written is read": "the newest one, 10 times"}


@pytest.mark.parametrize(
    ("change", "rule", "found"),
    [
        ({"spec": {"model": "L7b"}}, "model (table 2)", "L7b is none of llama3-8b"),
        ({"spec": {"ranks": 4}}, "checkpointClosedMpiProcesses", "4 processes of 8"),
        ({"spec": {"ranks": 8, "nodes": 4}}, "checkpointClosedAcceleratorsPerHost", "2 processes a host"),
        ({"spec": {"iterations": 9}}, "10 writes", "9 writes"),
        ({"spec": {"iterations": 9}}, "10 reads", "9 reads"),
        ({"spec": {"warmup": 1}}, "10 writes", "10 writes, after 1 that do not count"),
        ({"gap_s": 31.0}, "checkpointCacheFlushValidation", "31 s between"),
        ({"gap_s": -1.0}, "checkpointCacheFlushValidation", "reading began before writing had ended"),
        ({"save": {"durable": False}}, "flushed to stable storage", "page cache"),
        ({"save": {"state_bytes": 90 * GIB}}, "checkpoint size (table 2)", "90 GiB of 105"),
        (
            {"save": {"where": LARGE}, "load": {"place": "s3://bucket/x"}},
            "3 times the memory, or caches dropped",
            "the server keeps in memory",
        ),
    ],
)  # fmt: skip
def test_each_rule_that_is_broken_is_said(change, rule, found):
    assert found in broken(summarize(*pair(**change)))[rule]


@pytest.mark.parametrize(
    ("share", "kept", "found"),
    [(0.0, True, "0 % of the files"), (0.5, False, "50 % of the files"), (None, False, "was not looked at")],
)
def test_caches_count_as_dropped_only_where_that_was_seen(share, kept, found):
    save, load = pair(save={"where": LARGE})
    iterations = [one.model_copy(update={"cached_share": share}) for one in load.iterations]
    rules = summarize(save, load.model_copy(update={"iterations": iterations})).rules
    (rule,) = (rule for rule in rules if "caches dropped" in rule.name)
    assert (rule.met, found in rule.found) == (kept, True)


def test_one_record_of_both_interleaves_them():
    found = broken(summarize(made("save-and-load", [1.0] * 10)))
    assert found["writes first, then reads"] == "each save was loaded at once"
    assert "every checkpoint that was written is read" not in found


def test_a_load_that_gave_something_else_is_said():
    save, load = pair()
    wrong = [load.iterations[0].model_copy(update={"equal": False}), *load.iterations[1:]]
    found = broken(summarize(save, load.model_copy(update={"iterations": wrong})))
    assert found["loads equal what was saved (Lastgood's own)"] == "9 of 10 loads"


def test_records_that_do_not_belong_together_are_refused():
    save, load = pair()
    with pytest.raises(ConfigError, match="they differ in the checkpoint's suffix"):
        summarize(save, load.model_copy(update={"suffix": "another"}))
    with pytest.raises(ConfigError, match="they differ in model"):
        summarize(save, pair(spec={"model": "L7b"})[1])


@follows("a summary takes saves and loads")
def test_a_save_alone_is_no_summary():
    save, load = pair()
    hear(refusal(lambda: summarize(save)))
    assert summarize(save, load).rules
