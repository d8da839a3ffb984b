"""A sparse gradient as bytes: a header of 32 bytes, its values, then its indices in the shortest of five codings.

docs/wire-format.md has the offsets. What the header says gives the length of all that follows, so a reader knows what
to expect before it reads, and a writer chooses a coding without a look at the indices. The two split codings are
Elias and Fano's: the low bits of each index as they are, the high bits in unary; they need at most 1.3 bytes for each
of 1 % of the elements, wherever those lie, where differences of 16 bits would need 2.
"""

from __future__ import annotations

import enum
import functools
import struct
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lastgood import _native
from lastgood._lazy import torch
from lastgood.errors import CorruptCheckpoint
from lastgood.sparse.blocks import BLOCK_WIDTH, MAX_ELEMENTS, SparseGradient
from lastgood.wire.records import ITEM_BYTES, DType

__all__ = [
    "BLOCK_HEADER_BYTES",
    "Coding",
    "choose_coding",
    "decode",
    "decode_group",
    "encode",
    "encode_group",
    "encoded_bytes",
    "most_encoded_bytes",
    "most_group_bytes",
]

_HEADER = struct.Struct("<4sBBBBB7xQQ")
BLOCK_HEADER_BYTES = _HEADER.size
_MAGIC = b"LGSB"
_VERSION = 1
_NOT_FINITE = 1
_ALIGN: Final = 8
"""Each block of a group begins at a multiple of it."""


class Coding(enum.IntEnum):
    """How indices are written. Of codings of one length the first is chosen."""

    ALL = 0
    """Every place is there: nothing is written."""
    BITS = 1
    """A bit for each place."""
    LOW_8 = 2
    """The low 8 bits of each index, then the high ones in unary."""
    LOW_16 = 3
    """The low 16 bits, then the high ones in unary."""
    NUMBERS = 4
    """32 bits each."""


_LOW_BITS = {Coding.LOW_8: 8, Coding.LOW_16: 16}


def encoded_bytes(coding: Coding, places: int, count: int) -> int:
    """The length of `count` indices below `places` in this coding (ALL is for `count` == `places` only)."""
    if coding is Coding.ALL:
        return 0
    if coding is Coding.BITS:
        return -(-places // 8)
    if coding is Coding.NUMBERS:
        return 4 * count
    low = _LOW_BITS[coding]
    return low // 8 * count + -(-_unary_bits(places, count, low) // 8)


def _unary_bits(places: int, count: int, low: int) -> int:
    """Index i sets bit (index >> low) + i; this is one more than the last bit that may be set."""
    return count + ((places - 1) >> low)


def choose_coding(places: int, count: int) -> Coding:
    """The shortest coding of `count` indices below `places`."""
    if count == places:
        return Coding.ALL
    return min(list(Coding)[1:], key=lambda coding: (encoded_bytes(coding, places, count), coding))


def most_encoded_bytes(elements: int) -> int:
    """No sparse gradient of a tensor of `elements` elements is longer."""
    padded = -(-elements // BLOCK_WIDTH) * BLOCK_WIDTH
    return BLOCK_HEADER_BYTES + 4 * padded + -(-elements // 8)


def most_group_bytes(elements: Sequence[int]) -> int:
    """The same of the blocks of several tensors in a row."""
    return sum(most_encoded_bytes(own) + _ALIGN for own in elements)


def encode(sparse: SparseGradient) -> npt.NDArray[np.uint8]:
    """`sparse` as bytes, a copy. Raises CorruptCheckpoint if it is not what it promises."""
    sparse.check("a gradient to be sent")
    count, places = len(sparse.indices), sparse.places
    coding = choose_coding(places, count)
    dtype = DType[str(sparse.values.dtype).removeprefix("torch.")]
    values_bytes = ITEM_BYTES[dtype] * sparse.width * count
    content = np.empty(BLOCK_HEADER_BYTES + values_bytes + encoded_bytes(coding, places, count), np.uint8)
    header = _HEADER.pack(
        _MAGIC,
        _VERSION,
        coding,
        dtype,
        sparse.width,
        0 if sparse.finite else _NOT_FINITE,
        sparse.elements,
        count,
    )
    content[:BLOCK_HEADER_BYTES] = np.frombuffer(header, np.uint8)
    end = BLOCK_HEADER_BYTES + values_bytes
    if count:
        content[BLOCK_HEADER_BYTES:end] = sparse.values.contiguous().view(torch.uint8).numpy()
    indices = np.ascontiguousarray(sparse.indices)
    _native.sparse_write_indices(coding, _address(indices), count, places, _address(content) + end, len(content) - end)
    return content


def _address(array: npt.NDArray[Any]) -> int:
    """Of an array's first element; the caller keeps the array."""
    address: int = array.__array_interface__["data"][0]  # `ctypes.data` takes three times as long
    return address


def decode(content: memoryview | bytearray | npt.NDArray[np.uint8], elements: int, source: str) -> SparseGradient:
    """What `encode` made of a gradient of `elements` elements. Its values are a view of `content`, if that is aligned.

    Raises CorruptCheckpoint, which names `source`, for everything else.
    """
    data = np.frombuffer(content, np.uint8)
    if len(data) < BLOCK_HEADER_BYTES:
        raise CorruptCheckpoint(f"{source}: a sparse block of {len(data)} bytes; its header alone has 32")
    magic, version, code, kind, width, flags, said, count = _HEADER.unpack(data[:BLOCK_HEADER_BYTES].tobytes())
    if magic != _MAGIC or data[9:16].any():
        raise CorruptCheckpoint(f"{source}: no sparse block (it begins with {bytes(data[:16])!r})")
    if version != _VERSION:
        raise CorruptCheckpoint(f"{source}: a sparse block of version {version}; this side speaks version {_VERSION}")
    dtypes = _torch_types()
    if code not in list(Coding) or kind not in dtypes or width not in (1, BLOCK_WIDTH) or flags & ~_NOT_FINITE:
        raise CorruptCheckpoint(
            f"{source}: a sparse block of unknown coding {code}, dtype {kind}, width {width} or flags {flags}"
        )
    if said != elements or not 0 < elements <= MAX_ELEMENTS:
        raise CorruptCheckpoint(f"{source}: a sparse block of {said} elements, of a tensor of {elements}")
    coding, places = Coding(code), -(-elements // width)
    if count > places or (coding is Coding.ALL and count < places):
        raise CorruptCheckpoint(f"{source}: a sparse block with {count} indices of {places}, coding {coding.name}")
    end = BLOCK_HEADER_BYTES + ITEM_BYTES[DType(kind)] * width * count
    whole = end + encoded_bytes(coding, places, count)
    if len(data) != whole:
        raise CorruptCheckpoint(f"{source}: a sparse block of {len(data)} bytes, whose header declares {whole}")
    values = _read_values(data[BLOCK_HEADER_BYTES:end], dtypes[kind])
    indices = _read_indices(coding, data[end:], places, count, source)
    sparse = SparseGradient(elements, width, indices, values, finite=not flags & _NOT_FINITE)
    sparse.check(source)
    return sparse


# -- several tensors in a row ------------------------------------------------------------------------------------------


def encode_group(group: Sequence[SparseGradient]) -> npt.NDArray[np.uint8]:
    """The blocks of several tensors, one behind the other. Raises CorruptCheckpoint as `encode` does."""
    if all(_plain(one) for one in group):
        kinds = _kinds()
        parts = [
            (
                _address(one.indices),
                len(one.indices),
                one.values.data_ptr(),
                kinds[one.values.dtype],
                one.width,
                one.finite,
                one.elements,
            )
            for one in group
        ]
        content = np.empty(_native.sparse_group_bytes(parts), np.uint8)
        if _native.sparse_write_group(parts, _address(content), len(content)):
            return content
    return _joined([encode(one) for one in group])


def decode_group(content: npt.NDArray[np.uint8], elements: Sequence[int], source: str) -> tuple[SparseGradient, ...]:
    """What `encode_group` made of gradients of so many elements each; values are views of `content`, if it is aligned.

    Raises CorruptCheckpoint, which names `source`, for everything else.
    """
    address, nbytes = _address(content), len(content)
    found = _native.sparse_find_blocks(address, nbytes, elements) if content.flags.writeable else []
    indices = np.empty(sum(count for _, count, _, _, _ in found), np.uint32)
    if not found or not _native.sparse_read_blocks(address, nbytes, elements, _address(indices), len(indices)):
        return _decode_each(content, elements, source)
    dtypes, blocks, begin = _torch_types(), [], 0
    for own, (at, count, kind, width, finite) in zip(elements, found, strict=True):
        dtype = dtypes[kind]
        values = _read_values(content[at : at + ITEM_BYTES[DType(kind)] * width * count], dtype)
        blocks.append(SparseGradient(own, width, indices[begin : begin + count], values, finite))
        begin += count
    return tuple(blocks)


def _plain(one: SparseGradient) -> bool:
    """Whether its arrays are what native code may read; that looks at what is in them."""
    indices, values = one.indices, one.values
    return (
        indices.dtype == np.uint32
        and indices.ndim == values.dim() == 1
        and indices.flags.c_contiguous
        and values.is_contiguous()
        and not values.is_cuda
        and values.dtype in _kinds()
        and values.numel() == len(indices) * one.width
        and one.elements > 0
    )


def _joined(blocks: Sequence[npt.NDArray[np.uint8]]) -> npt.NDArray[np.uint8]:
    """The same as the native code writes."""
    pieces: list[npt.NDArray[np.uint8]] = []
    for number, block in enumerate(blocks):
        pieces.append(block)
        if number + 1 < len(blocks):
            pieces.append(np.zeros(-len(block) % _ALIGN, np.uint8))
    return np.concatenate(pieces)


def _decode_each(content: npt.NDArray[np.uint8], elements: Sequence[int], source: str) -> tuple[SparseGradient, ...]:
    """The same in Python, which says what is wrong."""
    blocks, begin = [], 0
    for number, own in enumerate(elements):
        named = source if len(elements) == 1 else f"{source}, tensor {number}"
        end = len(content)
        if number + 1 < len(elements):
            end = min(end, begin + _declared_bytes(content[begin : begin + BLOCK_HEADER_BYTES]))
        if end - begin < BLOCK_HEADER_BYTES:
            raise CorruptCheckpoint(f"{named}: a sparse block of {max(0, end - begin)} bytes; its header alone has 32")
        blocks.append(decode(content[begin:end], own, named))
        begin = end + (-end % _ALIGN if number + 1 < len(elements) else 0)
        if content[end:begin].any():
            raise CorruptCheckpoint(f"{named}: what lies between this sparse block and the next one is not zero")
    return tuple(blocks)


def _declared_bytes(header: npt.NDArray[np.uint8]) -> int:
    """How long a block is whose header this is; that of a header that is none says nothing."""
    if len(header) < BLOCK_HEADER_BYTES:
        return len(header)
    _, _, code, kind, width, _, elements, count = _HEADER.unpack(header.tobytes())
    if code not in list(Coding) or kind not in _torch_types() or width not in (1, BLOCK_WIDTH):
        return BLOCK_HEADER_BYTES
    places = -(-elements // width)
    if not 0 < elements <= MAX_ELEMENTS or count > places:
        return BLOCK_HEADER_BYTES
    values: int = ITEM_BYTES[DType(kind)] * width * count
    return BLOCK_HEADER_BYTES + values + encoded_bytes(Coding(code), places, count)


@functools.cache
def _kinds() -> dict[torch.dtype, int]:
    return {torch.float32: 1, torch.float16: 3, torch.bfloat16: 4}  # as DType has them


@functools.cache
def _torch_types() -> dict[int, torch.dtype]:
    return {DType.float32: torch.float32, DType.float16: torch.float16, DType.bfloat16: torch.bfloat16}


def _read_values(data: npt.NDArray[np.uint8], dtype: torch.dtype) -> torch.Tensor:
    if not len(data):
        return torch.empty(0, dtype=dtype)
    if _address(data) % 4 or not data.flags.writeable:
        data = data.copy()
    return torch.from_numpy(data).view(dtype)


def _read_indices(
    coding: Coding, data: npt.NDArray[np.uint8], places: int, count: int, source: str
) -> npt.NDArray[np.uint32]:
    indices = np.empty(count, np.uint32)
    if not _native.sparse_read_indices(coding, _address(data), len(data), places, count, _address(indices)):
        raise CorruptCheckpoint(f"{source}: a sparse block with more or less bits set than for {count} indices")
    return indices
