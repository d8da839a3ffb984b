"""Commands for switches: every watched port both ways, and what cannot be a port."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from lastgood.cli import app
from lastgood.errors import ConfigError
from lastgood.mirror.setup.switches import SWITCHES, switch_commands


@pytest.mark.parametrize("switch", SWITCHES)
def test_each_port_is_mirrored_both_ways_shown_and_undone(switch: str) -> None:
    found = switch_commands(switch, ["Ethernet1/1", "Ethernet1/5"], "Ethernet1/9", session=3)
    for port in ("Ethernet1/1", "Ethernet1/5"):
        assert [line for line in found.make if port in line and line.endswith(" both")]
    assert any("Ethernet1/9" in line and ("destination" in line or "monitor-port" in line) for line in found.make)
    assert any(line.lstrip().startswith(("show", "display")) for line in found.show)
    assert any(line.startswith(("no ", "undo ")) and "3" in line for line in found.undo)
    assert any("not tried" in note for note in found.notes)


def test_h3c_word_for_word() -> None:
    assert switch_commands("h3c", ["HundredGigE1/0/1"], "HundredGigE1/0/9").make == (
        "system-view",
        "mirroring-group 1 local",
        "mirroring-group 1 mirroring-port HundredGigE1/0/1 both",
        "mirroring-group 1 monitor-port HundredGigE1/0/9",
        "interface HundredGigE1/0/9",
        " undo stp enable",
        " quit",
    )


@pytest.mark.parametrize(
    ("switch", "watched", "to", "session", "words"),
    [
        ("juniper", ["e1"], "e2", 1, "h3c, cisco, arista"),
        ("cisco", [], "e2", 1, "--watch"),
        ("cisco", ["e1\nno shutdown"], "e2", 1, "not a port"),
        ("cisco", ["e1"], "1 ; reload", 1, "not a port"),
        ("arista", ["e1", "e1"], "e2", 1, "once"),
        ("h3c", ["e1"], "e1", 1, "once"),
        ("h3c", ["e1"], "e2", 0, "--session"),
    ],
)
def test_what_cannot_be_is_refused(switch: str, watched: list[str], to: str, session: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        switch_commands(switch, watched, to, session)


def test_the_command_prints_them() -> None:
    words = ["mirror", "commands", "--switch", "arista", "--watch", "Ethernet1", "--to", "Ethernet9"]

    def run(*more: str) -> str:
        result = CliRunner().invoke(app, [*words, *more])
        assert result.exit_code == 0
        return result.stdout

    assert "monitor session flowcheck1 source Ethernet1 both\n" in run()
    assert json.loads(run("--json"))["make"][0] == "configure"
