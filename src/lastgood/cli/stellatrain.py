"""`lastgood stellatrain`: training over slow links by the sparse engine (docs/stellatrain.md)."""

from __future__ import annotations

from lastgood.cli import (
    stellatrain_node,
    stellatrain_profile,
    stellatrain_replay,
    stellatrain_serve,
    stellatrain_train,
)
from lastgood.cli._app import App

__all__ = ["app"]

app = App(help="StellaTrain: training over slow links, with a small part of each gradient.", no_args_is_help=True)
app.command("train")(stellatrain_train.train)
app.command("node")(stellatrain_node.node)
app.command("serve")(stellatrain_serve.serve)
app.command("status")(stellatrain_serve.status)
app.command("replay")(stellatrain_replay.replay)
app.command("profile")(stellatrain_profile.profile)
app.command("plot-profile")(stellatrain_profile.plot_profile)
