"""What a testbed knows of itself: names, rates, networks, and a folder that is removed only if it is its own."""

from __future__ import annotations

import ipaddress
import os
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lastgood.cluster.testbed import state as testbed_state
from lastgood.cluster.testbed.state import (
    BedState,
    check_bed_name,
    choose_subnet,
    forget,
    load_state,
    parse_delay,
    parse_rate,
    parse_rates,
    prepare_folder,
    rate_text,
    save_state,
    state_folder,
)
from lastgood.cluster.testbed.testbed import Testbed
from lastgood.errors import ConfigError, HostError


@pytest.fixture(autouse=True)
def own_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testbed_state, "RUN", tmp_path / "run")


def state(name: str = "bed", **changed: object) -> BedState:
    values = {"name": name, "nodes": 2, "slots": 1, "rate_bits_per_s": None, "subnet": "10.219.7.0/24"}
    return BedState.model_validate({**values, **changed})


@pytest.mark.parametrize("name", ["", "A", "1a", "a-b", "a b", "../x", "abcdefghijk", "a\n"])
def test_names_that_links_cannot_have_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="not a testbed's name"):
        check_bed_name(name)


@pytest.mark.parametrize(
    ("text", "rate"), [("1gbit", 10**9), ("100Mbit", 10**8), ("2.5gbit", 25 * 10**8), ("1000kbit", 10**6)]
)
def test_rates(text: str, rate: int) -> None:
    assert parse_rate(text) == rate


def test_rates_of_single_nodes() -> None:
    assert parse_rates("1gbit") == (10**9, {})
    assert parse_rates("1gbit, vm2=50mbit,vm3=5mbit") == (10**9, {"vm2": 50 * 10**6, "vm3": 5 * 10**6})
    assert parse_rates("vm1=50mbit") == (None, {"vm1": 50 * 10**6})
    for wrong in ("1gbit,2gbit", "vm1=1gbit,vm1=2gbit", "vm1=", "", "=1gbit,=1gbit"):
        with pytest.raises(ConfigError):
            parse_rates(wrong)


@pytest.mark.parametrize(("text", "us"), [("20ms", 20_000), ("500us", 500), ("0ms", 0), ("1.5MS", 1500)])
def test_delays(text: str, us: int) -> None:
    assert parse_delay(text) == us


@pytest.mark.parametrize("text", ["", "20", "-1ms", "1s", "10001ms", "infms"])
def test_what_is_no_delay_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a delay"):
        parse_delay(text)


def test_single_nodes_have_their_own_rates_in_the_record() -> None:
    made = state(rate_bits_per_s=10**9, node_rates_bits_per_s={"vm2": 10**7}, node_delays_us={"vm1": 100})
    assert (made.rate_of("vm1"), made.rate_of("vm2")) == (10**9, 10**7)
    for wrong in ({"node_rates_bits_per_s": {"vm3": 1}}, {"node_delays_us": {"vm1": 0}}):
        with pytest.raises(ValueError):
            state(**wrong)


@given(st.one_of(*(st.builds("{}{}".format, st.decimals("1.6", 100, places=3), st.just(u)) for u in ("mbit", "gbit"))))
@example("1234.567kbit")
@example("1234.567mbit")
@example("1gbit")
def test_a_rate_is_written_as_it_is_read(text: str) -> None:
    assert parse_rate(rate_text(parse_rate(text))) == parse_rate(text)


@pytest.mark.parametrize("text", ["", "1", "1 gbit", "-1gbit", "0mbit", "101gbit", "1e9gbit", "1gbit; true", "999kbit"])
def test_no_rates(text: str) -> None:
    with pytest.raises(ConfigError, match="not a rate"):
        parse_rate(text)


@given(
    st.lists(st.ip_addresses(v=4).flatmap(lambda a: st.integers(1, 32).map(lambda bits: f"{a}/{bits}")), max_size=20)
)
def test_a_subnet_overlaps_nothing_that_is_routed(routed: list[str]) -> None:
    networks = [ipaddress.ip_network(text, strict=False) for text in routed]
    try:
        chosen = choose_subnet([*routed, "default", "fe80::/64", "0.0.0.0/0"])
    except ConfigError:
        assert any(network.prefixlen < 12 for network in networks)
    else:
        assert chosen.is_private and chosen.prefixlen == 24
        assert not any(chosen.overlaps(network) for network in networks)


def test_a_machine_that_routes_all_of_10_gets_another_network() -> None:
    assert str(choose_subnet(["10.0.0.0/8"])).startswith("172.30.")
    with pytest.raises(ConfigError, match="ip route"):
        choose_subnet(["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"])


def test_a_record_is_found_again_and_forgotten(tmp_path: Path) -> None:
    assert load_state("bed") is None
    folder = prepare_folder("bed", tmp_path / "place")
    assert state_folder("bed") == folder == tmp_path / "place"
    assert load_state("bed") is None
    save_state(folder, state())
    assert load_state("bed") == (folder, state())
    assert state().node_names == ("vm1", "vm2")
    assert (state().address("vm2"), state().host_address) == ("10.219.7.2", "10.219.7.254")
    forget("bed")
    assert not folder.exists()
    assert state_folder("bed") is None
    forget("bed")
    assert list((tmp_path / "run").iterdir()) == []


def test_only_its_own_folder_is_ever_removed(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis").write_text("years of work")
    with pytest.raises(ConfigError, match="something else"):
        prepare_folder("bed", home)
    assert state_folder("bed") is None
    # Ended between the note and the record, and the folder was used by somebody meanwhile.
    empty = prepare_folder("bed", tmp_path / "empty")
    (empty / "testbed.json").unlink()
    (empty / "thesis").write_text("years of work")
    forget("bed")
    assert (empty / "thesis").exists()
    # What an earlier uptime left is replaced.
    save_state(prepare_folder("bed", tmp_path / "old"), state())
    (tmp_path / "old" / "id_ed25519").write_text("")
    assert [path.name for path in prepare_folder("bed", tmp_path / "old").iterdir()] == ["testbed.json"]


def test_what_a_kill_left_half_written_goes_as_well(tmp_path: Path) -> None:
    folder = prepare_folder("bed", None)
    (folder / "testbed.json.tmp").write_text("{")
    (tmp_path / "run" / "bed.where.tmp").write_text("/so")
    (tmp_path / "run" / "bed2.where").write_text("/somewhere/else")
    forget("bed")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["bed2.where"]


@pytest.mark.parametrize("path", ["/a b", '/a"b', "/a%b", "/ä"])
def test_folders_that_ssh_cannot_name_are_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="ssh cannot use such a path"):
        prepare_folder("bed", Path(path))


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"version": 2}', b"[" * 70000])
def test_a_damaged_record_is_no_record(tmp_path: Path, content: bytes) -> None:
    folder = prepare_folder("bed", None)
    (folder / "testbed.json").write_bytes(content)
    assert load_state("bed") is None
    forget("bed")
    assert not folder.exists()


@pytest.mark.parametrize("arguments", [{"nodes": 0}, {"nodes": 65}, {"slots": 0}, {"name": "No"}, {"rate": "fast"}])
def test_wrong_arguments_are_refused_before_anything_is_made(arguments: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Testbed.up(**arguments)  # type: ignore[arg-type]


def test_without_root_it_says_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for act in (Testbed.up, Testbed.load, Testbed.remove):
        with pytest.raises(HostError, match="needs root"):
            act()


def test_missing_programs_are_named_with_their_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from lastgood.cluster.testbed import net as testbed_net

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(testbed_net, "_SEARCH_PATH", str(tmp_path))
    with pytest.raises(HostError, match=r"apt-get install .*iproute2.*openssh-server"):
        Testbed.up()
