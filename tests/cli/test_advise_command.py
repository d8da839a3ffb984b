"""`lastgood advise`: the answer first, the numbers behind it, refusals with their limits."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lastgood.cli import app
from lastgood.errors import ConfigError, LastgoodError
from tests.experiments.support.paired_records import make_paired
from tests.experiments.support.records import make_ceilings, make_record, place_record

ROOT = Path(__file__).resolve().parents[2]
MEASURED = str(ROOT / "figures" / "measured" / "amd-epyc-2c")
ASKED = ["--state-gb", "4", "--iter-ms", "100", "--mtbf-h", "24", "--nodes", "8"]


def advise(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["advise", *arguments], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


@pytest.fixture
def ceilings(tmp_path: Path) -> list[str]:
    path = tmp_path / "ceilings.json"
    make_ceilings(machine="box").write(path)
    return ["--ceilings", str(path)]


def test_the_answer_comes_first_and_says_where_it_is_from(ceilings: list[str]) -> None:
    first, *rest = advise(*ASKED, *ceilings).splitlines()
    assert first.startswith("Use pccheck every ")
    assert "from the model over the ceilings of box" in first
    text = "\n".join(rest)
    for part in ("sync", "gpm", "checkfreq", "slowdown", "lost per failure", "hours/day", "Ceilings: write 954 MiB/s"):
        assert part in text
    assert "A failure of the job every 3 h 0 min" in text


def test_json_holds_all_of_it(ceilings: list[str]) -> None:
    found = json.loads(advise(*ASKED, *ceilings, "--json", "--network-gbit", "100", "--intervals", "10,1000"))
    assert found["question"]["state_bytes"] == 4e9
    assert found["ceilings_bytes_per_s"]["network"] == 12.5e9
    assert {row["system"] for row in found["advice"]} == {"sync", "gpm", "checkfreq", "pccheck", "gemini"}
    assert {row["interval_steps"] for row in found["advice"]} == {10, 1000}
    best = found["advice"][0]
    assert best["goodput"] == max(row["goodput"] for row in found["advice"])
    assert found["answer"].startswith(f"Use {best['system']} every {best['interval_steps']} iterations")
    assert len(found["costs_s_per_byte"]) == 5


def test_what_blocks_leave_open_is_called_undecided(tmp_path: Path, ceilings: list[str]) -> None:
    alike = {"sync": (0.78, 0.8, 0.83), "gpm": (0.79, 0.81, 0.82), "checkfreq": (0.3, 0.3, 0.31)}
    for record in [
        make_paired("none", 0, machine="box"),
        *(make_paired(name, 10, ratios, proof=True, machine="box") for name, ratios in alike.items()),
    ]:
        place_record(record, tmp_path / "records")
    asked = ["--state-gb", "0.1", "--iter-ms", "100", "--mtbf-h", "24", "--records", str(tmp_path / "records")]
    first = advise(*asked, *ceilings, "--intervals", "10").splitlines()[0]
    assert re.search(r"Undecided, the intervals of goodput overlap: gpm \(.* to .*\) and sync every 10 \(", first)
    assert "checkfreq" not in first
    found = json.loads(advise(*asked, *ceilings, "--intervals", "10", "--json"))["advice"]
    assert all(len(row["goodput_interval"]) == 3 for row in found)


def test_single_runs_without_pairs_decide_nothing(tmp_path: Path, ceilings: list[str]) -> None:
    for name, rate in (("none", 10.0), ("sync", 2.0), ("gpm", 9.0)):
        interval = 0 if name == "none" else 10
        proof = None if name == "none" else True
        place_record(
            make_record(name, interval, iterations_per_s=rate, machine="box", proof=proof), tmp_path / "records"
        )
    asked = ["--state-gb", "0.1", "--iter-ms", "100", "--mtbf-h", "24", "--records", str(tmp_path / "records")]
    first = advise(*asked, *ceilings, "--intervals", "10").splitlines()[0]
    assert "Undecided, one run without pairs does not tell them apart: gpm and sync every 10." in first


def test_from_records_and_the_ceilings_that_they_carry() -> None:
    found = json.loads(
        advise("--state-gb", "0.15", "--iter-ms", "70", "--mtbf-h", "1", "--records", MEASURED, "--json")
    )
    assert "from measured runs of amd-epyc-2c" in found["answer"]
    assert {row["system"] for row in found["advice"]} == {"sync", "checkfreq", "gpm", "dcp", "pccheck"}
    assert all(row["source"].startswith("records") for row in found["advice"])


def test_systems_that_the_records_lack_are_named(tmp_path: Path) -> None:
    lines = Path(MEASURED, "fig8_vgg16.csv").read_text().splitlines(keepends=True)
    (tmp_path / "fig8_vgg16.csv").write_text("".join(line for line in lines if ",gpm," not in line))
    found = json.loads(
        advise("--state-gb", "0.15", "--iter-ms", "70", "--mtbf-h", "1", "--records", str(tmp_path), "--json")
    )
    assert any("not in the records, so not compared: gpm" in note for note in found["notes"])


def test_a_far_state_is_noted() -> None:
    found = json.loads(advise("--state-gb", "50", "--iter-ms", "70", "--mtbf-h", "1", "--records", MEASURED, "--json"))
    assert any("the state of 50 GB is far from those measured" in note for note in found["notes"])


def test_nothing_gets_anywhere(ceilings: list[str]) -> None:
    text = advise("--state-gb", "4", "--iter-ms", "100", "--mtbf-h", "0.001", *ceilings)
    assert text.startswith("No system gets anywhere: a failure comes every 3.6 s and costs at least ")


def test_one_row_more_gemini_where_the_network_was_measured(tmp_path: Path) -> None:
    text = advise(*ASKED, "--ceilings", _with_peer(tmp_path))
    assert "gemini" in text
    assert "network 1.16 GiB/s" in text


def _with_peer(tmp_path: Path) -> str:
    from lastgood.experiments.ceilings.network import PeerCeilings

    path = tmp_path / "peer.json"
    rates = {"send_bytes_per_s": 1.25e9, "receive_bytes_per_s": 1e9, "both_bytes_per_s": 2e9}
    make_ceilings(peers=[PeerCeilings(address="other:7471", points=[], **rates)]).write(path)
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--state-gb, --iter-ms and --mtbf-h are needed"),
        (["--state-gb", "0", "--iter-ms", "1", "--mtbf-h", "1"], "the state must be 1 to"),
        (["--state-gb", "1e9", "--iter-ms", "1", "--mtbf-h", "1"], r"1 to 1e\+15 bytes"),
        (["--state-gb", "1", "--iter-ms", "-3", "--mtbf-h", "1"], "the iteration time"),
        (["--state-gb", "1", "--iter-ms", "1", "--mtbf-h", "nan"], "the MTBF"),
        ([*ASKED, "--nodes", "0"], "the number of nodes"),
        ([*ASKED, "--intervals", "1,x"], "--intervals .1,x"),
        ([*ASKED, "--intervals", "0"], "an interval must be 1 to"),
        ([*ASKED, "--network-gbit", "0"], "--network-gbit must be above 0"),
        ([*ASKED, "--device", "cuda"], "no device copy"),
        ([*ASKED, "--ceilings", "/no/such.json"], "no ceilings of this machine"),
        ([*ASKED, "--records", "/no/such"], "no such folder"),
        (["score"], "--records DIR is needed"),
        (["score", "--records", MEASURED, "--mtbf-h", "often"], "--mtbf-h .often"),
        (["score", "--records", MEASURED, "--mtbf-h", "0"], "the MTBF"),
    ],
)
def test_bad_input_is_refused(arguments: list[str], message: str, ceilings: list[str]) -> None:
    more = [] if {"score", "--ceilings"} & set(arguments) else ceilings
    done = CliRunner().invoke(app, ["advise", *arguments, *more])
    assert isinstance(done.exception, LastgoodError)
    with pytest.raises(LastgoodError, match=message):
        raise done.exception


def test_ceilings_of_another_machine_are_refused(tmp_path: Path, ceilings: list[str]) -> None:
    for record in (make_record("none"), make_record("pccheck", 10)):
        place_record(record, tmp_path)
    done = CliRunner().invoke(app, ["advise", *ASKED, "--records", str(tmp_path), *ceilings])
    assert isinstance(done.exception, ConfigError)
    assert "is of box, and the records are of testbox" in str(done.exception)


def test_the_score_is_printed() -> None:
    text = advise("score", "--records", MEASURED)
    assert "Held-out advice on amd-epyc-2c, 60 measured cells" in text
    assert "Regret over 12 held-out cases" in text
    found = json.loads(advise("score", "--records", MEASURED, "--mtbf-h", "0.1", "--json"))
    assert [row["workload"] for row in found["scores"]] == ["bert", "opt", "transformer_xl", "vgg16"]


def test_no_torch_is_imported(ceilings: list[str]) -> None:
    program = (
        "import sys; from lastgood.cli import app\n"
        f"app(['advise', 'score', '--records', {MEASURED!r}, '--json'], standalone_mode=False)\n"
        f"app(['advise', *{ASKED!r}, *{ceilings!r}, '--json'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True, stdout=subprocess.DEVNULL)
