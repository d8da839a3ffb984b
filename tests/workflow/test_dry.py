"""What the workflow does before its first job: plans, order of configuration, refusals, lint, the folder's lock."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lastgood.locks import FileLock
from tests.workflow.support.workflow_folder import ROOT, WorkflowFolder, planned


@pytest.mark.slow
def test_the_default_plan_is_whole(flow: WorkflowFolder) -> None:
    done = flow.plan("-n", "--quiet", "rules", "--config", "machine=testbox", configfile=None)
    assert done.returncode == 0, done.stdout
    # Figure 8: 4 models, `none` and 5 systems at 3 intervals. Figure 11: 5 sizes and 5 systems.
    # Figures 12 to 14, without what they share: 9, 4 and 6. Figure 9: figure 8's runs, those of Gemini as well, and 4
    # systems at one interval, measured, for each model. The target `all` is the default.
    runs = 4 * (1 + 6 * 3) + 25 + 9 + 4 + 6 + 4 * 4
    expected = {"all": 1, "ceilings": 1, "collect": 12, "dataset": 3, "measure": runs, "plot": 12}
    assert planned(done.stdout) == expected


def test_the_whole_paper_is_planned_within_seconds(flow: WorkflowFolder) -> None:
    # CPU time, of which a busy machine takes more, though not ten times as much: it was 3 s.
    before = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    done = flow.call("paper", "-n", "--quiet", "rules", "--config", "machine=testbox", configfile=None)
    assert done.returncode == 0, done.stdout
    assert planned(done.stdout)["measure"] == 136
    assert sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - before < 30


@pytest.mark.parametrize(
    ("target", "overrides", "runs"),
    [
        ("fig8", ["models=vgg16", "intervals=1,10", "repetitions=1"], 1 + 5 * 2),
        pytest.param(
            "fig8",
            ["models=[vgg16, bert]", "intervals=[1, 10]", "repetitions='3'"],
            2 * 3 * (1 + 5 * 2),
            marks=pytest.mark.slow,
        ),
        pytest.param("fig8_bert", ["systems=none,sync", "intervals=5"], 2, marks=pytest.mark.slow),
        ("fig9_bert", ["systems=sync", "intervals=5", "fig9={intervals: [5, 7]}", "repetitions=1"], 1 + 5 * 2 + 8),
        ("fig11", ["systems=sync", "fig11={systems: null, sizes_mb: [10, 20]}"], 2),
        pytest.param(
            "fig11_blob", ["fig11={systems: [pccheck], sizes_mb: 10, repetitions: 3}"], 3, marks=pytest.mark.slow
        ),
        ("fig12_vgg16", ["fig12={in_flight: [1, 2], intervals: 5, repetitions: 1}"], 3),
        pytest.param("fig13", ["fig13={model: bert, intervals: 1, repetitions: 1}"], 5, marks=pytest.mark.slow),
        pytest.param("fig14", ["fig14={intervals: [1, 2], repetitions: 1}"], 9, marks=pytest.mark.slow),
        ("report", ["models=bert", "systems=none,sync", "intervals=5"], 62),
        pytest.param(
            "claims",
            ["models=bert", "systems=none,sync", "intervals=5"],
            62,
            marks=pytest.mark.slow,
        ),
        ("test_simple", [], 0),
        ("datasets", [], 0),
    ],
)
def test_targets_and_overrides(flow: WorkflowFolder, target: str, overrides: list[str], runs: int) -> None:
    done = flow.plan(target, "-n", "--quiet", "rules", "--config", "machine=testbox", *overrides, configfile=None)
    assert done.returncode == 0, done.stdout
    assert planned(done.stdout).get("measure", 0) == runs


def test_figures_over_nodes_come_when_asked_for_or_with_a_hostfile(flow: WorkflowFolder, tmp_path: Path) -> None:
    def plan(target: str, *overrides: str) -> dict[str, int]:
        done = flow.plan(target, "-n", "--quiet", "rules", "--config", "machine=testbox", *overrides, configfile=None)
        assert done.returncode == 0, done.stdout
        return planned(done.stdout)

    unasked = plan("paper")["measure"]
    asked = plan("fig8e", "fig8e={systems: [sync, pccheck], intervals: [5, 10], rate: 1gbit}")
    assert asked["measure"] == 1 + 2 * 2
    hosts = tmp_path / "two hosts"
    hosts.write_text("a slots=1\nb slots=1\n")
    assert plan("paper", f"fig8f={{hostfile: '{hosts}', systems: pccheck, intervals: 5}}")["measure"] == unasked + 2


def test_a_configfile_replaces_the_default_and_config_wins(flow: WorkflowFolder) -> None:
    done = flow.plan("fig8", "-n", "--quiet", "rules", "--config", "intervals=1,2,3")
    assert planned(done.stdout)["measure"] == 2 * (1 + 3)
    assert planned(done.stdout)["dataset"] == 2


@pytest.mark.slow  # every day it is a part of CI's lint
def test_the_workflow_passes_its_linter(flow: WorkflowFolder) -> None:
    done = flow.plan("--lint", configfile=None)
    assert "Congratulations" in done.stdout
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["models=vgg"], "--config: models[0]: 'vgg': unknown model 'vgg' (did you mean vgg16?); known: vgg16"),
        pytest.param(["intervals=1_10"], "--config: intervals[0]: '1_10': not a whole number", marks=pytest.mark.slow),
        pytest.param(["intervals=0"], "interval 0 is the run without checkpoints", marks=pytest.mark.slow),
        pytest.param(["options={pccheck: {keep: 0}}"], "--config: options.pccheck.keep: 0", marks=pytest.mark.slow),
        (["threads=100000"], "100000 threads on"),
        pytest.param(
            ["fig9={trace: /dev/null}"],
            "--config: fig9.trace: '/dev/null': /dev/null: no line `period_s SECONDS`",
            marks=pytest.mark.slow,
        ),
        pytest.param(["fig9={failures: 0}"], "--config: fig9.failures: 0", marks=pytest.mark.slow),
        pytest.param(["fig11={sizes_mb: 1000000}"], "--config: fig11.sizes_mb: scratch ", marks=pytest.mark.slow),
        (["fig14={pool_shares: 0.001}"], "--config: fig14.pool_shares"),
    ],
)
def test_bad_input_is_refused_before_any_job(flow: WorkflowFolder, overrides: list[str], message: str) -> None:
    done = flow.plan("fig8", "--config", *overrides)
    assert done.returncode == 1
    assert message in done.stdout
    assert "Traceback" not in done.stdout
    assert not (flow.folder / "results").exists()


def test_two_configfiles_are_refused(flow: WorkflowFolder) -> None:
    files = [str(ROOT / "config" / name) for name in ("laptop.yaml", "gpu.yaml")]
    done = flow.plan("fig8", "-n", "--configfile", *files, configfile=None)
    assert done.returncode == 1
    assert "--configfile takes one file, not 2: " in done.stdout


def test_a_second_workflow_in_the_folder_is_refused(flow: WorkflowFolder) -> None:
    with FileLock(flow.folder / ".snakemake" / "lastgood.lock", "this folder's workflow"):
        done = flow.plan("fig8")
    assert done.returncode == 1
    assert "this folder's workflow is held by process" in done.stdout
    assert "snakemake -d FOLDER" in done.stdout
    assert not flow.records()


def test_a_missing_package_says_what_to_do(flow: WorkflowFolder) -> None:
    # -I and -S hide the package, whichever way it is installed; Snakemake itself is put back.
    import snakemake

    site = Path(snakemake.__file__).resolve().parents[1]
    hide = "import sys; sys.modules['lastgood'] = None; from snakemake.cli import main; main()"
    command = [sys.executable, "-c", hide, "-s", str(ROOT / "Snakefile"), "-d", str(flow.folder), "-n", "fig8"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(site)})
    assert done.returncode == 1
    assert "run `bash install.sh`" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_read_only_checkout(flow: WorkflowFolder, tmp_path: Path) -> None:
    copy = tmp_path / "read only"
    copy.mkdir()
    shutil.copy(ROOT / "Snakefile", copy)
    for name in ("workflow", "config", "evaluation", "profiles"):
        shutil.copytree(ROOT / name, copy / name)
    before = sorted(copy.rglob("*"))
    for path in [copy, *before]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    command = [sys.executable, "-m", "snakemake", "-s", str(copy / "Snakefile"), "-d", str(flow.folder), "-n", "fig8"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(copy.rglob("*")) == before
    for path in [copy, *before]:
        path.chmod(0o755)


def test_every_panel_has_one_target_per_model(flow: WorkflowFolder) -> None:
    done = flow.plan("--list-target-rules", configfile=None)
    names = set(re.findall(r"^(\w+)", done.stdout, re.MULTILINE))
    wanted = {"all", "fig8", "fig8_vgg16", "fig8_bert", "fig8_transformer_xl", "fig8_opt", "datasets", "native"}
    wanted |= {"fig9", "fig9_vgg16", "fig9_opt"}
    wanted |= {"paper", "fig11", "fig11_blob", "fig12", "fig12_vgg16", "fig13", "fig13_vgg16", "fig14", "fig14_vgg16"}
    wanted |= {"fig8e", "fig8e_opt", "fig8f", "fig8f_bloom"}
    wanted |= {"checkmate", "checkmate_resnet18", "checkmate_opt", "checkmate_optimizer"}
    assert wanted | {"test_simple"} <= names


@pytest.mark.slow
def test_without_deepspeed_a_figure_that_needs_it_is_refused_where_it_is_asked_for(
    flow: WorkflowFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['deepspeed'] = None\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    given = ["--config", "machine=testbox", "models=vgg16", "fig8e={parallel: pipeline, hostfile: null}"]
    reason = "pipeline needs DeepSpeed, which is not installed; pip install 'lastgood[deepspeed]'"
    done = flow.call("fig8", "-n", "--quiet", "rules", *given, configfile=None)
    assert done.returncode == 0 and f"fig8e is left out: {reason}" in done.stdout, done.stdout
    done = flow.call("fig8e", "-n", "--quiet", "rules", *given, configfile=None)
    assert done.returncode == 1 and f"fig8e cannot be made here: {reason}" in done.stdout, done.stdout


@pytest.mark.slow
def test_snakemake_begins_no_timers_that_never_end(flow: WorkflowFolder) -> None:
    """Each job's end began one that begins another one, which took a fifth of a core after fifty runs."""
    program = (
        "from snakemake.scheduling.job_scheduler import JobScheduler\n"
        "begun = JobScheduler._schedule_reevalutation\n"
        "JobScheduler._schedule_reevalutation = lambda *given: (print('A TIMER'), begun(*given))\n"
        "from snakemake.cli import main\n"
        "main()\n"
    )
    command = [sys.executable, "-c", program, *flow.arguments("data/images.ready")]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=400)
    assert done.returncode == 0, done.stdout
    assert (flow.folder / "data/images.ready").exists()
    assert "A TIMER" not in done.stdout
