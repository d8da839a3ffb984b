"""Run records: they come back as they were written, whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lastgood.errors import LastgoodError
from lastgood.experiments.records.run import RunRecord
from tests.experiments.support.records import make_record, place_record


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    record = make_record("pccheck", 10, 1, iterations_per_s=1 / 3, proof=True, notes=["café"])
    assert RunRecord.load(place_record(record, tmp_path)) == record


def test_a_failed_write_leaves_the_old_record_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = make_record()
    path = place_record(record, tmp_path)

    def refuse(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(Exception, match="No space left"):
        make_record(iterations_per_s=9.0).write(path)
    monkeypatch.undo()
    assert RunRecord.load(path) == record
    assert [found.name for found in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"record_version": 1', '"record_version": 2'),
        lambda text: text.replace('"drain_s"', '"drain_ms"'),
        lambda _: "",
    ],
    ids=["cut", "other version", "unknown field", "empty"],
)
def test_a_damaged_record_is_refused_by_its_path(tmp_path: Path, damage: object) -> None:
    path = place_record(make_record(), tmp_path)
    path.write_text(damage(path.read_text()))
    with pytest.raises(LastgoodError, match=str(path)):
        RunRecord.load(path)


def test_repetitions_share_a_cell_and_settings_do_not() -> None:
    first, second = make_record(repetition=0).spec, make_record(repetition=1, proof=True).spec
    assert first.seed != second.seed
    assert first.proof != second.proof
    assert first.record_path().parent == second.record_path().parent
    others = [make_record(threads=4), make_record(measured_steps=41), make_record(method=2)]
    others.append(make_record(system_options={"max_in_flight": 3, "writer_threads": 2}))
    assert len({first.cell_hash, *(other.spec.cell_hash for other in others)}) == 5


def test_the_schema_is_closed() -> None:
    text = json.loads(make_record().model_dump_json())
    text["clocks"]["invented_s"] = 1.0
    with pytest.raises(ValueError, match="invented_s"):
        RunRecord.model_validate(text)


def test_the_factory_refuses_unknown_fields() -> None:
    with pytest.raises(TypeError, match="colour"):
        make_record(colour="blue")
