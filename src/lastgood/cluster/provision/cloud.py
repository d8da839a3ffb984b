"""VMs of a cloud: created with tags, found by tags, destroyed by tags. What is the same for every cloud is here."""

from __future__ import annotations

import re
import shlex
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from lastgood.errors import ConfigError, ProvisionError

__all__ = ["MOST_VMS", "PROJECT_TAG", "Cloud", "Order", "Vm", "check_run_name", "create_vms", "destroy_vms", "tags_of"]

MOST_VMS = 64
"""A slip of the finger must not rent a data centre."""

PROJECT_TAG = "lastgood"
_RUN_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_POLL_S = 3.0
_GONE = frozenset({"terminated", "gone"})


@dataclass(frozen=True)
class Order:
    """VMs to create: all of one type, under one run name.

    `disk_gb` is the size of the one disk, `ssh_key` a public key's line.
    """

    machine: str
    count: int
    run: str
    owner: str
    disk_gb: int
    spot: bool = False
    image: str | None = None
    """None: the newest Ubuntu 24.04 of Canonical."""
    user: str = "ubuntu"
    ssh_key: str | None = None
    network: str | None = None
    """AWS: a security group. GCP: a network. None: the account's default."""
    created: str = ""

    @staticmethod
    def now() -> str:
        """The time for the tag `created`, in characters that every cloud allows."""
        return datetime.now(timezone.utc).strftime("%Y%m%dt%H%M%Sz")


@dataclass(frozen=True)
class Vm:
    """A VM that carries the project's tag."""

    id: str
    name: str
    project: str
    run: str
    owner: str
    created: str
    machine: str
    state: str
    """The cloud's own word, in lower case."""
    zone: str
    spot: bool
    address: str | None
    """Public; None while there is none."""
    private_address: str | None


class Cloud(ABC):
    """One cloud account in one region or project.

    Every call is bounded in time, and raises ProvisionError in plain words.
    """

    name: str
    """aws or gcp."""

    @abstractmethod
    def where(self) -> list[str]:
        """The command line's options that lead to the same place, such as ``["--region", "us-east-1"]``."""

    @abstractmethod
    def create_one(self, order: Order, number: int) -> str:
        """Create VM `number` (from 1) of an order, with its tags from the first moment on; returns its id."""

    @abstractmethod
    def ask_for_vms(self, run: str | None) -> list[Vm]:
        """The cloud's answer when it is asked for VMs with the project's tag, and the run's if one is named."""

    def find(self, run: str | None = None) -> list[Vm]:
        """VMs that carry the project's tag, and the run's if one is named; those that are gone are left out.

        The tags in the cloud's answer are looked at once more: this list decides what is destroyed.
        """
        vms = [vm for vm in self.ask_for_vms(run) if vm.project == PROJECT_TAG and run in (None, vm.run)]
        return sorted(vms, key=lambda vm: (vm.run, vm.created, vm.name))

    @abstractmethod
    def destroy(self, vms: Sequence[Vm]) -> None:
        """Order the end of these VMs and their disks."""


def tags_of(order: Order) -> dict[str, str]:
    """What every VM of an order is tagged with."""
    return {"project": PROJECT_TAG, "run": order.run, "owner": order.owner, "created": order.created}


def check_run_name(name: str) -> None:
    """Raise ConfigError for a name that a cloud would not take."""
    if not _RUN_NAME.fullmatch(name):
        raise ConfigError(
            f"--name {name!r}: not a name that every cloud takes; give up to 40 of a-z, 0-9 and dashes, a letter first"
        )


def destroy_command(cloud: Cloud, run: str) -> str:
    """The command that ends all VMs of a run."""
    return shlex.join(
        ["lastgood", "provision", "cloud", "destroy", "--provider", cloud.name, *cloud.where(), "--name", run, "--yes"]
    )


def create_vms(cloud: Cloud, order: Order, say: Callable[[str], None], *, timeout_s: float = 900.0) -> list[Vm]:
    """Create an order's VMs and wait until each runs and has an address.

    The command that destroys them is said before the first is created, so that it is on the screen whatever happens.
    Raises ProvisionError if the cloud refuses one; the message says which exist by then and what ends them.
    """
    check_run_name(order.run)
    if not 1 <= order.count <= MOST_VMS:
        raise ConfigError(f"--count {order.count}: give 1 to {MOST_VMS}")
    undo = destroy_command(cloud, order.run)
    existing = cloud.find(order.run)
    if existing:
        raise ConfigError(
            f"--name {order.run}: there are {len(existing)} VMs of this name already; choose another, or end them: "
            f"{undo}"
        )
    say(f"to destroy what this creates: {undo}")
    made: list[str] = []
    for number in range(1, order.count + 1):
        try:
            made.append(cloud.create_one(order, number))
        except ProvisionError as error:
            left = _left_over(_look_again(cloud, order, made), order, undo)
            raise ProvisionError(f"{left}; VM {number} of {order.count} failed: {error}") from error
        say(f"created {number} of {order.count}: {made[-1]}")
    return _wait_until_running(cloud, order, made, undo, timeout_s)


def _look_again(cloud: Cloud, order: Order, made: Sequence[str]) -> list[str]:
    """What exists as far as can be known: a VM whose creation failed late, or too slowly, may be there all the same."""
    try:
        return sorted({*made, *(vm.id for vm in cloud.find(order.run))})
    except ProvisionError:
        return list(made)


def _left_over(made: Sequence[str], order: Order, undo: str) -> str:
    if not made:
        return (
            f"nothing of run {order.run} was created as far as is known (`lastgood provision cloud list` looks again)"
        )
    there = f"{len(made)} of {order.count} VMs of run {order.run} exist and cost money: {', '.join(made)}"
    return f"{there}; to destroy them: {undo}"


def _wait_until_running(cloud: Cloud, order: Order, made: list[str], undo: str, timeout_s: float) -> list[Vm]:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            found = {vm.id: vm for vm in cloud.find(order.run)}
        except ProvisionError as error:
            raise ProvisionError(f"{_left_over(made, order, undo)}; looking at them failed: {error}") from error
        ready = [
            found[name] for name in made if name in found and found[name].state == "running" and found[name].address
        ]
        if len(ready) == len(made):
            return ready
        if time.monotonic() >= deadline:
            states = ", ".join(f"{name} {found[name].state if name in found else 'gone'}" for name in made)
            raise ProvisionError(
                f"waited {timeout_s:.0f} s for all VMs to run with a public address: {states}; "
                f"{_left_over(made, order, undo)}"
            )
        time.sleep(min(_POLL_S, timeout_s))


def destroy_vms(cloud: Cloud, run: str, say: Callable[[str], None], *, yes: bool, timeout_s: float = 600.0) -> list[Vm]:
    """End all VMs of a run and wait until they are gone; returns them, none if there were none.

    Raises ConfigError without `yes`, naming what would be destroyed; ProvisionError where some are there at the end.
    """
    check_run_name(run)
    vms = cloud.find(run)
    if not vms:
        return []
    names = ", ".join(f"{vm.name} ({vm.id}, {vm.machine}, of {vm.owner})" for vm in vms)
    if not yes:
        raise ConfigError(f"this would destroy {len(vms)} VMs and their disks: {names}; add --yes if that is right")
    say(f"destroying {names}")
    cloud.destroy(vms)
    deadline = time.monotonic() + timeout_s
    while True:
        left = [vm for vm in cloud.find(run) if vm.state not in _GONE]
        if not left:
            return vms
        if time.monotonic() >= deadline:
            states = ", ".join(f"{vm.name} {vm.state}" for vm in left)
            raise ProvisionError(
                f"waited {timeout_s:.0f} s for the end of run {run}: {states}; again: {destroy_command(cloud, run)}"
            )
        time.sleep(min(_POLL_S, timeout_s))
