from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from lastgood import ports
from lastgood.errors import HostError
from lastgood.ports import free_ports


def system(folder: Path, outgoing: str, reserved: str = "") -> Path:
    (folder / "ip_local_port_range").write_text(outgoing)
    (folder / "ip_local_reserved_ports").write_text(reserved)
    return folder


def test_each_comes_once_is_free_and_is_none_of_outgoing_connections() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    own = "127.0.0.8"  # another process may be given one of so many on the usual address
    found = free_ports(200, own)
    assert len(set(found)) == 200
    if first > 11_000:
        assert not any(first <= number <= last for number in found)
    with ExitStack() as held:
        for number in found:
            held.enter_context(socket.create_server((own, number)))


@pytest.mark.parametrize(
    ("outgoing", "reserved", "wanted"),
    [
        ("10003 65535", "", {10_000, 10_001, 10_002}),
        ("5000 65533", "", {65_534, 65_535}),
        ("10005 65535", "9000,10001-10003", {10_000, 10_004}),
    ],
)
def test_what_the_machine_says_is_kept_to(
    outgoing: str, reserved: str, wanted: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports, "_SYSTEM", system(tmp_path, outgoing, reserved))
    assert set(free_ports(len(wanted), "127.0.0.9")) == wanted


def test_one_that_is_taken_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_SYSTEM", system(tmp_path, "10002 65535"))
    with socket.create_server(("127.0.0.10", 10_000)):
        assert free_ports(1, "127.0.0.10") == [10_001]
        with pytest.raises(HostError, match=r"found 1 of 2 free ports in 1000 tries"):
            free_ports(2, "127.0.0.10")


def test_where_all_are_for_outgoing_connections_one_of_those_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports, "_SYSTEM", system(tmp_path, "1024 65535"))
    assert len(set(free_ports(3))) == 3


def test_a_machine_that_says_nothing_is_taken_for_a_usual_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_SYSTEM", tmp_path / "nothing")
    assert not any(32_768 <= number <= 60_999 for number in free_ports(50))


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(HostError, match="is it an address of this machine"):
        free_ports(1, "192.0.2.1")
