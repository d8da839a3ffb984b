"""Arguments of commands that look at a job where it is: a folder of this machine, or a bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from lastgood.errors import ConfigError
from lastgood.locations import Location

if TYPE_CHECKING:
    from lastgood.storage.objects.s3 import S3Options

__all__ = ["EndpointUrl", "Profile", "Region", "s3_options"]

Region = Annotated[str | None, typer.Option("--region", help="Of a bucket (s3://).", show_default="AWS_REGION")]
EndpointUrl = Annotated[
    str | None,
    typer.Option("--endpoint-url", help="Of a server that is not AWS.", show_default="AWS_ENDPOINT_URL"),
]
Profile = Annotated[
    str | None,
    typer.Option("--profile", help="Of the AWS configuration, for the keys.", show_default="AWS_PROFILE"),
]


def s3_options(place: object, region: str | None, endpoint_url: str | None, profile: str | None) -> S3Options | None:
    """How a bucket is reached; None for a folder. Raises ConfigError for flags that the place has no use for."""
    given = {"--region": region, "--endpoint-url": endpoint_url, "--profile": profile}
    named = [flag for flag, value in given.items() if value is not None]
    if Location.parse(str(place)).scheme != "s3":
        if named:
            raise ConfigError(f"{', '.join(named)}: for s3://BUCKET/PREFIX only, and {place} is a folder")
        return None
    from lastgood.storage.objects.s3 import S3Options

    return S3Options(region=region, endpoint_url=endpoint_url, profile=profile)
