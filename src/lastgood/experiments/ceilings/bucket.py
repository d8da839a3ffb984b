"""What a bucket takes and gives: plain puts, and gets by range, of objects like a checkpoint's segments."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from lastgood.storage.objects.client import ObjectClient
from lastgood.storage.objects.opening import open_objects
from lastgood.storage.objects.s3 import S3Options
from lastgood.units import MIB

__all__ = ["bucket_burst"]

_RANGE_BYTES = 8 * MIB


def bucket_burst(url: str, s3: S3Options, nbytes: int, object_bytes: int, threads: int) -> tuple[float, float]:
    """Bytes per second of puts and of gets of `nbytes` in all, by so many threads. Leaves nothing behind.

    Raises StorageError.
    """
    content = memoryview(os.urandom(MIB) * (object_bytes // MIB + 1))
    top = f"burst-{secrets.token_hex(8)}"
    sizes = {f"{top}/{begin}": min(object_bytes, nbytes - begin) for begin in range(0, nbytes, object_bytes)}
    with closing(open_objects(url, s3)) as client, ThreadPoolExecutor(threads) as pool:
        try:
            put = _timed(pool, [_put(client, key, content[:size]) for key, size in sizes.items()])
            ranges = [
                _get(client, key, at, min(_RANGE_BYTES, size - at))
                for key, size in sizes.items()
                for at in range(0, size, _RANGE_BYTES)
            ]
            got = _timed(pool, ranges)
        finally:
            client.delete(list(sizes))
    return nbytes / put, nbytes / got


def _put(client: ObjectClient, key: str, content: memoryview) -> Callable[[], object]:
    return lambda: client.put(key, content)


def _get(client: ObjectClient, key: str, begin: int, nbytes: int) -> Callable[[], object]:
    return lambda: client.get_range(key, begin, nbytes)


def _timed(pool: ThreadPoolExecutor, calls: Sequence[Callable[[], object]]) -> float:
    began = time.perf_counter()
    for done in [pool.submit(call) for call in calls]:
        done.result()
    return time.perf_counter() - began
