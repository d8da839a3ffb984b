"""`lastgood config`: every value of a configuration, base and overrides included, and the schema of such files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lastgood.cli._app import App
from lastgood.cli._output import emit_json

__all__ = ["app"]

app = App(help="Configuration files: every value of one, and their schema.")


@app.command()
def show(
    more: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Further overrides.")] = None,
    configfile: Annotated[
        Path | None, typer.Option(help="A configuration file [default: the checkout's config/laptop.yaml].")
    ] = None,
    config: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="Override one key of the file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the values to stdout as JSON.")] = False,
) -> None:
    """Print every value that a call with this configuration would use, as one complete configuration file."""
    import yaml

    from lastgood.experiments.config.yaml_file import parse_overrides
    from lastgood.experiments.plan.grid import find_root
    from lastgood.experiments.plan.load import parse_config

    overrides = parse_overrides([*(config or []), *(more or [])])
    found, _ = parse_config(configfile or find_root() / "config" / "laptop.yaml", overrides)
    values = found.model_dump(mode="json")
    if as_json:
        emit_json(values)
    else:
        typer.echo(yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=120), nl=False)


@app.command()
def schema() -> None:
    """Print the JSON schema of configuration files, by which editors complete and check them (config/schema.json)."""
    from lastgood.experiments.config.editors import editor_schema

    typer.echo(editor_schema(), nl=False)
