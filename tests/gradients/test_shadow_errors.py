"""Errors inside a shadow that no retry mends: the trainer says what it is, and the shadow's log stays short."""

import logging

import pytest

from lastgood.checkpointers.checkmate import Checkmate
from lastgood.errors import WaitTimeout
from tests.checkpointers.small_training import SmallTraining
from tests.gradients.shadow_processes import shadow_threads


@pytest.mark.parametrize("where", ["declare", "receive_from", "greet"])
def test_an_error_inside_a_shadow_is_said_to_the_trainer_and_logged_once(where, tmp_path, caplog, monkeypatch):
    calls = []

    def breaks(*arguments):
        calls.append(arguments)
        raise ZeroDivisionError("a fault of the shadow's own")

    with shadow_threads(tmp_path, 2) as shadows:
        monkeypatch.setattr(shadows[1].service.core, where, breaks)
        knobs = {"shadows": [one.address for one in shadows], "token_file": str(tmp_path / "token"), "timeout_s": 3.0}
        checkpointer = Checkmate(tmp_path / "job", bucket_bytes=4096, **knobs)
        with (
            caplog.at_level(logging.INFO),
            pytest.raises(WaitTimeout, match=rf"{shadows[1].address} \(.*an error inside .*a fault of the shadow's"),
        ):
            checkpointer.start(SmallTraining().state)
        checkpointer.close()
    assert len([record for record in caplog.records if record.exc_info]) == 1
    assert 2 <= len(calls) < 12, "tried again, with growing pauses"
