"""Runs over several ranks before any process starts: spec, refusals, plan, and how results become one record."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from lastgood.errors import ConfigError, LastgoodError
from lastgood.experiments.config.yaml_file import parse_overrides
from lastgood.experiments.figures.registry import figure_kind
from lastgood.experiments.figures.workflow_plan import left_out, plan_figure, plan_workflow
from lastgood.experiments.multirank.execute import execute_ranks
from lastgood.experiments.multirank.results import (
    LiveProof,
    RestoredRank,
    merge_clocks,
    merge_counts,
    merge_proofs,
    merge_ranks,
    merge_resources,
    merge_workloads,
)
from lastgood.experiments.plan.load import parse_config
from lastgood.experiments.records.run import Clocks, Counts, RunRecord
from lastgood.experiments.records.spec import RunSpec
from lastgood.experiments.services.place import RankHosts
from lastgood.experiments.systems.over_ranks import PARTED, why_not_over_ranks, writers_of
from lastgood.experiments.tables.runs import collect
from tests.experiments.support.rank_results import measured
from tests.experiments.support.records import make_ceilings, make_record
from tests.experiments.support.specs import make_spec

ROOT = Path(__file__).resolve().parents[3]


def configure(*entries: str) -> Any:
    return parse_config(ROOT / "config" / "laptop.yaml", parse_overrides([*entries, "machine=testbox"]))[0]


# -- spec ----------------------------------------------------------------------------------------------------------


def test_specs_from_before_ranks_keep_text_and_hash() -> None:
    spec = make_spec()
    assert spec.canonical_json() == make_spec(ranks=1, nodes=1, parallel="none").canonical_json()
    assert not {"ranks", "nodes", "parallel"} & set(spec.canonical_json().replace('"', " ").split())
    # Of the same settings by the code before; a change here orphans every record that there is.
    assert spec.cell_hash == "73b89ccf"


@pytest.mark.parametrize("change", [{"ranks": 4}, {"nodes": 2}, {"parallel": "fsdp2"}])
def test_ranks_are_part_of_the_settings(change: dict[str, Any]) -> None:
    two = {"ranks": 2, "nodes": 1, "parallel": "ddp"}
    spec = make_spec(**two)
    assert make_spec(**{**two, **change}).cell_hash != spec.cell_hash != make_spec().cell_hash
    assert spec.variant.startswith("w2-ddp-n4-p2-c")
    assert RunSpec.model_validate_json(spec.canonical_json()) == spec


@pytest.mark.parametrize(
    "values",
    [{"ranks": 2}, {"parallel": "ddp"}, {"ranks": 2, "nodes": 3, "parallel": "ddp"}, {"ranks": 0, "parallel": "ddp"}],
)
def test_ranks_that_do_not_fit_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        make_spec(**values)


# -- configuration and plan ------------------------------------------------------------------------------------------


def test_a_figure_over_nodes_is_none_and_every_system_at_every_interval() -> None:
    section = "fig8e={nodes: 2, slots: 2, intervals: [5, 10], systems: [sync, pccheck], repetitions: 2, iterations: 4}"
    config = configure(section, "threads=4")
    specs = plan_figure(config, "fig8e")
    found = [(spec.repetition, spec.system, spec.interval_steps) for spec in specs]  # type: ignore[union-attr]
    assert sorted(found) == sorted(
        (repetition, *cell)
        for repetition in (0, 1)
        for cell in [("none", 0), ("sync", 5), ("sync", 10), ("pccheck", 5), ("pccheck", 10)]
    )
    for spec in specs:
        assert isinstance(spec, RunSpec)
        assert (spec.ranks, spec.nodes, spec.parallel, spec.threads, spec.workload) == (4, 2, "ddp", 1, "opt")
        assert spec.pairs == config.pairs.plan()
        assert spec.measured_steps >= max(4, 2 * spec.interval_steps)
        RunSpec.model_validate_json(spec.canonical_json())


@pytest.mark.parametrize(
    ("override", "replicated"),
    [
        ("fig8e={shared_scratch: true}", "ddp"),
        ("fig8e={shared_scratch: true, parallel: fsdp2, systems: pccheck}", "placements"),
        ("fig8e={shared_scratch: false}", None),
        ("fig8e={shared_scratch: true, parallel: zero2}", None),
        ("fig8e={shared_scratch: true, parallel: pipeline}", None),
    ],
)
def test_what_ranks_hold_alike_is_written_once_where_all_can_read_it(override: str, replicated: str | None) -> None:
    for spec in plan_figure(configure(override), "fig8e"):
        assert isinstance(spec, RunSpec)
        expected = replicated if spec.system == "pccheck" else None
        assert spec.system_options.get("replicated") == expected


def test_without_pairs_runs_over_nodes_are_what_they_were() -> None:
    for spec in plan_figure(configure("pairs={rounds: 0}", "fig8e={iterations: 40}"), "fig8e"):
        assert isinstance(spec, RunSpec) and spec.pairs is None and spec.measured_steps == 40
        assert '"pairs"' not in spec.canonical_json()


def test_paper_scale_has_the_published_sizes() -> None:
    config = parse_config(ROOT / "config" / "paper.yaml", parse_overrides(["machine=testbox"]))[0]
    for figure, billions, parallel in (("fig8e", 2.65, "pipeline"), ("fig8f", 7.07, "pipeline")):
        spec = plan_figure(config, figure)[0]
        assert isinstance(spec, RunSpec) and spec.parallel == parallel
        from lastgood.workloads.registry import workload_options_class

        options = workload_options_class(spec.workload).model_validate(spec.workload_options)
        assert options.parameters() == pytest.approx(billions * 1e9, rel=0.01)


@pytest.mark.parametrize("parallel", PARTED)
def test_what_deepspeed_trains_can_be_planned(parallel: str) -> None:
    specs = plan_figure(configure(f"fig8e={{parallel: {parallel}}}"), "fig8e")
    assert {spec.system for spec in specs} == {"none", "sync", "checkfreq", "gemini", "pccheck"}  # type: ignore[union-attr]
    for spec in specs:
        assert isinstance(spec, RunSpec)
        assert spec.parallel == parallel and spec.variant.startswith(f"w2-{parallel}-")
        assert RunSpec.model_validate_json(spec.canonical_json()) == spec


def test_without_deepspeed_figures_that_need_it_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure("fig8e={parallel: pipeline}")
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # as where it is not installed
    reason = "pipeline needs DeepSpeed, which is not installed; pip install 'lastgood[deepspeed]'"
    assert left_out(config) == {"fig8e": reason}
    assert plan_figure(config, "fig8e") == []
    assert figure_kind("fig8e").panels(config) == []
    # What does not need it stays.
    plan = plan_workflow(config)
    assert "fig8e" not in {figure for figure, _ in plan.records} and ("fig8f", "bloom") in plan.records
    with pytest.raises(ConfigError, match=r"pip install 'lastgood\[deepspeed\]'"):
        spec = make_spec(workload="opt", ranks=2, parallel="pipeline")
        execute_ranks(spec, Path(), Path(), Path(), str, RankHosts())


def test_each_rank_of_deepspeeds_writes_a_part_of_its_own() -> None:
    assert {system: writers_of(system, "ddp") for system in ("sync", "checkfreq", "pccheck", "gemini")} == {
        "sync": "first",
        "checkfreq": "first",
        "pccheck": "each",
        "gemini": "peers",
    }
    for parallel in PARTED:
        assert [writers_of(one, parallel) for one in ("none", "sync", "checkfreq", "pccheck", "gemini")] == [
            "nobody",
            "apart",
            "apart",
            "each",
            "peers",
        ]


def test_figures_over_nodes_share_no_record_with_others() -> None:
    plan = plan_workflow(configure("models=opt,bloom"))
    own = {
        record
        for (figure, model), records in plan.records.items()
        if figure in ("fig8e", "fig8f", "checkmate") and model != "optimizer"
        for record in records
    }
    rest = {
        record
        for (figure, _), records in plan.records.items()
        if figure not in ("fig8e", "fig8f", "checkmate", "dcp")
        for record in records
    }
    assert own and not own & rest
    assert all("/w2-ddp-" in record for record in own) and not any("/w2-" in record for record in rest)


def test_dcp_saves_shards_with_all_ranks_together() -> None:
    assert writers_of("dcp", "ddp") == "first"
    assert writers_of("dcp", "zero3") == "apart"
    assert writers_of("dcp", "fsdp2") == "together"
    assert why_not_over_ranks("opt", "dcp", "fsdp2", 2, 2) is None
    assert "plain tensors" in str(why_not_over_ranks("opt", "checkfreq", "fsdp2", 2, 2))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("fig8e={systems: [gpm]}", ["fig8e.systems[1]: gpm does not run over several ranks", "pccheck"]),
        ("fig8e={model: bert, parallel: fsdp2, systems: pccheck}", ["fsdp2 is for opt and bloom, not for bert"]),
        ("fig8e={parallel: fsdp2, systems: sync}", ["sync keeps plain tensors", "ddp"]),
        ("fig8e={model: bert, parallel: zero1}", ["zero1 is for opt and bloom, not for bert"]),
        ("fig8e={parallel: pipeline, nodes: 5}", ["fig8e.parallel: 5 ranks are as many stages", "opt has 4 layers"]),
        ("fig8e={model: transformer_xl, systems: checkfreq}", ["every rank of transformer_xl has a part of its own"]),
        ("fig8e={slots: 2}", ["gemini needs two nodes or more, with one rank on each, not 4 ranks on 2"]),
        ("fig8f={nodes: 1}", ["fig8f.nodes: 1 node with 1 slot is one rank"]),
        ("fig8e={rate: fast}", ["fig8e.rate: 'fast'", "2.5gbit"]),
        ("fig8e={hostfile: /no/such}", ["fig8e.hostfile", "there is no such file"]),
        ("fig8e={options: {depth: 3}}", ["fig8e.options.depth"]),
        ("fig8e={parallel: zero4}", ["fig8e.parallel: 'zero4'", "ddp, fsdp2, or DeepSpeed's zero1, zero2"]),
    ],
)
def test_what_cannot_run_over_ranks_is_refused(override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        configure(override)
    for word in words:
        assert word in str(error.value)


def test_a_hostfile_must_hold_the_nodes_and_slots(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a slots=1\nb slots=2\n")
    with pytest.raises(ConfigError, match=r"2 hosts \(slots: a 1, b 2\); needed: 2 hosts of 1 slots; change `nodes`"):
        configure(f"fig8e={{hostfile: {path}}}")
    path.write_text("a slots=1\nb slots=1\n")
    spec = plan_figure(configure(f"fig8e={{hostfile: {path}}}", "threads=2"), "fig8e")[0]
    # The hosts are other machines, so each rank has all cores of its own.
    assert isinstance(spec, RunSpec) and spec.threads == 2


# -- from the ranks' results to one record ---------------------------------------------------------------------------

times = st.floats(1e-3, 1e3)


@st.composite
def clocks_of_ranks(draw: st.DrawFn) -> list[Clocks]:
    steps, saves = draw(st.integers(1, 6)), draw(st.integers(0, 3))
    found = []
    for _ in range(draw(st.integers(1, 5))):
        elapsed_s, drain_s = draw(times), draw(st.floats(0, 1e3))
        writes = draw(st.booleans())
        found.append(
            Clocks(
                measured_steps=steps,
                elapsed_s=elapsed_s,
                iterations_per_s=steps / elapsed_s,
                durable_iterations_per_s=steps / (elapsed_s + drain_s),
                step_s=draw(st.lists(times, min_size=steps, max_size=steps)),
                hide_s=draw(times),
                stall_save_s=draw(times),
                stall_update_s=draw(times),
                persist_s=draw(st.lists(times, min_size=saves, max_size=saves)) if writes else [],
                drain_s=drain_s,
            )
        )
    return found


@given(clocks_of_ranks(), st.randoms(use_true_random=False))
def test_no_rank_is_slower_than_the_run(ranks: list[Clocks], random: Any) -> None:
    run = merge_clocks(ranks)
    shuffled = list(ranks)
    random.shuffle(shuffled)
    assert merge_clocks(shuffled) == run
    slack = 1 + 1e-12
    for clocks in ranks:
        assert run.elapsed_s >= clocks.elapsed_s
        assert run.iterations_per_s <= clocks.iterations_per_s * slack
        assert run.durable_iterations_per_s <= clocks.durable_iterations_per_s * slack
        assert run.hide_s <= clocks.hide_s
        assert run.stall_save_s >= clocks.stall_save_s and run.stall_update_s >= clocks.stall_update_s
        assert all(a >= b for a, b in zip(run.step_s, clocks.step_s, strict=True))
        assert all(a >= b for a, b in zip(run.persist_s, clocks.persist_s, strict=False))
    assert run.drain_s >= 0
    # Nothing is slower than some rank was, either.
    assert run.elapsed_s in [clocks.elapsed_s for clocks in ranks]
    assert run.durable_iterations_per_s in [
        run.measured_steps / (clocks.elapsed_s + clocks.drain_s) for clocks in ranks
    ]


def test_ranks_with_unlike_numbers_of_steps_are_refused() -> None:
    clocks = make_record(measured_steps=4).clocks, make_record(measured_steps=5).clocks
    with pytest.raises(LastgoodError, match=r"different measured steps \(rank 0: 4, rank 1: 5\)"):
        merge_clocks(clocks)


@st.composite
def counts_of_ranks(draw: st.DrawFn) -> list[Counts]:
    started = draw(st.integers(1, 9))
    found = []
    for _ in range(draw(st.integers(1, 4))):
        cuts = sorted(draw(st.lists(st.integers(0, started), min_size=3, max_size=3)))
        durable, superseded, failed = cuts[0], cuts[1] - cuts[0], cuts[2] - cuts[1]
        skipped = started - cuts[2]
        found.append(Counts(started=started, durable=durable, superseded=superseded, failed=failed, skipped=skipped))
    return found


@given(counts_of_ranks())
def test_durable_is_what_every_rank_has(ranks: list[Counts]) -> None:
    nobody = Counts(started=0, durable=0, superseded=0, failed=0, skipped=0)
    run = merge_counts([*ranks, nobody])
    assert run.durable == min(counts.durable for counts in ranks)
    assert run.started == run.durable + run.superseded + run.failed + run.skipped
    assert min(run.superseded, run.failed, run.skipped) >= 0
    if len(ranks) == 1:
        assert run == ranks[0]


def restored(rank: int, **changes: Any) -> RestoredRank:
    values = {"step": 9, "digest": f"d{rank}", "next_losses": [1.0 + rank], "restore_s": 0.5 + rank, **changes}
    return RestoredRank(token="t", rank=rank, host=f"vm{rank}", boot_id="k", **values)


def test_resources_are_summed_and_losses_averaged() -> None:
    ranks = [measured(0), measured(1)]
    resources = merge_resources([one.resources for one in ranks])
    assert resources.bytes_written == 800 and resources.peak_rss_bytes == 2 << 30
    assert merge_workloads([one.workload for one in ranks]).losses == [0.5, 0.5, 0.5]
    other = ranks[1].workload.model_copy(update={"data_sha256": "1" * 64})
    with pytest.raises(LastgoodError, match="different data"):
        merge_workloads([ranks[0].workload, other])


@pytest.mark.parametrize("wrong", [{"step": 8}, {"digest": "x"}, {"next_losses": [0.0]}])
def test_a_proof_holds_only_where_every_ranks_does(wrong: dict[str, Any]) -> None:
    live = [one.live for one in (measured(0), measured(1)) if one.live is not None]
    proof, equal = merge_proofs(live, [restored(0), restored(1)])
    assert proof.equal and equal == [True, True]
    assert proof.digest_live == proof.digest_restored and proof.restore_s == 1.5
    assert proof.next_losses_live == proof.next_losses_restored == [1.5]
    proof, equal = merge_proofs(live, [restored(0), restored(1, **wrong)])
    assert not proof.equal and equal == [True, False]
    if "step" in wrong:
        assert proof.restored_step == 8


def test_ranks_at_unlike_steps_are_no_proof() -> None:
    live = [LiveProof(step=step, digest="d", next_losses=[1.0]) for step in (9, 8)]
    back = [restored(rank, step=step, digest="d", next_losses=[1.0]) for rank, step in ((0, 9), (1, 8))]
    proof, equal = merge_proofs(live, back)
    assert equal == [True, True] and not proof.equal


@pytest.mark.parametrize(
    ("boots", "hosts", "writers", "disk", "link"),
    [
        (["k", "k"], ["a", "b"], "each", 200, 0),
        (["k", "l"], ["a", "b"], "each", 100, 0),
        # Of the two copies one stays where it is made.
        (["k", "k"], ["a", "b"], "peers", 0, 50),
        (["k", "k"], ["a", "a"], "peers", 0, 100),
    ],
)
def test_what_a_checkpoint_puts_on_one_disk_or_link(
    boots: list[str], hosts: list[str], writers: Any, disk: int, link: int
) -> None:
    # 40 steps with a checkpoint in ten: four, of 100 bytes each.
    ranks = [measured(rank, host=host, boot=boot) for rank, (boot, host) in enumerate(zip(boots, hosts, strict=True))]
    made = merge_ranks(ranks, [], [], writers, launcher="torchrun", hosts=hosts, link_bits_per_s=10**9)
    assert (made.bytes_per_disk, made.bytes_per_link) == (disk, link)


# -- collecting --------------------------------------------------------------------------------------------------------


def over_ranks(system: str, repetition: int = 0, *, link: int | None = 8_000_000, **facts: int) -> RunRecord:
    record = make_record(system, repetition=repetition, state_bytes=1 << 20)
    spec = record.spec.model_copy(update={"ranks": 2, "nodes": 2, "parallel": "ddp"})
    values = {"bytes_per_disk": 0, "bytes_per_link": 0, **facts}
    ranks = merge_ranks(
        [measured(0), measured(1)], [], [], "each", launcher="torchrun", hosts=["vm1", "vm2"], link_bits_per_s=link
    ).model_copy(update=values)
    return record.model_copy(update={"spec": spec, "ranks": ranks})


def test_the_bound_is_what_the_fullest_disk_or_link_allows() -> None:
    ceilings = make_ceilings()
    records = [
        over_ranks("none"),
        over_ranks("pccheck", bytes_per_disk=10**9),
        over_ranks("sync", bytes_per_disk=5 * 10**8),
        over_ranks("gemini", bytes_per_link=10**7),
    ]
    rows = {row.system: row for row in collect("fig8e", "vgg16", records, ceilings).tidy}
    for system, stored in (("pccheck", 10**9), ("sync", 5 * 10**8)):
        expected = min(5.0, 10 * ceilings.persist_bytes_per_s / stored)
        assert rows[system].bound_iterations_per_s == pytest.approx(expected, rel=0.05)
        assert rows[system].stored_bytes == stored
    assert rows["gemini"].bound_iterations_per_s == pytest.approx(10 * 1e6 / 1e7)
    assert rows["gemini"].bound_binds == "link"
    assert (rows["sync"].ranks, rows["sync"].nodes, rows["sync"].link_bits_per_s) == (2, 2, 8_000_000)


def test_a_link_of_unknown_rate_has_no_bound() -> None:
    records = [over_ranks("none", link=None), over_ranks("gemini", link=None, bytes_per_link=100)]
    rows = {row.system: row for row in collect("fig8e", "vgg16", records, make_ceilings()).tidy}
    assert rows["gemini"].bound_iterations_per_s is None and rows["none"].bound_iterations_per_s is not None


def test_links_and_ranks_never_mix_in_a_panel() -> None:
    with pytest.raises(LastgoodError, match=r"one link rate, not 0\.008 Gbit/s, 1 Gbit/s"):
        collect("fig8e", "vgg16", [over_ranks("none"), over_ranks("pccheck", link=10**9)], make_ceilings())
    with pytest.raises(LastgoodError, match="one number of ranks, not 1, 2"):
        collect("fig8e", "vgg16", [over_ranks("none", link=None), make_record("pccheck")], make_ceilings())


def test_a_record_with_ranks_is_read_back(tmp_path: Path) -> None:
    from lastgood.experiments.records.run import RunRecord

    record = over_ranks("pccheck", bytes_per_disk=7)
    record.write(tmp_path / "r0.json")
    assert RunRecord.load(tmp_path / "r0.json") == record
