"""What `lastgood plan` prints for every figure of every configuration, and which records the workflow makes, in order.

data/plans.json.xz holds, by configuration and figure, the output with the table's blanks squeezed, and of each run its
JSON with a digest in place of the spec. Remade by ``python -m tests.golden.support.remake plans``.
"""

from __future__ import annotations

import importlib.util

import pytest

from tests.golden.support.adapters import ROOT, plan_names
from tests.golden.support.plans import CONFIGS, kept_plans, planned, workflow

DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
OVER_NODES = ("fig8e", "fig8f")


@pytest.mark.parametrize("name", CONFIGS)
def test_every_plan_is_the_kept_one(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    kept = kept_plans("plans")[name]
    assert list(kept) == plan_names()
    # The paper's runs over nodes are DeepSpeed's.
    without = OVER_NODES if name == "paper" and not DEEPSPEED else ()
    for figure, expected in kept.items():
        if figure not in without:
            assert planned(name, figure) == expected


@pytest.mark.parametrize("name", CONFIGS)
def test_the_workflow_makes_the_kept_records_in_the_kept_order(name):
    if name == "paper" and not DEEPSPEED:
        pytest.skip("the paper's runs over nodes are DeepSpeed's")
    assert workflow(name) == kept_plans("workflows")[name]
