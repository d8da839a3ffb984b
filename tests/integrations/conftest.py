"""What tests of DeepSpeed share: importing it takes many seconds."""

from __future__ import annotations

import pytest

from tests.integrations.rank_asker import Ranks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    made = Ranks(tmp_path_factory.mktemp("ranks"), "deepspeed_rank.py")
    yield made
    made.end()
