"""Everything that a state may hold, each made twice alike: as it is saved (seed 0), and as a new process has it (1)."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import math
from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np
import torch

_NAMES = """bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64
    complex32 complex64 complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"""
DTYPES = [dtype for name in _NAMES.split() if isinstance(dtype := getattr(torch, name, None), torch.dtype)]


def bits(dtype, shape, seed):
    """A tensor of random bytes, odd ones too: NaNs with payloads, and bools that are neither 0 nor 1."""
    count = math.prod(shape) * dtype.itemsize
    generator = torch.Generator().manual_seed(seed + 7)
    return torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8).view(dtype).reshape(shape)


def shared(seed):
    base = bits(torch.float32, (24,), seed)
    return [base[:10], base[5:15], base[0:20:2]]


def as_two_dtypes(seed):
    base = bits(torch.float32, (8,), seed)
    return [base, base.view(torch.int32)[3:4]]


def windows(seed):
    return bits(torch.float32, (10,), seed).as_strided((4, 4), (2, 1))


TENSORS = {
    **{str(dtype): lambda seed, dtype=dtype: bits(dtype, (3, 5), seed) for dtype in DTYPES},
    "scalar": lambda seed: bits(torch.float64, (), seed),
    "no elements": lambda seed: torch.empty(0, 3, seed + 1)[:, :, :1],
    "transposed": lambda seed: bits(torch.int16, (4, 6), seed).t(),
    "channels last": lambda seed: bits(torch.float32, (2, 3, 4, 5), seed).to(memory_format=torch.channels_last),
    "sliced": lambda seed: bits(torch.int64, (4, 5), seed)[:, 1:3],
    "sliced bools": lambda seed: bits(torch.bool, (4, 5), seed)[:, 1:3],
    "expanded": lambda seed: bits(torch.float32, (1, 3), seed).expand(4, 3),
    "expanded bools": lambda seed: bits(torch.bool, (1,), seed).expand(4),
    "windows": windows,
    "conjugate": lambda seed: bits(torch.complex64, (3,), seed).nan_to_num().conj(),
    "negated": lambda seed: bits(torch.complex64, (3,), seed).nan_to_num().conj().imag,
    "minus zero": lambda seed: torch.tensor([-0.0, 0.0][seed:]) if seed == 0 else torch.tensor([1.0, 1.0]),
    "requires grad": lambda seed: bits(torch.float32, (2,), seed).nan_to_num().requires_grad_(),
    "parameter": lambda seed: torch.nn.Parameter(bits(torch.float32, (2,), seed)),
}


def inference(seed):
    with torch.inference_mode():
        return torch.full((3,), float(seed))


TENSORS["inference"] = inference

NAN = float("nan")
VALUES = {
    "none": None,
    "true": True,
    "small": -7,
    "128 bits": -(2**128 - 1),
    "1000 digits": 10**1000,
    "minus zero": -0.0,
    "nan": NAN,
    "infinity": -math.inf,
    "complex": complex(-0.0, math.nan),
    "text": "Ω\n\0",
    "empty text": "",
    "half a pair": "\ud800",
    "halves in the wrong order": "\ude00\ud83d",
    "one character of a pair": "\U0001f600",
    "bytes": b"\0\xff",
    "no bytes": b"",
    "bytearray": bytearray(b"ab"),
    "size": torch.Size([2, 3]),
    "dtype": torch.bfloat16,
    "quantised dtype": torch.qint8,
    "device": torch.device("cuda:3"),
    "list": [1, [2, []], ()],
    "tuple": (1, (2.5, "x"), [3]),
    "empty": {},
    "set": {1, "a", (2, b"x"), frozenset({3}), (1j, frozenset({(2j,)}))},
    "set of torch's": {torch.float32, torch.device("cuda:1"), torch.Size([2, 3]), torch.Size([]), 1},
    "frozenset of torch's": frozenset({(torch.bfloat16, frozenset({torch.device("cpu")})), (torch.Size([4]), None)}),
    "empty set": set(),
    "frozenset": frozenset({1.5, None}),
    "ordered": OrderedDict(b=1, a=OrderedDict()),
    "counter": Counter({"x": 2, (1, 2): -1}),
    "odd keys": {None: 1, True: 2, 2: 3, 2.5: 4, "": 5, b"k": 6, (1, ("a", None)): 7, "a.b": 8, "lastgood.layout": 9},
    "looks packed": {"lastgood": {"numpy": "<i4", "shape": None, "data": None}},
    "names that collide": {"a.b": 1, "a": {"b": 2}},
    "deep": [[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]],
    "numpy scalars": [np.float32(1.5), np.int64(-3), np.bool_(True), np.complex64(1j), np.float16(-0.0), np.uint8(3)],
    "numpy texts": [
        np.str_("aΩ"),
        np.bytes_(b"ab"),
        np.datetime64("2020-01-01T00:00:00", "ns"),
        np.timedelta64(3, "D"),
    ],
    "longdouble": np.longdouble(1) / 3,
}
ARRAYS = {
    "big-endian": np.arange(6, dtype=">i4").reshape(2, 3),
    "texts": np.array(["a", "bcΩ"]),
    "bytes": np.array([b"a", b"bc"]),
    "times": np.array(["2020-01-01"], dtype="M8[D]"),
    "no elements": np.zeros((0, 3), dtype="<f8"),
    "scalar": np.array(2.5),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "strided": np.arange(10)[::3],
    "bools": np.array([True, False]),
    "halves": np.array([1.5, np.nan], dtype=np.float16),
    "complex": np.array([1 + 2j]),
}


class Thing:
    """An object of the user's own."""

    def __init__(self, inner):
        self.inner = inner

    def state_dict(self):
        return {"inner": self.inner}

    def load_state_dict(self, state):
        self.inner = state["inner"]


class Extra(torch.nn.Module):
    """Parameters and buffers of all kinds, tied ones, one that is not persistent, and a state of its own."""

    def __init__(self, seed):
        super().__init__()
        for number, make in enumerate(TENSORS.values()):
            tensor = make(seed)
            if not isinstance(tensor, torch.nn.Parameter):
                tensor = tensor.detach() if tensor.requires_grad else tensor
            if isinstance(tensor, torch.nn.Parameter):
                self.register_parameter(f"parameter{number}", tensor)
            else:
                self.register_buffer(f"buffer{number}", tensor)
        for number, tensor in enumerate(shared(seed)):
            self.register_buffer(f"shared{number}", tensor)
        self.register_buffer("none", None)
        self.register_buffer("passing", torch.ones(seed + 1), persistent=False)
        self.one = torch.nn.Linear(2, 2)
        self.two = torch.nn.Linear(2, 2)
        self.two.weight = self.one.weight
        self.extra = torch.full((seed + 2,), float(seed))

    def get_extra_state(self):
        return {"tensor": self.extra, "values": dict(VALUES)} if self.extra is not None else None

    def set_extra_state(self, state):
        self.extra = state["tensor"]


class TensorAsExtra(torch.nn.Module):
    """Its own state is one tensor, whose length changes, as Transformer Engine's does."""

    def __init__(self, seed):
        super().__init__()
        self.extra = torch.full((seed + 2,), seed, dtype=torch.uint8)

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


class Keeps(torch.optim.Optimizer):
    """Keeps one of everything for its parameter."""

    def __init__(self, parameters, seed):
        super().__init__(parameters, {"lr": 0.1, "note": "x", "betas": (0.9, 0.95)})
        for parameter in self.param_groups[0]["params"]:
            if seed == 0:
                tensors = {name: make(0).detach() for name, make in TENSORS.items()}
                self.state[parameter] = {"tensors": tensors, "values": VALUES, "arrays": ARRAYS, **tensors}

    def step(self, closure=None):
        """Nothing."""


def plain(seed, values):
    return {name: value if seed == 0 else None for name, value in values.items()}


def make_state(seed):
    torch.manual_seed(seed)
    model = Extra(seed)
    half = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    tensors = {name: make(seed) for name, make in TENSORS.items()}
    return {
        "model": model,
        "extra": TensorAsExtra(seed),
        "half": half,
        "optimizer": Keeps(half.parameters(), seed),
        "tensors": tensors,
        **{f"tensor {name}": make(seed) for name, make in TENSORS.items()},
        "shared": shared(seed),
        "list of one": [tensors["scalar"], 3 + seed],
        "tuple": (torch.full((2,), float(seed)), 3 + seed, NAN, np.arange(3) + seed),
        "values": plain(seed, VALUES),
        "arrays": plain(seed, ARRAYS),
        "filled arrays": {
            name: np.copy(value) if seed == 0 else np.zeros_like(value) for name, value in ARRAYS.items()
        },
        **{f"array {name}": np.copy(value) if seed == 0 else np.zeros_like(value) for name, value in ARRAYS.items()},
        "thing": Thing({"values": plain(seed, VALUES), "tensor": torch.full((2,), float(seed))}),
        "things": [Thing(seed), {"deep": Thing((1, seed))}],
        "counter of tensors": OrderedDict(b=torch.full((1,), float(seed)), a=1),
        "later": {"ema": torch.ones(3)} if seed == 0 else {},
    }


class Colour(enum.IntEnum):
    RED = 1


@dataclasses.dataclass
class Record:
    x: int = 1


class Failing:
    def state_dict(self):
        raise RuntimeError("not now")

    def load_state_dict(self, state):
        pass


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


REFUSED = {
    "function": lambda: lambda: None,
    "object": object,
    "class": lambda: Thing,
    "enum": lambda: Colour.RED,
    "dataclass": Record,
    "named tuple": lambda: collections.namedtuple("Pair", "a")(1),
    "defaultdict": lambda: collections.defaultdict(list),
    "deque": collections.deque,
    "date": lambda: datetime.datetime(2020, 1, 1),
    "decimal": lambda: decimal.Decimal(1),
    "path": lambda: Path("x"),
    "range": lambda: range(3),
    "5000 digits": lambda: 10**5000,
    "two halves of a pair": lambda: "x\ud83d\ude00",
    "two halves in a key": lambda: {"\ud83d\ude00": torch.ones(1)},
    "sparse": lambda: torch.eye(2).to_sparse(),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "meta": lambda: torch.empty(2, device="meta"),
    "subclass": lambda: torch.ones(2).as_subclass(type("Mine", (torch.Tensor,), {})),
    "lazy": lambda: torch.nn.LazyLinear(2),
    "structured": lambda: np.zeros(2, dtype=[("a", "i4")]),
    "objects": lambda: np.array([object()]),
    "masked": lambda: np.ma.masked_array([1, 2], [True, False]),
    "matrix": lambda: np.matrix([[1]]),
    "set of tensors": lambda: {torch.ones(1)},
    "set of things": lambda: {Thing(1)},
    "key of a thing": lambda: {Thing(1): 1},
    "nan key": lambda: {NAN: torch.ones(1)},
    "tensor key": lambda: {torch.ones(1): 1},
    "failing": Failing,
    "very deep": lambda: nested(300),
    "deeper than the stack": lambda: nested(100_000),
}
