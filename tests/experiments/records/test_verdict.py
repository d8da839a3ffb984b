"""What a record must show to pass `lastgood check`."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from lastgood.cli import app
from lastgood.experiments.records.run import Proof, RunRecord
from tests.experiments.support.records import make_record


def with_proof(**changes: object) -> RunRecord:
    record = make_record(proof=True)
    assert record.proof is not None
    return record.model_copy(update={"proof": Proof.model_validate({**record.proof.model_dump(), **changes})})


def test_a_proved_run_passes() -> None:
    assert make_record(proof=True).faults() == []


@pytest.mark.parametrize(
    ("record", "fault"),
    [
        (make_record(proof=None), "no restore proof"),
        (make_record(proof=False), "the restored state differs"),
        (make_record(proof=True, durable=1), "1 durable checkpoints of 4 started, 2 needed"),
        (make_record(proof=True, failed=1), "1 checkpoints failed"),
        (with_proof(restored_step=3), "restored step 3 where"),
        (with_proof(digest_restored="other"), "the restored state differs: digest other"),
        (with_proof(next_losses_restored=[9.0]), "training went on with other losses"),
    ],
)
def test_every_fault_is_named(record: RunRecord, fault: str) -> None:
    assert any(found.startswith(fault) for found in record.faults())


def test_the_command_exits_by_the_verdict(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    make_record(proof=True).write(good)
    make_record(proof=False).write(bad)
    passed = CliRunner().invoke(app, ["check", str(good)])
    assert passed.exit_code == 0
    assert "equal to the bit" in passed.stdout
    failed = CliRunner().invoke(app, ["check", str(good), str(bad), "--json"])
    assert failed.exit_code == 1
    assert '"passed": false' in failed.stdout
