"""`lastgood mirror`: FlowCheck's mirror node, stage by stage (docs/flowcheck-capture.md)."""

from __future__ import annotations

from lastgood.cli import (
    mirror_describe,
    mirror_dump,
    mirror_generate,
    mirror_odds,
    mirror_parse,
    mirror_run,
    mirror_setup,
    mirror_status,
    mirror_update,
)
from lastgood.cli._app import App

__all__ = ["app"]

app = App(help="FlowCheck: checkpoints from mirrored packets, with the trainers untouched.", no_args_is_help=True)
app.command("describe")(mirror_describe.describe)
app.command("setup")(mirror_setup.setup)
app.command("check")(mirror_setup.check)
app.command("commands")(mirror_setup.commands)
app.command("dump")(mirror_dump.dump)
app.command("generate")(mirror_generate.generate)
app.command("odds")(mirror_odds.odds)
app.command("parse")(mirror_parse.parse)
app.command("extract")(mirror_parse.extract)
app.command("update")(mirror_update.update)
app.command("run")(mirror_run.run)
app.command("status")(mirror_status.status)
app.command("stop")(mirror_status.stop)
app.command("resync")(mirror_status.resync)
