"""`lastgood testbed`: a cluster of namespaces inside this machine, with faults on demand (docs/multinode.md)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lastgood.cli._app import App
from lastgood.cli._output import console, emit_json, emit_table

if TYPE_CHECKING:
    from lastgood.cluster.testbed.testbed import Testbed

__all__ = ["app"]

app = App(
    help="A cluster inside this machine: nodes with ssh that can be cut, paused and killed.", no_args_is_help=True
)

Name = Annotated[str, typer.Option("--name", help="Which testbed: up to 10 small letters and digits.")]
Node = Annotated[str, typer.Argument(help="vm1 to vmN.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print to stdout as JSON.")]


@app.command()
def up(
    nodes: Annotated[int, typer.Option(help="How many nodes.")] = 2,
    rate: Annotated[
        str | None, typer.Option(help="Limit of links, both ways, as 1gbit or 1gbit,vm2=50mbit; none by default.")
    ] = None,
    slots: Annotated[int, typer.Option(help="Slots of each node in the hostfile.")] = 1,
    hostfile: Annotated[Path | None, typer.Option(help="Also write the hostfile here.")] = None,
    state: Annotated[Path | None, typer.Option(help="Folder of its keys and files; by default below /run.")] = None,
    name: Name = "main",
) -> None:
    """Make a testbed, or repair one that is there. Needs root."""
    from lastgood.cluster.hostfile import write_hostfile
    from lastgood.cluster.testbed.testbed import Testbed

    bed = Testbed.up(nodes, name=name, rate=rate, slots=slots, state=state)
    if hostfile is not None:
        write_hostfile(hostfile, bed.hostfile.hosts, f"testbed {name}")
    place = hostfile or bed.folder / "hostfile"
    console.print(f"testbed {name}: {', '.join(bed.node_names)} on {bed.settings.subnet}; hostfile {place}")
    console.print(f"for Lastgood: export LASTGOOD_SSH_CONFIG={bed.ssh_config}")
    console.print(f"for ssh: ssh -F {bed.ssh_config} {bed.node_names[0]}")


@app.command()
def down(name: Name = "main") -> None:
    """Kill all nodes and remove everything that the testbed made, also of one that is half made."""
    from lastgood.cluster.testbed.testbed import Testbed

    found = Testbed.remove(name)
    console.print(f"testbed {name}: {'removed' if found else 'there is none'}")


@app.command()
def status(name: Name = "main", as_json: AsJson = False) -> None:
    """Show how each node is: up, cut, paused, killed."""
    bed = _bed(name)
    nodes = bed.status()
    if as_json:
        settings = bed.settings.model_dump(mode="json", exclude={"version", "complete"})
        found = [
            {
                "name": node.name,
                "address": node.address,
                "state": node.state,
                "processes": node.processes,
                "rate_bits_per_s": bed.settings.rate_of(node.name),
                "delay_us": bed.settings.node_delays_us.get(node.name, 0),
            }
            for node in nodes
        ]
        emit_json({**settings, "ssh_config": str(bed.ssh_config), "nodes": found})
        return
    rows = ((node.name, node.address, node.state, node.processes) for node in nodes)
    emit_table(f"Testbed {name} ({bed.folder})", ("node", "address", "state", "processes"), rows)


def _changing(method: str, done: str) -> Callable[[str, str], None]:
    """A command that calls a method of the testbed on a node, and then says that this is `done`."""

    def change(node: Node, name: Name = "main") -> None:
        getattr(_bed(name), method)(node)
        console.print(f"testbed {name}: {node} {done}")

    return change


for _command, _done, _help in (
    ("cut", "cut", "Drop all that a node sends and gets, without a word to its peers."),
    ("heal", "healed", "Let a node's traffic pass again."),
    ("pause", "paused", "Stop all processes of a node; its links stay up."),
    ("resume", "goes on", "Let a paused node go on."),
    ("kill", "killed", "Lose a node, with its memory and its network; its peers hear nothing."),
    ("restart", "up again", "Bring a node up again, as after a loss; what still runs in it is killed before."),
):
    app.command(_command, help=_help)(_changing(_command, _done))


@app.command()
def rate(
    node: Node,
    limit: Annotated[str, typer.Argument(metavar="RATE", help="As 50mbit.")],
    name: Name = "main",
) -> None:
    """Limit a node's link from now on, both ways; what is connected goes on."""
    _bed(name).set_rate(node, limit)
    console.print(f"testbed {name}: the link of {node} carries {limit}")


@app.command()
def delay(
    node: Node,
    time: Annotated[str, typer.Argument(metavar="TIME", help="Each way, as 20ms; 0ms ends it.")],
    name: Name = "main",
) -> None:
    """Delay what a node sends and gets from now on, if this machine's kernel has netem."""
    _bed(name).set_delay(node, time)
    console.print(f"testbed {name}: the link of {node} has a delay of {time} each way")


@app.command("exec", context_settings={"ignore_unknown_options": True})
def execute(
    node: Node,
    command: Annotated[list[str], typer.Argument(help="The command, after --.")],
    name: Name = "main",
) -> None:
    """Run a command on a node by ssh; exits with its exit code, 255 if ssh fails.

    Words arrive as they are given: for a pipe or a variable of the node's, `exec vm1 -- sh -c '...'`.
    """
    bed = _bed(name)
    address = bed.address(node)
    (state,) = (one.state for one in bed.status() if one.name == node)
    if state != "up":
        console.print(f"testbed {name}: {node} is {state} and will not answer: heal, resume or restart it")
    words = bed.remote().command(address, command)
    if sys.stdin.isatty() and sys.stdout.isatty():
        words[words.index("-T")] = "-t"
    sys.stdout.flush()
    os.execv(words[0], words)


def _bed(name: str) -> Testbed:
    from lastgood.cluster.testbed.testbed import Testbed

    return Testbed.load(name)
