"""docs/s3-format.md is enough: what is written here is read by a reader that knows that page only."""

from __future__ import annotations

import ast
from pathlib import Path

from lastgood.storage.objects.commits import retire
from lastgood.storage.objects.folder import FolderClient
from lastgood.storage.objects.format import BadVerdict
from tests.storage.objects.support import plain_reader
from tests.storage.objects.support.streams import Stream, save

RANKS = [Stream((rank, 5, 6), step=3, rank=rank, world_size=2) for rank in range(2)]
LATER = [Stream((rank, 7, 6), step=4, rank=rank, world_size=2) for rank in range(2)]


def test_the_reader_shares_no_code():
    tree = ast.parse(Path(plain_reader.__file__).read_text())
    names = {
        alias.name for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names
    } | {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [name for name in names if name and "lastgood" in name]


def test_a_folder_is_read(tmp_path):
    client = FolderClient(tmp_path)
    save(client, *RANKS, hashed=True)
    save(client, *LATER)
    save(client, Stream((9,), step=5))
    retire(client, Stream((9,), step=5).name)
    save(client, Stream((8,), step=6))
    client.put(Stream((8,), step=6).name.verdict_key, BadVerdict(Stream((8,), step=6).name, "loss is nan").encode())
    keys = [(str(path.relative_to(tmp_path)), path.stat().st_size) for path in tmp_path.rglob("*") if path.is_file()]
    found = plain_reader.streams(plain_reader.newest(keys), lambda key: (tmp_path / key).read_bytes())
    assert found == [stream.content for stream in LATER]


def test_a_bucket_is_read_with_boto3(bucket, server):
    save(bucket, *RANKS)
    prefix = f"{bucket.prefix}/"
    with server.control(bucket.bucket) as control:
        listed = control.client.list_objects_v2(Bucket=bucket.bucket, Prefix=prefix)["Contents"]
        keys = [(item["Key"].removeprefix(prefix), item["Size"]) for item in listed]

        def get(key: str) -> bytes:
            return control.client.get_object(Bucket=bucket.bucket, Key=prefix + key)["Body"].read()

        found = plain_reader.streams(plain_reader.newest(keys), get)
    assert found == [stream.content for stream in RANKS]
