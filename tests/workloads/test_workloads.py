"""Every workload: its formula, its determinism, and exact resume."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from lastgood.errors import ConfigError, DataError
from lastgood.state import flatten
from lastgood.workloads.base import Workload
from lastgood.workloads.registry import (
    build_workload,
    workload_data_kind,
    workload_module,
    workload_names,
    workload_options_class,
)
from tests.workloads.tiny_options import TINY

READERS = [name for name in workload_names() if workload_data_kind(name) is not None]
"""Workloads that read data."""
LONG = {"resnet50", "resnet18"}
"""Convolutional as VGG-16 is, and longer: in the long suite."""
EVERYDAY = [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in workload_names()]


def make(name: str, data_dir: Path, size: int = 0, seed: int = 3, **more: str) -> Workload:
    options = workload_options_class(name)(**TINY[name][size], **more)
    return build_workload(name, options, data_dir=data_dir, data_path=None, seed=seed, device="cpu")


def train(workload: Workload, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = workload.loss(next(workload.data))
        loss.backward()
        workload.optimizer.step()
        workload.optimizer.zero_grad()
        if workload.scheduler is not None:
            workload.scheduler.step()
        losses.append(loss.item())
    return losses


OPTIONS: list[tuple[str, dict[str, str]]] = [
    *[(name, {"attention": "sdpa"}) for name in ("bert", "opt")],
    *[(name, {"precision": "bfloat16"}) for name in ("vgg16", "transformer_xl")],
    ("opt", {"attention": "sdpa", "precision": "bfloat16"}),
]
"""What changes how a model computes."""


def take(workload: Workload) -> dict[str, Any]:
    saved = {name: part.state_dict() for name, part in workload.state().items()}
    return copy.deepcopy({**saved, "rng": torch.get_rng_state()})


def give_back(workload: Workload, saved: dict[str, Any]) -> None:
    for name, part in workload.state().items():
        part.load_state_dict(copy.deepcopy(saved[name]))
    torch.set_rng_state(saved["rng"])


@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("name", workload_names())
def test_the_formula_counts_the_models_parameters(name: str, size: int, data_dir: Path) -> None:
    options = workload_options_class(name)(**TINY[name][size])
    model = make(name, data_dir, size).model
    assert options.parameters() == sum(parameter.numel() for parameter in model.parameters())
    assert all(parameter.requires_grad and parameter.dtype == torch.float32 for parameter in model.parameters())


@pytest.mark.parametrize("name", workload_names())
def test_the_formula_predicts_the_size_of_the_state(name: str, data_dir: Path) -> None:
    workload = make(name, data_dir)
    train(workload, 1)
    options = workload_options_class(name)(**TINY[name][0])
    found = 4 * sum(parameter.numel() for parameter in workload.model.parameters())
    for moments in workload.optimizer.state.values():
        found += sum(4 * value.numel() for value in moments.values() if torch.is_tensor(value) and value.dim() > 0)
    found += sum(4 * part.hidden.numel() for part in workload.extra.values())
    assert options.state_bytes() == found


@pytest.mark.parametrize("name", workload_names())
def test_published_sizes(name: str) -> None:
    published = {
        "vgg16": ({"classifier_width": 4096, "image_size": 224, "classes": 1000}, 138_357_544),
        "resnet18": ({"image_size": 224, "classes": 1000}, 11_689_512),
        "resnet50": ({"image_size": 224, "classes": 1000}, 25_557_032),
        "bert": (
            {
                "sequence_length": 384,
                "layers": 24,
                "hidden": 1024,
                "heads": 16,
                "feedforward": 4096,
                "vocabulary": 30522,
            },
            334_094_338,
        ),
        "opt": (
            {
                "sequence_length": 1024,
                "layers": 24,
                "hidden": 2048,
                "heads": 32,
                "feedforward": 8192,
                "vocabulary": 50272,
            },
            1_315_758_080,
        ),
        "bloom": (
            {"sequence_length": 1024, "layers": 24, "hidden": 1024, "heads": 16, "vocabulary": 250880},
            559_214_592,
        ),
    }
    if name in published:
        values, parameters = published[name]
        assert workload_options_class(name)(batch_size=1, **values).parameters() == parameters


@pytest.mark.parametrize("name", EVERYDAY)
def test_the_same_seed_gives_the_same_losses_and_another_seed_others(name: str, data_dir: Path) -> None:
    torch.manual_seed(99)
    first = train(make(name, data_dir), 3)
    torch.rand(5)
    assert train(make(name, data_dir), 3) == first
    assert train(make(name, data_dir, seed=4), 3) != first


@pytest.mark.parametrize("name", EVERYDAY)
def test_training_after_a_restore_gives_the_losses_of_training_never_stopped(name: str, data_dir: Path) -> None:
    unbroken = make(name, data_dir)
    train(unbroken, 3)
    saved = take(unbroken)
    expected = train(unbroken, 3)

    resumed = make(name, data_dir)
    train(resumed, 2)  # its optimizer, memory and running statistics hold something that must not survive
    give_back(resumed, saved)
    assert train(resumed, 3) == expected
    ends = zip(unbroken.model.state_dict().items(), resumed.model.state_dict().items(), strict=True)
    for (key, live), (_, again) in ends:
        assert torch.equal(live, again), key


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_options_change_the_arithmetic_and_not_the_model(name: str, options: dict[str, str], data_dir: Path) -> None:
    plain = make(name, data_dir)
    other = make(name, data_dir, **options)
    for (key, value), (_, same) in zip(plain.model.state_dict().items(), other.model.state_dict().items(), strict=True):
        assert torch.equal(value, same) and value.dtype == same.dtype, key
    plain.model.eval()
    other.model.eval()
    before, after = (workload.loss(workload.data.batch(0)).item() for workload in (plain, other))
    assert after == pytest.approx(before, rel=2e-2)
    if "precision" in options:
        assert after != before
    expected = train(make(name, data_dir, **options), 4)
    first = make(name, data_dir, **options)
    assert train(first, 2) == expected[:2]
    saved = take(first)
    again = make(name, data_dir, **options)
    train(again, 1)
    give_back(again, saved)
    assert train(again, 2) == expected[2:]


def test_options_that_came_later_are_named_only_if_they_are_chosen() -> None:
    options = workload_options_class("opt")
    assert options(**TINY["opt"][0]).model_dump() == TINY["opt"][0]
    chosen = {"attention": "sdpa", "precision": "bfloat16"}
    assert options(**TINY["opt"][0], **chosen).model_dump() == {**TINY["opt"][0], **chosen}


def test_dropout_draws_from_the_saved_generator(data_dir: Path) -> None:
    workload = make("bert", data_dir)
    batch = workload.data.batch(0)
    state = torch.get_rng_state()
    first = workload.loss(batch).item()
    assert workload.loss(batch).item() != first
    torch.set_rng_state(state)
    assert workload.loss(batch).item() == first


def test_batch_norm_statistics_move_in_the_forward_pass(data_dir: Path) -> None:
    workload = make("resnet50", data_dir)
    before = copy.deepcopy(dict(workload.model.named_buffers()))
    workload.loss(workload.data.batch(0))
    moved = [name for name, buffer in workload.model.named_buffers() if not torch.equal(buffer, before[name])]
    assert len(moved) == len(before)


@pytest.mark.parametrize("name", workload_names())
def test_facts_of_the_data(name: str, data_dir: Path) -> None:
    facts = make(name, data_dir).data_facts
    assert set(facts) == {"name", "source", "sha256"}
    assert facts["name"].startswith(workload_data_kind(name) or "points")
    assert len(facts["sha256"]) == 64


@pytest.mark.parametrize("name", READERS)
def test_missing_data_names_the_command(name: str, tmp_path: Path) -> None:
    options = workload_options_class(name)(**TINY[name][0])
    with pytest.raises(DataError, match="lastgood data prepare"):
        build_workload(name, options, data_dir=tmp_path, data_path=None, seed=0, device="cpu")


@pytest.mark.parametrize("name", READERS)
def test_a_path_that_is_not_there_is_named(name: str, data_dir: Path, tmp_path: Path) -> None:
    options = workload_options_class(name)(**TINY[name][0])
    with pytest.raises(DataError, match=r"no-such-place.*expected"):
        build_workload(name, options, data_dir=data_dir, data_path=tmp_path / "no-such-place", seed=0, device="cpu")


@pytest.mark.parametrize("call", [workload_options_class, workload_data_kind, workload_module])
def test_an_unknown_workload_names_the_known_ones(call: Any) -> None:
    with pytest.raises(ConfigError, match=r"alexnet.*vgg16.*bloom"):
        call("alexnet")


def test_options_of_another_workload_are_refused(data_dir: Path) -> None:
    options = workload_options_class("resnet50")(**TINY["resnet50"][0])
    with pytest.raises(ConfigError, match="Vgg16Options"):
        build_workload("vgg16", options, data_dir=data_dir, data_path=None, seed=0, device="cpu")


def test_fewer_classes_than_the_data_has_are_refused(data_dir: Path) -> None:
    options = workload_options_class("vgg16")(**{**TINY["vgg16"][0], "classes": 9})
    with pytest.raises(ConfigError, match="10 classes"):
        build_workload("vgg16", options, data_dir=data_dir, data_path=None, seed=0, device="cpu")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("vgg16", {"batch_size": 0}, "batch_size"),
        ("vgg16", {"image_size": 31}, "image_size"),
        ("vgg16", {"width": 3}, "width"),
        ("resnet50", {"batch_size": 1}, "BatchNorm"),
        ("bert", {"heads": 3}, "divisible"),
        ("bert", {"sequence_length": 8}, "sequence_length"),
        ("transformer_xl", {"hidden": 15, "heads": 3}, "even"),
        ("transformer_xl", {"memory_length": -1}, "memory_length"),
        ("opt", {"vocabulary": 100}, "vocabulary"),
        ("bloom", {"layers": 0}, "layers"),
        ("blob", {"megabytes": 0}, "megabytes"),
    ],
)
def test_options_that_cannot_work_are_refused(name: str, change: dict[str, int], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        workload_options_class(name)(**{**TINY[name][0], **change})


def test_names_and_options_need_no_torch() -> None:
    code = (
        "import sys, lastgood.workloads.registry, lastgood.workloads.options\n"
        "assert not {'torch', 'numpy', 'transformers', 'tokenizers'} & set(sys.modules), 'a heavy module was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_blob_is_deferred_state_of_its_size_and_only_a_little_of_it_is_trained(data_dir: Path) -> None:
    workload = make("blob", data_dir, size=1)
    before = [parameter.detach().clone() for parameter in workload.model.parameters()]
    losses = train(workload, 3)
    assert all(loss < 1e6 for loss in losses)
    moved = [not torch.equal(old, new) for old, new in zip(before, workload.model.parameters(), strict=True)]
    assert moved == [True, False, False]
    flat = flatten(workload.state())
    assert (
        sum(block.numel() * block.element_size() for block in flat.blocks[: flat.layout.deferred_blocks]) == 65_000_000
    )
    # Random: a disk that compresses cannot make it smaller.
    assert before[1].std() > 0.5
