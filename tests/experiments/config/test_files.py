"""Configuration files on top of others: what is merged, which file is named, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lastgood.cli import app
from lastgood.errors import ConfigError
from lastgood.experiments.config.yaml_file import load_files, load_yaml, parse_overrides
from lastgood.experiments.plan.load import parse_config

ROOT = Path(__file__).resolve().parents[3]
CONFIG = ROOT / "config"
OVERLAYS = [
    CONFIG / "laptop.yaml",
    CONFIG / "gpu.yaml",
    CONFIG / "paper.yaml",
    ROOT / "tests" / "workflow" / "tiny.yaml",
]


def name_of(path: Path) -> str:
    return path.stem


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def leaves(values: dict[str, Any], above: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    found: dict[tuple[str, ...], Any] = {}
    for key, value in values.items():
        inner = leaves(value, (*above, key)) if isinstance(value, dict) else {}
        found |= inner or {(*above, key): value}
    return found


# -- what is merged ------------------------------------------------------------------------------------------------


def test_the_defaults_are_complete() -> None:
    assert "base" not in load_yaml(CONFIG / "default.yaml")
    parse_config(CONFIG / "default.yaml")


@pytest.mark.parametrize("path", OVERLAYS, ids=name_of)
def test_an_overlay_holds_only_what_it_changes(path: Path) -> None:
    *below, (_, own) = load_files(path)
    assert below
    inherited: dict[tuple[str, ...], Any] = {}
    for _, values in below:
        inherited |= leaves(values)
    assert {key: value for key, value in leaves(own).items() if inherited.get(key, key) == value} == {}


@pytest.mark.parametrize("path", OVERLAYS, ids=name_of)
def test_a_complete_file_may_have_a_base_too(path: Path, tmp_path: Path) -> None:
    whole = parse_config(path)[0]
    shown = CliRunner().invoke(app, ["config", "show", "--configfile", str(path)], catch_exceptions=False)
    alone = write(tmp_path / "alone.yaml", shown.stdout)
    above = write(tmp_path / "above.yaml", f"base: '{path}'\n{shown.stdout}")
    assert parse_config(alone)[0] == parse_config(above)[0] == whole


def test_an_overlay_changes_entries_at_any_depth_and_keeps_the_others(tmp_path: Path) -> None:
    write(tmp_path / "lower.yaml", f"base: '{CONFIG / 'default.yaml'}'\nknobs: {{pccheck: {{keep: 3}}}}\nseed: 5\n")
    upper = write(
        tmp_path / "upper.yaml",
        "base: lower.yaml\noptions: {pccheck: {pressure: skip}, sync: {keep: 1}}\nmodels: [bert]\n",
    )
    config = parse_config(upper, parse_overrides(["options={pccheck: {writer_threads: 1}}"]))[0]
    assert config.options["pccheck"] == {
        **parse_config(CONFIG / "default.yaml")[0].options["pccheck"],
        "keep": 3,
        "pressure": "skip",
        "writer_threads": 1,
    }
    assert (config.options["sync"], config.options["checkfreq"]) == ({"keep": 1}, {"keep": 2})
    assert (config.models, config.seed) == (["bert"], 5)


def test_the_earlier_name_of_options_is_read_and_not_beside_the_new_one(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.yaml", f"base: '{CONFIG / 'default.yaml'}'\nknobs: {{sync: {{keep: 1}}}}\n")
    assert parse_config(path)[0].options["sync"] == {"keep": 1}
    assert parse_config(path, parse_overrides(["knobs={sync: {keep: 4}}"]))[0].options["sync"] == {"keep": 4}
    with pytest.raises(ConfigError, match=r"^--config: knobs is the earlier name of options; put both into options$"):
        parse_config(path, parse_overrides(["knobs={sync: {keep: 1}}", "options={sync: {keep: 2}}"]))
    path.write_text(path.read_text() + "options: {sync: {keep: 3}}\n")
    assert refusal(path) == f"{path}: knobs is the earlier name of options; put both into options"


def test_a_base_is_looked_for_beside_the_file_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep").mkdir()
    write(tmp_path / "low.yaml", f"base: '{CONFIG / 'default.yaml'}'\nseed: 7\n")
    write(tmp_path / "deep" / "high.yaml", "base: ../low.yaml\n")
    monkeypatch.chdir(tmp_path)
    assert parse_config(Path("deep/high.yaml"))[0].seed == 7


# -- messages, and what is refused ---------------------------------------------------------------------------------


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(path)
    return str(caught.value)


def test_a_fault_is_blamed_on_the_file_that_holds_it(tmp_path: Path) -> None:
    text = (CONFIG / "default.yaml").read_text().replace("\nrepetitions: 1 ", "\nrepetitions: 0 ")
    lower = write(tmp_path / "lower.yaml", text.replace("seed: 0\n", ""))
    upper = write(tmp_path / "upper.yaml", "base: lower.yaml\niterations: 0\nknobs: {sync: {keeep: 1}}\nfoo: 1\n")
    lines = refusal(upper).splitlines()
    for expected in (
        f"{lower}: repetitions: 0",
        f"{upper}: iterations: 0",
        f"{upper}: seed: is missing",
        f"{upper}: foo: unknown key",
    ):
        assert any(line.startswith(expected) for line in lines), (expected, lines)
    upper.write_text("base: lower.yaml\nrepetitions: 1\nseed: 1\nknobs: {sync: {keeep: 1}}\n")
    assert refusal(upper).startswith(f"{upper}: options.sync.keeep: unknown key (did you mean keep?)")


@pytest.mark.parametrize("base", ["null", "3", "[a.yaml]", "''", '"a\\0b"'])
def test_a_base_that_names_no_file(base: str, tmp_path: Path) -> None:
    path = write(tmp_path / "mine.yaml", f"base: {base}\n")
    assert refusal(path).startswith(f"{path}: base: ")


def test_a_base_that_does_not_exist(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.yaml", "base: no/such.yaml\n")
    assert refusal(path) == f"{path}: base: {tmp_path / 'no/such.yaml'}: cannot be read: No such file or directory"


def test_a_base_that_is_no_configuration(tmp_path: Path) -> None:
    write(tmp_path / "list.yaml", "[1]\n")
    path = write(tmp_path / "mine.yaml", "base: list.yaml\n")
    assert refusal(path).startswith(f"{path}: base: {tmp_path / 'list.yaml'}: holds list")


@pytest.mark.parametrize("names", [["a"], ["a", "b"], ["a", "b", "c"]])
def test_a_circle_of_bases(names: list[str], tmp_path: Path) -> None:
    for name, base in zip(names, [*names[1:], names[0]], strict=True):
        write(tmp_path / f"{name}.yaml", f"base: ../{tmp_path.name}/{base}.yaml\n")
    message = refusal(tmp_path / "a.yaml")
    assert "a.yaml is this file, or has this file as its own base" in message
    assert f"{names[-1]}.yaml: base: " in message


def test_a_chain_of_bases_is_bounded(tmp_path: Path) -> None:
    write(tmp_path / "0.yaml", (CONFIG / "default.yaml").read_text())
    for number in range(1, 9):
        write(tmp_path / f"{number}.yaml", f"base: {number - 1}.yaml\nseed: {number}\n")
    assert parse_config(tmp_path / "7.yaml")[0].seed == 7
    assert "1.yaml: base: 0.yaml: more than 8 files" in refusal(tmp_path / "8.yaml")


def test_a_base_is_no_override() -> None:
    with pytest.raises(ConfigError, match="--config: base: unknown key"):
        parse_config(CONFIG / "laptop.yaml", parse_overrides(["base=gpu.yaml"]))


# -- the command ---------------------------------------------------------------------------------------------------


def test_show_applies_base_and_overrides() -> None:
    given = ["config", "show", "seed=3", "--configfile", str(CONFIG / "gpu.yaml"), "--config", "models=bert", "--json"]
    shown = json.loads(CliRunner().invoke(app, given, catch_exceptions=False).stdout)
    assert (shown["scale"], shown["models"], shown["seed"], shown["proof"]) == ("gpu", ["bert"], 3, "first")
