"""`lastgood stellatrain node`: one node of a training, by the arguments of StellaTrain's own two scripts."""

from __future__ import annotations

import ipaddress
import os
import socket
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from lastgood.cli.stellatrain_train import train
from lastgood.errors import ConfigError

__all__ = ["node"]


def node(
    master_ip_address: Annotated[str, typer.Option(metavar="ADDRESS", help="Of the node of rank 0.")],
    my_ip_address: Annotated[str, typer.Option(metavar="ADDRESS", help="Of this node, as the others reach it.")],
    world_size: Annotated[int, typer.Option(metavar="NODES", help="How many nodes train.")],
    num_gpus: Annotated[int, typer.Option(help="GPUs of this node: 0, since training is on CPUs so far.")],
    rank: Annotated[int, typer.Option(metavar="NODE", help="Of this node, from 0.")],
    dataset: Annotated[
        str, typer.Option(help="digits, dummy (noise, without labels that mean anything), or a folder CLASS/IMAGE.")
    ] = "digits",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Where rank 0 listens for the others to meet.")] = 29500,
    steps: Annotated[int, typer.Option(min=1, help="To train for.")] = 100,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads to compute with [default: torch's].")] = None,
    directory: Annotated[
        Path | None, typer.Option(help="Folder of PCcheck's checkpoints [default: none are made].")
    ] = None,
    data_dir: Annotated[Path, typer.Option(help="Folder of the prepared digits.")] = Path("data"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome to stdout as JSON.")] = False,
) -> None:
    """Train ResNet-18 on this node, with 1 % of each gradient sent; call it on every node.

    Everything is checked before anything starts. What else can be chosen, `lastgood stellatrain train` takes.
    """
    _check_ranks(world_size, rank)
    for name, address in (("--master-ip-address", master_ip_address), ("--my-ip-address", my_ip_address)):
        try:
            ipaddress.ip_address(address)
        except ValueError:
            raise ConfigError(f"{name} {address}: not an IP address") from None
    _check_own(my_ip_address)
    if rank == 0:
        if master_ip_address != my_ip_address:
            raise ConfigError(
                f"--rank 0 is the master, and --master-ip-address {master_ip_address} is not its --my-ip-address "
                f"{my_ip_address}"
            )
        _check_port(my_ip_address, port)
    _check_gpus(num_gpus)
    config = ["device=cpu", f"data_dir={data_dir.absolute()}"]
    configfile = None
    if dataset not in ("digits", "dummy"):
        from lastgood.experiments.plan.grid import find_root

        if not any(Path(dataset).glob("*/*")):
            raise ConfigError(f"--dataset {dataset}: no folder of CLASS/IMAGE; digits and dummy need none")
        config.append(f"data={{images: {Path(dataset).absolute()}}}")
        configfile = find_root() / "config" / "gpu.yaml"
    place = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": master_ip_address, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    train(
        steps=steps,
        noise=dataset == "dummy",
        system=None if directory is None else "pccheck",
        directory=directory,
        my_address=my_ip_address,
        threads=threads,
        configfile=configfile,
        config=config,
        as_json=as_json,
    )


def _check_ranks(nodes: int, rank: int) -> None:
    if nodes < 1 or not 0 <= rank < nodes:
        raise ConfigError(f"--rank {rank}: with --world-size {nodes} ranks go from 0 to {max(0, nodes - 1)}")


def _check_own(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            raise ConfigError(f"--my-ip-address {address}: this machine has no such address") from None


def _check_port(address: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            raise ConfigError(f"--port {port}: {error.strerror}; name another on all nodes") from None


def _check_gpus(count: int) -> None:
    if count:
        raise ConfigError(f"--num-gpus {count}: the sparse engine trains on CPUs so far; give 0")
