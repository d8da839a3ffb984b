"""Changes to what is sound, at the level of its structure: what somebody writes who knows the format.

Trees of JSON and the like are changed by node, pickles by opcode, text by word, bytes by field. Everything follows from
the `random.Random` that is given, so that a seed tells an input.
"""

from __future__ import annotations

import copy
import itertools
import json
import pickletools
import random
import struct
from collections.abc import Sequence
from typing import Any

__all__ = ["Raw", "changed_bytes", "changed_pickle", "changed_text", "changed_tree", "json_of"]


class Raw(str):
    """Stands in a document as it is: what no writer of JSON writes."""


SCALARS: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 3, 7, 8, 63, 64, 4095, 4096, 1 << 16, 1 << 20),
    *((1 << 31) - 1, 1 << 31, 1 << 32, 1 << 53, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, 10**30),
    *(-(1 << 31), -(1 << 63), -(10**30), 0.5, -0.0, 1e-320, 1e18, 1e308, -1e308),
    *("", "0", "1", "a", "\x00", "\ud800", "é" * 50, "x" * 5000, "../../x", "/etc/passwd", "9" * 50, "nan", "inf"),
    *("ff" * 16, "00", "T", "float32", "torch.float32", "<f8", "|O", "cuda:7", "2024-01-01", "kind", "[" * 200),
    *([], {}, [[]], [None], {"": None}, [0] * 100),
]
RAW = [
    *(
        Raw("Infinity"),
        Raw("-Infinity"),
        Raw("NaN"),
        Raw("1e999"),
        Raw("-1e999"),
        Raw("9" * 5000),
        Raw("-" + "9" * 400),
    ),
    *(Raw("[" * 60_000), Raw("[" * 2000 + "]" * 2000), Raw('{"a":' * 500 + "1" + "}" * 500), Raw("0x10"), Raw("01")),
    *(Raw('"\\ud800"'), Raw('"\\u0000"'), Raw("1" + "0" * 41), Raw("0." + "1" * 400), Raw("")),
]
NUMBERS = [0, 1, 2, 255, 256, 4096, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 33, 1 << 40, 1 << 62, (1 << 63) - 1]


def json_of(value: Any) -> bytes:
    """A document of anything that `changed_tree` makes, `Raw` text included."""
    if isinstance(value, Raw):
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, dict):
        return b"{" + b",".join(json_of(_key(key)) + b":" + json_of(item) for key, item in value.items()) + b"}"
    if isinstance(value, (list, tuple)):
        return b"[" + b",".join(map(json_of, value)) + b"]"
    return json.dumps(value).encode()


def _key(key: Any) -> Any:
    return key if isinstance(key, str) else str(key)


def changed_tree(rng: random.Random, tree: Any, *, raw: bool = True, most: int = 3) -> Any:
    """A copy of a tree of dicts and lists with one to `most` of its nodes changed; `raw`: also by what is no JSON."""
    root = [copy.deepcopy(tree)]
    for _ in range(rng.randint(1, most)):
        _change(rng, root, raw)
    return root[0]


def _places(root: list[Any]) -> list[tuple[Any, Any]]:
    """(container, key) of every node."""
    found: list[tuple[Any, Any]] = []
    waiting: list[Any] = [root]
    while waiting:
        holder = waiting.pop()
        for key in range(len(holder)) if isinstance(holder, list) else list(holder):
            found.append((holder, key))
            if isinstance(holder[key], (dict, list)):
                waiting.append(holder[key])
    return found


def _change(rng: random.Random, root: list[Any], raw: bool) -> None:
    places = _places(root)
    holder, key = rng.choice(places)
    value = holder[key]
    kind = rng.randrange(12)
    if kind <= 3:
        holder[key] = copy.deepcopy(rng.choice(RAW if raw and rng.random() < 0.25 else SCALARS))
    elif kind <= 5 and type(value) in (int, float):
        near = [value + 1, value - 1, -value, value * 2, value << 40 if type(value) is int else value * 1e300]
        holder[key] = rng.choice([*near, float(value), str(value), value + 0.5 if type(value) is float else True])
    elif kind <= 5 and isinstance(value, str):
        holder[key] = rng.choice([value[:-1], value + value[:1], value.upper(), value[::-1], value * 20, [value], ""])
    elif kind == 6 and holder is not root:
        if isinstance(holder, dict) or len(holder) > 0:
            del holder[key]
    elif kind == 7 and isinstance(holder, dict):
        holder[rng.choice([Raw(json.dumps(str(key))), "other", "", "__class__", "kind"])] = copy.deepcopy(value)
    elif kind == 7 and isinstance(holder, list) and holder is not root:
        holder[key:key] = [copy.deepcopy(value)] * rng.choice([1, 2, 70])
    elif kind == 8:
        other, where = rng.choice(places)
        first, second = copy.deepcopy(value), copy.deepcopy(other[where])
        holder[key] = second
        if rng.random() < 0.5:
            # The node may have gone with what was replaced; that changes nothing then.
            other[where] = first
    elif kind == 9:
        for _ in range(rng.choice([1, 3, 70, 150])):
            value = [value] if rng.random() < 0.9 else {"a": value}
        holder[key] = value
    elif kind == 10 and isinstance(value, list) and value:
        rng.shuffle(value)
    elif kind == 11 and isinstance(value, (list, dict)):
        holder[key] = list(value.items()) if isinstance(value, dict) else {str(n): item for n, item in enumerate(value)}
    else:
        holder[key] = copy.deepcopy(rng.choice(SCALARS))


def changed_bytes(rng: random.Random, content: bytes, *, fields: bool = True) -> bytes:
    """Flipped bits, cut, doubled, joined with itself, or with numbers of 1 to 8 bytes set to extremes."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(7)
        if kind <= 1 and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif kind <= 3 and fields and data:
            size = rng.choice([1, 2, 4, 8])
            at = at % len(data) // size * size
            number = rng.choice([*NUMBERS, (1 << 64) - 1]) % (1 << 8 * size)
            data[at : at + size] = struct.pack("<Q", number)[:size]
        elif kind == 4:
            del data[at : at + rng.choice([1, 4, 100, len(data)])]
        elif kind == 5:
            data[at:at] = data[at : at + rng.choice([1, 8, 64])] or b"\xff"
        else:
            data[at : at + 8] = bytes(rng.randrange(256) for _ in range(8))
    return bytes(data)


WORDS = ["", "-1", "0", "1e999", "nan", "inf", "9" * 400, "\x00", "é", "x" * 3000, "::", "%", "@", "slots=", "slots=0"]
WORDS += [
    "!!int 3",
    "&a x",
    "*a",
    "<<: {a: b}",
    "? [a]",
    "---",
    "2024-01-01",
    "{" * 300,
    '"',
    "'",
    "\t",
    "\r",
    ",",
    "1_0",
]


def changed_text(rng: random.Random, text: str) -> str:
    """Lines and words of a text swapped, doubled, left out, or made into others."""
    for _ in range(rng.randint(1, 3)):
        lines = text.split("\n")
        at = rng.randrange(len(lines))
        kind = rng.randrange(6)
        if kind == 0:
            lines[at:at] = [lines[rng.randrange(len(lines))]] * rng.choice([1, 2, 200])
        elif kind == 1:
            del lines[at]
        else:
            for sign in rng.sample([",", " ", ":", "="], 4):
                parts = lines[at].split(sign)
                if len(parts) > 1:
                    break
            place = rng.randrange(len(parts))
            parts[place] = rng.choice([*WORDS, parts[place] + rng.choice(WORDS), parts[place][:-1]])
            lines[at] = sign.join(parts)
        text = "\n".join(lines)
    return text


_ENDINGS = [
    b"R",
    b"b",
    b"\x81",
    b"\x85",
    b"\x86",
    b"\x87",
    b"t",
    b"l",
    b"d",
    b"s",
    b"u",
    b"e",
    b"a",
    b"(",
    b"0",
    b"1",
    b"2",
]
_VALUES = [b"N", b"\x88", b"K\xff", b"J\xff\xff\xff\x7f", b"\x8a\x09" + b"\xff" * 8 + b"\x7f", b"G\x7f\xf0" + bytes(6)]
_VALUES += [
    b"]",
    b"}",
    b")",
    b"X\xff\xff\xff\x7fab",
    b"X\x02\x00\x00\x00ab",
    b"\x8d" + b"\xff" * 7 + b"\x7f",
    b"Q",
    b"P0\n",
]
_VALUES += [
    b"h\x00",
    b"h\x05",
    b"j\xff\xff\xff\x7f",
    b"B\xff\xff\xff\x7f",
    b"C\x03abc",
    b"\x8b\xff\xff\xff\x7f" + b"\xff" * 9,
]
_VALUES += [
    b"c" + name + b"\n" for name in (b"os\nsystem", b"builtins\neval", b"torch\nload", b"collections\nOrderedDict")
]
_VALUES += [
    b"c" + name + b"\n"
    for name in (b"torch._utils\n_rebuild_tensor_v2", b"torch\nFloatStorage", b"copyreg\n_reconstructor")
]
_VALUES += [
    b"i" + b"os\nsystem\n",
    b"(o",
    b"\x82\x01",
    b"\x92",
    b"\x96" + b"\xff" * 8,
    b"\x97",
    b"r\xff\xff\xff\x7f",
    b"q\x00",
]


def changed_pickle(rng: random.Random, content: bytes) -> bytes:
    """A pickle with opcodes swapped, left out, doubled, or others put between; sometimes with bits flipped."""
    if rng.random() < 0.1:
        return changed_bytes(rng, content)
    ends = [position for _, _, position in pickletools.genops(content)] + [len(content)]
    codes = [content[begin:end] for begin, end in itertools.pairwise(ends)]
    # A frame's length would only be wrong.
    codes = [code for code in codes if not code.startswith(b"\x95")]
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(1, max(2, len(codes)))
        other = rng.randrange(max(1, len(codes)))
        kind = rng.randrange(7)
        if kind == 0:
            codes[at:at] = [rng.choice(_VALUES)]
        elif kind == 1:
            codes[at:at] = [rng.choice(_ENDINGS)]
        elif kind == 2:
            codes[at:at] = [rng.choice(_VALUES), rng.choice(_VALUES), rng.choice(_ENDINGS)]
        elif kind == 3 and at < len(codes):
            codes[at] = codes[other]
        elif kind == 4 and at < len(codes):
            codes[at] = rng.choice(_VALUES)
        elif kind == 5:
            codes[at:at] = _deep(rng)
        else:
            del codes[at : at + 1]
    return b"".join(codes)


def _deep(rng: random.Random) -> Sequence[bytes]:
    """Very many of one kind: containers in each other, or one object doubled and doubled."""
    if rng.random() < 0.5:
        return [b"]"] * 3000 + [b"a"] * 2999
    return [b"]", b"q\xfa"] + [b"(", b"h\xfa", b"h\xfa", b"t", b"q\xfa"] * 40
