"""Several ranks that save and load one state: the same bits as torch's own writer and reader, by any of them."""

from __future__ import annotations

import pytest

from tests.integrations.rank_asker import Ranks

pytestmark = pytest.mark.timeout(100)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    made = Ranks(tmp_path_factory.mktemp("ranks"), "dcp/dcp_rank.py")
    yield made
    made.end()


@pytest.mark.parametrize(("world", "how"), [(2, "sync"), (3, "thread"), (2, "process")])
def test_what_each_writer_writes_each_reader_reads(ranks, tmp_path, world, how):
    for answer in ranks.run("both_ways", world, place=str(tmp_path), how=how):
        assert answer == {"ours": [], "files": [], "files by torch": [], "torch": []}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["files", "ours", "torch"]


def test_another_number_of_ranks_reads_it_placed_in_another_way(ranks, tmp_path):
    ranks.run("both_ways", 3, place=str(tmp_path))
    placed = {"rows": 1, "columns": 0, "both": None, "small": 1, "empty": 1, "scalar": None}
    for answer in ranks.run("load_into", 2, place=str(tmp_path), names=["ours", "files", "torch"], placed=placed):
        assert answer == {"ours": [], "files": [], "torch": []}


def test_plans_may_be_cached(ranks, tmp_path):
    assert ranks.run("cached_plans", 2, place=str(tmp_path)) == [[[], [], []]] * 2


def test_ranks_may_save_by_themselves(ranks, tmp_path):
    assert ranks.run("without_collectives", 2, place=str(tmp_path)) == [{"together": [], "alone": []}] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone-0", "alone-1", "together"]
