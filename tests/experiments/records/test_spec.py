"""RunSpec: one path for one measurement."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from lastgood.experiments.records.spec import RunSpec
from tests.experiments.support.specs import make_spec


def test_the_path_is_readable() -> None:
    path = str(make_spec().record_path())
    assert re.fullmatch(r"testbox/laptop/vgg16/pccheck/f10/n4-p2-c[0-9a-f]{8}/r1\.json", path)
    assert make_spec().title() == "vgg16 pccheck f10 r1"


@pytest.mark.parametrize(
    "change",
    [
        {"workload_options": {"batch_size": 3}},
        {"system_options": {"max_in_flight": 4, "writer_threads": 2, "keep": 3}},
        {"method": 2},
        {"warmup_steps": 4},
        {"measured_steps": 51},
        {"threads": 1},
        {"device": "cuda"},
        {"data": "/data/images"},
        {"interval_steps": 11},
        {"drain_each": True},
        {"machine": "other"},
        {"scale": "gpu"},
    ],
)
def test_whatever_changes_the_measurement_changes_the_path(change: dict[str, Any]) -> None:
    assert make_spec(**change).record_path() != make_spec().record_path()


@pytest.mark.parametrize("change", [{"seed": 5}, {"proof": False}])
def test_seed_and_proof_do_not_change_the_path(change: dict[str, Any]) -> None:
    assert make_spec(**change).record_path() == make_spec().record_path()


def test_a_spec_that_does_not_drain_each_is_what_it_was_before_that_field() -> None:
    spec = make_spec()
    # The hash of this spec as the version before the field made it: records of that version stay where they belong.
    assert spec.variant == "n4-p2-c73b89ccf"
    assert "drain_each" not in spec.canonical_json()
    drained = make_spec(drain_each=True)
    assert drained.record_path() != spec.record_path()
    assert RunSpec.model_validate_json(drained.canonical_json()) == drained


def test_the_size_of_a_blob_is_readable() -> None:
    spec = make_spec(workload="blob", workload_options={"megabytes": 100}, system_options={})
    assert spec.variant.startswith("s100-c")
    assert spec.title() == "blob 100 MB pccheck f10 r1"


def test_repetitions_share_a_folder() -> None:
    assert make_spec(repetition=2).record_path().parent == make_spec().record_path().parent


def test_the_command_line_form_gives_the_same_spec() -> None:
    spec = make_spec(data="/a folder/with 'quotes'")
    assert RunSpec.model_validate_json(spec.canonical_json()) == spec
    assert "\n" not in spec.canonical_json()


@pytest.mark.parametrize(
    "change", [{"machine": "../up"}, {"machine": "A"}, {"interval_steps": -1}, {"threads": 0}, {"unknown": 1}]
)
def test_impossible_specs_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        make_spec(**change)
