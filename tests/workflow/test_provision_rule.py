"""`snakemake provision`: planned where there is a hostfile, refused with the reason where not."""

from __future__ import annotations

from tests.workflow.support.workflow_folder import WorkflowFolder


def test_a_hostfile_makes_one_job(flow: WorkflowFolder) -> None:
    (flow.folder / "hosts").write_text("vm1 slots=1\nvm2 slots=1\n")
    done = flow.plan("provision", "-n", "--printshellcmds", "--config", "hostfile=hosts")
    assert done.returncode == 0, done.stdout
    path = flow.folder / "hosts"
    assert f"exec lastgood provision run '{path}' --facts-dir logs/provision > logs/provision.log 2>&1" in done.stdout


def test_no_hostfile_says_how_to_give_one(flow: WorkflowFolder) -> None:
    done = flow.plan("provision", "-n")
    assert done.returncode != 0
    assert "snakemake provision --config hostfile=FILE" in done.stdout


def test_a_wrong_hostfile_is_refused_with_its_line_before_any_job(flow: WorkflowFolder) -> None:
    (flow.folder / "hosts").write_text("vm1 slots=1\nvm1 slots=1\n")
    done = flow.plan("fig8", "-n", "--config", "hostfile=hosts")
    assert done.returncode != 0
    assert "--config: hostfile: " in done.stdout and "hosts:2: vm1 is already on line 1" in done.stdout
    done = flow.plan("fig8", "-n", "--config", "hostfile=nowhere")
    assert "--config: hostfile: 'nowhere': there is no such file or folder" in done.stdout
