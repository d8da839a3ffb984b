"""`lastgood push`: a checkpoint of a directory, sent to a bucket."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lastgood.cli._output import console, emit_json, reporter
from lastgood.cli._place import EndpointUrl, Profile, Region
from lastgood.units import format_bytes, format_seconds

__all__ = ["push"]


def push(
    directory: Annotated[
        Path,
        typer.Argument(
            help="Checkpoint directory, may be in use; or that of a job of several ranks.", show_default=False
        ),
    ],
    uri: Annotated[
        str,
        typer.Argument(metavar="s3://BUCKET/JOB|FOLDER", help="Where to; a place for one job.", show_default=False),
    ],
    step: Annotated[
        int | None, typer.Option(help="Step of the checkpoint.", show_default="the newest good one")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, max=64, help="Segments, of up to 32 MiB, that are sent at once.")] = 4,
    mbps: Annotated[
        float | None, typer.Option(min=0.001, help="At most so many 10**6 bits per second.", show_default="no limit")
    ] = None,
    region: Region = None,
    endpoint_url: EndpointUrl = None,
    profile: Profile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was sent to stdout as JSON.")] = False,
) -> None:
    """Send a checkpoint to a bucket of S3, or a folder of objects, where it appears complete or not at all.

    Called again after it failed, it sends only what is missing; nor is sent what an earlier checkpoint there has.
    """
    from lastgood.checkpointers.remote.push import push_job
    from lastgood.cli._place import s3_options
    from lastgood.storage.objects.opening import ObjectPlace

    s3_options(uri, region, endpoint_url, profile)  # flags that the place has no use for are refused
    place = ObjectPlace(uri, region, endpoint_url, profile)
    client = place.open()
    try:
        found = push_job(directory, client, step, mbps=mbps, threads=threads, tell=reporter("push"))
    finally:
        client.close()
    if as_json:
        emit_json(
            {
                "place": str(place),
                "job_id": found.name.job_id.hex(),
                "incarnation": found.name.incarnation,
                "step": found.name.step,
                "ranks": found.world_size,
                "sent_bytes": found.sent_bytes,
                "kept_bytes": found.kept_bytes,
                "seconds": found.seconds,
                "was_there": found.was_there,
            }
        )
    elif found.was_there:
        console.print(f"{place}: step {found.name.step} is there already")
    else:
        console.print(
            f"{place}: step {found.name.step} of incarnation {found.name.incarnation}: "
            f"{format_bytes(found.sent_bytes)} sent, {format_bytes(found.kept_bytes)} were there, in "
            f"{format_seconds(found.seconds)}"
        )
