"""The command line: `lastgood COMMAND`. Commands import what they need when they run, so `--help` is quick."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from lastgood.cli import (
    advise,
    ceilings,
    check,
    claims,
    collect,
    config,
    data,
    dcp,
    doctor,
    examples,
    export,
    hosts,
    import_,
    inspect,
    launch,
    mirror,
    netbench,
    plan,
    plot,
    provision,
    prune,
    push,
    report,
    run,
    shadow,
    sparsebench,
    status,
    stellatrain,
    testbed,
    trace,
    train,
    tune,
    verify,
)
from lastgood.cli._app import App
from lastgood.errors import ConfigError, LastgoodError
from lastgood.extras import why_missing

__all__ = ["app", "main"]

app = App(
    name="lastgood",
    help="The last good state of a training run, and what keeping it costs.",
    epilog="Exit codes: 0 done, 1 it failed, 2 it was asked for wrongly, 130 interrupted (docs/exit-codes.md).",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _tell_version(asked: bool) -> None:
    if asked:
        import importlib.metadata

        typer.echo(f"lastgood {importlib.metadata.version('lastgood')}")
        raise typer.Exit


@app.callback()
def _begin(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version, and end.")
    ] = False,
) -> None:
    del version


CHECKPOINTS = "Your checkpoints"
REPRODUCE = "Reproduce"
CLUSTER = "Cluster"
PAPERS = "Checkmate, FlowCheck, StellaTrain"

_CHECKPOINTS: tuple[Callable[..., None], ...] = (
    status.status,
    inspect.inspect,
    verify.verify,
    export.export,
    prune.prune,
    push.push,
    tune.tune,
    doctor.doctor,
)
for _function in _CHECKPOINTS:
    app.command(rich_help_panel=CHECKPOINTS)(_function)
app.command("import", rich_help_panel=CHECKPOINTS)(import_.import_checkpoint)
app.add_typer(examples.app, name="examples", rich_help_panel=CHECKPOINTS)
app.add_typer(advise.app, name="advise", rich_help_panel=CHECKPOINTS)

_REPRODUCE: tuple[Callable[..., None], ...] = (
    run.run,
    plan.plan,
    check.check,
    collect.collect,
    plot.plot,
    claims.claims,
    report.report,
    ceilings.ceilings,
)
for _function in _REPRODUCE:
    app.command(rich_help_panel=REPRODUCE)(_function)
app.add_typer(config.app, name="config", rich_help_panel=REPRODUCE)
_DATA = "Small real data for the workloads: list, prepare, check."
app.add_typer(data.app, name="data", help=_DATA, rich_help_panel=REPRODUCE)
app.add_typer(dcp.app, name="dcp", rich_help_panel=REPRODUCE)
app.add_typer(trace.app, name="trace", rich_help_panel=REPRODUCE)

app.command(rich_help_panel=CLUSTER)(launch.launch)
app.command(rich_help_panel=CLUSTER)(netbench.netbench)
app.add_typer(hosts.app, name="hosts", rich_help_panel=CLUSTER)
app.add_typer(testbed.app, name="testbed", rich_help_panel=CLUSTER)
app.add_typer(provision.app, name="provision", rich_help_panel=CLUSTER)

app.command(rich_help_panel=PAPERS)(train.train)
app.add_typer(shadow.app, name="shadow", rich_help_panel=PAPERS)
app.add_typer(mirror.app, name="mirror", rich_help_panel=PAPERS)
app.command(rich_help_panel=PAPERS)(sparsebench.sparsebench)
app.add_typer(stellatrain.app, name="stellatrain", rich_help_panel=PAPERS)

_REPLACED = {
    "goodput": "run",
    "optimizers": "run",
    "storage": "shadow",
    "offset": "shadow offset",
    "switch": "shadow switch",
    "optbench": "shadow bench",
}
"""Commands of earlier versions, and what to call now. To be removed in version 0.2."""


def _replaced(context: typer.Context) -> None:
    name = str(context.info_name)
    raise ConfigError(f"`lastgood {name}` is replaced: call `lastgood {_REPLACED[name]}` with the same options")


for _name in _REPLACED:
    _any = {"ignore_unknown_options": True, "allow_extra_args": True}
    app.command(_name, hidden=True, add_help_option=False, context_settings=_any)(_replaced)


def main() -> None:
    """Run a command. Exit codes: 0 done, 1 it failed, 2 it was asked for wrongly, 130 interrupted."""
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    try:
        app()
    except LastgoodError as error:
        sys.stderr.write(f"lastgood: {error}\n")
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        reason = why_missing(error, f"lastgood {_command()}")
        if reason is None:
            raise
        sys.stderr.write(f"lastgood: {reason}\n")
        sys.exit(1)
    except BrokenPipeError:
        # The reader went away, as `lastgood plan fig8 | head` does; Python must not complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _command() -> str:
    """The command that was called, as in ``plot`` or ``data prepare``."""
    words = sys.argv[1:3]
    groups = {group.name for group in app.registered_groups}
    return " ".join(words if groups & set(words[:1]) else words[:1])
