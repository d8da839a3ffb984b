"""Which shadow a process is, and on which CPUs."""

import os

import pytest

from lastgood.errors import ConfigError
from lastgood.gradients.shadow.launch_env import Place, find_place, own_cpus, parse_cpus
from tests.suggestions.following import advice, follows, refusal


@pytest.mark.parametrize(
    ("flags", "environment", "expected"),
    [
        ((None, None, None), {}, Place(0, 1, None)),
        ((1, 3, 8), {"RANK": "0", "WORLD_SIZE": "2"}, Place(1, 3, 8)),
        ((None, None, None), {"RANK": "1", "WORLD_SIZE": "2"}, Place(1, 2, None)),
        (
            (None, None, None),
            {"NUM_TRAINING": "4", "NUM_STORAGE": "2", "RANK": "5", "WORLD_SIZE": "6"},
            Place(1, 2, 4),
        ),
        ((None, None, None), {"NUM_TRAINING": "4", "RANK": "5", "WORLD_SIZE": "6"}, Place(1, 2, 4)),
        (
            (None, None, None),
            {"NUM_TRAINING": "4", "NUM_STORAGE": "2", "RANK": "1", "WORLD_SIZE": "2"},
            Place(1, 2, 4),
        ),
    ],
)
def test_place(flags, environment, expected):
    assert find_place(*flags, environment) == expected


@pytest.mark.parametrize(
    ("flags", "environment", "match"),
    [
        ((None, 2, None), {}, "which of 2"),
        ((2, 2, None), {}, "0 to 1"),
        ((None, None, None), {"NUM_TRAINING": "4", "NUM_STORAGE": "2", "RANK": "3", "WORLD_SIZE": "6"}, "trains"),
        ((None, None, None), {"NUM_STORAGE": "2", "RANK": "1", "WORLD_SIZE": "5"}, "neither"),
        ((None, None, None), {"RANK": "x", "WORLD_SIZE": "5"}, "no number"),
    ],
)
def test_places_that_cannot_be(flags, environment, match):
    with pytest.raises(ConfigError, match=match):
        find_place(*flags, environment)


def test_lists_of_cpus():
    assert parse_cpus("0-3,8, 2") == (0, 1, 2, 3, 8)
    for wrong in ("", "a", "3-1", "1-", "-1", "0-99999", "1,,2"):
        with pytest.raises(ConfigError):
            parse_cpus(wrong)


@follows("at least, with --cpus")
def test_each_process_that_torchrun_starts_has_its_own_cpus(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4, 5})
    assert own_cpus(None, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}) == ()
    assert own_cpus("0-4", {}) == (0, 1, 2, 3, 4)
    parts = [own_cpus("0-4", {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}) for rank in (0, 1)]
    assert sorted(parts[0] + parts[1]) == [0, 1, 2, 3, 4]
    assert all(parts)
    with pytest.raises(ConfigError, match="may use"):
        own_cpus("5-6", {})
    message = refusal(lambda: own_cpus("0", {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}))
    count = int(advice(message, r"1 CPUs in '0' for (\d+) processes"))
    enough = ",".join(map(str, range(count)))
    assert own_cpus(enough, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}) == (0,)
