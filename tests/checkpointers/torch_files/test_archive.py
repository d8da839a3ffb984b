"""The reader of torch.save's files: all that torch writes, and files that say more than they have."""

from __future__ import annotations

import argparse
import io
import itertools
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from collections import Counter, OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood.bounds import MOST_DEPTH, Budget, Refused
from lastgood.checkpointers.torch_files.archive import (
    TorchFile,
    check_proportion,
    file_names,
    read_torch_file,
    reading_cost,
)
from lastgood.checkpointers.torch_files.files import TorchFiles, pack_numpy
from lastgood.errors import CorruptCheckpoint, StateError, StorageError
from lastgood.pickles import load_pickle
from lastgood.state import state_digest
from tests.checkpointers.support.pickle_craft import ORDERED, call, named, of, pickled, storage, tensor, torch_file
from tests.state.support.trees import TREES, types_of

FOUR = struct.pack("<4f", 1, 2, 3, 4)


def loaded(path, body, storages=None, **how):
    path.write_bytes(torch_file(body, storages, **how))
    return read_torch_file(path)


# -- what torch writes -------------------------------------------------------------------------------------------------


def test_all_that_torch_saves_of_plain_states_comes_back(tmp_path):
    base = torch.arange(12, dtype=torch.float32)
    hung = torch.ones(2)
    hung.note = "an attribute"
    parameter = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    parameter.note = 1
    module = torch.nn.BatchNorm1d(2)
    state = {
        "views": [base[2:5], base.view(3, 4).t(), base[::3]],
        "conjugated": torch.tensor([1 + 2j]).conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
        "parameters": [torch.nn.Parameter(torch.zeros(1)), parameter],
        "hung": hung,
        "module": module.state_dict(),
        "empty": [torch.empty(0, 3), base[12:]],
        "grad": torch.ones(1, requires_grad=True),
        "types": [torch.Size([1, 2]), torch.float8_e5m2, torch.device("cuda", 1), torch.device("cpu")],
        "plain": [
            b"",
            b"a\xff",
            bytearray(b"x"),
            bytearray(),
            1j,
            {1, "a"},
            frozenset(),
            Counter("aab"),
            1 << 1000,
            -1,
        ],
        "keys": {(1, ("a", None)): 1, None: 2, True: 3, 0.5: 4, 1 << 90: 5, b"\0": 6},
        "surrogate": "\udce9",
    }
    torch.save(state, tmp_path / "x.pt")
    found = read_torch_file(tmp_path / "x.pt")
    assert list(found) == list(state) and found["plain"] == state["plain"] and found["keys"] == state["keys"]
    assert list(map(type, found["plain"])) == list(map(type, state["plain"]))
    assert found["types"] == state["types"] and found["surrogate"] == state["surrogate"]
    assert state_digest({"x": found["views"]}) == state_digest({"x": state["views"]})
    assert found["views"][0].untyped_storage().data_ptr() == found["views"][2].untyped_storage().data_ptr()
    for name in ("conjugated", "negative"):
        assert found[name].is_conj() == state[name].is_conj() and found[name].is_neg() == state[name].is_neg()
        assert torch.equal(found[name], state[name])
    assert [(type(one), one.requires_grad) for one in found["parameters"]] == [
        (torch.nn.Parameter, True),
        (torch.nn.Parameter, False),
    ]
    assert torch.equal(found["hung"], hung) and found["grad"].requires_grad
    assert found["module"]._metadata == state["module"]._metadata
    module.load_state_dict(found["module"])


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_of_pickle_is_read(tmp_path, protocol):
    state = {
        "x": [torch.arange(3.0), "text" * 100, 1.5, (1, 2, 3, 4), {"a"}, frozenset("b"), b"bytes", bytearray(b"y")]
    }
    torch.save(state, tmp_path / "x.pt", pickle_protocol=protocol)
    found = read_torch_file(tmp_path / "x.pt")
    assert torch.equal(found["x"][0], state["x"][0]) and found["x"][1:] == state["x"][1:]


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(max_size=5), TREES, max_size=4))
def test_what_is_written_costs_no_more_to_read_than_was_reckoned(tmp_path_factory, state):
    packed = pack_numpy(state, "state")
    path = tmp_path_factory.mktemp("x") / "x.pt"
    torch.save(packed, path)
    budget = Budget(path.stat().st_size)
    with path.open("rb") as file:
        found = TorchFile(file.fileno(), 0, path.stat().st_size, budget).read()
    assert types_of(found) == types_of(packed)
    beside = 700 * 30 + path.stat().st_size  # the zip's directory and the pickle, which the file's bytes account for
    assert budget.taken <= reading_cost(packed, "state") + beside


def test_a_file_of_another_byte_order_or_of_old_torch_is_refused(tmp_path):
    torch.save({"x": 1}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CorruptCheckpoint, match=r"old.pt.*torch 1.6 or later"):
        read_torch_file(tmp_path / "old.pt")
    content = torch_file(of(1)).replace(b"little", b"big\0\0\0")
    (tmp_path / "big.pt").write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match=r"checksum|byte order"):
        read_torch_file(tmp_path / "big.pt")


def test_something_else_than_a_file_is_refused_and_nothing_waits(tmp_path):
    os.mkfifo(tmp_path / "x.pt")
    with pytest.raises(StorageError, match="FIFO"):
        read_torch_file(tmp_path / "x.pt")
    with pytest.raises(StorageError, match="No such file"):
        read_torch_file(tmp_path / "none.pt")


# -- tensors that are none ---------------------------------------------------------------------------------------------


def test_a_crafted_tensor_is_read_where_all_fits(tmp_path):
    assert torch.equal(loaded(tmp_path / "x", tensor(storage("0", 4)), {"0": FOUR}), torch.tensor([1.0, 2, 3, 4]))


KEPT = storage("0", 4)


@pytest.mark.parametrize(
    "body",
    {
        "offset": tensor(KEPT, 1),
        "negative offset": tensor(KEPT, -1),
        "stride": tensor(KEPT, 0, (2,), (4,)),
        "negative stride": tensor(KEPT, 3, (2,), (-1,)),
        "size": tensor(KEPT, 0, (5,)),
        "negative size": tensor(KEPT, 0, (-1,)),
        "huge size": tensor(KEPT, 0, (2**61, 2**61), (0, 0)),
        "expanded": tensor(KEPT, 0, (2**40,), (0,)),
        "size and stride": tensor(KEPT, 0, (2, 2), (1,)),
        "many axes": tensor(KEPT, 0, (1,) * 65, (1,) * 65),
        "a float": tensor(KEPT, 0.0),
        "a bool": tensor(KEPT, 0, (True,)),
        "grad": tensor(KEPT, grad=1),
        "metadata": tensor(KEPT, 0, (4,), (1,), {"other": True}),
        "no storage": tensor(of(1)),
        "hooks": call(named("torch._utils", "_rebuild_tensor_v2"), KEPT, 0, (4,), (1,), False, {"a": 1}),
        "other length": tensor(storage("0", 5), 0, (1,)),
        "other dtype": tensor(storage("0", 4, "DoubleStorage"), 0, (1,)),
        "no entry": tensor(storage("1", 4)),
        "a way out": tensor(storage("../data.pkl", 4)),
        "untyped": tensor(of(("storage", named("torch.storage", "UntypedStorage"), "0", "cpu", 16)) + b"Q"),
        "not a storage": of(("module", named("torch", "FloatStorage"), "0", "cpu", 4)) + b"Q",
        "quantised": call(
            named("torch._utils", "_rebuild_tensor_v3"),
            of(("storage", named("torch.storage", "UntypedStorage"), "0", "cpu", 16)) + b"Q",
            *(0, (4,), (1,), False, ORDERED, named("torch", "quint8")),
        ),
        "sparse": call(named("torch._utils", "_rebuild_sparse_tensor"), 1, 2),
        "tensor": call(named("torch", "Tensor"), 2**40),
        "bytearray": call(named("builtins", "bytearray"), 2**40),
        "bytes": call(named("builtins", "bytes"), 2**40),
        "grad of an int": tensor(storage("0", 2, "LongStorage"), 0, (1,), grad=True),
    }.items(),
    ids=lambda pair: pair[0],
)
def test_a_tensor_that_does_not_fit_is_refused(tmp_path, body):
    with pytest.raises(CorruptCheckpoint, match=r"x: cannot be read"):
        loaded(tmp_path / "x", body[1], {"0": FOUR})


# -- pickles that say more than they have ------------------------------------------------------------------------------


def lists(depth):
    return b"]" * depth + b"a" * (depth - 1)


def shared(levels):
    """A list that holds a list twice, which holds ...: 2^levels lists, if one walks."""
    return b"]q\x00" + b"".join(b"](h" + bytes([n]) + b"h" + bytes([n]) + b"eq" + bytes([n + 1]) for n in range(levels))


def shared_tuples(levels):
    return b")q\x00" + b"".join(
        b"h" + bytes([n]) + b"h" + bytes([n]) + b"\x86q" + bytes([n + 1]) for n in range(levels)
    )


@pytest.mark.parametrize(
    "body",
    {
        "a long text": b"X\xff\xff\xff\x7f",
        "a longer text": b"\x8d" + b"\xff" * 8,
        "long bytes": b"B\xff\xff\xff\x7f",
        "longer bytes": b"\x8e" + b"\xff" * 8,
        "a long bytearray": b"\x96" + b"\xff" * 8,
        "a long frame": b"\x95" + b"\xff" * 8,
        "a long number": b"\x8b\xff\xff\xff\x7f",
        "a negative number of bytes": b"\x8b\xff\xff\xff\xff",
        "an integer of too many digits": b"\x8b" + struct.pack("<i", 2000) + b"\1" * 2000,
        "a far note": of(1) + b"r\xff\xff\xff\x7f",
        "a note of nothing": b"q\x00",
        "a note that is not there": b"j\xff\xff\xff\x7f",
        "nothing": b"",
        "nothing left": b"0",
        "a mark": b"(",
        "two values": of(1) + of(2),
        "a tuple of nothing": b"\x87",
        "a name without an end": b"c" + b"a" * 300,
        "protocol 0": b"I1\n",
        "deep": lists(MOST_DEPTH + 1),
        "very deep": lists(100_000),
        "itself": b"]q\x00h\x00a",
        "itself in a dict": b"}q\x00" + of("a") + b"h\x00s",
        "twice and twice again": shared(60),
        "a key without an end": b"}" + shared_tuples(60) + of(1) + b"s",
        "in a set": b"\x8f(" + shared_tuples(60) + b"\x90",
        "a frozen set": b"(" + shared_tuples(60) + b"\x91",
        "a made set": call(named("builtins", "set"), b"](" + shared_tuples(60) + b"e"),
        "a list as key": b"}]" + of(1) + b"s",
        "keys without values": b"}(" + of(1) + b"u",
        "a class as value": named("torch", "Tensor"),
        "a function as value": of({"x": named("torch._utils", "_rebuild_tensor_v2")}),
        "a storage as value": storage("0", 4),
        "a size": call(named("torch", "Size"), ("x",)),
        "a device": call(named("torch", "device"), "nonsense"),
        "a device's number": call(named("torch", "device"), "cuda", 2**40),
        "an encoding": call(named("_codecs", "encode"), "x", "rot13"),
        "a counter": call(named("collections", "Counter"), 2**40),
        "metadata": ORDERED + of({"__class__": 1}) + b"b",
        "a state of a dict": of({}) + of({"a": 1}) + b"b",
    }.items(),
    ids=lambda pair: pair[0],
)
def test_a_pickle_that_says_more_than_it_has_is_refused(tmp_path, body):
    with pytest.raises(CorruptCheckpoint, match=r"x: cannot be read"):
        loaded(tmp_path / "x", body[1], {"0": FOUR})


def test_keys_of_one_hash_are_bounded(tmp_path):
    """2^61 - 1 is what Python takes the remainder of: a dict of such keys compares each with all others."""
    keys = b"".join(of(n * (2**61 - 1)) + b"N" for n in range(5000))
    with pytest.raises(CorruptCheckpoint, match="of one hash"):
        loaded(tmp_path / "x", b"}(" + keys + b"u")


def alike(count):
    """Complex numbers of one hash, which is that of the real part and 1,000,003 times that of the other one."""
    return [complex(-1_000_003.0 * n, n) for n in range(1, count)]


@pytest.mark.parametrize("kind", [dict.fromkeys, set, frozenset, Counter, lambda keys: {(key, 1) for key in keys}])
@pytest.mark.parametrize("protocol", [2, 4])
def test_keys_of_one_hash_are_bounded_in_every_container(tmp_path, kind, protocol):
    content = pickle.dumps(kind(alike(2500)), protocol)
    with pytest.raises(Refused, match="of one hash"):
        load_pickle(content, file_names(Budget(1 << 30)), Budget(1 << 30))
    fine = kind(alike(900))
    assert load_pickle(pickle.dumps(fine, protocol), file_names(Budget(0)), Budget(0)) == fine


OF_TORCH = (torch.float32, torch.qint8, torch.device("cuda:3"), torch.Size([2, 3]), torch.Size([]))


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize(
    "value",
    [
        set(OF_TORCH),
        frozenset(OF_TORCH),
        {key: str(key) for key in OF_TORCH},
        OrderedDict((key, None) for key in OF_TORCH),
        Counter(dict.fromkeys(OF_TORCH, 2)),
        {(OF_TORCH, frozenset(OF_TORCH))},
    ],
)
def test_values_of_torch_are_keys(tmp_path, value, protocol):
    """What a program notes for each dtype, device or shape."""
    cost = reading_cost({"x": value}, "state")
    torch.save({"x": value}, tmp_path / "x", pickle_protocol=protocol)
    check_proportion(cost, tmp_path / "x", "x")
    found = read_torch_file(tmp_path / "x")["x"]
    assert found == value and type(found) is type(value)
    assert sorted(map(told, found)) == sorted(map(told, value))


def told(value: object) -> str:
    """Types and values; of a set in an order of its own, since dtypes are hashed by where they lie in memory."""
    if isinstance(value, frozenset):
        return f"frozenset{sorted(map(told, value))}"
    if type(value) is tuple:
        return f"tuple{[told(one) for one in value]}"
    return repr(value)


@pytest.mark.parametrize("kind", [set, frozenset, dict.fromkeys])
def test_sizes_as_keys_cost_what_tuples_do(tmp_path, kind):
    alike = [torch.Size(bits) for bits in itertools.islice(itertools.product((-1, -2), repeat=12), 2500)]
    assert len(set(map(hash, alike))) == 1
    for keys, words in ((alike, "of one hash"), ([torch.Size([1] * 1001)], "more than 1000 values")):
        with pytest.raises(StateError, match=words):
            reading_cost({"x": kind(keys)}, "state")
        torch.save({"x": kind(keys)}, tmp_path / "x")
        with pytest.raises(CorruptCheckpoint, match=words):
            read_torch_file(tmp_path / "x")


def test_tensors_are_no_keys(tmp_path):
    for value in ({torch.ones(1)}, {torch.ones(1): 1}):
        torch.save({"x": value}, tmp_path / "x")
        with pytest.raises(CorruptCheckpoint, match="a Tensor is a key"):
            read_torch_file(tmp_path / "x")


def test_as_many_wide_keys_as_anybody_has_are_read(tmp_path):
    """Identifiers of samples fill 64 bits."""
    state = {"seen": {2**63 + 977 * n: n for n in range(3000)}, "set": {2**63 + 977 * n for n in range(3000)}}
    cost = reading_cost(state, "state")
    torch.save(state, tmp_path / "x")
    check_proportion(cost, tmp_path / "x", "x")
    assert read_torch_file(tmp_path / "x") == state


def test_what_would_be_refused_for_its_hashes_is_not_written():
    with pytest.raises(StateError, match=r"state\.a: more than 1000 keys of one hash"):
        reading_cost({"a": set(alike(2500))}, "state")


def test_as_deep_as_may_be_is_read(tmp_path):
    found = loaded(tmp_path / "x", lists(MOST_DEPTH))
    for _ in range(MOST_DEPTH - 1):
        (found,) = found
    assert found == []


# -- zips --------------------------------------------------------------------------------------------------------------


def test_nothing_is_inflated(tmp_path):
    with pytest.raises(CorruptCheckpoint, match="compressed"):
        loaded(tmp_path / "x", tensor(storage("0", 4)), {"0": FOUR}, compression=zipfile.ZIP_DEFLATED)


def rewritten(content, entry, **changes):
    """The zip with fields of an entry of its directory changed, by their place in it."""
    places = {"method": (10, "<H"), "packed": (20, "<L"), "size": (24, "<L"), "local": (42, "<L"), "flags": (8, "<H")}
    at = content.rindex(b"archive/" + entry.encode()) - 46
    content = bytearray(content)
    for field, value in changes.items():
        place, form = places[field]
        struct.pack_into(form, content, at + place, value)
    return bytes(content)


@pytest.mark.parametrize(
    "changes",
    [
        {"method": 8},
        {"method": 99},
        {"flags": 1},
        {"size": 2**31},
        {"size": 2**31, "packed": 2**31},
        {"size": 2**32 - 1, "packed": 2**32 - 1},
        {"local": 0},
        {"local": 2**32 - 1},
        {"local": 40},
        {"packed": 15},
    ],
    ids=str,
)
def test_a_directory_that_says_more_than_there_is_is_refused(tmp_path, changes):
    (tmp_path / "x").write_bytes(rewritten(torch_file(tensor(storage("0", 4)), {"0": FOUR}), "data/0", **changes))
    with pytest.raises(CorruptCheckpoint, match=r"x: cannot be read"):
        read_torch_file(tmp_path / "x")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_entries_that_share_bytes_or_a_name_are_refused(tmp_path):
    content = torch_file(tensor(storage("0", 4)), {"0": FOUR, "1": FOUR})
    other = struct.unpack_from("<L", content, content.rindex(b"archive/data/0") - 4)[0]
    (tmp_path / "x").write_bytes(rewritten(content, "data/1", local=other))
    with pytest.raises(CorruptCheckpoint, match="lies over another entry"):
        read_torch_file(tmp_path / "x")
    twice = io.BytesIO()
    with zipfile.ZipFile(twice, "w") as archive:
        for body in (of(1), of(2)):
            archive.writestr("archive/data.pkl", pickled(body))
    (tmp_path / "x").write_bytes(twice.getvalue())
    with pytest.raises(CorruptCheckpoint, match="directory of its zip is damaged"):
        read_torch_file(tmp_path / "x")


def test_any_cut_and_any_flipped_byte_is_seen_or_does_not_matter(tmp_path):
    state = {"a": torch.arange(4.0), "b": [1, "text"]}
    torch.save(state, tmp_path / "x")
    content = (tmp_path / "x").read_bytes()
    refused = 0
    for position in range(0, len(content), 5):
        for damaged in (
            content[:position],
            content[:position] + bytes([content[position] ^ 65]) + content[position + 1 :],
        ):
            (tmp_path / "x").write_bytes(damaged)
            try:
                found = read_torch_file(tmp_path / "x")
            except CorruptCheckpoint:
                refused += 1
            else:
                assert torch.equal(found["a"], state["a"]) and found["b"] == state["b"]
    assert refused > len(content) / 5


# -- memory ------------------------------------------------------------------------------------------------------------


def test_memory_follows_what_a_file_has(tmp_path):
    """One process reads all of them; the most that it ever had tells of the worst."""
    million = 1 << 20
    for name, body in {
        "lists": b"(" + b"]" * million + b"t",
        "noted": b"]" + b"\x94" * million,
        "wide text": of("\U0001f600" + "a" * million),
        "expanded": tensor(storage("0", 4), 0, (2**28,), (0,)),
        "bytes": call(named("builtins", "bytes"), 2**31),
        "bytearray": call(named("builtins", "bytearray"), 2**31),
        "tensor": call(named("torch", "FloatTensor"), 2**29),
    }.items():
        (tmp_path / name).write_bytes(torch_file(body, {"0": FOUR}))
    zeros = {"0": bytes(100 * million)}
    (tmp_path / "inflated").write_bytes(torch_file(tensor(storage("0", 4)), zeros, compression=zipfile.ZIP_DEFLATED))
    code = (
        "import sys, resource, pathlib, torch\n"
        "from lastgood.checkpointers.torch_files.archive import read_torch_file\n"
        "from lastgood.errors import CorruptCheckpoint\n"
        "torch.save({'x': torch.zeros(3)}, sys.argv[1] + '/first')\n"
        "read_torch_file(pathlib.Path(sys.argv[1], 'first'))\n"
        "for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "    try:\n"
        "        read_torch_file(path)\n"
        "    except CorruptCheckpoint:\n"
        "        pass\n"
        "    print(path.name, path.stat().st_size, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True, timeout=240
    )
    grown = [line.rsplit(" ", 2) for line in done.stdout.splitlines()]
    assert len(grown) == 9
    for name, nbytes, kib in grown:
        assert int(kib) << 10 <= 4 * int(nbytes) + (64 << 20), name


# -- what is saved can be read -----------------------------------------------------------------------------------------


def held(depth):
    value = []
    for _ in range(depth - 1):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (argparse.Namespace(a=1), r"state\.state\.x: a argparse.Namespace has no place there"),
        ({"y": [print]}, r"x\.y\[0\]: a builtins.builtin_function_or_method"),
        (torch.nn.Buffer(torch.ones(1)).to_sparse(), r"x: a torch.*Tensor"),
        (held(MOST_DEPTH - 1), "levels"),
        (1 << 8192, "an integer of more than 1024 bytes"),
        ({"lastgood.numpy": 1}, "is kept for Lastgood"),
        ({frozenset({torch.strided}): 1}, "a layout is a key, as a key"),
        (torch.zeros(1).expand(1 << 28), "memory to read"),
        (list(range(300_000)), "memory to read"),
    ],
    ids=["object", "function", "sparse", "deep", "integer", "key", "key of a set", "expanded", "long list"],
)
def test_what_could_not_be_read_again_fails_the_save(tmp_path, value, words, monkeypatch):
    monkeypatch.setattr("lastgood.bounds._BESIDE_BYTES", 16 << 20)
    files = TorchFiles(tmp_path, keep=1)
    files.prepare()
    files.write(1, {"x": 1})
    with pytest.raises(StateError, match=words):
        files.write(2, {"x": value})
    assert files.read(None)[:2] == (1, {"x": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-00000001-step-1.pt"]


def test_a_container_that_holds_itself_fails_the_save(tmp_path):
    value = OrderedDict()
    value["itself"] = value
    files = TorchFiles(tmp_path, keep=1)
    files.prepare()
    with pytest.raises(StateError, match="holds itself"):
        files.write(2, {"x": value})


def test_refused_names_what_was_unknown(tmp_path):
    with pytest.raises(CorruptCheckpoint) as error:
        loaded(tmp_path / "x", call(named("os", "system"), "true"))
    assert isinstance(error.value.__cause__, Refused) and error.value.__cause__.unknown == "os.system"
