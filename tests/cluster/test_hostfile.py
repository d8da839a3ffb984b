"""Hostfiles: what is read, what is refused and on which line, and that writing and reading are inverses."""

from __future__ import annotations

import re
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastgood.cluster.hostfile import (
    MAX_HOSTS,
    MAX_SLOTS,
    Host,
    Hostfile,
    parse_hostfile,
    read_hostfile,
    render_hostfile,
    write_hostfile,
)
from lastgood.errors import ConfigError, StorageError

ROOT = Path(__file__).resolve().parents[2]

names = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,30}", fullmatch=True)
addresses = st.ip_addresses().map(str)
hosts = st.lists(
    st.builds(Host, names | addresses, st.integers(1, MAX_SLOTS)),
    min_size=1,
    max_size=8,
    unique_by=lambda host: host.name.lower(),
)


def test_hosts_comments_and_blank_lines_as_deepspeed_reads_them() -> None:
    text = "# two machines\n\n  worker-1 slots=4\nworker-2\tslots=2   # small\r\n   # the end\n10.0.0.3 slots=1#x\n"
    found = parse_hostfile(text, "my hosts")
    assert found.names == ("worker-1", "worker-2", "10.0.0.3")
    assert [(host.slots, host.line) for host in found.hosts] == [(4, 3), (2, 4), (1, 6)]
    assert (found.slots, found.origin) == (7, "my hosts")


def deepspeed_reads(text: str) -> dict[str, int]:
    """The rules of deepspeed/launcher/runner.py in our own words: the entry is anchored at its begin only."""
    found = {}
    for line in map(str.strip, text.split("\n")):
        if line and not line.startswith("#"):
            entry = re.match(r"(\S+)\s+slots=(\d+)", line)
            assert entry is not None and entry[1] not in found
            found[entry[1]] = int(entry[2])
    return found


@given(hosts, st.text(alphabet=string.printable, max_size=60))
def test_what_is_written_is_read_again_here_and_by_deepspeed(made: list[Host], comment: str) -> None:
    text = render_hostfile(made, comment)
    assert parse_hostfile(text).hosts == tuple(made)
    assert deepspeed_reads(text) == {host.name: host.slots for host in made}


@given(
    st.text(max_size=200)
    | st.lists(st.sampled_from(["a", "-b", " slots=", "1", "0", "#", "\n", "\t", "é"])).map("".join)
)
def test_any_text_is_hosts_or_an_error_with_its_line(text: str) -> None:
    try:
        found = parse_hostfile(text, "F")
    except ConfigError as error:
        line = re.match(r"F:(\d+): ", str(error))
        assert line is not None, error
        assert 1 <= int(line[1]) <= text.count("\n") + 1
    else:
        assert found.hosts
        assert deepspeed_reads(text) == {host.name: host.slots for host in found.hosts}
        assert parse_hostfile(render_hostfile(found.hosts)) == found


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("worker-1", 1, "worker-1 slots=4"),
        ("a slots=1\nb slots = 2", 2, "not a host's entry"),
        ("a slots=1 max_slots=2", 1, "not a host's entry"),
        ("a slots=four", 1, "not a host's entry"),
        ("a slots=\u0661", 1, "not a host's entry"),
        ("a slots=1\n\na slots=2", 3, "already on line 1"),
        ("Worker slots=1\nworker slots=2", 2, "already on line 1"),
        ("a slots=0", 1, "give it 1 to"),
        (f"a slots={MAX_SLOTS + 1}", 1, "give it 1 to"),
        ("-oProxyCommand=x slots=1", 1, "begin with a dash"),
        ("root@a slots=1", 1, "ssh configuration"),
        ("a;b slots=1", 1, "letters, digits"),
        ("bücher slots=1", 1, "letters, digits"),
        ("fe80::1%eth0 slots=1", 1, "letters, digits"),
        ("# nothing\n\n", 3, "no host in this file"),
        ("", 1, "no host in this file"),
        ("a" * 254 + " slots=1", 1, "letters, digits"),
        ("".join(f"h{number} slots=1\n" for number in range(MAX_HOSTS + 1)), MAX_HOSTS + 1, "more than"),
        ("#\n" * (1 << 19) + "a slots=1\n", (1 << 19) + 1, "longer than 1 MiB"),
    ],
)
def test_refused_with_file_line_and_what_to_do(text: str, line: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_hostfile(text, "some/file")
    assert str(caught.value).startswith(f"some/file:{line}: ")
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


def test_files_that_cannot_be_read_say_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hosts make"):
        read_hostfile(tmp_path / "none")
    with pytest.raises(ConfigError, match="cannot read"):
        read_hostfile(tmp_path)
    (tmp_path / "binary").write_bytes(b"a slots=1\nb\xff slots=1\n")
    with pytest.raises(ConfigError, match=r"binary:2: not UTF-8"):
        read_hostfile(tmp_path / "binary")
    (tmp_path / "long").write_bytes(b"#" * (1 << 20) + b"\nx")
    with pytest.raises(ConfigError, match=r"long:2: .*longer"):
        read_hostfile(tmp_path / "long")


def test_a_file_is_written_whole_or_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "hosts"
    made = write_hostfile(path, [Host("a", 1), Host("b", 2)], "first")
    assert read_hostfile(path) == made == Hostfile((Host("a", 1), Host("b", 2)))
    for bad in ([], [Host("a", 0)], [Host("a slots=1\nb", 1)], [Host("a", 1), Host("a", 1)]):
        with pytest.raises(ConfigError):
            write_hostfile(path, bad)
    assert read_hostfile(path) == made
    assert [entry.name for entry in path.parent.iterdir()] == ["hosts"]
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file/hosts"):
        write_hostfile(tmp_path / "file" / "hosts", made.hosts)


def test_the_example_of_the_repository_is_one() -> None:
    assert read_hostfile(ROOT / "hostfiles" / "example").slots == 10
