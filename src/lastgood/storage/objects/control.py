"""What obstore lacks, by boto3: making a bucket, and the uploads in several parts that other tools left in one.

Lastgood makes no such uploads. Those of others take space, and are in no listing of objects.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from lastgood.errors import ConfigError, StorageError
from lastgood.locations import Location
from lastgood.storage.objects.s3 import Credentials, S3Options, missing_package, parse_s3

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["OpenUpload", "S3Control"]

_PATIENCE_S = 60.0
_FIRST_REGION = "us-east-1"
"""Whose buckets are made without saying so."""


@dataclass(frozen=True)
class OpenUpload:
    """An upload in several parts that was neither completed nor aborted."""

    key: str
    """In the bucket."""
    upload_id: str
    begun_s: float
    """In seconds since 1970, by the clock of the server."""
    nbytes: int
    """Of its parts so far."""


class S3Control:
    """A bucket, and a prefix in it. Use it as a context manager. All calls raise StorageError.

    Raises ConfigError for a location or options that cannot work, and if boto3 is not installed.
    """

    def __init__(self, location: Location | str, options: S3Options | None = None) -> None:
        self.bucket, self.prefix = parse_s3(location)
        self._client = _client(options or S3Options())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def client(self) -> Any:
        """boto3's own."""
        return self._client

    def close(self) -> None:
        """Let go of the connections."""
        self._client.close()

    def make_bucket(self) -> None:
        """Make the bucket, if this user does not have it yet."""
        region = self._client.meta.region_name
        where = {} if region in (None, _FIRST_REGION) else {"CreateBucketConfiguration": {"LocationConstraint": region}}
        with self._errors("making the bucket"):
            try:
                self._client.create_bucket(Bucket=self.bucket, **where)
            except self._client.exceptions.BucketAlreadyOwnedByYou:
                return
            except self._client.exceptions.BucketAlreadyExists:
                self._client.head_bucket(Bucket=self.bucket)  # another's is refused here

    def open_uploads(self) -> Iterator[OpenUpload]:
        """Uploads below the prefix that are open, one page after another."""
        below = f"{self.prefix}/" if self.prefix else ""
        with self._errors("listing open uploads"):
            for page in self._client.get_paginator("list_multipart_uploads").paginate(Bucket=self.bucket, Prefix=below):
                for upload in page.get("Uploads", []):
                    yield OpenUpload(
                        upload["Key"],
                        upload["UploadId"],
                        upload["Initiated"].timestamp(),
                        self._size(upload["Key"], upload["UploadId"]),
                    )

    def abort(self, uploads: Sequence[OpenUpload]) -> None:
        """End them, and free their parts. One that is over already is no error."""
        for upload in uploads:
            with self._errors(f"aborting the upload of {upload.key}"):
                try:
                    self._client.abort_multipart_upload(Bucket=self.bucket, Key=upload.key, UploadId=upload.upload_id)
                except self._client.exceptions.NoSuchUpload:
                    continue

    def _size(self, key: str, upload_id: str) -> int:
        pages = self._client.get_paginator("list_parts").paginate(Bucket=self.bucket, Key=key, UploadId=upload_id)
        with contextlib.suppress(self._client.exceptions.NoSuchUpload):
            return sum(part["Size"] for page in pages for part in page.get("Parts", []))
        return 0

    @contextlib.contextmanager
    def _errors(self, operation: str) -> Iterator[None]:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except ClientError as error:
            code = str(error.response.get("Error", {}).get("Code"))[:60]
            raise StorageError(f"s3://{self.bucket}: {operation} failed: {code}") from None
        except BotoCoreError as error:
            raise StorageError(f"s3://{self.bucket}: {operation} failed: {type(error).__name__}") from None


def _client(options: S3Options) -> Any:
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ModuleNotFoundError as error:
        raise missing_package(error) from error
    keys = options.credentials() if callable(options.credentials) else options.credentials
    given = {} if keys is None else {"botocore_session": _without_profile()}
    keys = keys or Credentials("", "")
    try:
        return boto3.session.Session(profile_name=options.profile, **given).client(
            "s3",
            region_name=options.region,
            endpoint_url=options.endpoint_url,
            aws_access_key_id=keys.access_key_id or None,
            aws_secret_access_key=keys.secret_access_key or None,
            aws_session_token=keys.token,
            config=Config(
                s3={"addressing_style": "path" if options.uses_path else "virtual"},
                retries={"max_attempts": options.retries + 1},
                connect_timeout=options.connect_s,
                read_timeout=min(options.request_s, _PATIENCE_S),
            ),
        )
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(f"S3 cannot be reached with these options: {type(error).__name__}") from None


def _without_profile() -> Any:
    """A session for keys that are given: boto3 refuses an AWS_PROFILE that there is not, though it needs none."""
    import botocore.session

    return botocore.session.Session(session_vars={"profile": (None, None, None, None)})
