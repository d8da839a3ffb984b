"""What tests of DeepSpeed share: importing it takes many seconds."""

from __future__ import annotations

import pytest

from tests.integrations.deepspeed_ranks import Ranks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    made = Ranks(tmp_path_factory.mktemp("ranks"))
    yield made
    made.end()
