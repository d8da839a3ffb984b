"""docs/adding-a-system.md, followed word by word: an installed package is all that a system of one's own takes."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "adding-a-system.md").read_text()

OTHERS = """
from lastgood.checkpointers.baselines.sync import SyncCheckpointer
from lastgood.checkpointers.traits import Traits
from lastgood.sinks import Sink

class Bare(SyncCheckpointer):
    name = "bare"

class Clash(SyncCheckpointer):
    name = "clash"
    traits = Traits(label="Clash", colour="#0072b2", order=90, safe_in=Sink.MEMORY, safe_words="in the moon")
"""
"""A system that declares nothing, and one with PCcheck's colour."""

HELPED = """
import sys
from lastgood.checkpointers.baselines.sync import SyncCheckpointer, SyncOptions
from lastgood.checkpointers.traits import Traits

PROGRAM = '''
import os, pathlib, sys, time
part = pathlib.Path(sys.argv[1] + ".part")
part.write_text(str(os.getpid()))
part.rename(sys.argv[1])
time.sleep(600)
'''

class HelpedOptions(SyncOptions):
    helpers: int = 2
    told: str = ""

class Helped(SyncCheckpointer):
    name = "helped"
    Options = HelpedOptions
    traits = Traits(helper="helped:Service")

    def storage_facts(self):
        return {**super().storage_facts(), "told": self.options.told}

class Service:
    name, directory, ready_s = "helper", "helpers", 60.0

    def __init__(self, spec):
        self.helpers = spec.system_options["helpers"]

    def hosts(self, names):
        return [names[0]] * self.helpers

    def secrets(self, folder):
        return {}

    def command(self, seat, folder):
        return [sys.executable, "-c", PROGRAM, str(self.ready_file(seat.number, folder))]

    def ready_file(self, number, folder):
        return folder / "helpers" / f"{number}.pid"

    def announce(self, ready, folder):
        told = b" ".join(content for _, content in ready)
        return {folder / "checkpoints" / "helpers": told}

    def options(self, checkpoints):
        return {"told": (checkpoints / "helpers").read_text()}

    def meter(self, checkpoints):
        return dict

    def check(self, place, folder):
        pass
"""
"""A system with helper processes of its own, whose ids its checkpointer is told."""

USE = """
import json, sys
import torch
from pathlib import Path
from lastgood.checkpointers.recovery.found_here import others_in
from lastgood.checkpointers.registry import checkpointer_class
from tests.experiments.support.records import make_ceilings, make_record
from lastgood.experiments.advise.model import Question, Rates, model_costs
from lastgood.experiments.formulas.goodput import formula_of
from lastgood.experiments.plots.canvas import read_tidy
from lastgood.experiments.plots.captions import throughput_caption
from lastgood.experiments.plots.throughput import draw_throughput
from lastgood.experiments.records.spec import RunSpec
from lastgood.errors import ConfigError
from lastgood.experiments.runs.execute import execute
from lastgood.experiments.services.registry import services_of
from lastgood.experiments.systems.labels import system_rank, system_styles
from lastgood.experiments.systems.over_ranks import why_not_over_ranks, writers_of
from lastgood.experiments.tables.runs import collect
from lastgood.experiments.machine import lock as machine
from lastgood.locks import FileLock

folder = Path(sys.argv[1])
machine.machine_lock = lambda: FileLock(folder / "turn", "the test's turn")  # others measure on this machine
shown = ["none", "pccheck", "mine", "bare", "clash"]
records = [make_record(system, 10) for system in shown]
collect("fig8", "vgg16", records, make_ceilings()).write(folder / "fig8.csv", folder / "wide.csv")
frame = read_tidy(folder / "fig8.csv")
figure = draw_throughput(frame)
spec = RunSpec(machine="here", scale="laptop", workload="blob", workload_options={"megabytes": 1}, system="mine",
               system_options={"keep": 2}, method=1, interval_steps=2, warmup_steps=1, measured_steps=4, threads=1,
               seed=0, repetition=0)
scratch = folder / "scratch"
scratch.mkdir()
said = []
record = execute(spec, folder, scratch, folder / "logs", lambda stage: None)
helped = execute(spec.model_copy(update={"system": "helped", "system_options": {"helpers": 2}}), folder, scratch,
                 folder / "logs", said.append)
try:
    services_of(spec.model_copy(update={"system": "lost"}))
except ConfigError as error:
    lost = str(error)
mine = checkpointer_class("mine")(folder / "checkpoints")
mine.start({"x": torch.zeros(3)})
mine.save(1)
mine.close()
question = Question(state_bytes=1e9, iteration_s=1.0, mtbf_s=1e6, nodes=1)
costs, notes = model_costs(Rates(write=1e9, copy=2e9), question)
print(json.dumps({
    "styles": {name: [style.label, style.colour] for name, style in system_styles(shown).items()},
    "legend": [text.get_text() for legend in figure.legends for text in legend.get_texts()],
    "caption": throughput_caption(frame),
    "wide": (folder / "wide.csv").read_text(),
    "costs": {name: [cost.stall, cost.busy] for name, cost in costs.items()},
    "notes": notes,
    "formulas": [formula_of("mine"), formula_of("bare"), formula_of("clash")],
    "over_ranks": {name: why_not_over_ranks("bloom", name, "ddp", 2, 2) for name in ("mine", "bare", "clash", "gpm")},
    "writers": [writers_of("mine", "ddp"), writers_of("mine", "zero1")],
    "proof": record.proof is not None and record.proof.equal,
    "durable": record.counts.durable,
    "helped": [helped.proof is not None and helped.proof.equal, helped.storage["told"], said],
    "lost": lost,
    "found": [str(found) for found in others_in(folder / "checkpoints")],
}))
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Where the page's package is installed, as `pip install .` leaves it, beside one of other systems."""
    site = tmp_path_factory.mktemp("site")
    (module,) = blocks("python")
    (project,) = blocks("toml")
    (site / "mine.py").write_text(module)
    (entry,) = re.findall(r'^\[project\.entry-points\."(.*)"\]\n(\w+) = "(.*)"$', project, re.MULTILINE)
    install(site, "mine", entry[0], {entry[1]: entry[2]})
    (site / "others.py").write_text(OTHERS)
    more = {"bare": "others:Bare", "clash": "others:Clash", "broken": "no_such_module:Broken"}
    install(site, "others", entry[0], more)
    (site / "helped.py").write_text(HELPED)
    (site / "lost.py").write_text(HELPED.replace('"helped:Service"', '"lost:NoSuchThing"'))
    install(site, "helped", entry[0], {"helped": "helped:Helped", "lost": "lost:Helped"})
    return {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}"}


def install(site: Path, name: str, group: str, systems: dict[str, str]) -> None:
    folder = site / f"{name}-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{system} = {target}" for system, target in systems.items()]
    (folder / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))


def answer(command: list[str], environment: dict[str, str]) -> Any:
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1] if command[1] == "-c" else done.stdout)


@pytest.fixture(scope="module")
def used(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return answer([sys.executable, "-c", USE, str(tmp_path_factory.mktemp("used"))], environment)


def test_the_pages_command_plans_its_runs(environment: dict[str, str]) -> None:
    (line,) = blocks("console")
    program, *arguments = shlex.split(line)
    assert program == "lastgood"
    planned = answer([sys.executable, "-m", program, *arguments, "--json", "--no-probe"], environment)
    options = {str(run["spec"]["system_options"]) for run in planned["runs"] if run["spec"]["system"] == "mine"}
    assert options == {"{'keep': 3}"}
    intervals = {
        system: {run["spec"]["interval_steps"] for run in planned["runs"] if run["spec"]["system"] == system}
        for system in ("mine", "pccheck")
    }
    assert intervals["mine"] == intervals["pccheck"] != set()


def test_it_runs_and_is_proved(used: Any) -> None:
    assert used["proof"] is True
    assert used["durable"] == 2


def test_helper_processes_of_another_package_run_beside_the_training_and_end_with_it(used: Any) -> None:
    proved, told, said = used["helped"]
    assert proved is True
    assert "starting 2 helpers on this machine" in said
    pids = [int(pid) for pid in told.split()]
    assert len(set(pids)) == 2
    assert not any(psutil.pid_exists(pid) and "helpers" in " ".join(psutil.Process(pid).cmdline()) for pid in pids)
    assert "system 'lost': its helper lost:NoSuchThing cannot be imported" in used["lost"]


def test_what_it_leaves_in_a_directory_may_be_its_own(used: Any) -> None:
    (text,) = used["found"]
    assert "files of sync or checkfreq or mine or bare (checkpoint-*.pt) of steps 1" in text


def test_figures_show_it_in_its_place(used: Any) -> None:
    styles = used["styles"]
    assert list(styles) == ["none", "mine", "pccheck", "clash", "bare"]
    assert styles["mine"] == ["My system", "#91B791"]
    assert styles["bare"][0] == "bare"
    assert len({colour for _, colour in styles.values()}) == len(styles)
    labels = [text for text in used["legend"] if text in ("My system", "PCcheck", "Clash", "bare")]
    assert labels == ["My system", "PCcheck", "Clash", "bare"]
    assert [line for line in used["wide"].splitlines() if line.startswith("My system")] != []


def test_the_caption_says_where_it_is_safe(used: Any) -> None:
    assert "flushed to the disk (fsync, msync, or direct I/O and flush), or in the moon under Clash." in used["caption"]
    assert "Clash, which writes to no disk, may pass it" in used["caption"]
    assert "My system" not in used["caption"]


def test_advice_knows_what_it_costs(used: Any) -> None:
    assert used["costs"]["mine"] == [pytest.approx(1.5e-9), 0.0]
    assert used["costs"]["bare"] == used["costs"]["sync"]
    assert "clash" not in used["costs"]
    assert used["formulas"] == ["half_interval", "half_interval", "interval"]


def test_one_that_cannot_be_loaded_is_named_and_nothing_else_fails(used: Any) -> None:
    (note,) = [text for text in used["notes"] if text.startswith("broken")]
    assert "no_such_module:Broken cannot be imported" in note


def test_over_ranks_it_is_what_it_declares(used: Any) -> None:
    assert used["writers"] == ["first", "apart"]
    refused = used["over_ranks"]
    assert refused["mine"] is refused["bare"] is None
    assert re.fullmatch(r"clash does not run over several ranks here; known: none, .*\bmine\b.*", refused["clash"])
    assert "broken" not in refused["gpm"]
