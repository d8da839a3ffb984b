"""`lastgood dcp clean`: what saves that nobody goes on with have left, and removing it."""

from __future__ import annotations

from typing import Annotated

import typer

from lastgood.cli._output import console, emit_json, emit_table
from lastgood.cli._place import EndpointUrl, Profile, Region
from lastgood.units import format_bytes, format_seconds

__all__ = ["clean"]


def clean(
    uri: Annotated[str, typer.Argument(metavar="s3://BUCKET[/PREFIX]|FOLDER", help="Where to look, and below.")],
    yes: Annotated[bool, typer.Option("--yes", help="Remove it; without, only say what would be removed.")] = False,
    older_than: Annotated[
        float,
        typer.Option(
            "--older-than",
            min=0.0,
            metavar="HOURS",
            help="Spare what is younger; Lastgood's own uploads are spared for two hours at least.",
        ),
    ] = 24.0,
    region: Region = None,
    endpoint_url: EndpointUrl = None,
    profile: Profile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all to stdout as JSON.")] = False,
) -> None:
    """Find multipart uploads that were never ended, objects that no checkpoint needs, and half DCP checkpoints.

    Complete checkpoints are never touched, nor what a living upload needs. Exit 1 if something could not be looked at,
    or not be removed; all else is done.
    """
    from lastgood.cli._place import s3_options
    from lastgood.errors import StorageError
    from lastgood.storage.objects.leftovers import clean as clean_place
    from lastgood.storage.objects.opening import ObjectPlace

    s3_options(uri, region, endpoint_url, profile)  # flags that the place has no use for are refused
    place = ObjectPlace(uri, region, endpoint_url, profile)
    report = clean_place(place, older_s=older_than * 3600.0, remove=yes)
    gone = [one for one in report.found if not one.spared]
    if as_json:
        described = [
            {
                "kind": one.kind,
                "where": one.where,
                "objects": one.objects,
                "bytes": one.nbytes,
                "age_s": one.age_s,
                "spared": one.spared,
            }
            for one in report.found
        ]
        emit_json({"place": str(place), "removed": yes, "found": described, "trouble": report.troubles})
    else:
        done = "removed" if yes else "would be removed"
        rows = [
            (
                one.kind,
                one.where,
                one.objects or None,
                format_bytes(one.nbytes),
                format_seconds(one.age_s) if one.age_s else None,
                f"stays: {one.spared}" if one.spared else done,
            )
            for one in report.found
        ]
        if rows:
            emit_table(str(place), ("what", "where", "objects", "size", "age", ""), rows)
        total = format_bytes(sum(one.nbytes for one in gone))
        hint = "" if yes or not gone else "; --yes removes it"
        console.print(f"{place}: {total} {done}{hint}" if gone else f"{place}: nothing to remove")
    if report.troubles:
        raise StorageError("; ".join(report.troubles))
