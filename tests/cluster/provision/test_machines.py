"""The price guard, and the machine types that the documentation lists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lastgood.cluster.provision.machines import MACHINE_TYPES, Price, guard_price, price_order
from lastgood.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]


def test_the_sum_counts_every_vm_and_its_disk():
    price = price_order("gcp", "a2-highgpu-1g", 3, 1000, None)
    assert price.usd_per_hour == pytest.approx(3 * (3.67 + 1000 * 0.17 / 730))
    assert "list price of mid-2025, approximate" in price.source
    assert price_order("aws", "m5.xlarge", 1, 20, 2.5).usd_per_hour == pytest.approx(2.5 + 20 * 0.08 / 730)


def test_above_the_limit_only_with_yes():
    price = Price(24.5, "list price")
    with pytest.raises(
        ConfigError, match=r"2 x p3.8xlarge cost about 24.50 USD an hour .*above --max-usd-per-hour 10;"
    ):
        guard_price(price, "2 x p3.8xlarge", 10.0, yes=False)
    guard_price(price, "2 x p3.8xlarge", 10.0, yes=True)
    guard_price(price, "2 x p3.8xlarge", 24.5, yes=False)


@pytest.mark.parametrize("limit", [float("nan"), float("inf"), -1.0])
def test_a_limit_that_guards_nothing_is_refused(limit):
    with pytest.raises(ConfigError, match="not a limit"):
        guard_price(Price(1.0, ""), "1 x x", limit, yes=True)


def test_an_unknown_type_needs_a_price():
    with pytest.raises(
        ConfigError, match=r"x9.large: its price is not known here \(known on aws: p3.8xlarge.*--usd-per-hour"
    ):
        price_order("aws", "x9.large", 1, 20, None)
    # A type of the other cloud is not known either.
    with pytest.raises(ConfigError, match="not known here"):
        price_order("aws", "a2-highgpu-1g", 1, 20, None)
    with pytest.raises(ConfigError, match="not a price"):
        price_order("aws", "x9.large", 1, 20, float("nan"))


def test_the_documentation_has_the_same_types_and_prices():
    text = (ROOT / "docs" / "provisioning.md").read_text()
    rows = re.findall(r"^\| (aws|gcp) \| (\S+) \| [^|]*\| ([0-9.]+) \|", text, re.MULTILINE)
    assert rows == [(kind.provider, kind.name, f"{kind.usd_per_hour:.2f}") for kind in MACHINE_TYPES]
