"""Native kernels. Memory crosses the border as integer addresses and byte counts; the GIL is released in long calls."""

from collections.abc import Sequence
from typing import Any

from typing_extensions import Buffer

def crc32c(data: Buffer, seed: int = 0, *, variant: str = "") -> int:
    """CRC32C of `data`, going on from the checksum `seed`; `variant` names one of `crc32c_variants()`."""

def crc32c_at(address: int, nbytes: int, seed: int = 0, *, variant: str = "") -> int:
    """CRC32C of `nbytes` of memory at `address`."""

def crc32c_portable(data: Buffer, seed: int = 0) -> int:
    """CRC32C by tables alone: the twin that the fast variants are held to."""

def copy_crc32c(target: int, source: int, nbytes: int, seed: int = 0, *, variant: str = "") -> int:
    """Copy `nbytes` from address `source` to address `target` and return their CRC32C, in one pass over memory."""

def crc32c_variants() -> list[str]:
    """Names of the CRC32C variants that this CPU can run, fastest first."""

def crc32c_implementation() -> str:
    """Name of the CRC32C variant that is used on this CPU."""

def chunk_seed(sequence: int, index: int) -> int:
    """The seed of a chunk's checksum: CRC32C over sequence and index, both little-endian 64-bit."""

class ChunkPool:
    """A fixed number of buffers of `chunk_bytes` (a multiple of 4096), shared first come, first served.

    With `address` 0 the pool maps and touches memory of its own; otherwise it cuts up the `nbytes` at `address`, which
    `owner` (kept alive) owns.
    """

    def __init__(self, address: int, nbytes: int, chunk_bytes: int, owner: Any = None) -> None: ...
    @property
    def address(self) -> int:
        """Address of the first buffer."""
    @property
    def chunk_bytes(self) -> int:
        """Size of each buffer."""
    @property
    def count(self) -> int:
        """Number of buffers."""
    @property
    def free(self) -> int:
        """Number of buffers that nobody holds now."""

class PersistentMapping:
    """The first `nbytes` of an open file, mapped: stores instead of writes, for persistent memory.

    The file must be written in full. Errors come out as OSError, as with `SlotWriter`.
    """

    def __init__(self, fd: int, nbytes: int) -> None: ...
    def write(self, data: Buffer, offset: int) -> None:
        """Store bytes at `offset`; durable after the next `flush`."""
    def flush(self) -> None:
        """Make all stores durable."""
    @property
    def how(self) -> str:
        """``libpmem`` (durable by fences alone) or ``msync`` (by the kernel)."""

class SlotWriter:
    """Writes one stream into one open file, chunk by chunk, by `writer_threads` threads.

    Errors of the operating system come out of the next call as OSError with the attributes operation, offset and
    nbytes; waits that end as TimeoutError, whose text names what was waited for.
    """

    def __init__(
        self,
        pool: ChunkPool,
        fd: int,
        data_offset: int,
        stream_bytes: int,
        chunk_bytes: int,
        sequence: int,
        writer_threads: int,
        cpus: Sequence[int] = (),
        checksum: str = "",
        mapping: PersistentMapping | None = None,
    ) -> None:
        """Start the threads; thread i stays on ``cpus[i % len(cpus)]`` if there are any.

        `checksum` names a variant of `crc32c_variants()` ("" the fastest); "none" sums nothing, to measure what sums
        cost. With a `mapping` of the file, chunks are stored through it.
        """
    def copy_host(self, ranges: Sequence[tuple[int, int]], timeout_s: float, threads: int = 1) -> None:
        """Append (address, nbytes) ranges to the stream; return when all their bytes are copied."""
    def acquire(self, timeout_s: float) -> tuple[int, int, int]:
        """Take a buffer for the next chunk: (address, chunk index, bytes of the stream that belong in it)."""
    def put(self, chunk_index: int) -> None:
        """Hand a filled buffer over for writing."""
    def finish(self, timeout_s: float) -> bytes:
        """Wait until all chunks are written; return their checksums as little-endian 32-bit words."""
    def abort(self) -> None:
        """Stop everything and wake everybody, without waiting."""
    def join(self, timeout_s: float) -> bool:
        """Wait for the threads to end; False if they have not within `timeout_s`."""
    def release(self) -> None:
        """Give back the buffers taken by `acquire`; nothing may write into them any more."""
    @property
    def position(self) -> int:
        """Bytes of the stream given so far."""
    @property
    def stream_bytes(self) -> int:
        """Length of the whole stream."""

def read_verify(
    fd: int,
    data_offset: int,
    stream_bytes: int,
    chunk_bytes: int,
    sequence: int,
    table: bytes,
    ranges: Sequence[tuple[int, int]],
    first_chunk: int,
    threads: int,
    timeout_s: float,
) -> tuple[int, int, int] | None:
    """Read the stream from chunk `first_chunk` on into (address, nbytes) ranges; address 0 checks and skips.

    Returns (chunk index, expected checksum, found checksum) of the first bad chunk, or None.
    """

def prefill(fd: int, offset: int, nbytes: int) -> None:
    """Write zeros over a range of whole 4096-byte blocks."""

def device_step_variants() -> list[str]:
    """Names of the variants of `device_step` that this CPU can run, fastest first."""

def device_step(
    tensors: Sequence[tuple[int, int, int, int, int, int, float, float, bool, bool]],
    *,
    kind: str,
    family: str,
    dtype: str,
    decay: str,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    eps: float,
    momentum: float,
    dampening: float,
    nesterov: bool,
    maximize: bool,
    factors: Sequence[float],
    limit: float,
    divisor: float,
    lanes: int,
    threads: int,
    variant: str = "",
) -> None:
    """One step of torch's CUDA optimizers, to the bit, over tensors in host memory.

    `kind` is sgd or adam, `family` foreach, single or fused, `dtype` float32, float64 or bfloat16, `decay` none, l2 or
    decoupled. A tensor is the addresses of parameter, gradient, first moment (or momentum; 0 for none), second moment
    and its largest (0 without amsgrad); the number of elements; Adam's step size and bias correction; whether a
    momentum buffer is still empty; whether the device's tensors were aligned. Gradients are multiplied by each of
    `factors`, bounded by `limit` (-1 for none) and divided by `divisor` (0 for none) first. `lanes`: GroupSpec.
    """
