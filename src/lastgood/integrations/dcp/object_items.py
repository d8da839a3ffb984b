"""A rank's stream in segments of objects: copied, segment by segment, into a few buffers that threads send."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from lastgood.errors import CheckpointError, WaitTimeout
from lastgood.integrations.dcp.slot_items import CHUNK_BYTES, RankStream, SlotOptions
from lastgood.state import Layout
from lastgood.storage import format as fmt
from lastgood.storage.objects.client import ObjectClient
from lastgood.storage.objects.format import CommitName, Part, segment_bytes_for
from lastgood.storage.objects.upload import PartUpload
from lastgood.units import MIB

__all__ = ["send_bytes", "send_stream"]

_LEAST_SEGMENT_BYTES = 8 * MIB
"""Of a small stream, which is cut so that all threads have something to send."""


def send_stream(
    client: ObjectClient, name: CommitName, rank: int, world_size: int, stream: RankStream, options: SlotOptions
) -> tuple[PartUpload, Part]:
    """Send a rank's stream as its part of the checkpoint `name`; nothing of it is there before the commit.

    Raises StateError as `RankStream`; StorageError, WaitTimeout; no thread of it runs then.
    """
    upload = _upload(client, name, rank, world_size, stream.nbytes, options.writer_threads)
    _send(upload, stream.buffers(), options, pinned=stream.on_device)
    layout = stream.layout
    return upload, upload.finish(layout.stream_bytes, stream.meta.numel(), layout.digest())


def send_bytes(client: ObjectClient, name: CommitName, rank: int, world_size: int, what: str, content: bytes) -> Part:
    """Send `content` as the part of a rank, with a layout in which `what` names it. Raises StorageError."""
    layout = Layout(["d", [[["s", what], ["T", 0, 0, "uint8", [len(content)], [1]]]]], (len(content),), 0)
    meta = layout.to_json()
    stream = memoryview(content + bytes(layout.stream_bytes - len(content)) + meta)
    upload = _upload(client, name, rank, world_size, stream.nbytes, 1)
    for index in range(upload.segments):
        begin = index * upload.segment_bytes
        upload.send(index, stream[begin : begin + upload.size_of(index)])
    return upload.finish(layout.stream_bytes, len(meta), layout.digest())


def _upload(
    client: ObjectClient, name: CommitName, rank: int, world_size: int, stream_bytes: int, threads: int
) -> PartUpload:
    table_offset, table_bytes, _ = fmt.stream_layout(stream_bytes, CHUNK_BYTES)
    record = fmt.CommitRecord(
        kind=fmt.RecordKind.WRITING,
        job_id=name.job_id,
        step=name.step,
        incarnation=name.incarnation,
        sequence=1,
        stream_bytes=stream_bytes,
        meta_offset=0,
        meta_bytes=0,
        chunk_bytes=CHUNK_BYTES,
        data_offset=fmt.DATA_OFFSET,
        table_offset=table_offset,
        table_bytes=table_bytes,
        layout_digest=bytes(32),
        table_digest=bytes(32),
        rank=rank,
        world_size=world_size,
    )
    share = max(-(-stream_bytes // threads), _LEAST_SEGMENT_BYTES)
    whole_chunks = -(-share // CHUNK_BYTES) * CHUNK_BYTES
    return PartUpload(client, record, segment_bytes=min(whole_chunks, segment_bytes_for(CHUNK_BYTES)))


def _send(upload: PartUpload, buffers: Iterator[torch.Tensor], options: SlotOptions, *, pinned: bool) -> None:
    """Fill one buffer while the others are sent. At most `pool_bytes` of memory, but two segments."""
    count = min(upload.segments, options.writer_threads + 1, max(2, options.pool_bytes // upload.segment_bytes))
    free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
    for _ in range(count):
        free.put(torch.empty(upload.size_of(0), dtype=torch.uint8, device="cpu", pin_memory=pinned))

    def send(index: int, memory: torch.Tensor) -> None:
        try:
            upload.send(index, memory.numpy()[: upload.size_of(index)].data)
        finally:
            free.put(memory)

    under_way: list[Future[None]] = []

    def buffer() -> torch.Tensor:
        """One that is free. Raises what a thread has met, and WaitTimeout."""
        try:
            memory = free.get(timeout=options.timeout_s)
        except queue.Empty:
            raise WaitTimeout(
                f"{upload.client.place}: waited {options.timeout_s:.0f} s for a segment to be taken; see whether the "
                "store is up, and what other work it has"
            ) from None
        for one in [one for one in under_way if one.done()]:
            under_way.remove(one)
            one.result()
        return memory

    with ThreadPoolExecutor(options.writer_threads, thread_name_prefix="lastgood-dcp-send") as pool:
        try:
            for index, memory in enumerate(_filled(upload, buffers, buffer)):
                under_way.append(pool.submit(send, index, memory))
            for one in under_way:
                one.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _filled(
    upload: PartUpload, buffers: Iterator[torch.Tensor], buffer: Callable[[], torch.Tensor]
) -> Iterator[torch.Tensor]:
    """The stream, in buffers that hold a segment each."""
    index, at, memory = 0, 0, buffer()
    for piece in buffers:
        begin = 0
        while begin < piece.numel():
            if at == upload.size_of(index):
                yield memory
                index, at, memory = index + 1, 0, buffer()
            count = min(piece.numel() - begin, upload.size_of(index) - at)
            memory[at : at + count].copy_(piece[begin : begin + count])
            begin, at = begin + count, at + count
    if index != upload.segments - 1 or at != upload.size_of(index):
        raise CheckpointError(f"{upload.client.place}: a stream that ends in segment {index} of {upload.segments}")
    yield memory
