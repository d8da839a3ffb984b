"""From the flags of `lastgood dcp` to what is measured, and where."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from lastgood.experiments.dcp.places import BucketPlace, FolderPlace
    from lastgood.experiments.dcp_runs.server import RunningServer
    from lastgood.experiments.records.dcp import DcpSpec, Medium, Operation

__all__ = ["Reached", "medium_of", "reached", "spec_of", "spec_of_saved", "started_by_torchrun"]

_DEFAULTS: Final = {"disk": "disk", "s3": "lastgood"}
"""The storage that nobody names, by medium."""
_OF_STORAGES: Final = ("thread_count", "sync_files", "part_size", "target_gbps", "prefix_strategy", "s3_reader")


@dataclass(frozen=True)
class Reached:
    """Where checkpoints are."""

    place: FolderPlace | BucketPlace
    server: RunningServer | None = None


@contextlib.contextmanager
def reached(flags: Mapping[str, Any]) -> Iterator[Reached]:
    """What ``--uri`` names, with the server of ``--server`` up inside. Raises ConfigError, naming the flag."""
    from lastgood.errors import ConfigError
    from lastgood.experiments.dcp.places import S3Access, open_place
    from lastgood.experiments.dcp_runs.server import own_server

    uri, access = flags["uri"], S3Access(region=flags.get("region"), endpoint_url=flags.get("endpoint_url"))
    place = open_place(uri, access)
    if flags.get("server") is None:
        yield Reached(place)
        return
    if medium_of(uri) != "s3":
        raise ConfigError(f"--server beside the folder {uri}: a folder has no server")
    if access != S3Access():
        raise ConfigError("--server beside --region or --endpoint-url: it has its own")
    if flags.get("hostfile") is not None or started_by_torchrun() is not None:
        raise ConfigError("--server answers on this machine alone, and these ranks are not this command's")
    with own_server(flags["server"], uri) as server:
        yield Reached(open_place(uri, server.access), server)


def medium_of(uri: str) -> Medium:
    """Of ``--uri``."""
    return "s3" if uri.lower().startswith("s3://") else "disk"


def _given(flags: Mapping[str, Any]) -> dict[str, Any]:
    return {name: flags[name] for name in _OF_STORAGES if flags.get(name) is not None}


def started_by_torchrun() -> tuple[int, int] | None:
    """(rank, ranks) if a launcher started this process as one of several ranks."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def spec_of(operation: Operation, flags: Mapping[str, Any]) -> DcpSpec:
    """What `save` and `save-and-load` measure. Raises ConfigError, naming the flag."""
    from lastgood.errors import ConfigError
    from lastgood.experiments.dcp.storages import storage_named

    medium = medium_of(flags["uri"])
    storage = storage_named(flags["storage"] or _DEFAULTS[medium], medium)
    if storage.tensors_only and flags["state"] == "full":
        raise ConfigError(
            f"--state full: storage {storage.name} keeps tensors only, no hyperparameters; use --state model"
        )
    return _checked(
        flags,
        operation=operation,
        model=flags["model"] or "L7b",
        state=flags["state"] or "model",
        medium=medium,
        storage=storage.name,
        storage_options=storage.resolved(_given(flags), medium),
        saving=flags["asynchronous"] or "sync",
        planner_cache=flags["planner_cache"],
        seed=flags["seed"],
        **_over_ranks(flags, flags["world_size"]),
    )


def spec_of_saved(flags: Mapping[str, Any], at: Reached) -> DcpSpec:
    """What loads measure: what was saved, by the file beside it. Raises ConfigError, NoCheckpoint."""
    from lastgood.experiments.dcp.storages import storage_named
    from lastgood.experiments.dcp_runs.order import check_suffix, newest_saved

    saved = newest_saved(at.place, check_suffix(flags["suffix"])).spec
    medium = medium_of(flags["uri"])
    storage = storage_named(flags["storage"] or saved.storage, medium)
    given = _given(flags)
    if (storage.name, medium) == (saved.storage, saved.medium):
        given = {**saved.storage_options, **given}
    named = any(flags[name] for name in ("sharding", "replicas", "fsdp", "ddp"))
    kept = {"spread": saved.spread, "sharding": saved.sharding, "replicas": saved.replicas}
    ranks = _over_ranks(flags, flags["world_size"] or saved.ranks)
    return _checked(
        flags,
        operation="load",
        model=saved.model,
        state=saved.state,
        medium=medium,
        storage=storage.name,
        storage_options=storage.resolved(given, medium),
        seed=saved.seed,
        **(ranks if named else {**ranks, **kept}),
    )


def _over_ranks(flags: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    from lastgood.cluster.hostfile import read_hostfile
    from lastgood.errors import ConfigError

    if flags["ddp"] and flags["fsdp"] is not None:
        raise ConfigError("--ddp and --fsdp: give one of them")
    if flags["fsdp"] not in (None, 1, 2):
        raise ConfigError(f"--fsdp {flags['fsdp']}: 1 or 2")
    if flags["replicas"] is not None and flags["sharding"] != "hybrid":
        raise ConfigError("--replicas is for --sharding hybrid")
    started = started_by_torchrun()
    nodes = 1
    if started is not None:
        world_size = started[1]
        nodes = max(1, world_size // int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size))))
    elif flags["hostfile"] is not None:
        hosts = read_hostfile(flags["hostfile"])
        world_size, nodes = hosts.slots, len(hosts.hosts)
    found: dict[str, Any] = {
        "ranks": world_size,
        "nodes": nodes,
        "spread": "ddp" if flags["ddp"] else f"fsdp{flags['fsdp'] or 2}",
        "sharding": flags["sharding"] or "full",
    }
    if flags["replicas"] is not None:
        found["replicas"] = flags["replicas"]
    return found


def _checked(flags: Mapping[str, Any], **fields: Any) -> DcpSpec:
    """The spec. Raises ConfigError, which names the option, for a value that is impossible."""
    from pydantic import ValidationError

    from lastgood.errors import ConfigError
    from lastgood.experiments.dcp.models import MODELS
    from lastgood.experiments.machine.facts import machine_label
    from lastgood.experiments.records.dcp import DcpSpec

    if fields["model"] not in MODELS:
        raise ConfigError(f"--model {fields['model']}: unknown; known: {', '.join(MODELS)}")
    try:
        return DcpSpec(
            machine=machine_label(),
            scale="laptop" if fields["model"].endswith("MB") else "paper",
            backend=flags["backend"],
            iterations=flags["iterations"],
            warmup=flags["warmup"],
            **fields,
        )
    except ValidationError as error:
        first = error.errors()[0]
        option = (
            {"saving": "async", "ranks": "world-size"}.get(str(first["loc"][0]), str(first["loc"][0]))
            if first["loc"]
            else ""
        )
        said = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"--{option}: {said}" if option else said) from error
