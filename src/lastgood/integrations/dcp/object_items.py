"""A rank's stream in segments of objects, which threads send: from where it lies in host memory, or through buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

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

_SMALL_BYTES = 256 * 1024
_LEAST_SEGMENT_BYTES = 8 * MIB
"""Of a small stream, which is cut so that all threads have something to send."""


def send_stream(
    client: ObjectClient, name: CommitName, rank: int, world_size: int, stream: RankStream, options: SlotOptions
) -> tuple[PartUpload, Part]:
    """Send a rank's stream as its part of the checkpoint `name`; nothing of it is there before the commit.

    Raises StateError as `RankStream`; StorageError, WaitTimeout; no thread of it runs then.
    """
    upload = _upload(client, name, rank, world_size, stream.nbytes, options.writer_threads)
    _send(upload, stream, options)
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


def _send(upload: PartUpload, stream: RankStream, options: SlotOptions) -> None:
    """Send a segment in each of `writer_threads` threads, while the next one is gathered."""
    in_progress: dict[Future[bool], torch.Tensor | None] = {}
    free: list[torch.Tensor] = []
    most = options.writer_threads + 1
    if stream.on_device:
        most = min(upload.segments, most, max(2, options.pool_bytes // upload.segment_bytes))
        size = upload.size_of(0)
        free = [torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(most)]

    def settle(left: int) -> None:
        """Wait until at most `left` are in progress. Raises what a thread has met, and WaitTimeout."""
        while len(in_progress) > left:
            done, _ = wait(in_progress, options.timeout_s, FIRST_COMPLETED)
            if not done:
                raise WaitTimeout(
                    f"{upload.client.place}: waited {options.timeout_s:.0f} s for a segment to be taken; see whether "
                    "the store is up, and what other work it has"
                )
            for one in done:
                memory = in_progress.pop(one)
                one.result()
                if memory is not None:
                    free.append(memory)

    with ThreadPoolExecutor(options.writer_threads, thread_name_prefix="lastgood-dcp-send") as pool:
        try:
            for index, pieces in enumerate(_cut(upload, stream.buffers())):
                settle(most - 1)
                memory = None
                if stream.on_device:
                    memory = free.pop()
                    pieces = [_landed(pieces, memory)]
                in_progress[pool.submit(upload.send, index, *_buffers(pieces))] = memory
            settle(0)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _cut(upload: PartUpload, buffers: Iterator[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The stream in segments, each as views of the tensors that it consists of."""
    index, held = 0, 0
    pieces: list[torch.Tensor] = []
    for buffer in buffers:
        begin = 0
        while begin < buffer.numel():
            if held == upload.size_of(index):
                yield pieces
                index, held, pieces = index + 1, 0, []
            count = min(buffer.numel() - begin, upload.size_of(index) - held)
            pieces.append(buffer[begin : begin + count])
            begin, held = begin + count, held + count
    if index != upload.segments - 1 or held != upload.size_of(index):
        raise CheckpointError(f"{upload.client.place}: a stream that ends in segment {index} of {upload.segments}")
    yield pieces


def _landed(pieces: Sequence[torch.Tensor], memory: torch.Tensor) -> torch.Tensor:
    """Pieces of a device, one after another in host memory."""
    at = 0
    for piece in pieces:
        memory[at : at + piece.numel()].copy_(piece)
        at += piece.numel()
    return memory[:at]


def _buffers(pieces: Sequence[torch.Tensor]) -> Iterator[memoryview]:
    """Large pieces in their places; small ones joined, since each is a write to the connection of its own."""
    small: list[torch.Tensor] = []
    for piece in pieces:
        if piece.numel() < _SMALL_BYTES:
            small.append(piece)
            continue
        if small:
            yield torch.cat(small).numpy().data
            small = []
        yield piece.numpy().data
    if small:
        yield torch.cat(small).numpy().data
