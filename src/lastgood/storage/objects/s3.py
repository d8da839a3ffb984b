"""Objects in a bucket of S3, or of a server that speaks as S3 does. Data goes by obstore, in any number of threads.

Payloads are not signed (TLS covers them if it is used) and carry a CRC64NVME, which the server checks. All objects
are single puts: there are no multipart uploads that could be orphaned. obstore repeats what failed on the way, within
`S3Options.retries` and `retry_s`; a repeated create that finds the first one's object is told so (`ObjectExists`).
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lastgood.errors import ConfigError, LastgoodError, StorageError
from lastgood.extras import why_missing
from lastgood.locations import Location
from lastgood.storage.objects.client import ObjectExists, ObjectInfo, ObjectMissing, check_key

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Credentials", "S3Client", "S3Options", "missing_package", "parse_s3"]

_T = TypeVar("_T")
_URL = re.compile(r"s3://([^/]+)(?:/(.*))?", re.DOTALL | re.IGNORECASE)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,60})</Code>")
_RETRIED = re.compile(r", after (\d+) retries")
_TRANSPORT = re.compile(r"HTTP error: ([^\n]{1,120})")
_STALE = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken", "RequestExpired"}
_HINTS = {
    "NoSuchBucket": "make the bucket, or correct its name",
    "AccessDenied": "let this user get, put, list and delete there",
    "InvalidAccessKeyId": "the server does not know this access key; check the credentials",
    "SignatureDoesNotMatch": "check the secret key",
    "ExpiredToken": "get a new session token",
    "RequestTimeTooSkewed": "the clock of this machine differs from the server's; set it",
    "SlowDown": "the server is overloaded; use fewer threads, or try again later",
    "ServiceUnavailable": "the server is overloaded or away; try again later",
    "InsufficientStorage": "the server is full",
    "PermanentRedirect": "the bucket is in another region; name it",
    "AuthorizationHeaderMalformed": "the bucket is in another region; name it",
    "InvalidRange": "the object is shorter than what was put; it was replaced or damaged",
}
_HINTS_BY_STATUS = {
    403: "check the credentials, and that they let this user get, put, list and delete there",
    404: "make the bucket, or correct its name",
    500: "look into the log of the server; it may be full",
    503: "the server is overloaded or away; try again later",
    507: "the server is full",
}
_PAGE = 1000
_FIRST_PAUSE_S, _MOST_PAUSE_S = 0.1, 10.0
_KEYS_OF_ENVIRONMENT = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
)
_FILES = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}


@dataclass(frozen=True)
class Credentials:
    """Keys for a bucket. They are in no message and no `repr`."""

    access_key_id: str = field(repr=False)
    secret_access_key: str = field(repr=False)
    token: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class S3Options:
    """How a bucket is reached. None: as the environment has it (AWS_REGION, AWS_ENDPOINT_URL, and so on)."""

    region: str | None = None
    endpoint_url: str | None = None
    """Of a server that is not AWS; with http:// it is reached without TLS."""
    path_style: bool | None = None
    """The bucket in the path and not in the host name; by default if an endpoint is given."""
    profile: str | None = None
    """Of the files of the AWS command line; needs boto3."""
    credentials: Credentials | Callable[[], Credentials] | None = field(default=None, repr=False)
    """The keys, or what gives new ones: it is called again when the old ones have expired."""
    retries: int = 8
    """Of one request, after errors of the server and of the connection."""
    retry_s: float = 120.0
    """No retry begins later than this."""
    request_s: float = 120.0
    """For one try of a request, with its body."""
    connect_s: float = 5.0

    def __post_init__(self) -> None:
        if self.retries < 0 or min(self.retry_s, self.request_s, self.connect_s) <= 0:
            raise ConfigError("S3Options: retries must not be negative, and times must be above 0")
        if self.endpoint_url is not None and not re.match(r"https?://[^@\s]+$", self.endpoint_url):
            raise ConfigError("S3Options: endpoint_url must be http://HOST or https://HOST, without user and password")

    @property
    def endpoint(self) -> str | None:
        """Of the server: given, or the environment's; None for AWS."""
        return self.endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")

    @property
    def uses_path(self) -> bool:
        """Whether the bucket is named in the path."""
        return self.endpoint is not None if self.path_style is None else self.path_style


def parse_s3(location: Location | str) -> tuple[str, str]:
    """Bucket and prefix (without slashes at its ends) of s3://BUCKET/PREFIX. Raises ConfigError."""
    text = str(location)
    match = _URL.fullmatch(text)
    if match is None or not _BUCKET.fullmatch(match[1]):
        raise ConfigError(f"{text}: is not s3://BUCKET or s3://BUCKET/PREFIX")
    prefix = (match[2] or "").strip("/")
    return match[1], check_key(prefix, f"s3://{match[1]}") if prefix else ""


class S3Client:
    """An `ObjectClient` over the objects of a bucket whose keys begin with ``PREFIX/``.

    It belongs to the process that made it: after a fork, connections and threads of the parent are no use to the child,
    and every call of it raises StorageError. Raises ConfigError for a location or options that cannot work, and if
    obstore (or boto3, for a profile) is not installed.
    """

    def __init__(self, location: Location | str, options: S3Options | None = None) -> None:
        self.bucket, self.prefix = parse_s3(location)
        self.options = options or S3Options()
        try:
            import obstore
            from obstore import exceptions, store
        except ModuleNotFoundError as error:
            raise missing_package(error) from error
        self._obstore: Any = obstore
        self._stores: Any = store
        self._exceptions: Any = exceptions
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._made = 0
        self._store: Any = self._make()

    def __repr__(self) -> str:
        return f"S3Client({self.place!r})"

    @property
    def place(self) -> str:
        """The URL."""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def where(self, key: str) -> str:
        """The URL of an object."""
        return f"{self.place}/{key}"

    def create(self, key: str, *content: Buffer) -> None:
        """As `ObjectClient.create`."""
        self._put(key, content, "create")

    def put(self, key: str, content: Buffer) -> None:
        """As `ObjectClient.put`."""
        self._put(key, (content,), "overwrite")

    def get(self, key: str, most_bytes: int) -> bytes:
        """As `ObjectClient.get`."""

        def one(store: Any) -> bytes:
            result = self._obstore.get(store, self._key(key))
            size = result.meta["size"]
            if size > most_bytes:
                raise StorageError(f"{self.where(key)}: has {size} bytes, over the limit of {most_bytes} for it")
            content = bytes(result.bytes())
            if len(content) != size:
                raise StorageError(f"{self.where(key)}: {len(content)} bytes came instead of {size}; try again")
            return content

        return self._run(key, "get", one)

    def get_range(self, key: str, begin: int, nbytes: int) -> memoryview:
        """As `ObjectClient.get_range`."""

        def one(store: Any) -> memoryview:
            content = memoryview(self._obstore.get_range(store, self._key(key), start=begin, length=nbytes))
            if content.nbytes != nbytes:
                raise StorageError(
                    f"{self.where(key)}: {content.nbytes} bytes came instead of {nbytes} from byte {begin} on; the "
                    "object is shorter than what was put"
                )
            return content

        return self._run(key, f"get {nbytes} bytes", one)

    def head(self, key: str) -> ObjectInfo | None:
        """As `ObjectClient.head`."""
        try:
            meta = self._run(key, "look", lambda store: self._obstore.head(store, self._key(key)))
        except ObjectMissing:
            return None
        return ObjectInfo(key, meta["size"], _seconds(meta["last_modified"]))

    def list(self, folder: str, after: str = "") -> Iterator[ObjectInfo]:
        """As `ObjectClient.list`."""
        top, last = self._key(folder) if folder else self.prefix, self._key(after) if after else ""
        while True:
            page = self._run(folder, "list", partial(self._page, top, last))
            for meta in page:
                key = meta["path"].removeprefix(f"{self.prefix}/" if self.prefix else "")
                yield ObjectInfo(key, meta["size"], _seconds(meta["last_modified"]))
            if len(page) < _PAGE:
                return
            last = page[-1]["path"]

    def delete(self, keys: Sequence[str]) -> None:
        """As `ObjectClient.delete`."""
        for begin in range(0, len(keys), _PAGE):
            some = [self._key(key) for key in keys[begin : begin + _PAGE]]
            try:
                self._run(keys[begin], "delete", partial(self._delete, some))
            except ObjectMissing:
                continue  # some servers answer that for what is not there

    def close(self) -> None:
        """Let go of the connections."""
        with self._lock:
            self._store = None

    # -- inside ----------------------------------------------------------------------------------------------------

    def _key(self, key: str) -> str:
        return check_key(f"{self.prefix}/{key}" if self.prefix else key, self.place)

    def _put(self, key: str, content: Sequence[Buffer], mode: str) -> None:
        views = [memoryview(piece).cast("B") for piece in content]
        body = views[0] if len(views) == 1 else views
        self._run(
            key,
            f"put of {sum(view.nbytes for view in views)} bytes",
            lambda store: self._obstore.put(store, self._key(key), body, mode=mode, use_multipart=False),
        )

    def _delete(self, some: Sequence[str], store: Any) -> None:
        self._obstore.delete(store, list(some))

    def _page(self, top: str, last: str, store: Any) -> Sequence[Any]:
        """Up to `_PAGE` objects: one request, as long as a page of the server has as many."""
        stream = self._obstore.list(store, top or None, offset=last or None, chunk_size=_PAGE)
        return next(iter(stream), [])

    def _run(self, key: str, operation: str, one: Callable[[Any], _T]) -> _T:
        """One operation, once more with new credentials if the old ones have expired.

        And again if the connection broke: obstore does not repeat a create by itself, nor the body of an answer.
        All operations may be repeated, and whoever creates knows that an object that is there may be its own.
        """
        deadline, renewed, tries = time.monotonic() + self.options.retry_s, False, 0
        while True:
            store, made = self._current()
            try:
                return one(store)
            except LastgoodError:
                raise
            except Exception as error:
                if not renewed and _may_be_stale(error):
                    renewed = True
                    self._renew(made)
                elif tries < self.options.retries and time.monotonic() < deadline and _was_cut(error):
                    time.sleep(min(_MOST_PAUSE_S, _FIRST_PAUSE_S * 2**tries))
                    tries += 1
                else:
                    # Its own text may hold more than it should.
                    raise self._refused(key, operation, error, tries) from None

    def _current(self) -> tuple[Any, int]:
        if os.getpid() != self._pid:
            raise StorageError(
                f"{self.place}: this connection was made by process {self._pid}, and this is a fork of it; make a "
                "client in the process that uses it"
            )
        with self._lock:
            if self._store is None:
                raise StorageError(f"{self.place}: the connection is closed")
            return self._store, self._made

    def _renew(self, made: int) -> None:
        with self._lock:
            if self._made == made and self._store is not None:  # else another thread was faster
                self._store = self._make()
                self._made += 1

    def _make(self) -> Any:
        options = self.options
        # In bulk, obstore passes over the objects that the server did not delete.
        config: dict[str, Any] = {
            "unsigned_payload": True,
            "checksum_algorithm": "crc64nvme",
            "disable_bulk_delete": True,
        }
        if options.region is not None:
            config["region"] = options.region
        endpoint, path_style = options.endpoint, options.uses_path
        if endpoint is not None:
            # With the bucket in the host name, obstore takes an endpoint that has it already.
            scheme, _, rest = endpoint.partition("://")
            endpoint = endpoint if path_style else f"{scheme}://{self.bucket}.{rest}"
            config["endpoint"] = config["aws_endpoint_url_s3"] = endpoint.rstrip("/")
        config["virtual_hosted_style_request"] = not path_style
        keys = options.credentials() if callable(options.credentials) else options.credentials
        profile = options.profile or (_profile_of_files() if keys is None else None)
        if keys is None and profile is not None:
            keys, region = _of_profile(profile)
            if options.region is None and region is not None:
                config["region"] = region
        # By a callback, so that nothing of the environment's keys is mixed in.
        given = None
        if keys is not None:
            given = {
                "access_key_id": keys.access_key_id,
                "secret_access_key": keys.secret_access_key,
                "token": keys.token,
                "expires_at": None,
            }
        try:
            return self._stores.S3Store(
                self.bucket,
                config=config,
                credential_provider=None if given is None else lambda: given,
                client_options={
                    "allow_http": bool(endpoint and endpoint.startswith("http://")),
                    "timeout": timedelta(seconds=options.request_s),
                    "connect_timeout": timedelta(seconds=options.connect_s),
                },
                retry_config={
                    "max_retries": options.retries,
                    "retry_timeout": timedelta(seconds=options.retry_s),
                    "backoff": {
                        "init_backoff": timedelta(seconds=_FIRST_PAUSE_S),
                        "max_backoff": timedelta(seconds=_MOST_PAUSE_S),
                    },
                },
            )
        except Exception as error:
            raise ConfigError(f"{self.place}: cannot be used with these options: {type(error).__name__}") from None

    def _refused(self, key: str, operation: str, error: Exception, tries: int) -> StorageError:
        text, code = str(error), _code_of(error)
        where = self.where(key)
        if isinstance(error, self._exceptions.AlreadyExistsError):
            return ObjectExists(f"{where}: is there already")
        if isinstance(error, FileNotFoundError) and code != "NoSuchBucket":
            return ObjectMissing(f"{where}: is not there")
        status = _STATUS.search(text)
        retried, transport = _RETRIED.search(text), _TRANSPORT.search(text)
        if status is not None:
            reason = f"status {status[1]}" + (f" {code}" if code else "")
        elif transport is not None:
            reason = transport[1]
        else:
            reason = type(error).__name__
        tries = max(tries, int(retried[1]) if retried else 0)
        after = f" after {tries} retries" if tries else ""
        hint = _HINTS.get(code) or _HINTS_BY_STATUS.get(int(status[1]) if status else 0)
        if hint is None:
            endpoint = self.options.endpoint
            hint = "try again later" if status else f"is the server{f' at {endpoint}' if endpoint else ''} up?"
        return StorageError(f"{where}: {operation} failed{after}: {reason}; {hint}")


def missing_package(error: ModuleNotFoundError) -> ConfigError:
    """The error of a package of the extra s3 that is not installed."""
    return ConfigError(why_missing(error, "s3://") or str(error))


def _profile_of_files() -> str | None:
    """The profile that the AWS command line would take its keys from; None if obstore finds some by itself."""
    if any(os.environ.get(name) for name in _KEYS_OF_ENVIRONMENT):
        return None
    named = os.environ.get("AWS_PROFILE")
    files = (Path(os.environ.get(name) or default) for name, default in _FILES.items())
    return named or ("default" if any(path.expanduser().is_file() for path in files) else None)


def _of_profile(profile: str) -> tuple[Credentials, str | None]:
    """Keys and region of a profile. Raises ConfigError."""
    try:
        import boto3
    except ModuleNotFoundError as error:
        raise missing_package(error) from error
    try:
        session = boto3.session.Session(profile_name=profile)
        frozen = session.get_credentials().get_frozen_credentials()
        return Credentials(frozen.access_key, frozen.secret_key, frozen.token), session.region_name
    except Exception as error:  # of botocore, whose classes are known only if it is there
        raise ConfigError(f"the AWS profile {profile!r} gives no credentials: {type(error).__name__}") from None


def _code_of(error: Exception) -> str:
    """S3's own name of an error; empty if there is none."""
    match = _CODE.search(str(error))
    return match[1] if match else ""


def _may_be_stale(error: Exception) -> bool:
    """Whether new credentials may heal it. The answer to a HEAD has no body that would tell."""
    code, status = _code_of(error), _STATUS.search(str(error))
    return code in _STALE or (not code and status is not None and status[1] in ("400", "403"))


def _was_cut(error: Exception) -> bool:
    """Whether the connection broke, and obstore did not try again."""
    text = str(error)
    told = isinstance(error, OSError) or _STATUS.search(text) or _RETRIED.search(text)
    return not told and type(error).__name__ in ("GenericError", "JoinError")


def _seconds(moment: datetime) -> float:
    return float(int(moment.timestamp()))
