"""What earlier revisions wrote is read as before: kept records, CSV files, configurations and checkpoint directories.

Samples are never remade to please a test. Of configurations, data/configs.json holds the values that were read (a key
that came later may be added to them): ``python -m tests.golden.support.remake configs``. New samples of checkpoint
directories: ``python -m tests.golden.support.make_samples``.
"""

from __future__ import annotations

import json

import pytest

from tests.golden.support.adapters import load_record, load_table
from tests.golden.support.drawing import drawn_names
from tests.golden.support.make_samples import SAMPLES, restored, unpack
from tests.golden.support.tables import CONFIG_FILES, DATA, RECORDS, config_values

KEPT_RECORDS = sorted(RECORDS.rglob("r*.json"))


def kind_of_record(spec):
    if "failures_s" in spec:
        return "goodput"
    return "optimizer" if "updates" in spec else "run"


@pytest.mark.parametrize("sample", SAMPLES)
def test_a_kept_checkpoint_directory_is_gone_on_from(sample, tmp_path):
    expected = unpack(sample, tmp_path)
    assert len(expected) == SAMPLES[sample][1]
    assert restored(sample, tmp_path) == expected


@pytest.mark.parametrize("path", KEPT_RECORDS, ids=[str(path.relative_to(RECORDS)) for path in KEPT_RECORDS])
def test_a_kept_record_is_read_and_would_be_written_as_it_is(path, tmp_path):
    kept = json.loads(path.read_text(encoding="utf-8"))
    record = load_record(kind_of_record(kept["spec"]), path)
    assert str(path).endswith(str(record.spec.record_path()))
    assert json.loads(record.model_dump_json()) == kept
    again = tmp_path / "again.json"
    record.write(again)
    assert again.read_bytes() == path.read_bytes()


def test_records_of_all_kinds_are_kept():
    specs = [json.loads(path.read_text(encoding="utf-8"))["spec"] for path in KEPT_RECORDS]
    assert {kind_of_record(spec) for spec in specs} == {"run", "goodput", "optimizer"}
    assert any(spec.get("ranks", 1) > 1 for spec in specs) and any(spec.get("shadows") for spec in specs)


@pytest.mark.parametrize("name", CONFIG_FILES)
def test_a_kept_configuration_has_the_values_that_it_had(name):
    expected = json.loads((DATA / "configs.json").read_text(encoding="utf-8"))[name]
    assert common(config_values(name), expected) == expected


def common(found, like):
    """Of nested mappings, the keys that `like` has too."""
    if not isinstance(found, dict) or not isinstance(like, dict):
        return found
    return {key: common(value, like[key]) for key, value in found.items() if key in like}


@pytest.mark.parametrize("name", drawn_names())
def test_a_kept_table_is_read_with_its_columns_and_rows(name):
    lines = (DATA / "tables" / f"{name}.csv").read_text(encoding="utf-8").splitlines()
    frame = load_table(DATA / "tables" / f"{name}.csv")
    assert list(frame.columns) == lines[0].split(",")
    assert len(frame) == len(lines) - 1
