"""DeepSpeed trainings of two ranks that save and load through Lastgood; DeepSpeed's own engine is the oracle."""

from __future__ import annotations

import importlib.util

import pytest

from lastgood.checkpointers.gemini.traffic import Traffic
from lastgood.errors import ConfigError
from lastgood.files import TEMPORARY_SUFFIX
from lastgood.integrations.deepspeed_traffic import mark_communication
from lastgood.storage import format as fmt
from lastgood.storage.standalone_slot import is_standalone_slot
from tests.integrations.rank_asker import KILLED

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="lastgood[deepspeed] is not installed"
)
KINDS = [
    pytest.param({"stage": 0}, id="zero0", marks=pytest.mark.slow),
    pytest.param({"stage": 0, "precision": "bf16"}, id="zero0-bf16", marks=pytest.mark.slow),
    pytest.param({"stage": 0, "precision": "fp16"}, id="zero0-fp16", marks=pytest.mark.slow),
    pytest.param({"stage": 1, "precision": "bf16"}, id="zero1-bf16", marks=pytest.mark.slow),
    pytest.param({"stage": 1}, id="zero1", marks=pytest.mark.slow),
    pytest.param({"stage": 2}, id="zero2", marks=pytest.mark.slow),
    pytest.param({"stage": 2, "precision": "fp16"}, id="zero2-fp16"),
    pytest.param({"stage": 3}, id="zero3"),
    pytest.param({"stage": 3, "precision": "bf16"}, id="zero3-bf16", marks=pytest.mark.slow),
    pytest.param({"pipeline": True}, id="pipeline", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_training_goes_on_as_with_deepspeeds_own_engine(ranks, tmp_path, kind):
    what = {**kind, "lastgood": str(tmp_path / "lastgood"), "torch": str(tmp_path / "torch")}
    codes, before, folder = ranks.ask("save_twice", **what)
    assert codes == [KILLED, KILLED] and None not in before, ranks.logs(folder)
    own, foreign = ([path.name for path in (tmp_path / one).rglob("*.pt")] for one in ("lastgood", "torch"))
    assert sorted(own) == sorted(foreign) and own
    assert all(is_standalone_slot(path) for path in (tmp_path / "lastgood").rglob("*.pt"))
    assert (tmp_path / "lastgood" / "latest").read_text() == "global_step3"
    after = ranks.run("load_both", **what)
    for rank in range(2):
        ours, oracle = after[rank]
        assert ours["digests"] == oracle["digests"]
        assert ours["losses"] == oracle["losses"] == before[rank]["losses"]
        assert ours["client"] == oracle["client"] == "{'mine': 5, 'options': Namespace(depth=2)}"
    (files,) = ranks.run("compare_files", world=1, **what)
    assert set(files["same"].values()) == {True} and len(files["same"]) == len(set(own))
    assert files["exported"] == (2 if kind.get("stage") else 0)
    if kind.get("stage") and kind.get("precision") == "fp16":
        assert "DynamicLossScaler" in files["kinds"]


@pytest.mark.parametrize(
    "dying", [pytest.param([1], id="one rank"), pytest.param([0, 1], id="both", marks=pytest.mark.slow)]
)
def test_a_kill_during_a_save_leaves_the_older_tag(ranks, tmp_path, dying):
    what = {"stage": 1, "precision": "bf16", "lastgood": str(tmp_path)}
    codes, answers, folder = ranks.ask("die_in_save", dying=dying, **what)
    assert [codes[rank] for rank in dying] == [KILLED] * len(dying) and 0 not in codes, ranks.logs(folder)
    assert answers == [{"first": True}] * 2
    assert (tmp_path / "latest").read_text() == "first"
    assert not list((tmp_path / "second").glob("*.pt"))
    for found in ranks.run("load_newest", **what):
        assert "/first/" in found["path"] and found["step"] == 1
        assert found["exported"] == 7  # what save_16bit_model wrote is for torch.load


@pytest.mark.parametrize("failing", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_what_one_rank_cannot_save_fails_the_save_on_all(ranks, tmp_path, failing):
    # With ZeRO 3 each rank saves the client state, so any rank can be the one.
    found = ranks.run("fail_in_save", stage=3, lastgood=str(tmp_path), failing=failing)
    for one in found:
        assert one["said"].startswith(
            f"CheckpointError: {tmp_path}/second was not saved: rank {failing}: zero_pp_rank_"
        )
        assert "state.held[0].lock: cannot store a builtins.function" in one["said"]
        assert one["latest"] == "first"
        assert one["outcomes"] == [[1, "durable"], [2, "failed"], [3, "durable"]]
    assert (tmp_path / "latest").read_text() == "third"
    assert not list((tmp_path / "second").iterdir())


def test_a_background_save_never_raises_and_is_committed_at_a_later_step(ranks, tmp_path):
    what = {"stage": 2, "precision": "bf16"}
    found = ranks.run("in_background", lastgood=str(tmp_path / "good"), **what)
    assert [one["latest"] for one in found] == [["a", "b"]] * 2
    assert not list((tmp_path / "good").rglob(f"*{TEMPORARY_SUFFIX}"))
    found = ranks.run("fail_in_save", stage=3, lastgood=str(tmp_path / "bad"), failing=1, background=True)
    for one in found:
        assert one["said"] == "" and one["latest"] == "first"
        assert one["outcomes"] == [[1, "durable"], [2, "failed"], [3, "durable"]]
    assert (tmp_path / "bad" / "latest").read_text() == "third"


@pytest.mark.slow
def test_a_flipped_bit_is_named_by_load_checkpoint(ranks, tmp_path):
    what = {"stage": 1, "precision": "bf16", "lastgood": str(tmp_path)}
    ranks.ask("die_in_save", dying=[0, 1], **what)
    (path,) = (tmp_path / "first").glob("*zero_pp_rank_1_*")
    content = bytearray(path.read_bytes())
    content[fmt.DATA_OFFSET + 300] ^= 1
    path.write_bytes(content)
    codes, _, folder = ranks.ask("load_newest", **what)
    assert codes[1] == 1
    said = (folder / "rank-1.log").read_text()
    assert f"CorruptCheckpoint: {path}: step 1, chunk 0 of 1: checksum" in said


def test_engines_that_cannot_be_served_are_refused(ranks):
    (said,) = ranks.run("refuse", world=1)
    assert "a Linear is no DeepSpeedEngine" in said[0]
    assert "must be positive" in said[1]
    assert "DeepSpeed's configuration chose object" in said[2]
    assert "CheckpointEngine.save takes ['self', 'state_dict', 'path', 'extra']" in said[3]
    assert "is installed, and this Lastgood knows" in said[3]
    assert said[4:] == ["", ""]


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param({"stage": 1}, id="zero1", marks=pytest.mark.slow),
        pytest.param({"stage": 2}, id="zero2"),
        pytest.param({"stage": 2, "precision": "bf16"}, id="zero2-bf16", marks=pytest.mark.slow),
        pytest.param({"stage": 3}, id="zero3"),
        pytest.param({"stage": 3, "precision": "bf16"}, id="zero3-bf16", marks=pytest.mark.slow),
    ],
)
def test_a_ranks_live_partitions_are_its_state(ranks, kind):
    found = ranks.run("live_again", **kind)
    assert len({one["before"] for one in found}) == 2  # parts, not copies
    for one in found:
        assert one["after"] == one["before"] != one["other"]
        assert one["again"] == one["losses"]
        assert one["groups"] == [1]
        assert one["buffers"] == ["buffer 1/seen"]
        # Partitions and two moments, each half of 740 parameters and some padding, may be copied until the next update.
        assert 3 * 4 * 370 <= one["updated"] <= 3 * 4 * 400
        assert not one["busy"] and one["traffic"]["iterations_without"] == 2
        assert one["traffic"]["without_checkpoint_traffic"] > 0


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_killed_training_with_pccheck_on_its_live_parts_goes_on(ranks, tmp_path, stage):
    lives = []
    for _ in range(2):
        codes, answers, folder = ranks.ask("attach_live", stage=stage, job=str(tmp_path))
        assert codes == [KILLED, KILLED] and None not in answers, ranks.logs(folder)
        lives.append(answers)
    for first, second in zip(*lives, strict=True):
        assert (first["resumed"], second["resumed"]) == (0, 3)
        assert len(first["losses"]) == 10 and second["losses"] == first["losses"][6:]


def test_live_states_that_are_not_known_are_refused(ranks):
    (said,) = ranks.run("refuse_live", world=1)
    assert "of ZeRO stage 0 has no partitions" in said[0]
    assert "a dynamic loss scale (fp16) is no part of this live state" in said[1]
    assert "of ZeRO stage 3 has no persistent_parameters" in said[2]


def test_communication_is_marked_only_where_deepspeed_is_initialised():
    with pytest.raises(ConfigError, match=r"backend NoneType has no all_gather, .*after deepspeed.initialize"):
        mark_communication(Traffic(1))
