"""The command line: `lastgood COMMAND`. Commands import what they need when they run, so `--help` is quick."""

from __future__ import annotations

import logging
import os
import sys

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
    export,
    hosts,
    inspect,
    launch,
    mirror,
    netbench,
    plan,
    plot,
    provision,
    push,
    report,
    run,
    shadow,
    sparsebench,
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
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(run.run)
app.command()(plan.plan)
app.command()(check.check)
app.command()(collect.collect)
app.command()(plot.plot)
app.command()(claims.claims)
app.command()(report.report)
app.command()(ceilings.ceilings)
app.command()(netbench.netbench)
app.command()(sparsebench.sparsebench)
app.command()(tune.tune)
app.command()(train.train)
app.command()(launch.launch)
app.command()(inspect.inspect)
app.command()(verify.verify)
app.command()(export.export)
app.command()(push.push)
app.command()(doctor.doctor)
app.add_typer(advise.app, name="advise")
app.add_typer(config.app, name="config")
app.add_typer(data.app, name="data", help="Small real data for the workloads: list, prepare, check.")
app.add_typer(dcp.app, name="dcp")
app.add_typer(hosts.app, name="hosts")
app.add_typer(testbed.app, name="testbed")
app.add_typer(provision.app, name="provision")
app.add_typer(shadow.app, name="shadow")
app.add_typer(mirror.app, name="mirror")
app.add_typer(stellatrain.app, name="stellatrain")
app.add_typer(trace.app, name="trace")

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
