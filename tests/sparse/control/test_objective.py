"""The objective: fits, splits, bisection and what Nelder-Mead finds, against plain searches."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood.errors import ConfigError
from lastgood.sparse.control.objective import (
    Choice,
    GridSurface,
    Problem,
    Weighing,
    Worker,
    apportion,
    batch_weights,
    best_choice,
    fit_times,
    level,
    price,
)

FEW = settings(max_examples=15, deadline=None)
SURFACE = GridSurface((16.0, 128.0), (0.0, 0.9, 0.99, 0.999), ((0.0, 0.004, 0.02, 0.08), (0.02, 0.03, 0.05, 0.12)))


@st.composite
def workers(draw, most=4):
    count = draw(st.integers(1, most))
    made = []
    for _ in range(count):
        least = draw(st.integers(0, 4))
        made.append(
            Worker(
                draw(st.floats(1e-4, 0.1)),
                draw(st.floats(0.0, 0.5)),
                least,
                draw(st.integers(max(1, least), 64)),
                draw(st.floats(1e6, 1e10)),
            )
        )
    return tuple(made)


@st.composite
def problems(draw, surface=SURFACE):
    made = draw(workers())
    least, most = max(1, sum(w.least_samples for w in made)), sum(w.most_samples for w in made)
    first = draw(st.integers(least, most))
    last = draw(st.sampled_from([first, most]))
    return Problem(
        made, draw(st.integers(1, 10**8)), first, last, overlap=draw(st.floats(0, 1)), surface=surface or SURFACE
    )


def kept(problem: Problem, choice: Choice) -> None:
    assert problem.least_total <= sum(choice.samples) <= problem.most_total
    for worker, own in zip(problem.workers, choice.samples, strict=True):
        assert worker.least_samples <= own <= worker.most_samples
    assert problem.least_compression <= choice.compression <= problem.most_compression


@FEW
@given(problems())
def test_the_choice_keeps_sum_and_limits_and_is_the_same_again(problem):
    choice = best_choice(problem, starts=2, seed=7)
    kept(problem, choice)
    assert best_choice(problem, starts=2, seed=7) == choice


@FEW
@given(workers(), st.floats(0, 1))
def test_a_split_in_whole_numbers_keeps_sum_and_limits_and_stays_near(made, place):
    least, most = sum(w.least_samples for w in made), sum(w.most_samples for w in made)
    total = max(1, round(least + place * (most - least)))
    problem = Problem(made, 1, total, total)
    parts = level(problem, total)
    assert sum(parts) == pytest.approx(total, abs=1e-3) or all(w.beta_s > 0 for w in made)
    whole = apportion(parts, total, made)
    assert sum(whole) == total
    assert all(w.least_samples <= own <= w.most_samples for w, own in zip(made, whole, strict=True))
    if math.isclose(sum(parts), total, abs_tol=1e-3):
        assert all(abs(own - part) <= 1.001 for own, part in zip(whole, parts, strict=True))


@FEW
@given(st.lists(st.tuples(st.floats(1e-3, 0.1), st.floats(0, 0.3)), min_size=2, max_size=3), st.integers(3, 20))
def test_the_level_split_is_the_fastest_of_all(speeds, total):
    made = tuple(Worker(alpha, beta, 0, total, 1e9) for alpha, beta in speeds)
    problem = Problem(made, 1, total, total)
    fastest = min(
        problem.compute_s(split)
        for split in itertools.product(range(total + 1), repeat=len(made))
        if sum(split) == total
    )
    assert problem.compute_s(level(problem, total)) <= fastest * (1 + 1e-6)


@FEW
@given(problems(), st.floats(1.0, 100.0))
def test_more_bandwidth_never_asks_for_more_compression_of_the_same_split(problem, faster):
    quick = Problem(
        tuple(
            Worker(w.alpha_s, w.beta_s, w.least_samples, w.most_samples, w.link_bits_per_s * faster)
            for w in problem.workers
        ),
        problem.elements,
        problem.least_total,
        problem.most_total,
        overlap=problem.overlap,
        surface=problem.surface,
    )
    samples = apportion(level(problem, problem.least_total), problem.least_total, problem.workers)
    slow, fast = problem.compression_for(samples), quick.compression_for(samples)
    assert fast <= slow
    assert price(quick, samples, fast) <= price(problem, samples, slow) * (1 + 1e-9)
    # What is chosen hides the exchange, unless nothing does.
    if slow < problem.most_compression:
        assert problem.exchange_s(slow) <= problem.overlap * problem.compute_s(samples) * (1 + 1e-9)


def test_a_choice_follows_the_bandwidth():
    """From 100 kbit/s to 100 Gbit/s: less and less compression, never a longer iteration."""
    found = []
    for exponent in range(5, 12):
        made = (Worker(0.01, 0.05, 1, 64, 10.0**exponent), Worker(0.02, 0.05, 1, 64, 1e12))
        found.append(best_choice(Problem(made, 11_181_642, 64, 64), starts=2))
    compressions = [one.compression for one in found]
    assert compressions == sorted(compressions, reverse=True)
    assert compressions[0] == 0.999 and compressions[-1] == 0.0
    assert all(first.cost >= second.cost * (1 - 2e-3) for first, second in itertools.pairwise(found))
    assert found[-1].samples == (43, 21)


def test_nelder_mead_comes_near_the_best_of_a_complete_search():
    made = (Worker(0.01, 0.05, 1, 24, 100e6), Worker(0.02, 0.02, 1, 24, 50e6))
    problem = Problem(made, 4_000_000, 8, 40, surface=SURFACE)

    def cost(split):
        return price(problem, split, problem.compression_for(split))

    best = min(cost((a, b)) for a in range(1, 25) for b in range(1, 25) if 8 <= a + b <= 40)
    assert best_choice(problem, starts=8).cost <= best * 1.005


def test_a_heavier_lambda_pays_with_time_for_less_compression():
    made = (Worker(0.01, 0.05, 1, 64, 20e6), Worker(0.01, 0.05, 1, 64, 20e6))
    light, heavy = (
        best_choice(Problem(made, 11_181_642, 32, 128, weighing=Weighing(weight), surface=SURFACE), starts=8)
        for weight in (0.0, 200.0)
    )
    lag = [SURFACE.lag(sum(one.samples), one.compression) for one in (light, heavy)]
    assert lag[1] < lag[0]


@FEW
@given(st.floats(1e-4, 0.1), st.floats(0, 1), st.lists(st.integers(1, 256), min_size=2, max_size=8, unique=True))
def test_a_fit_finds_the_line(alpha, beta, sizes):
    found = fit_times((size, alpha * size + beta) for size in sizes)
    assert found == (pytest.approx(alpha, rel=1e-6), pytest.approx(beta, rel=1e-4, abs=1e-6))


def test_a_fit_bears_outliers_and_one_size_and_never_goes_below_zero():
    chance = random.Random(1)
    points = [(size, 0.01 * size + 0.1 + chance.uniform(0, 1e-4)) for size in (8, 16, 32) for _ in range(9)]
    points += [(size, 30.0) for size in (8, 16, 32)]
    alpha, beta = fit_times(points)
    assert (alpha, beta) == (pytest.approx(0.01, rel=0.01), pytest.approx(0.1, rel=0.02))
    assert fit_times([(8, 0.4)]) == (0.05, 0.0)
    assert fit_times([(8, 0.4), (16, 0.2)]) == (0.0, pytest.approx(0.3))
    alpha, beta = fit_times([(8, 0.1), (16, 0.4)])
    assert alpha > 0 and beta == 0
    for none in ([], [(0, 1.0)], [(8, math.nan)], [(8, math.inf)]):
        with pytest.raises(ConfigError, match="no iteration time"):
            fit_times(none)


@FEW
@given(st.lists(st.integers(0, 50), min_size=1, max_size=6).filter(any), st.data())
def test_weights_make_the_mean_over_workers_that_over_samples(sizes, data):
    losses = [[data.draw(st.floats(-10, 10)) for _ in range(size)] for size in sizes]
    weights = batch_weights(sizes)
    means = [sum(own) / len(own) if own else 0.0 for own in losses]
    over_workers = sum(weight * mean for weight, mean in zip(weights, means, strict=True)) / len(sizes)
    assert over_workers == pytest.approx(sum(sum(own) for own in losses) / sum(sizes), abs=1e-9)
    assert sum(weights) == pytest.approx(len(sizes))


def test_a_surface_has_its_own_points_and_is_bounded_by_them():
    assert SURFACE.lag(16, 0.99) == 0.02 and SURFACE.lag(128, 0.999) == 0.12
    assert SURFACE.lag(1, 0) == 0.0 and SURFACE.lag(10**6, 0.9999) == 0.12
    assert SURFACE.lag(16, 1 - math.sqrt(0.1 * 0.01)) == pytest.approx(0.012)
    assert GridSurface((8.0,), (0.5,), ((-0.1,),)).lag(8, 0.5) == 0.0


@pytest.mark.parametrize(
    "make",
    [
        lambda: GridSurface((16.0, 8.0), (0.5,), ((0.0,), (0.0,))),
        lambda: GridSurface((8.0,), (0.5, 1.0), ((0.0, 0.0),)),
        lambda: GridSurface((8.0,), (0.5,), ((0.0, 0.0),)),
        lambda: GridSurface((8.0,), (0.5,), ((math.nan,),)),
        lambda: Weighing(-1.0),
        lambda: Problem((Worker(0.1, 0, 1, 8, 1e6),), 1, 9, 9),
        lambda: Problem((), 1, 1, 1),
        lambda: batch_weights([0, 0]),
    ],
)
def test_what_cannot_be_is_refused(make):
    with pytest.raises(ConfigError):
        make()
