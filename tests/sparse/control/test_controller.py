"""The controller: what it learns of workers, when it decides, and that a setting holds for all ranks or for none."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood.errors import ConfigError
from lastgood.sparse.control.controller import Controller, ControllerSettings, InForce, Report, Setting

FEW = settings(max_examples=10, deadline=None)
GIB = 1 << 30


def made(workers=2, **changed):
    values = {"elements": 11_181_642, "samples": 64, "starts": 2}
    return Controller(ControllerSettings(**{**values, **changed}), workers)


def report(worker, iteration, samples=32, *, alpha=0.01, rate=100e6, waited=0.0, **more):
    sent = 1_000_000
    return Report(
        worker=worker,
        iteration=iteration,
        samples=samples,
        compute_s=alpha * samples + 0.05,
        waited_s=waited,
        sent_bytes=sent,
        sending_s=sent * 8 / rate,
        **more,
    )


def fed(controller, iterations=range(4), alphas=(0.01, 0.02), **more):
    for iteration in iterations:
        for worker, alpha in enumerate(alphas):
            controller.observe(report(worker, iteration, 28 + 4 * (iteration % 2), alpha=alpha, **more))
    return controller


def test_it_decides_once_all_have_reported_and_then_only_for_a_gain():
    controller = made()
    assert controller.decide() is None
    controller.observe(report(0, 0))
    assert controller.decide() is None and controller.silent() == [1]
    first = fed(controller, range(1, 5)).decide()
    assert first is not None and first.number == 1 and first.from_iteration == 4 + 1
    assert sum(first.samples) == 64 and first.samples[0] > first.samples[1]
    assert controller.decide() is None  # nothing is new


@FEW
@given(
    st.integers(1, 3),
    st.integers(8, 96),
    st.lists(st.tuples(st.floats(1e-3, 0.05), st.floats(1e6, 1e9), st.floats(0, 2)), min_size=3, max_size=3),
    st.integers(0, 5),
)
def test_every_setting_keeps_the_batch_and_repeats_with_its_seed(workers, samples, kinds, seed):
    def run():
        controller = made(workers, samples=samples, seed=seed)
        settings_made = []
        for iteration in range(6):
            for worker in range(workers):
                alpha, rate, waited = kinds[worker]
                size = max(1, samples // workers + iteration % 2)
                controller.observe(report(worker, iteration, size, alpha=alpha, rate=rate, waited=waited))
            found = controller.decide()
            if found is not None:
                assert sum(found.samples) == samples
                for worker, own in enumerate(found.samples):
                    assert 1 <= own <= controller.most_samples(worker)
                settings_made.append(found)
        return settings_made

    assert run() == run()


def test_the_rate_rises_while_nobody_waits_and_falls_to_what_the_link_gives():
    controller = made(1)
    rates = []
    for iteration in range(60):
        controller.observe(report(0, iteration, rate=1e9))
        rates.append(controller.bits_per_s(0))
    assert rates == sorted(rates) and 1e9 <= rates[-1] <= 1.25e9
    for iteration in range(60, 160):
        controller.observe(report(0, iteration, rate=10e6, waited=0.4))
        assert controller.urgent
    assert controller.bits_per_s(0) == pytest.approx(10e6)
    for iteration in range(160, 2000):
        controller.observe(report(0, iteration, rate=1e13))
    assert controller.bits_per_s(0) == 1e11  # the most that is taken


def test_a_slower_link_is_answered_by_more_compression_and_a_faster_one_by_less():
    answers = []
    for rate in (1e6, 1e7, 1e8, 1e9, 1e10):
        # The waiting share of 10 % holds the estimate near what is measured.
        controller = fed(made(first_bits_per_s=rate), range(40), alphas=(0.01, 0.01), rate=rate, waited=0.037)
        found = controller.decide()
        assert found is not None
        answers.append(found.compression)
    assert answers == sorted(answers, reverse=True) and answers[0] > 0.99 and answers[-1] < 0.1


def test_memory_is_measured():
    controller = made(1, samples=16, most_samples=4096)
    controller.observe(report(0, 0, 16, memory_bytes=GIB, memory_room_bytes=10 * GIB))
    assert controller.most_samples(0) == 20  # one size says nothing of the next: a quarter more
    controller.observe(report(0, 1, 20, memory_bytes=GIB * 9 // 8, memory_room_bytes=10 * GIB))
    assert controller.most_samples(0) == 40  # twice what was seen
    controller.observe(report(0, 2, 200, memory_bytes=8 * GIB, memory_room_bytes=10 * GIB))
    assert 200 <= controller.most_samples(0) < 260  # nine tenths of the room
    controller.refuse(0, 210)
    assert controller.most_samples(0) == 209
    controller.observe(report(0, 3, 215))
    assert controller.most_samples(0) > 209  # it did fit


def test_a_batch_that_fits_nowhere_is_said_once_it_is_known():
    controller = fed(made())
    controller.refuse(0, 20)
    controller.refuse(1, 20)
    with pytest.raises(ConfigError, match="64 samples does not fit: the workers' memory takes 38 together"):
        controller.decide()


def test_a_setting_that_no_longer_fits_is_replaced_though_it_gains_nothing():
    controller = fed(made(), alphas=(0.01, 0.01))
    first = controller.decide()
    assert first is not None and first.samples == (32, 32)
    controller.refuse(0, 32)
    second = controller.decide()
    assert second is not None and second.number == 2 and second.samples == (31, 33)


def test_reports_that_are_old_repeated_or_of_strangers_are_not_taken():
    controller = made()
    assert controller.observe(report(0, 5)) and not controller.observe(report(0, 5))
    assert not controller.observe(report(0, 4)) and not controller.observe(report(2, 6))
    for wrong in ({"worker": -1}, {"compute_s": 0.0}, {"compute_s": float("nan")}, {"sent_bytes": -1}, {"samples": 0}):
        with pytest.raises(ValueError):
            Report.model_validate({**report(0, 6).model_dump(), **wrong})


def test_its_state_goes_on_as_it_stood():
    controller = fed(made())
    controller.decide()
    other = made()
    other.load_state_dict(controller.state_dict())
    for one in (controller, other):
        fed(one, range(10, 30), alphas=(0.05, 0.01))
    assert controller.decide() == other.decide() is not None
    with pytest.raises(ConfigError, match="of 2 workers, and these are 3"):
        made(3).load_state_dict(controller.state_dict())


def test_a_controller_started_anew_counts_on_from_what_the_ranks_have():
    found = fed(made(), setting_number=7).decide()
    assert found is not None and found.number == 8


@pytest.mark.parametrize(
    "values", [{"samples": 1}, {"most_samples": 32}, {"least_compression": 0.9, "most_compression": 0.5}]
)
def test_settings_that_cannot_be_are_refused(values):
    with pytest.raises(ConfigError):
        made(**values)


# -- for all or for none -----------------------------------------------------------------------------------------------


def setting(number, from_iteration=0, samples=(1, 1), compression=0.5):
    return Setting(number=number, from_iteration=from_iteration, samples=samples, compression=compression)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), st.data())
def test_all_ranks_have_the_same_setting_in_each_iteration(ranks, every, data):
    """Settings come late, out of order, twice, or to some ranks only, and one number with two contents."""
    sides = [InForce(ranks) for _ in range(ranks)]
    offers = [
        setting(number, data.draw(st.integers(0, 20)), (8,) * ranks, data.draw(st.sampled_from([0.5, 0.9])))
        for number in data.draw(st.lists(st.integers(1, 5), max_size=8))
    ]
    heard = [{one: data.draw(st.integers(0, 40)) for one in range(len(offers))} for _ in range(ranks)]
    numbers = []
    for iteration in range(30):
        for side, when in zip(sides, heard, strict=True):
            for one, arrives in when.items():
                if arrives == iteration:
                    side.offer(offers[one])
        if iteration % every == 0:
            shown = [side.shown(iteration) for side in sides]
            for side in sides:
                side.agree(iteration, shown)
        assert len({side.current for side in sides}) == 1
        if sides[0].current is not None:
            assert sides[0].current.from_iteration <= iteration
            numbers.append(sides[0].current.number)
    assert all(first <= second for first, second in itertools.pairwise(numbers))


def test_what_one_rank_has_not_heard_holds_for_none_and_the_next_one_for_all():
    first, second = InForce(2), InForce(2)
    first.offer(setting(1))
    shown = [first.shown(0), second.shown(0)]
    assert first.agree(0, shown) is None and second.agree(0, shown) is None
    for side in (first, second):
        side.offer(setting(2, 5))
    for iteration, number in ((4, None), (5, 2)):
        shown = [first.shown(iteration), second.shown(iteration)]
        found = {side.agree(iteration, shown) for side in (first, second)}
        assert [None if one is None else one.number for one in found] == [number]
    assert not first.offer(setting(1)) and not first.offer(setting(3, samples=(1, 1, 1)))
