from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from lastgood.cli import app
from lastgood.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]


def test_cloud_names_the_playbooks_instead() -> None:
    done = CliRunner().invoke(app, ["provision", "cloud", "create", "--provider", "aws", "--count", "2"])
    assert isinstance(done.exception, ConfigError) and done.exception.exit_code == 2
    said = str(done.exception)
    assert "ansible-playbook install/ansible/cloud_aws.yml" in said and "docs/provisioning.md" in said
    assert (ROOT / "install" / "ansible" / "cloud_aws.yml").is_file()
    assert (ROOT / "install" / "ansible" / "cloud_gcp.yml").is_file()
