"""Native kernels. Memory crosses the border as integer addresses and byte counts; the GIL is released in long calls."""

from collections.abc import Sequence
from typing import Any, Literal

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

class ReceiverEvent:
    """Something that happened on a connection."""

    @property
    def kind(self) -> Literal["complete", "end", "closed"]:
        """All bytes of a bucket at an iteration are held; a rank's END record; a connection is read no more."""
    @property
    def connection(self) -> int:
        """The number that `Receiver.add` gave; of ``complete``, the connection that brought the last byte."""
    @property
    def rank(self) -> int:
        """The connection's rank."""
    @property
    def bucket(self) -> int:
        """Of ``complete``."""
    @property
    def iteration(self) -> int:
        """Of ``complete`` and ``end``."""
    @property
    def cause(self) -> str:
        """Of ``closed``: "" if the other side closed it between two records, else a name of docs/wire-format.md."""
    @property
    def errno(self) -> int:
        """Of ``closed`` with the cause ``broken``: the operating system's number; else 0."""

class Receiver:
    """Reads gradient records (`lastgood.wire.records`) from many connections into the memory of gradient slots.

    Iteration i of a bucket lies in slot i mod the number of slots; a bucket's *window* is that many iterations. A
    record's range is reserved at its header and counts as held once its payload's checksum is right, so no record can
    change a byte that another one holds or has reserved. All methods may be called from any thread.
    """

    def __init__(
        self,
        job: int,
        epoch: int,
        buckets: Sequence[tuple[int, int, int]],
        slots: Sequence[Sequence[int]],
        *,
        threads: int = 1,
        cpus: Sequence[int] = (),
        queue: int = 4096,
        stall_s: float = 60.0,
        owner: Any = None,
    ) -> None:
        """Start `threads` threads; thread i stays on ``cpus[i % len(cpus)]`` if there are any.

        `buckets` are (index, bytes, dtype of `wire.records.DType`) of those that are received here; ``slots[s][b]`` is
        the address of the b-th one's memory in slot s, which `owner` (kept alive) owns. Up to `queue` events wait for
        `poll`; while it is full, connections that have something to tell are not read. A record that has begun and
        brings no byte for `stall_s` ends its connection. A bucket of 0 bytes is complete always, and has no event.
        """
    def add(self, fd: int, rank: int) -> int:
        """Read records of `rank` from a connection from here on; return its number. `fd` is duplicated: close yours."""
    def advance(self, first: int) -> None:
        """Move all placed windows forward to begin at iteration `first`, and clear the slots that they leave."""
    def set_first(self, bucket: int, first: int) -> bool:
        """Place a bucket's window: from here on records beyond it wait.

        False, and nothing is changed, where iterations from `first` on may have been forgotten already.
        """
    def reset(self, bucket: int) -> None:
        """Let a bucket's window float from where it is: a record beyond it moves it along, and no connection waits.

        All windows float at first, from the first record on.
        """
    def begin(self, epoch: int, *, keep: bool) -> None:
        """Close all connections, forget what is not complete, and take records of `epoch` only.

        With `keep`, complete iterations and windows stay; without, nothing is held and all windows float. Events of
        before are dropped, except those of closed connections: ask `complete`. Raises ValueError for an older epoch.
        """
    def first(self, bucket: int) -> int | None:
        """The first iteration of a bucket's window; None while it floats and nothing has come."""
    def complete(self, bucket: int, iteration: int) -> bool:
        """Whether all bytes of a bucket are held for an iteration of its window."""
    def missing(self, iteration: int) -> dict[int, list[tuple[int, int]]]:
        """(begin, end) of the bytes that are not held, by bucket; buckets whose placed window is past it lack nothing.

        What a floating window has forgotten is missing.
        """
    def poll(self, timeout_s: float, most: int = 256) -> list[ReceiverEvent]:
        """Take up to `most` events, oldest first; an empty list if there are none within `timeout_s`."""
    def counters(self) -> dict[str, float]:
        """Since the begin: records and bytes (of payloads) held, read_bytes, drained_bytes, ends, checksum_s.

        read_bytes are all that came, drained_bytes of refused payloads; checksum_s is the sum over all threads.

        Now: connections, and parked ones, which wait for a window or for the queue.
        """
    def refused(self) -> dict[str, int]:
        """Records and connections that were refused, by cause (docs/wire-format.md)."""
    def close(self, timeout_s: float) -> bool:
        """Close all connections and end the threads; False if they have not ended within `timeout_s`."""

class Sender:
    """Sends gradient records over one connection, in the order of the calls, from a thread of its own.

    A failed connection comes out of the next call as OSError whose text names `destination`. All methods may be called
    from any thread.
    """

    def __init__(
        self,
        fd: int,
        job: int,
        epoch: int,
        rank: int,
        destination: str,
        *,
        pool_bytes: int = 33554432,
        queue: int = 4096,
        record_bytes: int = 1048576,
        stall_s: float = 60.0,
        cpu: int = -1,
    ) -> None:
        """Start the thread, on processor `cpu` unless that is -1. `fd` is duplicated: close yours.

        If the thread cannot be started, or kept on `cpu` (OSError), the connection is ended.

        Up to `queue` calls wait to go out, with up to `pool_bytes` of payloads that are copied. Payloads over
        `record_bytes` go out as several records. The connection fails (ETIMEDOUT) if the other side takes no byte for
        `stall_s`.
        """
    def put(
        self,
        iteration: int,
        bucket: int,
        dtype: int,
        offset: int,
        address: int,
        nbytes: int,
        *,
        borrowed: bool,
        timeout_s: float,
        final: bool = True,
    ) -> int:
        """Queue a gradient: `nbytes` at `address` that belong at byte `offset` of a bucket. Return a ticket, from 1 on.

        Return 0 if the queue or the pool has no room within `timeout_s`. Borrowed memory is sent from where it lies,
        and must not change until `returned`; other memory is copied before this returns. Raises ValueError for what
        makes no record, and for a copy that the pool can never hold.
        """
    def end(self, iteration: int, *, timeout_s: float) -> int:
        """Queue an END record: nothing more comes for this iteration. Return as `put`."""
    def returned(self, ticket: int) -> bool:
        """Whether nothing of all calls up to `ticket` is read any more: it has gone out, or the thread has ended."""
    def wait_returned(self, ticket: int, timeout_s: float) -> bool:
        """Wait until all calls up to `ticket` have gone out to the kernel; False if they have not within `timeout_s`.

        Raises OSError if the connection has failed; then nothing is read any more, either.
        """
    @property
    def last_ticket(self) -> int:
        """Of the newest call; 0 before the first."""
    @property
    def errno(self) -> int:
        """The operating system's number of what ended the connection (ECANCELED: `abort`), or 0."""
    def counters(self) -> dict[str, float]:
        """Since the begin: records (ends among them), bytes, sends (system calls), checksum_s, blocked_s.

        blocked_s was spent waiting for the other side to take more. Now: queued calls and queued_bytes.
        """
    def close(self, timeout_s: float) -> bool:
        """Send what is queued, close the connection and end the thread.

        False, and all is given up, where that fails (`errno`) or takes longer than `timeout_s`.
        """
    def abort(self) -> None:
        """Give up what is queued and end the connection, without waiting."""
    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end; False if it has not within `timeout_s`."""

def step_variants() -> list[str]:
    """Names of the variants of `device_step` and `host_adam` that this CPU can run, fastest first."""

def host_adam(
    tensors: Sequence[tuple[int, int, int, int, int, int, float, float]],
    *,
    wide: bool,
    decoupled: bool,
    maximize: bool,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    eps: float,
    factor1: float,
    factor2: float,
    limit: float,
    threads: int,
    variant: str = "",
) -> None:
    """One step of torch's fused CPU Adam or AdamW, to the bit, unscaling and clipping included.

    A tensor is the addresses of parameter, gradient, first moment, second moment and its largest (0 without amsgrad);
    the number of elements, whole 64 bytes of them; lr / (1 - beta1**t); sqrt(1 - beta2**t). `wide` is float64, else
    float32. Gradients are multiplied by both factors (1 for none) and bounded by `limit` (infinity for none) first.
    """

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

def sparse_compress(
    choice: Literal["heaviest", "threshold", "given", "all"],
    *,
    gradient: int,
    gradient_type: str,
    residual: int,
    target: int,
    elements: int,
    width: int,
    value_type: str,
    wanted: int,
    middle: int,
    most: int,
    threshold: int | None,
    indices: int,
    values: int,
    threads: int,
    sample: int = 0,
    variant: str = "",
) -> tuple[bool, bool, int, int, int]:
    """Choose places of gradient + residual: (finite, held, count, weight of the lightest, tensors read).

    Numbers of places and their values are written to the addresses `indices` and `values`, which have room for `most`
    places; the new residual to `target`, which may be `residual`. `variant` is one of `step_variants()`.
    """

def sparse_draw(places: int, count: int, seed: int, call: int, indices: int) -> None:
    """Write to address `indices` `count` different numbers below `places`, ascending, that seed and call draw."""

def sparse_write_indices(coding: int, indices: int, count: int, places: int, target: int, nbytes: int) -> None:
    """Write `count` ascending uint32 below `places` from one address to another, in a coding of sparse blocks.

    Raises ValueError if they do not ascend, or `nbytes` is not the length that they have in that coding.
    """

def sparse_read_indices(coding: int, source: int, nbytes: int, places: int, count: int, target: int) -> bool:
    """Read `nbytes` in a coding of sparse blocks from one address, and write `count` uint32 to another.

    False if there are not as many, or bits beyond the last place; whether they ascend is still to be seen.
    """

def sparse_group_bytes(parts: Sequence[tuple[int, int, int, int, int, bool, int]]) -> int:
    """How many bytes the blocks of some tensors take together; 0 if one can be no block.

    Each part: the address of its indices (uint32), their number, the address of its values, their type as a header has
    it, the width, whether the gradient was finite, and the tensor's elements.
    """

def sparse_write_group(parts: Sequence[tuple[int, int, int, int, int, bool, int]], target: int, nbytes: int) -> bool:
    """Write the blocks of some tensors to the address `target`; False if `nbytes` differs, or one is not valid."""

def sparse_find_blocks(source: int, nbytes: int, elements: Sequence[int]) -> list[tuple[int, int, int, int, bool]]:
    """What the headers at the address `source` say of tensors of so many elements; nothing if this is no group.

    Each: where its values begin, the number of its indices, the values' type, the width, whether it was finite.
    """

def sparse_read_blocks(source: int, nbytes: int, elements: Sequence[int], indices: int, count: int) -> bool:
    """Write all `count` indices of a group to the address `indices` (uint32); False if any of it is not valid."""

def sparse_update(
    adam: bool,
    tensor: tuple[int, int, int, int, int],
    blocks: Sequence[tuple[int, int, int, str]],
    *,
    scale: float,
    rows: int,
    steps: int,
    base: int,
    touched: int,
    threads: int,
    variant: str = "",
) -> None:
    """One step of SGD or Adam at the places that some rank sent, and before it those that each place missed.

    `tensor`: the addresses of parameter, first and second moment (0 for none), float32; elements; a place's width. Each
    of `blocks`, in the order of ranks: the address of its indices (uint32, ascending), their number, the address of its
    values, and their type. `rows`: the address of `steps` rows of float64 (sparse/steps.py), of step `base` + 1 and
    those after it. `touched`: the address of each place's last step (int32), or 0. ValueError, and nothing has changed,
    for what is not valid.
    """

def sparse_update_all(
    adam: bool,
    tensors: Sequence[tuple[int, int, int, int, int]],
    blocks: Sequence[Sequence[tuple[int, int, int, str]]],
    *,
    scale: float,
    rows: int,
    threads: int,
    variant: str = "",
) -> None:
    """`sparse_update` of several tensors, one step of each, without counters; `rows` has a row for each.

    ValueError, and nothing has changed in any, if one is not valid.
    """

def sparse_catch_up(
    adam: bool,
    tensor: tuple[int, int, int, int, int],
    *,
    rows: int,
    steps: int,
    base: int,
    touched: int,
    threads: int,
    variant: str = "",
) -> None:
    """All steps that any place missed, as `sparse_update` makes them; `touched` then shows it."""

class OutOfStep(Exception):
    """The previous rank of a ring sent another record than this rank's own plan expects."""

class DamagedRecord(Exception):
    """What the previous rank of a ring sent is no record, or damaged."""

def ring_add(dtype: int, target: int, source: int, elements: int) -> None:
    """target[i] = source[i] + target[i] for a dtype of `wire.records`; 16-bit types by way of float32, as torch."""

def ring_divide(dtype: int, target: int, elements: int, divisor: int) -> None:
    """target[i] = target[i] / divisor, rounded to the type."""

class RingPlan:
    """How one tensor goes around a ring: the same for each of its iterations. `wire.ring_comm` makes them.

    `ranges` are (bytes, bucket, offset in the bucket) in the tensor's order; `own` and `previous` what this rank and
    the one before send at each step: (chunk, whole sum or not, marked or not). ValueError if they do not fit.
    """

    def __init__(
        self,
        dtype: int,
        divide: int,
        chunk_bytes: Sequence[int],
        ranges: Sequence[tuple[int, int, int]],
        own: Sequence[tuple[int, bool, bool]],
        previous: Sequence[tuple[int, bool, bool]],
        segment_bytes: int,
    ) -> None: ...

class Ring:
    """One rank's side of a ring all-reduce over two connected sockets, of which it takes duplicates.

    Errors: OSError and TimeoutError name the neighbour; OutOfStep; DamagedRecord. Each of them ends the ring.
    """

    def __init__(
        self,
        previous_fd: int,
        next_fd: int,
        job: int,
        epoch: int,
        rank: int,
        ranks: int,
        previous_name: str,
        next_name: str,
        timeout_s: float,
    ) -> None: ...
    def all_reduce(self, plan: RingPlan, address: int, iteration: int) -> None:
        """Reduce the tensor at `address` in place."""
    def end(self, iteration: int) -> None:
        """Exchange ends of iteration with the neighbours."""
    def shut_down(self) -> None:
        """Make every call fail, now and later."""
    @property
    def sent_bytes(self) -> int:
        """Bytes handed to the kernel, headers included."""
    @property
    def sent_records(self) -> int:
        """Records sent, ends included."""
    @property
    def marked_bytes(self) -> int:
        """Payload bytes sent with the final mark."""

# process

def end_watch_begin() -> int:
    """Wake a thread too at SIGTERM; returns the descriptor of which 8 bytes can be read if the answer is late.

    In the main thread only, once Python's handler is set; a forked child has none of its own yet.
    """

def end_watch_limits(patience_s: float, limit_s: float) -> None:
    """How long to wait for an answer, and after how long, from SIGTERM on, the process ends in any case."""

def end_watch_answered() -> None:
    """The main thread ends the process in its own way."""

def end_watch_done() -> None:
    """End the process now."""

def end_watch_stop() -> None:
    """Put the former handler of SIGTERM back."""

# -- frames of mirrored traffic --

FRAME_RING_HEADER_BYTES: int
FRAME_RING_LEAST_DATA_BYTES: int

class PacketBlocks:
    """Frames out of an AF_PACKET socket's ring (TPACKET_V3), which lies at `address`."""

    def __init__(self, address: int, block_bytes: int, blocks: int, link: int) -> None: ...
    def read(self, fd: int, table: int, limit: int, timeout_s: float) -> int:
        """Fill up to `limit` rows of FRAME at address `table` from one block, the caller's until it is released.

        0: none came in time; below 0: minus the errno of the socket. With `fd` -1 it does not wait.
        """
    def release(self) -> bool:
        """Give the oldest block that was read to its end back to the kernel. False: there is none."""
    @property
    def oldest(self) -> int:
        """The number of that block; below 0: there is none."""
    def counters(self) -> dict[str, int]:
        """Frames and bytes, and what was seen of them: truncated, no_checksum, vlan_restored, own, damaged_blocks."""

class FrameRing:
    """One side of a ring of frames in the `nbytes` of shared memory at `address`.

    ValueError if there is none; RuntimeError if the other side left what cannot be.
    """

    def __init__(self, address: int, nbytes: int, writer: bool) -> None: ...
    @staticmethod
    def format(address: int, nbytes: int, link: int) -> None:
        """Make an empty ring of memory that is all zero."""
    def write(self, data: int, data_bytes: int, table: int, count: int, drop: bool) -> int:
        """Copy frames in until one does not fit; with `drop` the others count as dropped. Returns how many are done."""
    def wait_freed(self, timeout_s: float) -> bool:
        """Wait until the reader gave something back since the last `write`; False if it did not."""
    def end(self) -> None:
        """Nothing more will be written."""
    def read(self, table: int, limit: int, timeout_s: float) -> int:
        """Give the last batch back, then fill up to `limit` rows of FRAME; offsets count from the start of the ring."""
    def give_back(self) -> None:
        """Give the last batch back before the next read."""
    @property
    def ended(self) -> bool:
        """Whether the writer said so."""
    @property
    def drained(self) -> bool:
        """Whether the reader has been given everything."""
    @property
    def link(self) -> int:
        """The link type of its frames."""
    def counters(self) -> dict[str, int]:
        """data_bytes, held_bytes, offered_frames, dropped_frames, dropped_bytes, taken_frames, missing_frames."""

def pcapng_blocks(
    data: int, data_bytes: int, table: int, count: int, interface: int, out: int, out_bytes: int
) -> tuple[int, int]:
    """Write frames as enhanced packet blocks while they fit; returns how many, and their bytes."""

def crc32(data: bytes, seed: int = 0, *, variant: str = "") -> int:
    """CRC-32 of `data`, as zlib's; `variant` names one of `crc32_variants()`."""

def crc32_variants() -> list[str]:
    """Names of the CRC-32 variants that this CPU can run, fastest first."""

def icrc(packet: bytes, udp: int) -> int:
    """RoCEv2's checksum of a packet from its IP header on, without the checksum; UDP's header is at `udp`."""

def icrc_copy_frames(data: int, frames: int, count: int, target: int, head: int, udp: int) -> int:
    """For benchmarks: check the ICRC of frames and copy what follows BTH; returns how many checksums are right.

    IP begins `head` bytes into each frame, UDP `udp` bytes later.
    """

class RoceParser:
    """RoCEv2 frames to messages: lastgood.mirror.streams.roce has the form of what it gives."""

    def __init__(self, protocol: str, patience: int, most_waiting_bytes: int, striped: bool) -> None: ...
    def feed(
        self, data: int, nbytes: int, frames: int, count: int
    ) -> tuple[list[tuple[int, bytes, bytes, int, int, bool]], list[int], bytes, bytes, bytes, list[tuple[int, str]]]:
        """Read `count` rows of FRAME at address `frames`, whose bytes are among the `nbytes` at `data`.

        Returns opened flows (number, source, destination, UDP port, queue pair, whether from the start), closed ones,
        the tables HEAD, PIECE and LOST as bytes, and resynchronised flows with the reason.
        """
    def finish(
        self,
    ) -> tuple[list[tuple[int, bytes, bytes, int, int, bool]], list[int], bytes, bytes, bytes, list[tuple[int, str]]]:
        """What is open is lost."""
    def counters(self) -> dict[str, int]:
        """All counters that are not 0."""

# mirror: streams over TCP

class GlooStreams:
    """Gloo's messages in frames; lastgood.mirror.streams.native uses it."""

    def __init__(self, keep_bytes: int, keep_all_bytes: int, blind_bytes: int, max_connections: int) -> None: ...
    def feed(self, data: int, size: int, frames: int, count: int) -> tuple[Any, ...]:
        """Read `count` frames (rows of FRAME at `frames`) of `size` bytes at `data`.

        Returns flows that opened, flows that closed, heads, pieces and losses (rows as bytes), what was resynchronised,
        and what is refused.
        """
    def finish(self) -> tuple[Any, ...]:
        """Nothing more comes; returns as `feed`."""
    def counters(self) -> dict[str, int]:
        """What was counted, without zeros."""

# -- mirror: pieces of messages into buffers

def scatter_pieces(
    memory: int, memory_bytes: int, begin: int, end: int, pieces: int, count: int
) -> list[tuple[int, int]]:
    """Copy pieces of a message (`mirror.streams.messages.PIECE`) to their places in a buffer, without the GIL.

    The message is bytes `begin` to `end` of the `memory_bytes` at `memory`; what lies outside of it is left out.
    Returns the ranges of the buffer that were written, in the order of the pieces, neighbours joined.
    """
