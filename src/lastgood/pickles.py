"""Pickles of other programs (torch.save, torch.distributed.checkpoint), read without running anything that is in them.

Python's own unpickler, restricted by names alone, is no protection: it hands out *classes*, and its opcode BUILD sets
any attribute on whatever it is given, a class's bases included. Here a name in a pickle stands for a `Maker`, a
function of ours that checks its arguments and is no class; an object of a foreign class becomes a `Record`, which only
holds what the pickle said of it; and each opcode works on exact types alone. Opcodes that no pickler of protocol 2 to 5
needs for data are not known. Memory is charged to a `Budget` before it is taken.
"""

from __future__ import annotations

import pickle
import struct
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lastgood.bounds import DAMAGE, MOST_INT_BYTES, Budget, Refused, hashable, key_cost

__all__ = ["Maker", "Record", "load_pickle"]

_MOST_NAME_BYTES = 256


@dataclass(eq=False, repr=False, slots=True)
class Maker:
    """What a name in a pickle stands for: a function that checks its arguments."""

    name: str
    make: Callable[..., Any]


@dataclass(eq=False, repr=False, slots=True)
class Record:
    """An object of a foreign class: its class's name, the arguments that made it, and its state."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None

    @classmethod
    def maker(cls, name: str) -> Maker:
        """What stands for a class of that name."""
        return Maker(name, lambda *arguments: cls(name, arguments))


def load_pickle(
    content: bytes,
    names: Mapping[tuple[str, str], Any],
    budget: Budget,
    *,
    persistent: Callable[[Any], Any] | None = None,
    build: Mapping[type, Callable[[Any, Any], None]] | None = None,
    keys: tuple[type, ...] = (),
) -> Any:
    """The value of one pickle.

    Args:
        content: the pickle, to its end.
        names: for each (module, name) that it may hold a `Maker`, or a value that nothing can change.
        budget: is charged for all that is built.
        persistent: gives the object for a persistent id; without it there are none.
        build: for a type of the objects that makers return, how a state is set on it. Records take theirs once.
        keys: types beside those of plain values that may be in a set, or the key of a mapping.

    What it returns may still hold makers, and containers that hold themselves; `tree_cost` looks for them.

    Raises Refused, with the name in `unknown` if it is not one of `names`.
    """
    machine = _Machine(content, names, budget, persistent, build or {}, keys)
    try:
        return machine.run()
    except Refused:
        raise
    except DAMAGE as error:
        raise Refused(f"at byte {machine.position} of its pickle: {type(error).__name__}: {error}") from error


@dataclass(eq=False)
class _Machine:
    _content: bytes
    _names: Mapping[tuple[str, str], Any]
    _budget: Budget
    _persistent: Callable[[Any], Any] | None
    _build: Mapping[type, Callable[[Any, Any], None]]
    _keys: tuple[type, ...]
    _stack: list[Any] = field(default_factory=list)
    _below: list[list[Any]] = field(default_factory=list)
    _memo: list[Any] = field(default_factory=list)
    position: int = 0

    def run(self) -> Any:
        while True:
            code = self._take(1)
            if code == pickle.STOP:
                value = self._stack.pop()
                if self._stack or self._below:
                    raise Refused("its pickle ends with more than one value")
                if self.position != len(self._content):
                    raise Refused(f"{len(self._content) - self.position} bytes follow the end of its pickle")
                return value
            step = _STEPS.get(code)
            if step is None:
                raise Refused(f"opcode {code!r} at byte {self.position - 1} of its pickle is not one that data need")
            step(self)

    # -- reading the pickle --------------------------------------------------------------------------------------------

    def _take(self, nbytes: int) -> bytes:
        end = self.position + nbytes
        if end > len(self._content):
            raise Refused(f"its pickle ends {end - len(self._content)} bytes too early")
        found = self._content[self.position : end]
        self.position = end
        return found

    def _number(self, form: str) -> int:
        (number,) = struct.unpack(form, self._take(struct.calcsize(form)))
        return int(number)

    def _line(self) -> str:
        end = self._content.find(b"\n", self.position, self.position + _MOST_NAME_BYTES)
        if end < 0:
            raise Refused("a name in its pickle has no end")
        line = self._content[self.position : end]
        self.position = end + 1
        return line.decode()

    def _push(self, value: Any) -> None:
        self._budget.take(sys.getsizeof(value) + 8)
        self._stack.append(value)

    def _marked(self) -> list[Any]:
        items = self._stack
        self._stack = self._below.pop()
        return items

    # -- opcodes -------------------------------------------------------------------------------------------------------

    def _protocol(self) -> None:
        if self._take(1)[0] > pickle.HIGHEST_PROTOCOL:
            raise Refused("its pickle has a protocol that nobody knows yet")

    def _frame(self) -> None:
        if self._number("<Q") > len(self._content) - self.position:
            raise Refused("a frame of its pickle is longer than the pickle")

    def _mark(self) -> None:
        self._budget.take(96)
        self._below.append(self._stack)
        self._stack = []

    def _text(self, form: str) -> None:
        self._push(self._take(self._number(form)).decode("utf-8", "surrogatepass"))

    def _bytes(self, form: str, kind: type = bytes) -> None:
        self._push(kind(self._take(self._number(form))))

    def _long(self, form: str) -> None:
        nbytes = self._number(form)
        if not 0 <= nbytes <= MOST_INT_BYTES:
            raise Refused(f"an integer of {nbytes} bytes in its pickle is over the limit of {MOST_INT_BYTES}")
        self._push(int.from_bytes(self._take(nbytes), "little", signed=True))

    def _constant(self, value: Any) -> None:
        self._budget.take(8)
        self._stack.append(value)

    def _tuple(self, length: int) -> None:
        if length > len(self._stack):
            raise Refused("its pickle makes a tuple of values that are not there")
        items = tuple(self._stack[-length:])
        del self._stack[-length:]
        self._push(items)

    def _extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise Refused(f"its pickle appends to a {type(target).__name__}")
        self._budget.take(9 * len(items))
        target.extend(items)

    def _set_item(self) -> None:
        value = self._stack.pop()
        key = self._stack.pop()
        self._set([key, value])

    def _set(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) not in (dict, OrderedDict, Counter) or len(items) % 2:
            raise Refused(f"its pickle sets items of a {type(target).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            self._budget.take(160 + key_cost(key, (Record, *self._keys)))
            self._budget.note(target, key)
            target[key] = value

    def _add_items(self) -> None:
        items = self._marked()
        target = self._stack[-1]
        if type(target) is not set:
            raise Refused(f"its pickle adds items to a {type(target).__name__}")
        for item in hashable(items, self._budget, self._keys):
            self._budget.note(target, item)
            target.add(item)

    def _frozen_set(self) -> None:
        self._push(frozenset(hashable(self._marked(), self._budget, self._keys)))

    def _global(self) -> None:
        module = self._line()
        self._named(module, self._line())

    def _stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise Refused("its pickle asks for a name that is no text")
        self._named(module, name)

    def _named(self, module: str, name: str) -> None:
        module = "builtins" if module == "__builtin__" else module
        found = self._names.get((module, name), self)
        if found is self:
            full = f"{module}.{name}"[:_MOST_NAME_BYTES]
            raise Refused(f"{full!r} is not on the list of what may be in it; nothing of it was run", full)
        self._constant(found)

    def _call(self) -> None:
        arguments = self._stack.pop()
        maker = self._stack.pop()
        if type(maker) is not Maker or type(arguments) is not tuple:
            raise Refused(f"its pickle calls a {type(maker).__name__}")
        self._push(maker.make(*arguments))

    def _set_state(self) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        if type(target) is Record and target.state is None:
            target.state = state
            return
        build = self._build.get(type(target))
        if build is None:
            raise Refused(f"its pickle sets the state of a {type(target).__name__}")
        build(target, state)

    def _persistent_id(self) -> None:
        if self._persistent is None:
            raise Refused("its pickle refers to what lies outside it")
        self._push(self._persistent(self._stack.pop()))

    def _get(self, form: str) -> None:
        self._constant(self._memo[self._number(form)])

    def _put(self, form: str) -> None:
        # Picklers number what they note, from 0 on.
        number = self._number(form)
        if number < len(self._memo):
            self._memo[number] = self._stack[-1]
        elif number == len(self._memo):
            self._memoize()
        else:
            raise Refused(f"its pickle notes value {number} after {len(self._memo)} of them")

    def _memoize(self) -> None:
        self._budget.take(16)
        self._memo.append(self._stack[-1])


_STEPS: dict[bytes, Callable[[_Machine], None]] = {
    pickle.PROTO: _Machine._protocol,
    pickle.FRAME: _Machine._frame,
    pickle.MARK: _Machine._mark,
    pickle.NONE: lambda machine: machine._constant(None),
    pickle.NEWTRUE: lambda machine: machine._constant(True),
    pickle.NEWFALSE: lambda machine: machine._constant(False),
    pickle.BININT: lambda machine: machine._push(machine._number("<i")),
    pickle.BININT1: lambda machine: machine._push(machine._number("<B")),
    pickle.BININT2: lambda machine: machine._push(machine._number("<H")),
    pickle.LONG1: lambda machine: machine._long("<B"),
    pickle.LONG4: lambda machine: machine._long("<i"),
    pickle.BINFLOAT: lambda machine: machine._push(struct.unpack(">d", machine._take(8))[0]),
    pickle.SHORT_BINUNICODE: lambda machine: machine._text("<B"),
    pickle.BINUNICODE: lambda machine: machine._text("<I"),
    pickle.BINUNICODE8: lambda machine: machine._text("<Q"),
    pickle.SHORT_BINBYTES: lambda machine: machine._bytes("<B"),
    pickle.BINBYTES: lambda machine: machine._bytes("<I"),
    pickle.BINBYTES8: lambda machine: machine._bytes("<Q"),
    pickle.BYTEARRAY8: lambda machine: machine._bytes("<Q", bytearray),
    pickle.EMPTY_LIST: lambda machine: machine._push([]),
    pickle.EMPTY_DICT: lambda machine: machine._push({}),
    pickle.EMPTY_SET: lambda machine: machine._push(set()),
    pickle.EMPTY_TUPLE: lambda machine: machine._constant(()),
    pickle.TUPLE: lambda machine: machine._push(tuple(machine._marked())),
    pickle.TUPLE1: lambda machine: machine._tuple(1),
    pickle.TUPLE2: lambda machine: machine._tuple(2),
    pickle.TUPLE3: lambda machine: machine._tuple(3),
    pickle.APPEND: lambda machine: machine._extend([machine._stack.pop()]),
    pickle.APPENDS: lambda machine: machine._extend(machine._marked()),
    pickle.SETITEM: _Machine._set_item,
    pickle.SETITEMS: lambda machine: machine._set(machine._marked()),
    pickle.ADDITEMS: _Machine._add_items,
    pickle.FROZENSET: _Machine._frozen_set,
    pickle.GLOBAL: _Machine._global,
    pickle.STACK_GLOBAL: _Machine._stack_global,
    pickle.REDUCE: _Machine._call,
    pickle.NEWOBJ: _Machine._call,
    pickle.BUILD: _Machine._set_state,
    pickle.BINPERSID: _Machine._persistent_id,
    pickle.BINGET: lambda machine: machine._get("<B"),
    pickle.LONG_BINGET: lambda machine: machine._get("<I"),
    pickle.BINPUT: lambda machine: machine._put("<B"),
    pickle.LONG_BINPUT: lambda machine: machine._put("<I"),
    pickle.MEMOIZE: _Machine._memoize,
}
