"""config/schema.json: the JSON schema by which editors complete and check configuration files. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, create_model

from lastgood.checkpointers.registry import checkpointer_class, checkpointer_names
from lastgood.experiments.config.schema import Config
from lastgood.workloads.registry import workload_names, workload_options_class

__all__ = ["editor_schema"]


def editor_schema() -> str:
    """The schema as the text of a file: of `Config`, with the options of each model and of our own systems.

    A file changes what its base says, so no key is required. Lists written as text (``1,10``), which `Config` reads as
    well, are none to an editor.
    """
    systems = {name: checkpointer_class(name) for name in checkpointer_names()}
    # The file is the same with and without systems of other packages.
    ours = {name: kind.Options for name, kind in systems.items() if kind.__module__.startswith("lastgood.")}
    sections: dict[str, Any] = {
        "workloads": _by_name("workloads", {name: workload_options_class(name) for name in workload_names()}, "forbid"),
        "options": _by_name("options", ours, "allow"),
        "base": (str, Field(description="the file that this one changes, relative to this file's folder")),
    }
    whole: type[BaseModel] = create_model("Configuration", __base__=Config, **sections)
    described = {**whole.model_json_schema(), "description": "A configuration file; docs/workflow.md has its keys."}
    return json.dumps(_plain(described), indent=1) + "\n"


def _by_name(section: str, models: Mapping[str, type[BaseModel]], others: Any) -> Any:
    fields: dict[str, Any] = {name: (model, Field()) for name, model in models.items()}
    made = create_model(section, __config__=ConfigDict(extra=others), __doc__=None, **fields)
    return made, Field(description=Config.model_fields[section].description)


_LIMITS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
"""Limits of values that a validator reads first: pydantic leaves them under its own names."""


def _plain(node: Any) -> Any:
    """Without `required`, and without titles, which only repeat the names."""
    if isinstance(node, list):
        return [_plain(value) for value in node]
    if not isinstance(node, dict):
        return node
    left_out = {"required": list, "title": str}
    kept = {key: value for key, value in node.items() if not isinstance(value, left_out.get(key, ()))}
    return {_LIMITS.get(key, key): _plain(value) for key, value in kept.items()}
