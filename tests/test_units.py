"""Sizes and times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastgood.errors import ConfigError
from lastgood.units import format_bytes, format_rate, format_seconds, option_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [("4 MiB", 4 << 20), ("1.5GiB", 3 << 29), ("100MB", 10**8), ("7", 7), ("0 b", 0), (12, 12), ("2 kb", 2000)],
)
def test_parse(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "4 parsecs", "-1", "1e3", "4MiB4", None, True, -1])
def test_parse_refuses(text):
    with pytest.raises(ValueError, match="size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("30m", 1800), ("1.5 h", 5400), ("2d", 172_800), ("45", 45), ("9s", 9), ("3 min", 180)]
)
def test_durations(text, seconds):
    assert option_seconds("--max-age", text) == seconds


@pytest.mark.parametrize("text", ["", "m", "-3m", "3 parsecs", "1h30m", "1e3s", "3M"])
def test_what_is_no_duration(text):
    with pytest.raises(ConfigError, match=r"^--max-age: not a duration: .*one of s, m, h, d"):
        option_seconds("--max-age", text)


@given(st.integers(0, 2**50))
def test_format_keeps_three_digits(size):
    assert abs(parse_bytes(format_bytes(size)) - size) <= max(1, size // 150)


def test_format_times_and_rates():
    assert [format_seconds(value) for value in (5e-6, 0.0123, 3.21, 119, 125)] == [
        "5 us",
        "12.3 ms",
        "3.21 s",
        "119 s",
        "2 min 5 s",
    ]
    assert format_rate(2**30) == "1 GiB/s"
