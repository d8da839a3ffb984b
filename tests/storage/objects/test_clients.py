"""One contract for all stores of objects: the folder is the oracle of the bucket."""

from __future__ import annotations

import os
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from lastgood.errors import ConfigError, StorageError
from lastgood.storage.objects.client import ObjectExists, ObjectMissing
from lastgood.storage.objects.folder import FolderClient
from lastgood.storage.objects.opening import open_objects
from lastgood.storage.objects.s3 import Credentials, S3Client, S3Options, parse_s3

SECRET = "TOP/SECRET+KEY0123456789"


@pytest.fixture(params=["folder", "bucket"])
def client(request, tmp_path):
    if request.param == "folder":
        return FolderClient(tmp_path / "objects")
    return request.getfixturevalue("bucket")


def test_what_was_put_is_got(client):
    client.put("a/b", b"first")
    client.put("a/b", memoryview(bytearray(b"second")))
    assert client.get("a/b", 6) == b"second"
    assert bytes(client.get_range("a/b", 2, 3)) == b"con"
    info = client.head("a/b")
    assert (info.key, info.nbytes) == ("a/b", 6)
    assert info.modified_s == int(info.modified_s) > 1.7e9
    client.put("empty", b"")
    assert client.get("empty", 0) == b""


def test_one_of_many_creates_an_object(client):
    won = []

    def race(number):
        try:
            client.create("commits/one", str(number).encode())
            won.append(number)
        except ObjectExists:
            pass

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(race, range(8)))
    assert len(won) == 1
    assert client.get("commits/one", 10) == str(won[0]).encode()


def test_what_is_not_there_is_missing(client):
    assert client.head("a/b") is None
    with pytest.raises(ObjectMissing, match="a/b: is not there"):
        client.get("a/b", 10)
    with pytest.raises(ObjectMissing):
        client.get_range("a/b", 0, 1)
    client.delete(["a/b", "a/c"])
    assert list(client.list("a")) == []


def test_what_is_larger_than_it_may_be_is_not_read(client):
    client.put("a", bytes(1000))
    with pytest.raises(StorageError, match="a: has 1000 bytes, over the limit of 999"):
        client.get("a", 999)


@pytest.mark.parametrize(("begin", "nbytes"), [(0, 101), (99, 2), (100, 1), (5000, 10)])
def test_a_range_is_never_shorter(client, begin, nbytes):
    client.put("a", bytes(100))
    with pytest.raises(StorageError, match=r"short|ends at byte"):
        client.get_range("a", begin, nbytes)


def test_lists_are_in_the_order_of_keys_and_go_on_after_one(client):
    for name in ("b/2", "a/2", "a/1", "ab/1", "a/1-1", "a/c/d"):
        client.put(name, name.encode())
    found = list(client.list("a"))
    assert [info.key for info in found] == ["a/1", "a/1-1", "a/2", "a/c/d"]
    assert [info.nbytes for info in found] == [3, 5, 3, 5]
    assert [info.key for info in client.list("a", after="a/1-1")] == ["a/2", "a/c/d"]
    client.delete(["a/2", "a/gone", "b/2"])
    assert [info.key for info in client.list("a")] == ["a/1", "a/1-1", "a/c/d"]


def test_more_keys_than_a_page_has_are_listed_and_deleted(client):
    keys = [f"many/{number:04d}" for number in range(1101)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: client.put(key, b"x"), keys))
    assert [info.key for info in client.list("many")] == keys
    assert [info.key for info in client.list("many", after=keys[1000])] == keys[1001:]
    client.delete(keys)
    assert list(client.list("many")) == []


@pytest.mark.parametrize(
    "key", ["../x", "a/../b", "a//b", "/a", "a/", ".", "a/./b", "a\nb", "a\x00", "\ud800", "k" * 1100]
)
def test_a_key_that_leads_elsewhere_is_refused(client, key):
    for call in (client.head, lambda key: client.put(key, b""), lambda key: client.get(key, 1)):
        with pytest.raises(ConfigError):
            call(key)


def test_a_place_with_odd_characters(server, tmp_path):
    odd = f"{secrets.token_hex(4)}/a b+c%25&d=é~#?;:@[]{{}}'(ü)!"
    for client in (S3Client(f"s3://lastgood/{odd}", server.options()), FolderClient(tmp_path / odd)):
        client.create("x/1", b"one")
        assert client.get("x/1", 10) == b"one"
        assert [info.key for info in client.list("x")] == ["x/1"]
        client.delete(["x/1"])
        assert client.head("x/1") is None
        client.close()


def test_places_that_name_no_bucket_are_refused(tmp_path):
    assert parse_s3("s3://bucket/a/b/") == ("bucket", "a/b")
    assert parse_s3("S3://bucket") == ("bucket", "")
    for url in ("s3://", "s3://a", "s3://b@d/x", "s3:///x", "s3://bucket/a//b", "s3://bucket/../x", "s3://bucket/a\nb"):
        with pytest.raises(ConfigError):
            parse_s3(url)
    with pytest.raises(ConfigError, match="is a URL"):
        open_objects("gs://bucket/x")
    assert isinstance(open_objects(tmp_path), FolderClient)


def test_options_that_cannot_work_are_refused():
    for options in (
        {"retries": -1},
        {"retry_s": 0},
        {"endpoint_url": "http://user:secret@host"},
        {"endpoint_url": "x"},
    ):
        with pytest.raises(ConfigError) as caught:
            S3Options(**options)
        assert "secret" not in str(caught.value)


def test_no_secret_is_in_any_text(server, url):
    options = server.options(credentials=Credentials("KEYID0", SECRET, "TOKEN" + SECRET), retries=0)
    client = S3Client(url, options)
    texts = [repr(options), repr(client), str(client), repr(options.credentials)]
    for call in (lambda: client.put("a", b"x"), lambda: client.get("a", 1), lambda: list(client.list("a"))):
        with pytest.raises(StorageError) as caught:
            call()
        texts += [str(caught.value), repr(caught.value), str(caught.value.__cause__)]
        assert "check" in str(caught.value) or "access key" in str(caught.value)
    assert [text for text in texts if SECRET in text or "KEYID0" in text] == []


def test_a_client_is_of_no_use_after_a_fork(bucket):
    bucket.put("a", b"x")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            bucket.get("a", 1)
            os.write(writing, b"no error")
        except StorageError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    assert os.waitpid(child, 0)[1] == 0
    with os.fdopen(reading, "rb") as told:
        assert b"was made by process" in told.read()
    assert bucket.get("a", 1) == b"x"


def test_a_closed_client_says_so(bucket):
    bucket.close()
    with pytest.raises(StorageError, match="the connection is closed"):
        bucket.head("a")


def test_threads_share_a_client(client):
    content = os.urandom(200_000)
    failures = []

    def both(number):
        try:
            client.create(f"t/{number}", content)
            assert client.get(f"t/{number}", len(content)) == content
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=both, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []


def test_a_folder_that_is_none_or_has_gone_does_not_look_empty(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="is no folder"):
        FolderClient(tmp_path / "file")
    client = FolderClient(tmp_path / "objects")
    assert list(client.list("commits")) == []
    client.root.rmdir()
    with pytest.raises(StorageError, match="is its disk mounted"):
        list(client.list("commits"))
