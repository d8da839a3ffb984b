"""`lastgood status`: the newest durable checkpoint of a training, and whether it is young enough."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer

from lastgood.cli._output import emit_json
from lastgood.cli._place import EndpointUrl, Profile, Region, s3_options
from lastgood.errors import CheckpointError, NoCheckpoint
from lastgood.units import format_bytes, format_seconds, option_seconds

__all__ = ["status"]


def status(
    directory: Annotated[
        str,
        typer.Argument(
            metavar="DIRECTORY|s3://BUCKET/JOB",
            help="Checkpoint directory of any system, may be in use; that of a job of several ranks; or in a bucket.",
            show_default=False,
        ),
    ],
    max_age: Annotated[
        str | None, typer.Option(help="Exit 1 if the newest one is older, as 30m, 2h, 1d.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all to stdout as JSON.")] = False,
    region: Region = None,
    endpoint_url: EndpointUrl = None,
    profile: Profile = None,
) -> None:
    """Say which step is durable, how old and how large it is, how fast they come, and what failed last.

    Exit 1 if there is no durable checkpoint, or none that is as young as --max-age. Reads no data, and takes no lock:
    for monitoring, every minute if you like.
    """
    from lastgood.checkpointers.kept.durable import look_at_place

    limit_s = None if max_age is None else option_seconds("--max-age", max_age)
    look = look_at_place(directory, s3_options(directory, region, endpoint_url, profile))
    newest = look.newest
    age_s = None if newest is None or newest.written_s is None else max(0.0, time.time() - newest.written_s)
    late = limit_s is not None and newest is not None and (age_s is None or age_s > limit_s)
    if as_json:
        described: dict[str, Any] = {
            "directory": look.place,
            "in_use": look.in_use,
            "step": None if newest is None else newest.step,
            "incarnation": None if newest is None else newest.incarnation,
            "age_s": None if age_s is None else round(age_s, 3),
            "bytes": None if newest is None else newest.nbytes,
            "where": None if newest is None else newest.where,
            "steps_per_s": None if look.pace is None else look.pace[0],
            "checkpoint_every_s": None if look.pace is None else look.pace[1],
            "durable_steps": [one.step for one in look.checkpoints],
            "last_failure": next(iter(look.failures), None),
            "max_age_s": limit_s,
            "late": late,
        }
        emit_json(described)
    elif newest is not None:
        age = "at an unknown time" if age_s is None else f"{format_seconds(age_s)} ago"
        use = ", in use" if look.in_use else ""
        lines = [f"{look.place}: step {newest.step}, written {age}, {format_bytes(newest.nbytes)}{use}"]
        if look.pace is not None:
            steps_per_s, every_s = look.pace
            lines.append(f"rate: {steps_per_s:.3g} steps/s, a checkpoint every {format_seconds(every_s)}")
        lines.append(f"last failure: {next(iter(look.failures), 'none that can be seen here')}")
        sys.stdout.write("\n".join(lines) + "\n")
    if newest is None:
        judged = "; all that is complete was judged bad" if look.checkpoints else ""
        seen = f"; {look.failures[0]}" if look.failures else ""
        raise NoCheckpoint(f"{look.place}: there is no durable checkpoint here{judged}{seen}")
    if late:
        age = "at an unknown time" if age_s is None else f"{format_seconds(age_s)} ago"
        raise CheckpointError(f"{look.place}: step {newest.step} was written {age}, and --max-age is {max_age}")
