"""Job descriptions of real objects: what they say is what the training does, and what is read back is what was said."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lastgood.errors import ConfigError
from lastgood.mirror.job.ddp import assign, initial_buckets
from lastgood.mirror.job.describe import ddp_settings, describe
from lastgood.mirror.job.description import JobDescription, read_job, write_job
from lastgood.mirror.job.factory import Training, call_factory, training_of
from lastgood.mirror.job.rules import ScalerSettings
from lastgood.optim.rule import GroupRule
from lastgood.units import MIB


def model() -> nn.Module:
    made = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Linear(5, 2))
    made[0].weight.requires_grad_(False)
    made[3].to(memory_format=torch.channels_last)
    return made


def training(schedule: str = "none", **more: Any) -> Training:
    made = model()
    trainable = [one for one in made.parameters() if one.requires_grad]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(
        [{"params": trainable[:2], "lr": 0.1}, {"params": trainable[2:]}], lr=0.01, weight_decay=0.1
    )
    schedulers = torch.optim.lr_scheduler
    scheduler = {
        "none": lambda: None,
        "lambda": lambda: schedulers.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
        "cosine": lambda: schedulers.CosineAnnealingLR(optimizer, 50),
        "one cycle": lambda: schedulers.OneCycleLR(optimizer, [0.3, 0.2], total_steps=100),
        "steps": lambda: schedulers.MultiStepLR(optimizer, [3, 7]),
        "chain": lambda: schedulers.SequentialLR(
            optimizer, [schedulers.LinearLR(optimizer, 0.1), schedulers.ExponentialLR(optimizer, 0.9)], [4]
        ),
    }[schedule]()
    return Training(made, optimizer, scheduler, **more)


def test_tensors_are_told_in_module_order(tmp_path: Path) -> None:
    made = training()
    job = describe(made, ranks=3)
    named = list(made.model.named_parameters())
    assert [one.name for one in job.parameters] == [name for name, _ in named]
    for one, (_, tensor) in zip(job.parameters, named, strict=True):
        assert (one.shape, one.stride) == (tuple(tensor.shape), tensor.stride())
        assert one.nbytes == tensor.nbytes
        assert one.trainable is tensor.requires_grad
        # In this order of dimensions the elements lie one after another.
        assert tensor.permute(one.order).is_contiguous()
    assert [one.name for one in job.buffers] == [name for name, _ in made.model.named_buffers()]
    held = [one for group in made.optimizer.param_groups for one in group["params"]]
    assert [dict(named)[job.parameters[place].name] is one for place, one in zip(job.optimized, held, strict=True)]
    write_job(job, tmp_path / "job.json")
    assert read_job(tmp_path / "job.json") == job


@pytest.mark.parametrize("schedule", ["none", "lambda", "cosine", "one cycle", "steps", "chain"])
@pytest.mark.parametrize("every", [1, 3])
def test_rules_are_those_of_the_training_itself(schedule: str, every: int) -> None:
    made = training(schedule, steps_per_schedule=every)
    before = [{key: value for key, value in one.items() if key != "params"} for one in made.optimizer.param_groups]
    job = JobDescription.model_validate_json(describe(made, ranks=2, steps=30).model_dump_json())
    after = [{key: value for key, value in one.items() if key != "params"} for one in made.optimizer.param_groups]
    assert before == after
    for step in range(30):
        assert job.rules.rule(step).groups == tuple(map(GroupRule.of, made.optimizer.param_groups)), step
        made.optimizer.step()
        if made.scheduler is not None and (step + 1) % every == 0:
            made.scheduler.step()
        if made.scheduler is not None:
            state: Any = training(schedule, steps_per_schedule=every).scheduler
            told = with_changes(state.state_dict(), job.rules.scheduler_state(step))
            assert plain(told) == plain(made.scheduler.state_dict()), step
    if schedule == "none":
        assert job.rules.rule(10**9).groups == job.rules.rule(0).groups
    else:
        with pytest.raises(ConfigError, match="30 steps"):
            job.rules.rule(30)


def with_changes(tree: Any, changes: Sequence[tuple[tuple[str | int, ...], float | int]]) -> Any:
    """A copy of a tree of dicts and lists, with other values at some paths."""
    here = {path[0]: value for path, value in changes if len(path) == 1}
    below: dict[str | int, list[tuple[tuple[str | int, ...], float | int]]] = {}
    for path, value in changes:
        if len(path) > 1:
            below.setdefault(path[0], []).append((path[1:], value))
    if isinstance(tree, dict):
        return {key: here[key] if key in here else with_changes(one, below.get(key, ())) for key, one in tree.items()}
    if isinstance(tree, (list, tuple)):
        changed = [here[i] if i in here else with_changes(one, below.get(i, ())) for i, one in enumerate(tree)]
        return changed if isinstance(tree, list) else tuple(changed)
    return tree


def plain(tree: Any) -> Any:
    """Without functions and objects."""
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [plain(value) for value in tree]
    return tree if isinstance(tree, (int, float, str)) else None


def test_a_schedule_that_looks_at_losses_is_refused() -> None:
    made = training()
    made.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(made.optimizer)  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="ReduceLROnPlateau"):
        describe(made, ranks=2, steps=3)


@pytest.mark.parametrize("interval", [1, 3])
def test_loss_scales_follow_torchs_own_arithmetic(interval: int) -> None:
    settings = ScalerSettings(scale=3.3e38, growth_factor=1.7, backoff_factor=0.3, growth_interval=interval)
    state = settings.start()
    scale, tracker = torch.tensor(3.3e38), torch.tensor(0, dtype=torch.int32)
    generator = torch.Generator().manual_seed(1)
    for _ in range(200):
        overflow = bool(torch.rand((), generator=generator) < 0.3)
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(overflow)), 1.7, 0.3, interval)
        state = state.after(settings, overflow)
        assert (state.scale, state.growth_tracker) == (float(scale), int(tracker))
        assert state.inverse == float(scale.double().reciprocal().float())


def test_buckets_are_those_of_torch() -> None:
    generator = torch.Generator().manual_seed(3)
    for _ in range(50):
        counts = torch.randint(1, 3000, (20,), generator=generator).tolist()
        kinds = torch.randint(0, 2, (20,), generator=generator).tolist()
        tensors = [torch.empty(n, dtype=(torch.float32, torch.bfloat16)[k]) for n, k in zip(counts, kinds, strict=True)]
        for limits in ([4000], [2000, 9000], [1000, 5000, 20000]):
            wanted, _ = torch.distributed._compute_bucket_assignment_by_size(tensors, limits)
            assert assign([one.nbytes for one in tensors], kinds, limits) == wanted


def test_ddp_arguments() -> None:
    assert ddp_settings({}).cap == 25 * MIB
    assert ddp_settings({"bucket_cap_mb": 2}).first_cap == 2 * MIB
    assert ddp_settings({"bucket_cap_mb_list": [1, 4]}).cap_list == (MIB, 4 * MIB)
    assert ddp_settings({"broadcast_buffers": False}).init_buffers is False
    only = ddp_settings({"forward_sync_buffers": False})
    assert (only.init_buffers, only.forward_buffers) == (True, False)
    assert ddp_settings({}, buffers=False).forward_buffers is False
    assert ddp_settings({"gradient_as_bucket_view": True, "device_ids": [0], "hook": "fp16"}).hook == "fp16"
    for wrong in ({"mixed_precision": object()}, {"no_such": 1}, {"hook": "powersgd"}):
        with pytest.raises(ConfigError):
            ddp_settings(wrong)


def test_first_buckets() -> None:
    job = describe(training(), ranks=2)
    assert initial_buckets(job) == (tuple(range(len(job.trainable))),)


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    made = nn.Linear(3, 2)
    return made, torch.optim.SGD(made.parameters(), lr=0.1)


def test_factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert training_of(make(), "make").scheduler is None
    (tmp_path / "own_training.py").write_text(
        "import torch\n"
        "def make():\n"
        "    model = torch.nn.Linear(3, 2)\n"
        "    return {'model': model, 'optimizer': torch.optim.SGD(model.parameters(), lr=0.1), 'clip_norm': 1.0}\n"
        "def wrong():\n    return 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    job = describe(call_factory("own_training:make"), ranks=2)
    assert job.rules.clip is not None
    assert job.rules.clip.limit == 1.0
    for path in ("own_training", "own_training:none", "no_such_module:make", "own_training:wrong"):
        with pytest.raises(ConfigError):
            call_factory(path)


def test_what_cannot_be_followed_is_refused() -> None:
    made = training()
    made.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    with pytest.raises(ConfigError, match="none of the model"):
        describe(made, ranks=2)
    linear = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="Adagrad"):
        describe(Training(linear, torch.optim.Adagrad(linear.parameters())), ranks=2)


# -- hostile files -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(describe(training("cosine"), ranks=2, steps=20).model_dump_json())
    return data


def test_every_key_is_checked(written: dict[str, Any], tmp_path: Path) -> None:
    """Each value in turn becomes one of another type, or too large: refused with its file's name, or as before."""
    path = tmp_path / "job.json"
    names = [*written, *(("ddp", key) for key in written["ddp"]), *(("rules", key) for key in written["rules"])]
    for name in names:
        for wrong in (-1, "x" * 100_000, [[]], {"a": 1}, 1 << 80, None, True, 1.5):
            copy = json.loads(json.dumps(written))
            holder, key = (copy, name) if isinstance(name, str) else (copy[name[0]], name[1])
            holder[key] = wrong
            path.write_text(json.dumps(copy))
            try:
                read_job(path)
            except ConfigError as error:
                assert str(path) in str(error)
                assert len(str(error)) < 2000


@pytest.mark.parametrize(
    "change",
    [
        lambda job: job.update(version=2),
        lambda job: job.update(extra=1),
        lambda job: job["optimized"].append(0),
        lambda job: job["parameters"].append(job["parameters"][0]),
        lambda job: job["parameters"][0].update(shape=[1 << 49, 1 << 49]),
        lambda job: job["parameters"][0].update(stride=[1, 1, 1, 1]),
        lambda job: job["parameters"][0].update(dtype="object"),
        lambda job: job["rules"].update(steps=10**6),
        lambda job: job["rules"]["columns"][0].update(base64="AAAA"),
        lambda job: job["rules"]["varying"][0].update(column=99),
        lambda job: job["rules"]["initial"].pop(),
        lambda job: [one.update(trainable=False) for one in job["parameters"]],
        lambda job: job["backend"].update(kind="nccl"),
    ],
)
def test_what_does_not_fit_together_is_refused(written: dict[str, Any], tmp_path: Path, change: Any) -> None:
    copy = json.loads(json.dumps(written))
    change(copy)
    (tmp_path / "job.json").write_text(json.dumps(copy))
    with pytest.raises(ConfigError, match=r"job\.json"):
        read_job(tmp_path / "job.json")


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "null", '{"version": 1}', "\x00"])
def test_what_is_no_description_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.json").write_text(text)
    with pytest.raises(ConfigError, match=r"job\.json"):
        read_job(tmp_path / "job.json")
    with pytest.raises(ConfigError, match=r"none\.json"):
        read_job(tmp_path / "none.json")
