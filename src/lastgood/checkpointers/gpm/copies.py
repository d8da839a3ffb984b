"""Three ways of a state into a mapped area: stores by CPU threads, stores by a device, and through a pinned area.

Each stores a whole stream, with the zeros that fill it up to whole blocks, and returns the checksums of its chunks, in
order. When they return no copy is in progress, also if they raise.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotInTime
from typing import Any

from lastgood import _native
from lastgood._lazy import torch
from lastgood.checkpointers.copies.device_streams import DeviceStreams, copy_bytes
from lastgood.errors import WaitTimeout
from lastgood.files import storage_errors
from lastgood.storage.mapped_areas import AreaWrite, MappedArea

__all__ = ["Registrar", "copy_through_pinned", "store_from_devices", "store_from_host"]

_PORTABLE_AND_MAPPED = 1 | 2
"""Flags of cudaHostRegister: known to all devices, which may store into it."""


class Registrar:
    """Tells the driver of mappings, so that devices may store into them, and remembers where it refused."""

    def __init__(self) -> None:
        self.refused = ""
        """Why devices cannot store into the areas; empty while they can."""
        self._registered: set[int] = set()

    def register(self, mapped: MappedArea, device: torch.device) -> bool:
        """Whether devices can store into this mapping; it is registered until it is unmapped.

        One refusal holds for all: tmpfs and DAX allow it, file systems that must see each write do not.
        """
        if not self.refused and importlib.util.find_spec("triton") is None:
            self.refused = "Triton is not installed"
        if self.refused or mapped.address in self._registered:
            return not self.refused
        cudart = torch.cuda.cudart()
        with torch.cuda.device(device):
            error = cudart.cudaHostRegister(mapped.address, mapped.nbytes, _PORTABLE_AND_MAPPED)
        if int(error) != 0:
            self.refused = f"registering {mapped.path} was refused: {cudart.cudaGetErrorString(error)}"
            # It stays the runtime's last error, and torch would blame its next kernel for it.
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device=device)
            return False
        self._registered.add(mapped.address)
        mapped.closing.append(lambda: self._unregister(mapped.address))
        return True

    def _unregister(self, address: int) -> None:
        self._registered.discard(address)
        torch.cuda.cudart().cudaHostUnregister(address)


def store_from_host(write: AreaWrite, stream: Iterable[torch.Tensor], chunk_bytes: int, threads: int) -> list[int]:
    """Store buffers of host memory; each byte is read and stored once, and summed on its way. Raises StorageError."""

    def store(index: int, buffers: list[torch.Tensor]) -> int:
        checksum = _native.chunk_seed(write.sequence, index)
        target = write.address + index * chunk_bytes
        write.mapped.populate(write.data_offset + index * chunk_bytes, _total(buffers))
        for buffer in buffers:
            checksum = _native.copy_crc32c(target, buffer.data_ptr(), buffer.numel(), checksum)
            target += buffer.numel()
        return checksum

    with storage_errors(write.path, "storing", write.padded_bytes), ThreadPoolExecutor(threads, "gpm-store") as pool:
        chunks = list(_chunks(stream, chunk_bytes))
        return list(pool.map(store, range(len(chunks)), chunks))


def store_from_devices(write: AreaWrite, stream: Iterable[torch.Tensor], chunk_bytes: int, threads: int) -> list[int]:
    """Have devices store into the mapping, which must be registered; then make the CPU touch each page, and sum it.

    Raises StorageError.
    """
    from lastgood.checkpointers.gpm.device_kernel import store_from_device

    area = torch.frombuffer(write.mapped.memory, dtype=torch.uint8)[write.data_offset :]
    devices = set()
    position = 0
    try:
        for buffer in stream:
            target = area[position : position + buffer.numel()]
            if buffer.is_cuda:
                devices.add(buffer.device)
                store_from_device(target, buffer)
            else:
                copy_bytes(target, buffer)
            position += buffer.numel()
    finally:
        for device in devices:
            torch.cuda.synchronize(device)

    def check(begin: int) -> int:
        length = min(chunk_bytes, position - begin)
        write.mapped.redirty(write.data_offset + begin, length)
        seed = _native.chunk_seed(write.sequence, begin // chunk_bytes)
        return _native.crc32c_at(write.address + begin, length, seed)

    with storage_errors(write.path, "storing", write.padded_bytes), ThreadPoolExecutor(threads, "gpm-check") as pool:
        return list(pool.map(check, range(0, position, chunk_bytes)))


def copy_through_pinned(
    write: AreaWrite,
    stream: Iterable[torch.Tensor],
    chunk_bytes: int,
    threads: int,
    streams: DeviceStreams,
    pinned: torch.Tensor,
    timeout_s: float,
) -> list[int]:
    """Copy chunk by chunk from devices into `pinned` while CPU threads store earlier chunks into the mapping.

    `pinned` is a uint8 tensor of page-locked host memory that holds at least one chunk. Raises StorageError,
    WaitTimeout.
    """
    places = pinned.numel() // chunk_bytes

    def store(index: int, chunk: torch.Tensor, arrivals: list[tuple[Any, Any]]) -> int:
        for _, event in arrivals:
            event.synchronize()
        write.mapped.populate(write.data_offset + index * chunk_bytes, chunk.numel())
        target = write.address + index * chunk_bytes
        seed = _native.chunk_seed(write.sequence, index)
        return _native.copy_crc32c(target, chunk.data_ptr(), chunk.numel(), seed)

    stored: list[Future[int]] = []
    with storage_errors(write.path, "storing", write.padded_bytes), ThreadPoolExecutor(threads, "gpm-store") as pool:
        try:
            for index, buffers in enumerate(_chunks(stream, chunk_bytes)):
                if index >= places:
                    stored[index - places].result(timeout_s)  # its place in the pinned area is free again
                begin = index % places * chunk_bytes
                chunk = pinned[begin : begin + _total(buffers)]
                filled = 0
                for buffer in buffers:
                    streams.copy(chunk[filled : filled + buffer.numel()], buffer)
                    filled += buffer.numel()
                stored.append(pool.submit(store, index, chunk, streams.mark()))
            return [one.result(timeout_s) for one in stored]
        except NotInTime as error:
            raise WaitTimeout(f"{write.path}: waited {timeout_s:.0f} s for a chunk of step {write.step}") from error
        finally:
            streams.synchronize()


def _chunks(stream: Iterable[torch.Tensor], chunk_bytes: int) -> Iterator[list[torch.Tensor]]:
    """The buffers of each chunk of the stream; all chunks but the last have `chunk_bytes`."""
    chunk: list[torch.Tensor] = []
    room = chunk_bytes
    for buffer in stream:
        position = 0
        while position < buffer.numel():
            count = min(room, buffer.numel() - position)
            chunk.append(buffer[position : position + count])
            position, room = position + count, room - count
            if room == 0:
                yield chunk
                chunk, room = [], chunk_bytes
    if chunk:
        yield chunk


def _total(buffers: list[torch.Tensor]) -> int:
    return sum(buffer.numel() for buffer in buffers)
