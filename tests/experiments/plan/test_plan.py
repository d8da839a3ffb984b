"""The plan: which runs, in which order, with which settings, and how long they take."""

from __future__ import annotations

from pathlib import Path

import pytest

from lastgood.errors import ConfigError
from lastgood.experiments.config.schema import Config
from lastgood.experiments.config.yaml_file import parse_overrides
from lastgood.experiments.figures.registry import figure_kind
from lastgood.experiments.figures.workflow_plan import (
    SIMPLE,
    load_prediction_grid,
    plan_figure,
    plan_names,
    plan_target,
    plan_workflow,
    predict_runs,
    workflow_seconds,
)
from lastgood.experiments.plan.grid import load_grid
from lastgood.experiments.plan.load import parse_config
from lastgood.experiments.records.spec import RunSpec
from tests.experiments.support.records import make_record

ROOT = Path(__file__).resolve().parents[3]


ONE_STRETCH = ("pairs={rounds: 0}", "repetitions=2", *(f"fig{number}={{repetitions: 2}}" for number in (12, 13, 14)))
"""Runs without pairs, which are repeated."""


def configure(*entries: str, before: tuple[str, ...] = ONE_STRETCH) -> Config:
    given = {entry.partition("=")[0] for entry in entries}
    defaults = ["systems=none,sync,checkfreq,pccheck", *before]
    kept = [entry for entry in defaults if entry.partition("=")[0] not in given]
    overrides = parse_overrides([*kept, *entries, "machine=testbox"])
    return parse_config(ROOT / "config" / "laptop.yaml", overrides)[0]


def cells(specs: list[RunSpec]) -> list[tuple[str, int]]:
    return [(spec.system, spec.interval_steps) for spec in specs]


def test_a_batch_holds_none_once_and_every_system_at_every_interval() -> None:
    specs = plan_figure(configure("models=vgg16", "intervals=1,10", "repetitions=1"), "fig8")
    systems = ["sync", "checkfreq", "pccheck"]
    assert sorted(cells(specs)) == sorted([("none", 0), *((system, f) for system in systems for f in (1, 10))])


def test_batches_follow_each_other_repetition_by_repetition() -> None:
    config = configure("models=vgg16,bert", "intervals=1,10", "repetitions=3")
    specs = plan_figure(config, "fig8")
    assert len(specs) == 3 * 2 * 7
    batches = [{(spec.workload, spec.repetition) for spec in specs[i : i + 7]} for i in range(0, len(specs), 7)]
    assert batches == [{(model, r)} for r in range(3) for model in ("vgg16", "bert")]


def test_every_panel_s_first_picture_of_pairs_comes_first() -> None:
    config = configure("models=vgg16,bert", "intervals=25,1,10", before=())
    specs = plan_figure(config, "fig8")
    assert all(spec.pairs is not None and spec.repetition == 0 for spec in specs)
    first = [(model, *cell) for model in ("vgg16", "bert") for cell in [("none", 0), ("sync", 10), ("checkfreq", 10)]]
    first += [(model, "pccheck", 10) for model in ("vgg16", "bert")]
    places = [(spec.workload, spec.system, spec.interval_steps) for spec in specs]
    assert sorted(places[:8]) == sorted(first)
    # After it panel by panel.
    assert [place[0] for place in places[8:]] == ["vgg16"] * 6 + ["bert"] * 6
    # Other options of PCcheck at the same interval are no part of it, and change no place.
    everything = [spec.record_path() for spec in plan_workflow(config).specs.values()]
    assert [path for path in everything if path in {spec.record_path() for spec in specs}] == [
        spec.record_path() for spec in specs
    ]
    assert set(everything[:8]) == {spec.record_path() for spec in specs[:8]}


def test_batches_are_shuffled_by_the_seed_and_nothing_else() -> None:
    entries = ("models=vgg16", "intervals=1,2,3,4,5", "repetitions=2")
    first = plan_figure(configure(*entries), "fig8")
    assert first == plan_figure(configure(*entries), "fig8")
    assert cells(first[:16]) != cells(first[16:])
    assert cells(first) != cells(plan_figure(configure(*entries, "seed=1"), "fig8"))


def test_a_figure_s_runs_have_one_order_alone_and_among_those_of_all_figures() -> None:
    config = configure("models=vgg16,bert")
    everything = list(plan_workflow(config).specs.values())
    for figure in ("fig8", "fig9", "fig12", "fig13"):
        alone = [spec.record_path() for spec in plan_figure(config, figure)]
        assert [spec.record_path() for spec in everything if spec.record_path() in alone] == alone


def test_runs_that_are_compared_with_one_none_are_made_beside_it() -> None:
    plan = plan_workflow(configure("models=vgg16,bert"))
    order = list(plan.specs)
    for repetition in range(2):
        batch = {
            record
            for (figure, model), records in plan.records.items()
            for record in records
            if model == "vgg16" and record.endswith(f"r{repetition}.json") and figure in ("fig8", "fig12", "fig14")
        }
        places = [order.index(record) for record in batch]
        between = [plan.specs[record] for record in order[min(places) : max(places) + 1]]
        assert {(spec.workload, spec.repetition) for spec in between} == {("vgg16", repetition)}


def test_no_two_runs_share_a_record() -> None:
    plan = plan_workflow(configure("models=vgg16,bert,opt", "intervals=1,10,50", "iterations=100"))
    count = sum(len(records) for (figure, _), records in plan.records.items() if figure == "fig8")
    assert count == 3 * 2 * 10
    assert len({record for records in plan.records.values() for record in records}) == len(plan.specs)
    assert sorted(plan.priorities.values()) == list(range(1, len(plan.specs) + 1))
    assert list(plan.priorities.values()) == list(range(len(plan.specs), 0, -1))


def test_measured_steps_are_raised_to_hold_enough_checkpoints() -> None:
    specs = plan_figure(configure("models=vgg16", "intervals=1,30", "iterations=50", "min_checkpoints=3"), "fig8")
    assert {(spec.interval_steps, spec.measured_steps) for spec in specs} == {(0, 50), (1, 50), (30, 90)}


@pytest.mark.parametrize(("proof", "expected"), [("first", {(0, True), (1, False)}), ("every", {(0, True), (1, True)})])
def test_which_repetitions_carry_the_proof(proof: str, expected: set[tuple[int, bool]]) -> None:
    specs = plan_figure(configure("models=vgg16", f"proof={proof}"), "fig8")
    assert {(spec.repetition, spec.proof) for spec in specs if spec.system != "none"} == expected
    assert not any(spec.proof for spec in specs if spec.system == "none")


def test_repetitions_differ_in_their_seed_and_share_their_cell() -> None:
    specs = plan_figure(configure("models=vgg16", "systems=none", "repetitions=2", "seed=40"), "fig8")
    assert [spec.seed for spec in specs] == [40, 41]
    assert len({spec.cell_hash for spec in specs}) == 1


def test_every_knob_is_resolved() -> None:
    config = configure("models=vgg16", "options={pccheck: {writer_threads: 3}}")
    spec = next(spec for spec in plan_figure(config, "fig8") if spec.system == "pccheck")
    assert spec.system_options["writer_threads"] == 3
    assert spec.system_options["max_in_flight"] == 2
    assert spec.workload_options["image_size"] == 32
    assert spec.threads == config.thread_count


def test_the_smoke_test() -> None:
    (spec,) = plan_figure(configure(), SIMPLE)
    assert (spec.workload, spec.system, spec.interval_steps) == ("vgg16", "pccheck", 10)
    assert (spec.measured_steps, spec.repetition, spec.proof) == (20, 0, True)


def test_the_smoke_test_is_measured_anew_and_is_no_record_of_the_workflow() -> None:
    plan = plan_workflow(configure("models=vgg16"))
    assert SIMPLE not in {figure for figure, _ in plan.records}
    simple = plan_figure(configure("models=vgg16"), SIMPLE)[0]
    assert simple.cell_hash not in {spec.cell_hash for spec in plan.specs.values()}


@pytest.mark.parametrize(
    ("interval", "iterations", "steps"), [(1, 50, 50), (20, 50, 60), (25, 50, 50), (75, 50, 150), (7, 1, 14)]
)
def test_steps_are_whole_intervals(interval: int, iterations: int, steps: int) -> None:
    specs = plan_figure(configure(f"intervals={interval}", f"iterations={iterations}"), "fig8")
    assert {spec.measured_steps for spec in specs if spec.interval_steps} == {steps}


def test_an_unknown_figure_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"unknown figure 'fig7'; known: fig8, .*fig14, fig8e, fig8f, checkmate, .*, test_simple",
    ):
        plan_figure(configure(), "fig7")
    assert plan_names() == [
        "fig8",
        "fig9",
        "fig11",
        "fig12",
        "fig13",
        "fig14",
        "fig8e",
        "fig8f",
        "checkmate",
        "dcp",
        "flowcheck",
        "remote",
        "stellatrain",
        SIMPLE,
    ]


# -- targets -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["all", "paper", "report", "claims"])
def test_a_target_of_all_figures_is_what_the_workflow_makes_of_them(name: str, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=1\nb slots=1\n")
    for entries, over_nodes in ((("models=vgg16,bert",), False), ((f"fig8e={{hostfile: {hosts}}}",), True)):
        config = configure(*entries)
        plan, target = plan_workflow(config), plan_target(config, name)
        always = {figure for figure, _ in plan.records if figure_kind(figure).always(config)}
        assert ("fig8e" in always) is over_nodes and not {"dcp", "flowcheck", "checkmate"} & always
        expected = {record for place, records in plan.records.items() if place[0] in always for record in records}
        # The records of exactly these figures, each once, in the order and with the proofs of the workflow.
        assert target.specs == [spec for record, spec in plan.specs.items() if record in expected]
        for spec, panels in zip(target.specs, target.panels, strict=True):
            record = str(Path(config.results_dir, spec.record_path()))
            assert panels == [place for place in plan.records if place[0] in always and record in plan.records[place]]


def test_a_panel_is_the_figure_s_runs_of_one_model() -> None:
    config = configure("models=vgg16,transformer_xl")
    for figure in ("fig8", "fig9", "fig11", "checkmate"):
        whole = plan_target(config, figure)
        assert whole.specs == list(plan_figure(config, figure))
        for model in figure_kind(figure).panels(config):
            target = plan_target(config, f"{figure}_{model}")
            assert target.specs == [spec for spec in whole.specs if spec.panel == model] != []
            assert target.panels == [[(figure, model)]] * len(target.specs)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fig8_opt", "fig8 has no panel 'opt' in this configuration; it has: fig8_vgg16$"),
        ("fig7_vgg16", "unknown figure 'fig7_vgg16'; known: fig8, .*, test_simple, all, paper, .* as fig8_vgg16$"),
        ("fig8_", "fig8 has no panel ''"),
        ("test_simple_vgg16", "unknown figure 'test_simple_vgg16'"),
    ],
)
def test_what_is_no_target_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_target(configure("models=vgg16"), name)


def test_each_run_of_a_target_is_predicted_by_its_own_figure_and_every_panel_is_drawn(tmp_path: Path) -> None:
    target = plan_target(configure("models=vgg16", "systems=none,sync"), "paper")
    figures = [panels[0][0] for panels in target.panels]
    grids = {figure: load_prediction_grid(ROOT, figure) for figure in set(figures)}
    runs = predict_runs(target.specs, tmp_path, [grids[figure] for figure in figures])
    for figure in ("fig8", "fig11"):
        alone = predict_runs(
            plan_figure(configure("models=vgg16", "systems=none,sync"), figure), tmp_path, grids[figure]
        )
        assert {run.record: run.seconds for run in alone}.items() <= {run.record: run.seconds for run in runs}.items()
    # vgg16 in figures 8, 9, 12, 13 and 14, and blob; and the ceilings once.
    drawn_s = workflow_seconds(runs, target.panels, tmp_path) - sum(run.seconds for run in runs) - 1.7 * len(runs)
    assert drawn_s == pytest.approx(6 * 5 + 20)


# -- prediction ----------------------------------------------------------------------------------------------------


def record_for(spec: RunSpec, wall_s: float):
    steps = {"measured_steps": spec.measured_steps}
    made = make_record(spec.system, spec.interval_steps, spec.repetition, **steps)
    return made.model_copy(update={"spec": spec, "wall_s": wall_s})


def test_the_model_predicts_what_has_no_record() -> None:
    grid = load_grid(ROOT, "fig8")
    prediction = grid.prediction["laptop"]
    specs = plan_figure(configure("models=vgg16", "systems=none", "repetitions=1"), "fig8")
    (run,) = predict_runs(specs, Path("nowhere"), grid)
    assert run.source == "model"
    assert not run.done
    assert run.seconds == pytest.approx(prediction.startup_s + 53 * prediction.step_s["vgg16"])


def test_checkpoints_and_proofs_cost_time() -> None:
    grid = load_grid(ROOT, "fig8")
    specs = plan_figure(configure("models=vgg16", "systems=sync", "intervals=1,10", "repetitions=2"), "fig8")
    seconds = {
        (run.spec.interval_steps, run.spec.repetition): run.seconds
        for run in predict_runs(specs, Path("nowhere"), grid)
    }
    assert seconds[1, 0] > seconds[10, 0] > seconds[0, 0]
    assert seconds[1, 0] - seconds[1, 1] == pytest.approx(grid.prediction["laptop"].proof_s)


def test_records_of_the_cell_predict_better_than_the_model(tmp_path: Path) -> None:
    grid = load_grid(ROOT, "fig8")
    specs = plan_figure(configure("models=vgg16", "systems=none", "repetitions=2"), "fig8")
    record_for(specs[0], wall_s=120.0).write(tmp_path / specs[0].record_path())
    runs = predict_runs(specs, tmp_path, grid)
    assert [(run.done, run.seconds, run.source) for run in runs] == [
        (True, 120.0, "records"),
        (False, 120.0, "records"),
    ]


def test_a_broken_or_foreign_record_counts_as_not_done(tmp_path: Path) -> None:
    grid = load_grid(ROOT, "fig8")
    (spec,) = plan_figure(configure("models=vgg16", "systems=none", "repetitions=1"), "fig8")
    path = tmp_path / spec.record_path()
    path.parent.mkdir(parents=True)
    path.write_text("{", encoding="utf-8")
    assert not predict_runs([spec], tmp_path, grid)[0].done
    record_for(spec.model_copy(update={"threads": spec.threads + 1}), wall_s=1.0).write(path)
    assert not predict_runs([spec], tmp_path, grid)[0].done
