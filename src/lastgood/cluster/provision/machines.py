"""Machine types of the papers, what they cost about, and the guard in front of a bill."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lastgood.errors import ConfigError

__all__ = ["MACHINE_TYPES", "PRICES_OF", "MachineType", "Price", "guard_price", "price_order"]

PRICES_OF = "mid-2025"
"""When the list prices below held, roughly. They are on-demand prices of a cheap US region, from memory, rounded, not
checked against the clouds' pages: good enough to stop a costly mistake, not to plan a budget."""

_HOURS_OF_A_MONTH = 730
_DISK_USD_PER_GB_MONTH = {"aws": 0.08, "gcp": 0.17}  # gp3; pd-ssd


@dataclass(frozen=True)
class MachineType:
    """One machine type: GPUs, USD an hour on demand (None: not known here), and who used it."""

    provider: str
    name: str
    gpus: int
    gpu: str
    usd_per_hour: float | None
    used_by: str
    disk_gb: int = 200
    """Size of the disk that a VM gets unless told otherwise."""


MACHINE_TYPES = (
    MachineType("gcp", "a2-highgpu-1g", 1, "A100 40GB", 3.67, "PCcheck, with 1 TB of pd-ssd", disk_gb=1000),
    MachineType(
        "gcp", "a3-highgpu-8g", 8, "H100 80GB", 88.25, "H100s; PCcheck's own H100 VM was on Azure, which is not served"
    ),
    MachineType("gcp", "e2-standard-4", 0, "", 0.13, "a trial without a GPU"),
    MachineType("aws", "p3.8xlarge", 4, "V100 16GB", 12.24, "StellaTrain, two of them"),
    MachineType("aws", "p4d.24xlarge", 8, "A100 40GB", 32.77, "A100s with fast networks"),
    MachineType("aws", "p5.48xlarge", 8, "H100 80GB", 98.32, "H100s with fast networks"),
    MachineType("aws", "c5n.18xlarge", 0, "", 3.89, "CPU nodes with fast networks, as Checkmate's shadows"),
    MachineType("aws", "m5.xlarge", 0, "", 0.19, "a trial without a GPU"),
)


@dataclass(frozen=True)
class Price:
    """What VMs cost an hour, together, and where the number comes from."""

    usd_per_hour: float
    source: str


def price_order(provider: str, machine: str, count: int, disk_gb: int, usd_per_hour: float | None) -> Price:
    """The price of `count` VMs with `disk_gb` of disk each; `usd_per_hour` of one VM takes the place of the table's.

    A spot VM is counted at the on-demand price, which it can reach. Raises ConfigError if no price is known.
    """
    source = "as given with --usd-per-hour"
    if usd_per_hour is None:
        usd_per_hour = find_machine(provider, machine).usd_per_hour
        source = f"list price of {PRICES_OF}, approximate"
        if usd_per_hour is None:
            known = ", ".join(kind.name for kind in MACHINE_TYPES if kind.provider == provider)
            raise ConfigError(
                f"--machine {machine}: its price is not known here (known on {provider}: {known}); look it up and give "
                "--usd-per-hour"
            )
    elif not (math.isfinite(usd_per_hour) and usd_per_hour > 0):
        raise ConfigError(f"--usd-per-hour {usd_per_hour}: not a price; give the USD of one VM for an hour")
    disk = disk_gb * _DISK_USD_PER_GB_MONTH[provider] / _HOURS_OF_A_MONTH
    return Price(count * (usd_per_hour + disk), f"{source}, disks included")


def find_machine(provider: str, name: str) -> MachineType:
    """The table's entry, or one without a price."""
    for kind in MACHINE_TYPES:
        if (kind.provider, kind.name) == (provider, name):
            return kind
    return MachineType(provider, name, 0, "", None, "")


def guard_price(price: Price, what: str, limit_usd_per_hour: float, *, yes: bool) -> None:
    """Raise ConfigError where `what` costs more than the limit an hour and nobody said yes."""
    if not (math.isfinite(limit_usd_per_hour) and limit_usd_per_hour >= 0):
        raise ConfigError(f"--max-usd-per-hour {limit_usd_per_hour}: not a limit; give USD an hour, such as 10")
    if price.usd_per_hour > limit_usd_per_hour and not yes:
        raise ConfigError(
            f"{what} cost about {price.usd_per_hour:.2f} USD an hour ({price.source}), which is above "
            f"--max-usd-per-hour {limit_usd_per_hour:g}; nothing was created. Add --yes if that is right, or raise it"
        )
