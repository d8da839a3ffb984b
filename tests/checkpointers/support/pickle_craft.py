"""Pickles that no pickler writes: opcodes as texts, and files of torch.save around them."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Mapping
from typing import Any

NONE, MARK, STOP = b"N", b"(", b"."


def of(value: Any) -> bytes:
    """Plain values as pickles have them; bytes are opcodes already."""
    if isinstance(value, bytes):
        return value
    if value is None or isinstance(value, bool):
        return {None: NONE, True: b"\x88", False: b"\x89"}[value]
    if isinstance(value, int):
        if -(2**31) <= value < 2**31:
            return b"J" + struct.pack("<i", value)
        content = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        return b"\x8a" + bytes([len(content)]) + content
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, str):
        content = value.encode()
        return b"X" + struct.pack("<I", len(content)) + content
    if isinstance(value, tuple):
        return MARK + b"".join(map(of, value)) + b"t"
    if isinstance(value, list):
        return b"](" + b"".join(map(of, value)) + b"e"
    assert isinstance(value, dict)
    return b"}(" + b"".join(of(key) + of(item) for key, item in value.items()) + b"u"


def named(module: str, name: str) -> bytes:
    """GLOBAL."""
    return f"c{module}\n{name}\n".encode()


def call(function: bytes, *arguments: Any) -> bytes:
    """REDUCE."""
    return function + of(arguments) + b"R"


def made(function: bytes, state: Any, *arguments: Any) -> bytes:
    """NEWOBJ and BUILD."""
    return function + of(arguments) + b"\x81" + of(state) + b"b"


def pickled(body: bytes) -> bytes:
    return b"\x80\x02" + body + STOP


ORDERED = call(named("collections", "OrderedDict"))


def storage(key: str, count: int, kind: str = "FloatStorage") -> bytes:
    return of(("storage", named("torch", kind), key, "cpu", count)) + b"Q"


def tensor(kept: bytes, offset: Any = 0, size: Any = (4,), stride: Any = (1,), *more: Any, grad: Any = False) -> bytes:
    return call(named("torch._utils", "_rebuild_tensor_v2"), kept, offset, size, stride, grad, ORDERED, *more)


def torch_file(
    body: bytes, storages: Mapping[str, bytes] | None = None, compression: int = zipfile.ZIP_STORED
) -> bytes:
    """A file of torch.save whose pickle is `body`."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled(body))
        archive.writestr("archive/byteorder", b"little")
        for key, data in (storages or {}).items():
            archive.writestr(f"archive/data/{key}", data)
        archive.writestr("archive/version", b"3\n")
    return content.getvalue()


def attempts(module: str, name: str, foreign: tuple[str, str]) -> dict[str, bytes]:
    """Bodies that use a listed name in each way that an unpickler has; `foreign` is what must never be called."""
    it = named(module, name)
    evil = named(*foreign)
    stacked = of(module) + of(name) + b"\x93"
    found = {"alone": it, "stacked": stacked, "stacked foreign": of(foreign[0]) + of(foreign[1]) + b"\x93"}
    states = {
        "bases": {"__bases__": (evil, it)},
        "class": {"__class__": it},
        "dict": {"__dict__": {}, "marker": 1},
        "attribute": {"marker": evil, "make": evil, "call": evil, "__call__": evil, "__reduce__": evil},
        "slots": (None, {"marker": 1, "make": evil, "__setstate__": evil, "dtype": 1, "name": "x", "state": 2}),
        "list": [1],
    }
    arguments: dict[str, tuple[Any, ...]] = {
        "nothing": (),
        "number": (1,),
        "huge": (2**40,),
        "text": ("x",),
        "pair": ("x", "latin1"),
        "list": ([1, 2],),
        "evil": (evil, (), it, {}),
        "itself": (it,),
        "many": (1, 2, 3, 4, 5, 6, 7, 8),
    }
    for label, state in states.items():
        found[f"BUILD {label}"] = it + of(state) + b"b"
        found[f"stacked BUILD {label}"] = stacked + of(state) + b"b"
    for label, given in arguments.items():
        found[f"REDUCE {label}"] = it + of(given) + b"R"
        found[f"NEWOBJ {label}"] = it + of(given) + b"\x81"
        found[f"NEWOBJ_EX {label}"] = it + of(given) + of({"marker": 1}) + b"\x92"
        found[f"OBJ {label}"] = MARK + it + b"".join(map(of, given)) + b"o"
        found[f"INST {label}"] = MARK + b"".join(map(of, given)) + f"i{module}\n{name}\n".encode()
        for state_label, state in states.items():
            found[f"REDUCE {label} BUILD {state_label}"] = it + of(given) + b"R" + of(state) + b"b"
            found[f"NEWOBJ {label} BUILD {state_label} twice"] = it + of(given) + b"\x81" + (of(state) + b"b") * 2
    found["append"] = it + of(1) + b"a"
    found["appends"] = it + MARK + of(1) + b"e"
    found["set item"] = it + of("marker") + of(1) + b"s"
    found["set items"] = it + MARK + of("marker") + of(1) + b"u"
    found["add items"] = it + MARK + of(1) + b"\x90"
    found["key"] = b"}" + it + of(1) + b"s"
    found["in a set"] = b"\x8f" + MARK + it + b"\x90"
    found["BINPERSID"] = it + b"Q"
    found["PERSID"] = b"Parchive\n"
    for code, number in (
        (b"\x82", struct.pack("<B", 240)),
        (b"\x83", struct.pack("<H", 240)),
        (b"\x84", struct.pack("<i", 240)),
    ):
        found[f"EXT{len(number)}"] = code + number + of(()) + b"R"
    found["foreign REDUCE"] = evil + of(()) + b"R"
    found["foreign INST"] = MARK + f"i{foreign[0]}\n{foreign[1]}\n".encode()
    return found
