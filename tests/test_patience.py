"""The wait that tests share."""

from __future__ import annotations

import pytest

from tests.support import patience
from tests.support.patience import wait_until


def test_it_gives_what_it_waited_for() -> None:
    asked = iter([0, "", 7])
    assert wait_until(lambda: next(asked), "a true value", 60, every_s=0) == 7


def test_it_ends_with_the_name_of_what_did_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "PATIENCE", 3.0)
    with pytest.raises(AssertionError, match=r"^waited 0\.03 s for the end of days$"):
        wait_until(lambda: False, "the end of days", 0.01, every_s=0.001)
    with pytest.raises(AssertionError, match=r"^waited 0\.03 s for 2 more$"):
        wait_until(lambda: False, lambda: f"{1 + 1} more", 0.01, every_s=0.001)


def test_the_limit_of_all_tests_has_the_factor(request: pytest.FixtureRequest) -> None:
    assert request.config.option.timeout is not None
    if not request.config.invocation_params.args or "--timeout" not in str(request.config.invocation_params.args):
        assert request.config.option.timeout == 900 * patience.PATIENCE
