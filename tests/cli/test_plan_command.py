"""`lastgood plan`: the same overrides as snakemake, a table for people and JSON for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lastgood.cli import app
from lastgood.errors import ConfigError
from lastgood.experiments.records.spec import RunSpec
from lastgood.mounts import lies_in_memory
from tests.experiments.support.records import make_record

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    if lies_in_memory(ROOT):
        pytest.skip("the checkout lies in memory, so its scratch folder is refused")
    monkeypatch.chdir(ROOT)


def plan(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def test_json_holds_every_run_ready_to_be_made() -> None:
    arguments = ("--json", "--config", "models=vgg16", "intervals=1,10", "machine=nowhere", "repetitions=1")
    found = json.loads(plan("fig8", *arguments))
    assert found["runs_left"] == len(found["runs"]) == 1 + 5 * 2
    assert found["minutes_left"] > 0
    for run in found["runs"]:
        assert run["record"] == f"results/{RunSpec.model_validate(run['spec']).record_path()}"


def test_the_table_ends_with_the_sum() -> None:
    text = plan("test_simple", "--config", "machine=nowhere")
    assert "vgg16 pccheck" in text


def test_a_target_of_all_figures_has_each_run_once(tmp_path: Path) -> None:
    few = ["models=vgg16", "machine=nowhere", f"results_dir={tmp_path}"]
    found = {name: json.loads(plan(name, "--json", "--config", *few)) for name in ("paper", "fig8", "fig12_vgg16")}
    records = {name: [run["record"] for run in one["runs"]] for name, one in found.items()}
    assert len(set(records["paper"])) == len(records["paper"]) == found["paper"]["runs_left"]
    assert set(records["fig8"]) | set(records["fig12_vgg16"]) < set(records["paper"])
    assert set(records["fig8"]) & set(records["fig12_vgg16"])
    assert found["paper"]["minutes_of_workflow"] > found["paper"]["minutes_left"] > found["fig8"]["minutes_of_workflow"]


def test_the_sum_says_how_long_what_is_left_takes_and_where_nothing_is(tmp_path: Path) -> None:
    few = ["systems=none", "models=vgg16", "intervals=1", "repetitions=2", "machine=nowhere", f"results_dir={tmp_path}"]
    runs = json.loads(plan("fig8", "--json", "--config", *few))["runs"]
    assert len(runs) == 2
    sums = []
    for run in [*runs, None]:
        done = CliRunner().invoke(app, ["plan", "fig8", "--config", *few], catch_exceptions=False)
        sums.append(done.stderr.splitlines()[-1])
        if run is not None:
            record = make_record("none").model_copy(
                update={"spec": RunSpec.model_validate(run["spec"]), "wall_s": 90.0}
            )
            record.write(Path(run["record"]))
    assert sums[0].startswith("2 runs, 0 done, 2 left: about ")
    assert sums[1:] == [
        "2 runs, 1 done, 1 left: about 117 s in the workflow, 90 s of it in runs",
        "2 runs, 2 done: nothing is left to be measured",
    ]
    assert json.loads(plan("fig8", "--json", "--config", *few))["minutes_left"] == 0


def test_overrides_may_come_one_by_one() -> None:
    overrides = ("--config", "models=bert", "--config", "systems=none", "--config", "machine=nowhere")
    assert {run["spec"]["workload"] for run in json.loads(plan("fig8", "--json", *overrides))["runs"]} == {"bert"}


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (
            ["fig7"],
            "known: fig8, fig9, fig11, fig12, fig13, fig14, fig8e, fig8f, checkmate, dcp, flowcheck, remote, "
            "stellatrain, test_simple, all, paper, report, claims, and panels, as fig8_vgg16",
        ),
        (["fig8_gpt"], "fig8 has no panel 'gpt' in this configuration; it has: fig8_vgg16, fig8_bert, "),
        (["fig8", "a=1"], "unknown key"),
    ],
)
def test_bad_input_is_refused(arguments: list[str], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(*arguments)
    assert part in str(caught.value)
