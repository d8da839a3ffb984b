"""Slot files with right checksums over any content: what somebody can write who has the format's description.

Everything here is made from docs/file-format.md and the format's own encoders; nothing checks what it is given.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from lastgood import _native
from lastgood.errors import LastgoodError
from lastgood.state.layout import Layout
from lastgood.storage import format as fmt

JOB_ID = b"j" * fmt.JOB_ID_BYTES
CHUNK = 1 << 20


def record(*, rank: int = 0, world_size: int = 1, step: int = 1, sequence: int = 1) -> fmt.CommitRecord:
    """The record of a checkpoint; `write_slot` fills in what follows from its content."""
    return fmt.CommitRecord(
        kind=fmt.RecordKind.COMMITTED,
        job_id=JOB_ID,
        step=step,
        incarnation=1,
        sequence=sequence,
        stream_bytes=0,
        meta_offset=0,
        meta_bytes=0,
        chunk_bytes=CHUNK,
        data_offset=fmt.DATA_OFFSET,
        table_offset=0,
        table_bytes=0,
        layout_digest=bytes(32),
        table_digest=bytes(32),
        rank=rank,
        world_size=world_size,
    )


def write_slot(path: Path, made: fmt.CommitRecord, blocks: bytes, meta: bytes, *, chunk_bytes: int = CHUNK) -> None:
    """Write a committed slot file of `blocks` and `meta` whose every checksum and digest holds."""
    stream = blocks + meta
    table_offset, table_bytes, size = fmt.stream_layout(len(stream), chunk_bytes)
    table = b""
    for index in range(table_bytes // 4):
        chunk = stream[index * chunk_bytes : (index + 1) * chunk_bytes]
        padded = chunk.ljust(fmt.align_up(len(chunk)), b"\0")
        table += _native.crc32c(padded, _native.chunk_seed(made.sequence, index)).to_bytes(4, "little")
    made = replace(
        made,
        stream_bytes=len(stream),
        meta_offset=len(blocks),
        meta_bytes=len(meta),
        chunk_bytes=chunk_bytes,
        table_offset=table_offset,
        table_bytes=table_bytes,
        table_digest=hashlib.sha256(table).digest(),
        layout_digest=digest_of(meta),
    )
    with path.open("wb") as file:
        file.write(fmt.SlotHeader(made.job_id, fmt.slot_number(path) or 0).encode())
        file.seek(fmt.COMMIT_OFFSET)
        file.write(made.encode())
        file.seek(fmt.DATA_OFFSET)
        file.write(stream)
        file.seek(table_offset)
        file.write(table)
        file.truncate(size)


def digest_of(meta: bytes) -> bytes:
    """The digest that belongs to a layout, as far as one can be taken of what is none."""
    try:
        document = json.loads(meta)
        sizes = tuple(document["block_bytes"])
        return Layout(document["tree"], sizes, document["deferred_blocks"], document["layout_version"]).digest()
    except (LastgoodError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return bytes(32)


def layout_json(tree: Any, block_bytes: Sequence[Any], **changes: Any) -> bytes:
    """The meta data of a layout."""
    document = {"layout_version": 2, "deferred_blocks": 0, "block_bytes": list(block_bytes), "tree": tree}
    return json.dumps({**document, **changes}).encode()


def stream_of(blocks: Sequence[bytes]) -> bytes:
    """Blocks as they lie in a stream."""
    return b"".join(block + bytes(-len(block) % 64) for block in blocks)


def put(directory: Path, tree: Any, blocks: Sequence[bytes], made: fmt.CommitRecord | None = None, **how: Any) -> Path:
    """A directory of one slot that holds this tree over these blocks; returns the slot file."""
    made = made or record()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / fmt.JOB_FILE).write_bytes(fmt.encode_job(made.job))
    path = directory / fmt.slot_name(how.pop("slot", 0))
    chunk_bytes = how.pop("chunk_bytes", CHUNK)
    meta = layout_json(tree, [len(block) for block in blocks], **how)
    write_slot(path, made, stream_of(blocks), meta, chunk_bytes=chunk_bytes)
    return path


def put_ranks(job: Path, parts: Sequence[tuple[Any, Sequence[bytes]]]) -> Path:
    """A job of as many ranks as there are (tree, blocks), each in its directory; returns the job's."""
    for rank, (tree, blocks) in enumerate(parts):
        put(job / f"rank-{rank:05d}", tree, blocks, record(rank=rank, world_size=len(parts)))
    return job


def entries(**nodes: Any) -> list[Any]:
    """The root of a tree."""
    return ["d", [[["s", name], node] for name, node in nodes.items()]]


def dense(shape: Sequence[int], dtype: str = "float32", block: int = 0, offset: int = 0) -> list[Any]:
    """A contiguous tensor."""
    return ["T", block, offset, dtype, list(shape), _strides(shape)]


def part(local: Any, shape: Sequence[int], runs: Any, ranks: int = 2) -> list[Any]:
    """A part of a tensor that is spread over its first dimension."""
    return ["H", local, list(shape), _strides(shape), [ranks], None, [["S", 0]], runs]


def _strides(shape: Sequence[int]) -> list[int]:
    strides = [1] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * max(1, shape[axis])
    return strides


# -- families of hostile layouts ---------------------------------------------------------------------------------------

NUMBERS = (-1, 0, 1, 2, 3, 7, 64, 1 << 31, 1 << 32, 1 << 40, 1 << 62, 1 << 63, 1 << 64)
LEAVES: tuple[Any, ...] = (
    *NUMBERS,
    True,
    None,
    0.5,
    "",
    "float32",
    "float64",
    "int32",
    "qint8",
    "<f4",
    "|O",
    "T",
    "R",
    "H",
    [],
    {},
    ["n"],
    [0],
    [[0, 1]],
)


def places(node: Any, path: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """The way to everything in a tree."""
    yield path
    if isinstance(node, list):
        for number, item in enumerate(node):
            yield from places(item, (*path, number))


def mutated(tree: Any, random: Random, changes: int = 1) -> Any:
    """A copy of a tree in which some places hold something else, or something that lay elsewhere in it."""
    tree = copy.deepcopy(tree)
    for _ in range(changes):
        spots = [path for path in places(tree) if path]
        spot = random.choice(spots)
        at = tree
        for number in spot[:-1]:
            at = at[number]
        if random.random() < 0.15:
            other = tree
            for number in random.choice(spots):
                other = other[number]
            at[spot[-1]] = copy.deepcopy(other)
            continue
        alike = [leaf for leaf in LEAVES if type(leaf) is type(at[spot[-1]])]
        at[spot[-1]] = copy.deepcopy(random.choice(alike if alike and random.random() < 0.6 else LEAVES))
    return tree
