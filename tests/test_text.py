"""The one reader of text from outside: held to json and yaml wherever those are strict enough."""

from __future__ import annotations

import ast
import contextlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

import lastgood
from lastgood.errors import ConfigError, CorruptCheckpoint, DataError, LastgoodError
from lastgood.experiments.config.yaml_file import parse_overrides
from lastgood.experiments.plan.load import load_config
from lastgood.storage.format import RecordError, decode_job, seal_json
from lastgood.storage.global_commit import read_global_commit
from lastgood.storage.verdicts import VerdictBook
from lastgood.text import (
    is_whole,
    parse_csv,
    parse_json,
    parse_model,
    parse_number,
    parse_yaml,
    read_bytes,
    read_model,
)

ROOT = Path(__file__).parents[1]
MOST = 1 << 20
PLAIN = (
    st.none() | st.booleans() | st.integers(-(10**39), 10**39) | st.floats(allow_nan=False, allow_infinity=False)
) | st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
VALUES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), inner, max_size=4)
    ),
    max_leaves=20,
)
TOKENS = st.sampled_from(
    [
        *[
            "[",
            "]",
            "{",
            "}",
            ",",
            ":",
            '"',
            '\\"',
            "\\\\",
            "\\",
            " ",
            "1",
            "-0.5e3",
            "NaN",
            "Infinity",
            "1e999",
            "true",
        ],
        *['"a"', '"b":1', '"a":2', "null", '"\\ud800"', '"\\ud83d\\ude00"', "9" * 41, "[[[[[", "]]]]]", "é", "\x00"],
    ]
)


def both(document: bytes | str, **limits: Any) -> Any:
    return parse_json(document, "here", most_bytes=MOST, **limits)


# -- JSON --------------------------------------------------------------------------------------------------------------


@given(VALUES, st.booleans())
def test_reads_what_json_writes(value: Any, ascii_only: bool) -> None:
    document = json.dumps(value, ensure_ascii=ascii_only)
    for given_as in (document, document.encode(), bytearray(document.encode())):
        assert both(given_as) == json.loads(document)


@settings(max_examples=400)
@given(st.lists(TOKENS, max_size=12).map("".join))
def test_takes_what_json_takes_and_nothing_doubtful(document: str) -> None:
    doubts: list[str] = []

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) < len(pairs):
            doubts.append("twice")
        return dict(pairs)

    try:
        value = json.loads(document, object_pairs_hook=once)
    except ValueError:
        value, doubts = None, ["no JSON"]
    doubts += list(doubts_of(value))
    try:
        found = both(document, most_depth=3)
    except CorruptCheckpoint as error:
        assert doubts, (document, error)
        assert str(error).startswith("here: cannot be read as JSON: ")
    else:
        assert not doubts and found == value


def doubts_of(value: Any, depth: int = 0) -> Any:
    if isinstance(value, (list, dict)):
        if depth == 3:
            yield "deep"
            return
        for inner in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from doubts_of(inner, depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        yield "not finite"
    elif isinstance(value, int) and abs(value) >= 10**40:
        yield "digits"
    elif isinstance(value, str) and any("\ud800" <= sign <= "\udfff" for sign in value):
        yield "surrogate"


@pytest.mark.parametrize(
    ("document", "why"),
    [
        (b"[Infinity]", "Infinity is not finite"),
        (b"[-Infinity]", "-Infinity is not finite"),
        (b"[NaN]", "NaN is not finite"),
        (b"[1e999]", "1e999 is not finite"),
        (b'{"a": ' + b"9" * 5000 + b"}", "a number of 5000 digits, over the limit of 40"),
        (b"[0." + b"3" * 5000 + b"]", "a number of 5000 digits"),
        (b"[" * 60_000, "nested deeper than 64 levels"),
        (b"[" * 65 + b"]" * 65, "nested deeper than 64 levels"),
        (b'{"a":' * 60_000, "nested deeper than 64 levels"),
        (b'{"a": 1, "b": 2, "a": 1}', "the key 'a' is given twice"),
        (b'["\\ud800"]', "surrogates not allowed"),
        (b'{"\\udfff": 1}', "surrogates not allowed"),
        (b"\xff", "can't decode byte 0xff"),
        (b"\xef\xbb\xbf[]", "BOM"),
        (b"", "Expecting value"),
        (b"[1] [2]", "Extra data"),
        (b'"' + b"x" * MOST + b'"', f"over the limit of {MOST}"),
        ('"' + "é" * (MOST // 2) + '"', f"over the limit of {MOST}"),
        ('["\ud800"]', "surrogates not allowed"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_what_no_json_reader_should_take(document: bytes | str, why: str) -> None:
    with pytest.raises(CorruptCheckpoint, match=r"^here: cannot be read as JSON: ") as caught:
        both(document)
    assert why in str(caught.value)
    assert len(str(caught.value)) < 300


def test_brackets_in_strings_are_no_nesting() -> None:
    assert both('["' + "[{" * 500 + '\\"' + "[" * 500 + '", "\\\\"]') == ["[{" * 500 + '"' + "[" * 500, "\\"]
    assert both(b'["\\ud800"]', half_pairs=True) == ["\ud800"]


def test_the_error_is_the_callers() -> None:
    with pytest.raises(DataError, match=r"^there: "):
        parse_json("[", "there", most_bytes=10, error=DataError)


class Example(BaseModel):
    count: int = 0
    rate: float = 0.0
    parts: tuple[int, ...] = ()


def test_a_model_is_read_as_strictly(tmp_path: Path) -> None:
    assert parse_model(Example, '{"count": 3, "parts": [1, 2]}', "here", most_bytes=MOST) == Example(
        count=3, parts=(1, 2)
    )
    for document, why in (
        ('{"count": 1e30}', "the number 1e\\+30 is out of all bounds"),
        ('{"parts": [' + "9" * 30 + "]}", "out of all bounds"),
        ('{"rate": Infinity}', "not finite"),
        ('{"rate": "x"}', "rate: "),
        ("[]", "valid dictionary|Input should be"),
    ):
        with pytest.raises(ConfigError, match=f"^here: .*({why}).*; do this"):
            parse_model(Example, document, "here", most_bytes=MOST, advice="do this")
    with pytest.raises(DataError, match=r"none\.json: cannot be read: No such file or directory; do that"):
        read_model(Example, tmp_path / "none.json", "an example", most_bytes=9, advice="do that", error=DataError)
    (tmp_path / "some.json").write_text('{"count": "many"}')
    with pytest.raises(DataError, match=r"some\.json: not an example: count: "):
        read_model(Example, tmp_path / "some.json", "an example", most_bytes=99, error=DataError)


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_bytes(path, 5) == b"12345"
    with pytest.raises(ConfigError, match="file: longer than 4 bytes"):
        read_bytes(path, 4)
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_bytes(tmp_path, 4)
    with pytest.raises(ConfigError, match="cannot be read: embedded null byte"):
        read_bytes(Path("a\x00b"), 4)


# -- YAML --------------------------------------------------------------------------------------------------------------

YAML_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**39), 10**39)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(min_codepoint=32, max_codepoint=0xFFFD, exclude_categories=["Cs", "Cc"]), max_size=12)
    | st.sampled_from(
        ["2024-01-01", "1:30", "1_0", "0x1f", "010", "=", "<<", "yes", "~", ".inf", "12e03", "&a", "*a", "!t"]
    ),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["a", "b c", "1", "on", "<<", "2024-01-01", "é"]), inner, max_size=4)
    ),
    max_leaves=15,
)


@pytest.fixture(params=["C", "Python"])
def either_parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyYAML may have been built without its parser in C."""
    if request.param == "Python":
        monkeypatch.delattr(yaml, "CSafeLoader", raising=False)


@settings(max_examples=150)
@given(YAML_VALUES, st.sampled_from([True, False, None]))
def test_reads_what_yaml_writes(value: Any, flow: bool | None) -> None:
    document = yaml.safe_dump(value, default_flow_style=flow, allow_unicode=True)
    assert yaml.safe_load(document) == value
    assert parse_yaml(document, "here", most_bytes=MOST) == value


@pytest.mark.usefixtures("either_parser")
def test_what_surprises_in_yaml_stays_text() -> None:
    document = "a: 2024-01-01\nb: 2024-01-01 10:00:00\nc: 1:30\nd: 1_000\ne: 0x10\nf: 010\ng: 1:30.5\nh: 1_0.5\ni: ="
    found = parse_yaml(document, "here", most_bytes=MOST)
    assert found == {line[0]: line[3:] for line in document.split("\n")}
    taken = 'a: -0\nb: 1.5e+3\nc: .5\nd: Off\ne:\nf: \'1\'\ng: ! "2"\nh: |\n  text\ni: [x, {y: z}]\nj: "\\u00e9"'
    assert parse_yaml(taken, "here", most_bytes=MOST) == {
        "a": 0,
        "b": 1500.0,
        "c": 0.5,
        "d": False,
        "e": None,
        "f": "1",
        "g": "2",
        "h": "text\n",
        "i": ["x", {"y": "z"}],
        "j": "é",
    }
    assert parse_yaml("", "here", most_bytes=MOST) is None


@pytest.mark.usefixtures("either_parser")
@pytest.mark.parametrize(
    ("document", "why"),
    [
        ("a: 1\nb: !!int 3", "line 2: the tag 'tag:yaml.org,2002:int'"),
        ("a: !!python/object/apply:os.system [x]", "line 1: the tag"),
        ("a: !mine x", "line 1: the tag '!mine'"),
        ("a: !!set {b}", "line 1: the tag"),
        ("%TAG ! tag:x,2000:\n---\na: !b c", "line 3: the tag"),
        ("a: &x 1", "line 1: anchors"),
        ("a: &x [1]\nb: *x", "line 1: anchors"),
        ("a: *x", "line 1: anchors"),
        ("&a : 1", "line 1: anchors"),
        ("a: 1\n<<: {b: 2}", "line 2: merge keys"),
        ("a: .inf", "line 1: the number .inf is not finite"),
        ("a: -.INF", "not finite"),
        ("a: .nan", "not finite"),
        ("a: 1.0e+999", "line 1: the number 1.0e+999 is not finite"),
        ("a: " + "9" * 5000, "line 1: a number of more than 40 digits"),
        ("a: 0." + "9" * 5000, "line 1: a number of more than 40 digits"),
        ("a: 1\nb: 2\na: 3", "line 3: key 'a' is given twice"),
        ("1: a", "line 1: the key '1' is not text; put it in quotes"),
        ("on: a", "line 1: the key 'on' is not text"),
        ("? [a]\n: b", "line 1: a key that is not text"),
        ("a: b\n---\nc: d", "a second document begins"),
        ("- " * 70, "line 1: nested deeper than 64 levels"),
        ("[" * 60_000, "line 1: "),
        ("{a: " * 60_000, "line 1: "),
        ("a: [", "not valid YAML"),
        ("a: b: c", "line 1: not valid YAML"),
        ("\ta", "not valid YAML"),
        ("a: \x00", "not valid YAML"),
        ("a: '" + "x" * MOST + "'", f"over the limit of {MOST} bytes"),
        (b"a: \xff", "can't decode byte 0xff"),
        ('a: "\\ud800"', "not valid YAML"),
        ("a: \ud800", "not valid YAML"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_what_no_yaml_reader_should_take(document: bytes | str, why: str) -> None:
    with pytest.raises(ConfigError, match=r"^here") as caught:
        parse_yaml(document, "here", most_bytes=MOST)
    assert why in str(caught.value)
    assert len(str(caught.value)) < 400


# -- CSV and numbers ---------------------------------------------------------------------------------------------------


def rows_of(content: bytes, most_rows: int = 9) -> Any:
    return parse_csv(content, "here", ["a"], most_bytes=99, most_rows=most_rows, error=DataError)


def test_rows_of_a_csv() -> None:
    assert rows_of(b'a,b\r\n1,"x\ny"\n\n3,\n') == [(3, {"a": "1", "b": "x\ny"}), (5, {"a": "3", "b": ""})]
    assert rows_of(b"a") == []


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "columns are missing: a"),
        (b"b\n1", "columns are missing: a"),
        (b"a,a\n1,2", "a column is named twice"),
        (b"a,b\n1", "here:2: 1 fields under 2 columns"),
        (b"a\n1,2", "here:2: 2 fields under 1 columns"),
        (b"a\n" + b"1\n" * 10, "9 rows are the most"),
        (b"a\n" + b"1\n" * 100, "over the limit of 99"),
        (b'a\n"x', "not such a CSV file"),
        (b"a\n\xff", "can't decode"),
    ],
)
def test_what_is_no_csv(content: bytes, why: str) -> None:
    with pytest.raises(DataError, match=r"^here") as caught:
        rows_of(content)
    assert why in str(caught.value)


def test_numbers_are_in_range() -> None:
    assert [parse_number(one, least=0, most=10) for one in ("0", "+1", "2.", ".5", "1e1", "1E-1")] == [
        *(0, 1, 2, 0.5, 10, 0.1)
    ]
    for wrong in (
        "",
        "x",
        "nan",
        "inf",
        "1e999",
        "-1",
        "11",
        "1_0",
        " 1",
        "1 ",
        "0x1",
        "\u0661",
        "9" * 5000,
        "1e99999",
    ):
        with pytest.raises(ValueError, match="is no number from 0 to 10"):
            parse_number(wrong, least=0, most=10)
    assert is_whole(3, 0, 3) and not any(is_whole(one, 0, 3) for one in (4, -1, True, 1.0, "1", None, 10**30))


# -- who reads with it -------------------------------------------------------------------------------------------------

ODD = {"infinite": float("inf"), "30 digits": 10**30, "5,000 digits": 10**5000 - 1, "negative": -1, "none": None}


def of_sealed(described: dict[str, Any]) -> bytes:
    """A sealed document with a right checksum, as Python writes it."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return seal_json({"version": 1, **described})
    finally:
        sys.set_int_max_str_digits(before)


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_numbers_in_sealed_files_end_in_no_other_error(odd: object, tmp_path: Path) -> None:
    """A right checksum says nothing of what is in it."""
    with contextlib.suppress(RecordError):  # its callers name the file
        decode_job(of_sealed({"format": "lastgood-slots", "job_id": "00" * 16, "rank": odd, "world_size": 2}))
    mark = {"format": "lastgood-global", "incarnation": odd, "step": odd, "sequence": odd}
    (tmp_path / "global.json").write_bytes(of_sealed(mark))
    with contextlib.suppress(LastgoodError):
        read_global_commit(tmp_path)
    verdict = {"sequence": odd, "step": odd, "ok": False, "reason": "x"}
    book = {"format": "lastgood-verdicts", "verdicts": [verdict], "restarts": []}
    (tmp_path / "verdicts.json").write_bytes(of_sealed(book))
    with contextlib.suppress(LastgoodError):
        VerdictBook(tmp_path)


@pytest.mark.parametrize(
    "odd", ["2024-13-45", "!!int x", "!!float 'x'", "9" * 5000, "[" * 2000], ids=lambda odd: odd[:9]
)
def test_a_configuration_of_odd_values_is_refused_as_one(odd: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"machine: {odd}\n")
    with pytest.raises(ConfigError):
        load_config(tmp_path / "config.yaml")
    with pytest.raises(ConfigError):
        load_config(ROOT / "config" / "laptop.yaml", parse_overrides([f"intervals={odd}"]))


# -- nobody reads past it ----------------------------------------------------------------------------------------------

ALLOWED = {
    "text.py": {"json.loads", "csv.reader", "yaml.parse", "model_validate_json"},
    # Sent alone to hosts on which Lastgood may be missing; what it is asked comes from whoever started it there.
    "cluster/host_check/agent.py": {"json.loads"},
    # Reads bytes that were bounded, and checks each column.
    "experiments/tables/frames.py": {"pd.read_csv"},
    # Of values that parse_json gave: only from JSON a strict model takes a list for a tuple.
    "gradients/protocol/messages.py": {"_ADAPTER.validate_json"},
    "mirror/agent/messages.py": {"_ADAPTER.validate_json"},
    "mirror/handover/extracted.py": {"validate_json"},
    "gradients/shadow/spill_store.py": {
        "_ENTRIES.validate_json",
        "Side.model_validate_json",
        "Saved.model_validate_json",
    },
}
READERS = {"json": {"load", "loads"}, "yaml": {"load", "safe_load", "load_all", "compose", "parse", "full_load"}}
ANYWHERE = {"model_validate_json", "validate_json", "read_csv", "read_json", "literal_eval", "DictReader", "raw_decode"}


def test_nobody_reads_text_from_outside_otherwise() -> None:
    root = Path(lastgood.__file__).parent
    found: dict[str, set[str]] = {}
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module in ("json", "yaml", "csv"):
                found.setdefault(str(path.relative_to(root)), set()).add(f"from {node.module}")
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
            name = node.func.attr
            if name in ANYWHERE or name in READERS.get(owner, ()) or (owner, name) == ("csv", "reader"):
                found.setdefault(str(path.relative_to(root)), set()).add(f"{owner}.{name}".removeprefix("."))
    found["text.py"] = {name.removeprefix("model.") for name in found["text.py"]}
    assert found == ALLOWED
