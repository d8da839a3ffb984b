"""When a training must have ended: what is taken for a time, and what is refused."""

from __future__ import annotations

import logging
import math
import time

import pytest
import torch

from lastgood import PCcheck
from lastgood.checkpointers.attach.deadline import monotonic_end
from lastgood.errors import ConfigError
from tests.suggestions.following import advice, follows, refusal


def end(deadline, *, together=True):
    return monotonic_end("pccheck", deadline, together=together)


def test_a_time_that_was_given(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(time.time() + 10))
    assert end(time.time() + 100) == pytest.approx(time.monotonic() + 100, abs=1)
    assert end(None) is None


@pytest.mark.parametrize("text", ["", "0", "soon", "nan", "1e400", "7200"])
def test_what_slurm_does_not_say(text, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", text)
    assert end("slurm") is None
    monkeypatch.delenv("SLURM_JOB_END_TIME")
    assert end("slurm") is None


def test_what_slurm_says(monkeypatch, caplog):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 100))
    assert end("slurm") == pytest.approx(time.monotonic() + 100, abs=2)
    assert end("slurm", together=False) is None, "Slurm itself ends it"
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) - 100))
    with caplog.at_level(logging.WARNING, "lastgood"):
        assert end("slurm") is None
    assert "SLURM_JOB_END_TIME was" in caplog.text


@pytest.mark.parametrize("bad", ["tomorrow", math.nan, math.inf, object()])
def test_what_is_no_time(bad, tmp_path):
    with pytest.raises(ConfigError, match="deadline is a time in seconds since 1970, or 'slurm'"):
        PCcheck(tmp_path, interval_steps=1, deadline=bad)


@follows(
    "is a time in 1970, not one from now; for so many seconds give",
    "a training that saves by hand also ends by hand; leave deadline out, or give an interval",
    "by which they agree on a last step; call torch.distributed.init_process_group() before, or leave deadline out",
)
def test_what_cannot_be_kept(tmp_path):
    message = refusal(lambda: PCcheck(tmp_path, interval_steps=1, deadline=3600))
    given = eval(advice(message, r"deadline=(time.*)"), {"time": time})
    PCcheck(tmp_path, interval_steps=1, deadline=given)

    def attach(**options):
        checkpointer = PCcheck(tmp_path, **options)
        try:
            checkpointer.attach(model=torch.nn.Linear(1, 1))
        finally:
            checkpointer.close()

    assert "the deadline was" in refusal(lambda: attach(interval_steps=1, deadline=time.time() - 60))
    attach(interval_steps=1, deadline=given)
    refusal(lambda: PCcheck(tmp_path, interval_steps=0, deadline=given))
    attach(interval_steps=0)
    several = {"interval_steps": 1, "rank": 0, "world_size": 2, "control": "off"}
    refusal(lambda: attach(**several, deadline=given))
    assert not (tmp_path / "rank-00000").exists(), "it is refused before anything is written"
