"""The configuration: what is read, how overrides win, and every refusal with its source, key, value and choices."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lastgood.errors import ConfigError
from lastgood.experiments.config import schema as config_module
from lastgood.experiments.config.schema import Config
from lastgood.experiments.config.yaml_file import parse_overrides
from lastgood.experiments.machine.facts import CudaDevice
from lastgood.experiments.plan import machine_checks as feasible
from lastgood.experiments.plan.load import load_config, parse_config

ROOT = Path(__file__).resolve().parents[3]
LAPTOP = ROOT / "config" / "laptop.yaml"


def configure(*entries: str, file: Path = LAPTOP) -> Config:
    return parse_config(file, parse_overrides(entries))[0]


def refusal(*entries: str, file: Path = LAPTOP) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(file, parse_overrides(entries))
    return str(caught.value)


@pytest.fixture(autouse=True)
def _on_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A known machine, whatever the tests run on: 4 cores, no GPU, 32 GiB, an empty disk of 100 GiB."""
    monkeypatch.setattr(config_module, "usable_cores", lambda: 4)
    monkeypatch.setattr(feasible, "usable_cores", lambda: 4)
    monkeypatch.setattr(feasible, "cuda_devices", lambda: ())
    monkeypatch.setattr(feasible, "memory_bytes", lambda: 32 << 30)
    monkeypatch.setattr(feasible, "free_bytes", lambda path: 100 << 30)
    monkeypatch.setattr(feasible, "lies_in_memory", lambda path: False)


# -- what is read --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["laptop", "gpu", "paper"])
def test_the_shipped_files_are_valid(name: str) -> None:
    config = configure(file=ROOT / "config" / f"{name}.yaml")
    assert config.scale == name
    assert config.systems[0] == "none"
    for model in config.used_models:
        assert config.workload_options(model).state_bytes() > 0


def test_the_laptop_file_is_the_planned_default() -> None:
    config = load_config(LAPTOP)
    assert config.models == ["vgg16", "bert", "transformer_xl", "opt"]
    assert config.systems == ["none", "sync", "checkfreq", "gpm", "dcp", "pccheck"]
    assert config.intervals == [1, 10, 25]
    assert (config.repetitions, config.pairs.rounds) == (1, 3)
    assert config.thread_count == 4
    assert config.scratch_folder == Path("scratch")


@pytest.mark.parametrize(
    "entry",
    ["intervals=1,10", "intervals=[1, 10]", "intervals=['1,10']", "intervals=[1, '10']", "intervals=' 1 , 10 '"],
)
def test_lists_come_in_every_form(entry: str) -> None:
    assert configure(entry).intervals == [1, 10]


def test_names_come_in_every_form() -> None:
    assert configure("models=vgg16").models == ["vgg16"]
    assert configure("models=vgg16,bert").models == ["vgg16", "bert"]
    assert configure("models=[vgg16, bert]").models == ["vgg16", "bert"]
    assert configure("intervals=5").intervals == [5]
    assert configure("iterations='20'").iterations == 20


def test_none_is_always_measured() -> None:
    assert configure("systems=pccheck").systems == ["none", "pccheck"]
    assert configure("systems=pccheck,none").systems == ["pccheck", "none"]


def test_overrides_change_entries_of_sections_and_keep_the_others() -> None:
    config = configure("options={pccheck: {keep: 3}}", "workloads={vgg16: {batch_size: 7}}", "simple={interval: 5}")
    assert config.system_options("pccheck").model_dump()["keep"] == 3
    assert config.system_options("pccheck").model_dump()["max_in_flight"] == 2
    assert config.workload_options("vgg16").model_dump()["batch_size"] == 7
    assert config.workload_options("vgg16").model_dump()["image_size"] == 32
    assert config.simple.interval == 5
    assert config.simple.model == "vgg16"


def test_an_empty_override_is_null() -> None:
    assert configure("scratch=").scratch is None
    assert configure("threads=", "machine=null").threads is None


def test_data_paths_belong_to_the_models_that_read_them(tmp_path: Path) -> None:
    config = configure(f"data={{wikitext: '{tmp_path}'}}")
    assert config.data.of_workload("opt") == str(tmp_path)
    assert config.data.of_workload("vgg16") is None


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "parts"),
    [
        ("foo=1", ["--config: foo: unknown key", "known: scale, machine, models"]),
        ("repetitons=1", ["repetitons: unknown key (did you mean repetitions"]),
        ("models=vgg", ["models[0]: 'vgg'", "did you mean vgg16?", "known: vgg16", "opt"]),
        ("models=", ["models: None", "allowed: a list of models"]),
        ("models=[]", ["models: []", "at least"]),
        ("models=bert,bert", ["models: 'bert,bert': listed more than once: bert"]),
        (
            "systems=pcheck",
            ["systems[0]: 'pcheck'", "(did you mean pccheck or flowcheck?); known: none, "],
        ),
        ("intervals=-1", ["intervals[0]: -1: below 1", "allowed: a list of whole numbers from 1"]),
        ("intervals=0", ["intervals[0]: 0: interval 0 is the run without checkpoints"]),
        ("intervals=1,0", ["intervals[1]: '0': interval 0"]),
        ("intervals=1_10", ["intervals[0]: '1_10': not a whole number"]),
        ("intervals=[1_10]", ["intervals[0]: '1_10': not a whole number"]),
        ("intervals=1.5", ["intervals[0]: 1.5: not a whole number"]),
        ("intervals=1,1", ["listed more than once: 1"]),
        ("intervals=true", ["intervals[0]: True: not a whole number"]),
        ("repetitions=0", ["repetitions: 0", "allowed: a whole number from 1"]),
        ("iterations=ten", ["iterations: 'ten': not a whole number"]),
        ("iterations=1_0", ["iterations: '1_0': not a whole number"]),
        ("warmup_iterations=-1", ["warmup_iterations: -1"]),
        ("min_checkpoints=0", ["min_checkpoints: 0"]),
        ("proof=maybe", ["proof: 'maybe'", "'every' or 'first'"]),
        ("scale=huge", ["scale: 'huge'", "'laptop', 'gpu' or 'paper'"]),
        ("machine=My Machine", ["machine: 'My Machine'", "allowed: at most 64 of a-z"]),
        ("device=tpu", ["device: 'tpu'", "cpu or cuda"]),
        ("threads=0", ["threads: 0"]),
        ("seed=-1", ["seed: -1"]),
        (
            "data={images: /no/such/folder}",
            ["--config: data.images: '/no/such/folder': there is no such file or folder"],
        ),
        ("data={image: x}", ["data.image: unknown key (did you mean images?); known: images, squad, wikitext"]),
        (
            "workloads={vgg16: {batch_size: 0}}",
            ["--config: workloads.vgg16.batch_size: 0", "a whole number, at least 1"],
        ),
        ("workloads={vgg16: {batch: 1}}", ["workloads.vgg16.batch: unknown key (did you mean batch_size?)"]),
        ("workloads={vgg: {}}", ["--config: workloads.vgg: 'vgg': unknown model"]),
        ("options={pccheck: {keeep: 1}}", ["--config: options.pccheck.keeep: unknown key (did you mean keep?)"]),
        ("options={pccheck: {pressure: push}}", ["options.pccheck.pressure: 'push'", "'wait' or 'skip'"]),
        ("options={none: {keep: 1}}", ["options.none.keep: unknown key; known: no keys at all"]),
        ("simple={system: none}", ["simple.system: none takes no checkpoint"]),
        ("simple={interval: 80}", ["--config: simple.interval: 20 iterations are less than twice the interval, 80"]),
        ("simple={iterations: 19}", ["--config: simple.iterations: 19 iterations are less than twice"]),
        ("simple=3", ["--config: simple: 3"]),
    ],
)
def test_refusals_name_source_key_value_and_choices(entry: str, parts: list[str]) -> None:
    message = refusal(entry)
    assert message.startswith("--config: ")
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("entry", "part"),
    [
        ("models", "'models' is not KEY=VALUE"),
        ("data.images=x", "write data='{images: VALUE}'"),
        ("intervals=[1", "intervals=[1, line"),
    ],
)
def test_overrides_that_cannot_be_read(entry: str, part: str) -> None:
    with pytest.raises(ConfigError, match="--config: ") as caught:
        parse_overrides([entry])
    assert part in str(caught.value)


def test_a_key_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="models is given twice; put several values into one: models=A,B"):
        parse_overrides(["models=vgg16", "models=bert"])


def test_all_problems_are_named_at_once() -> None:
    message = refusal("models=vgg", "iterations=0", "foo=1")
    assert [line.split(":")[1].strip() for line in message.splitlines()] == ["models[0]", "iterations", "foo"]


def test_faults_in_the_file_are_blamed_on_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    text = (LAPTOP.parent / "default.yaml").read_text(encoding="utf-8")
    file.write_text(text.replace("iterations: 50 ", "iterations: 1_10 ").replace("seed: 0\n", ""), encoding="utf-8")
    message = refusal("repetitions=0", file=file)
    assert f"{file}: iterations: '1_10': not a whole number" in message
    assert f"{file}: seed: is missing; allowed: a whole number from 0" in message
    assert "--config: repetitions: 0" in message


def test_a_file_that_is_no_configuration(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(file)
    file.write_text("[1, 2]", encoding="utf-8")
    assert "holds list where a mapping" in refusal(file=file)
    file.write_text("a: [", encoding="utf-8")
    assert "not valid YAML" in refusal(file=file)
    file.write_text("seed: 1\nseed: 2\n", encoding="utf-8")
    assert "key 'seed' is given twice" in refusal(file=file)


# -- what this machine cannot do -----------------------------------------------------------------------------------


def test_more_threads_than_cores() -> None:
    assert "--config: threads: 5 threads on 4 cores; allowed: 1 to 4, or null" in refusal("threads=5")


def test_cuda_without_a_device() -> None:
    message = refusal("device=cuda")
    assert "device: 'cuda': this machine shows no CUDA device" in message
    assert "allowed here: cpu" in message


def test_a_model_that_the_gpu_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feasible, "cuda_devices", lambda: (CudaDevice("Small GPU", 1 << 20),))
    message = refusal("device=cuda", "models=bert")
    assert "workloads.bert: bert needs" in message
    assert "the GPU has 1 MiB" in message


def test_more_memory_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feasible, "memory_bytes", lambda: 1 << 28)
    message = refusal("models=bert")
    assert "of memory (and " in message
    assert "this machine has 256 MiB" in message


def test_more_disk_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feasible, "free_bytes", lambda path: 1 << 20)
    message = refusal("models=bert", "systems=sync")
    assert "scratch: 'scratch' has 1 MiB free, and " in message


def test_scratch_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feasible, "lies_in_memory", lambda path: True)
    assert "lies in memory" in refusal("scratch=somewhere")


def test_scratch_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "is not a folder" in refusal(f"scratch={tmp_path / 'file' / 'below'}")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_scratch_that_may_not_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    assert "this user may not write to" in refusal(f"scratch={tmp_path / 'below'}")


def test_every_key_is_documented() -> None:
    text = (ROOT / "docs" / "workflow.md").read_text(encoding="utf-8")
    missing = [name for name in Config.model_fields if f"`{name}`" not in text]
    assert not missing
