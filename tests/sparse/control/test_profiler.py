"""The profiler: which point comes next, the surface, a restart after a kill, and real probes."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from lastgood.cli import app
from lastgood.errors import ConfigError
from lastgood.experiments.plots.profile import plot_profile
from lastgood.sparse.control import profiler
from lastgood.sparse.control.objective import Problem, Worker
from lastgood.sparse.control.profile import Profile, Wanted, begin_profile, read_profile, write_profile
from lastgood.sparse.control.profiler import LagModel, expected_improvement, next_point, profile_on
from lastgood.sparse.control.replay import read_surface
from lastgood.training.sparse_probe import probe
from lastgood.workloads.base import BatchStream, Workload
from lastgood.workloads.data.prepare import prepare_dataset

WANTED = Wanted(
    workload="resnet18",
    parameters=11_000_000,
    seed=0,
    compressor="v16",
    staleness=1,
    part_samples=4096,
    repeats=1,
    least_samples=8,
    most_samples=128,
    least_compression=0.9,
    most_compression=0.999,
    nodes=2,
    mbit_per_s=100.0,
    lambda_=5.0,
    g_scale=1.0,
)
EMPTY = Profile(profile_version=1, wanted=WANTED)


def lag(samples: float, compression: float) -> float:
    return 0.02 * math.log2(samples / 8) ** 1.3 + 0.05 * (-math.log10(1 - compression) - 1) ** 2


def step_s(samples: float) -> float:
    return 0.02 + 0.004 * samples


def trial(samples: int, compression: float) -> tuple[list[float], int, float]:
    return [2.0 + lag(samples, compression)], WANTED.part_samples // samples, step_s(samples)


def made(probes: int, keep=lambda _: None, begun=EMPTY, trial=trial) -> Profile:
    return profile_on(begun, probes, lambda: [2.0], trial, keep)


@pytest.fixture(scope="module")
def done() -> Profile:
    return made(15)


def test_expected_improvement_is_the_mean_of_what_is_gained() -> None:
    """By the plain integral over the normal distribution."""
    steps = np.linspace(-9, 9, 200_001)
    density = np.exp(-(steps**2) / 2) / math.sqrt(2 * math.pi)
    means, deviations = np.array([1.0, 0.5, 3.0, 0.2, 1.4]), np.array([0.3, 1.0, 0.5, 0.0, 0.0])
    found = expected_improvement(means, deviations, 1.0)
    for mean, deviation, one in zip(means, deviations, found, strict=True):
        gains = np.maximum(0.0, 1.0 - (mean + deviation * steps))
        assert one == pytest.approx(float(np.trapezoid(gains * density, steps)), abs=1e-6)


def test_the_surface_is_what_was_measured_and_surest_there(done: Profile) -> None:
    model = LagModel(done.probes)
    points = [(samples, compression) for samples in (10, 30, 100) for compression in (0.93, 0.98, 0.997)]
    means, deviations = model.predict([(float(one), other) for one, other in points])
    for (samples, compression), mean, deviation in zip(points, means, deviations, strict=True):
        assert abs(mean - lag(samples, compression)) < 0.02
        assert 0 <= deviation < 0.05
    near, far = LagModel(done.probes[:5]).predict([(8.0, 0.9), (45.0, 0.97)])[1]
    assert near < far
    assert done.surface is not None
    assert done.surface.grid().lag(32, 0.99) == pytest.approx(lag(32, 0.99), abs=0.03)


def test_the_best_setting_is_found_with_few_probes(done: Profile) -> None:
    """By the price that the controller pays, among all points of a fine grid."""
    problem = Problem((Worker(0.004, 0.02, 0, 128, 100e6),) * 2, WANTED.parameters, 1, 128)

    def price(samples: float, compression: float) -> float:
        seconds = problem.iteration_s([samples / 2] * 2, compression) / samples
        return seconds * (1 + 5 * lag(samples, compression))

    sizes = np.geomspace(8, 128, 40)
    best = min(price(one, 1 - other) for one in sizes for other in np.geomspace(0.1, 0.001, 40))
    assert min(price(one.samples, one.compression) for one in done.probes) < 1.03 * best
    assert len({(one.samples, one.compression) for one in done.probes}) == 15


def test_a_profile_that_was_killed_goes_on_to_the_same(done: Profile, tmp_path: Path) -> None:
    """`done` began in the same way: each of its probes follows from those before it."""
    path = tmp_path / "profile.json"
    for killed_at in (3, 6):
        left = [killed_at - len(begin_profile(path, WANTED).probes)]

        def dies(samples: int, compression: float, left: list[int] = left) -> tuple[list[float], int, float]:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            return trial(samples, compression)

        with pytest.raises(KeyboardInterrupt):
            made(8, lambda now: write_profile(path, now), begin_profile(path, WANTED), dies)
        assert len(read_profile(path).probes) == killed_at
    again = made(8, lambda now: write_profile(path, now), begin_profile(path, WANTED))
    assert again.probes == done.probes[:8] and again == read_profile(path)
    assert [one.name for one in tmp_path.iterdir()] == ["profile.json"]


def test_another_profile_is_not_gone_on_with(done: Profile, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(path, done)
    with pytest.raises(ConfigError, match=r"compressor is 'v16' there and 'topk' here; name another file$"):
        begin_profile(path, WANTED.model_copy(update={"compressor": "topk"}))
    path.write_text(path.read_text().replace('"profile_version": 1', '"profile_version": 2'))
    with pytest.raises(ConfigError, match=r"profile\.json: profile_version"):
        begin_profile(path, WANTED)


def test_the_controller_reads_the_surface(done: Profile, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(path, done)
    assert done.surface is not None
    assert read_surface(path) == done.surface.grid()
    write_profile(path, made(2))
    with pytest.raises(ConfigError, match=r"profile\.json: the profile has too few probes for a surface so far$"):
        read_surface(path)


def test_all_points_may_be_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "_GRID", 3)
    few = EMPTY.model_copy(update={"wanted": WANTED.model_copy(update={"least_samples": 8, "most_samples": 9})})
    probed = made(6, begun=few)
    with pytest.raises(ConfigError, match=r"^all points between the limits of this profile are probed: 6$"):
        next_point(probed)


def test_a_loss_that_never_lags_is_a_flat_surface() -> None:
    flat = made(7, trial=lambda samples, compression: ([2.0], 1, step_s(samples)))
    assert flat.surface is not None and {one for row in flat.surface.lags for one in row} == {0.0}


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"least_samples": 200}, "go from a lower to a higher value"),
        ({"least_compression": 0.9995}, "go from a lower to a higher value"),
        ({"part_samples": 1000}, "a part of 1000 samples is less than 8 of the largest batches, 128"),
    ],
)
def test_a_profile_of_nothing_is_refused(changed: dict[str, float], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Wanted(**{**WANTED.model_dump(), **changed})


def test_pictures_are_the_same_each_time(done: Profile, tmp_path: Path) -> None:
    drawn = [plot_profile(done, "it", tmp_path / name) for name in ("a", "b")]
    assert [one.suffix for one in drawn[0]] == [".pdf", ".png", ".svg"]
    for one, other in zip(*drawn, strict=True):
        assert one.read_bytes() == other.read_bytes()
    with pytest.raises(ConfigError, match=r"^it: too few probes for a surface so far: 2$"):
        plot_profile(made(2), "it", tmp_path / "c")


# -- real probes -------------------------------------------------------------------------------------------------------


class _Points(BatchStream):
    def batch(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(5, 30, generator=generator)
        return {"x": x, "y": x[:, :3].sum(1, keepdim=True)}


def workload() -> Workload:
    torch.manual_seed(7)
    model = nn.Linear(30, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    return Workload(
        "line", model, optimizer, _Points(), lambda one: nn.functional.mse_loss(model(one["x"]), one["y"]), {}
    )


def test_without_compression_a_probe_is_a_plain_training() -> None:
    kind = {"compressor": "none", "staleness": 0, "part_samples": 80, "first_sample": 10}
    found = probe(workload, "cpu", samples=4, compression=0.0, **kind)
    plain = workload()
    rows = [plain.data.batch(number) for number in range(20)]
    joined = {name: torch.cat([one[name] for one in rows]) for name in ("x", "y")}
    losses = []
    for step in range(20):
        begin = 10 + 4 * step
        loss = plain.loss({name: one[begin : begin + 4] for name, one in joined.items()})
        plain.optimizer.zero_grad()
        loss.backward()
        plain.optimizer.step()
        losses.append(float(loss.detach()))
    assert (found.loss, found.steps) == (pytest.approx(sum(losses[-5:]) / 5, rel=1e-5), 20)


def test_what_is_not_sent_makes_the_loss_lag() -> None:
    kind = {"compressor": "topk", "staleness": 0, "part_samples": 200, "first_sample": 0}
    losses = [probe(workload, "cpu", samples=4, compression=one, **kind).loss for one in (0.0, 0.5, 0.95)]
    assert losses == sorted(losses) and losses[2] > 1.5 * losses[0]


def test_a_loss_that_is_not_finite_says_nothing() -> None:
    def wild() -> Workload:
        found = copy.copy(workload())
        found.optimizer.param_groups[0]["lr"] = 1e20
        return found

    kind = {"compressor": "none", "staleness": 0, "part_samples": 80, "first_sample": 0}
    with pytest.raises(ConfigError, match=r"line: the loss is (nan|inf) after 20 steps of 4 samples"):
        probe(wild, "cpu", samples=4, compression=0.0, **kind)


@pytest.mark.slow
def test_the_commands_profile_and_draw_a_workload(tmp_path: Path) -> None:
    prepare_dataset("images", tmp_path / "data")
    out = tmp_path / "profile.json"
    words = ["stellatrain", "profile", str(out), "--threads", "1", "--config", f"data_dir={tmp_path / 'data'}"]
    small = ["--least-samples", "2", "--most-samples", "4", "--part-samples", "32", "--json"]
    begun = CliRunner().invoke(app, [*words, *small, "--probes", "5"])
    assert begun.exit_code == 0, begun.output
    done = CliRunner().invoke(app, [*words, *small, "--probes", "6"])
    found = json.loads(done.stdout)
    assert found["probes"][:5] == json.loads(begun.stdout)["probes"] and len(found["probes"]) == 6
    drawn = CliRunner().invoke(app, ["stellatrain", "plot-profile", str(out), "--out-stem", str(tmp_path / "p")])
    assert drawn.exit_code == 0 and (tmp_path / "p.pdf").stat().st_size > 1000
