"""Logs of a run that failed: kept beside its record, bounded, named in its error, and gone with the next attempt."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood.cluster.launch.job import LOG_THERE
from lastgood.cluster.ssh.remote import Completed, Remote
from lastgood.errors import HostError, LaunchError
from lastgood.experiments.runs.logs import (
    MAX_LOG_BYTES,
    Logs,
    fetch_logs,
    keep_logs_of_failure,
    logs_beside,
    main,
    read_logs,
)


def fill(folder: Path, logs: dict[str, bytes]) -> Path:
    for name, content in logs.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's scratch folder, with all that may lie there."""
    return fill(
        tmp_path / "scratch of runs" / "run-1-0a",
        {
            "ranks/measure/rank-00000.log": b"zero\n",
            "ranks/measure/rank-00001.log": b"one\n",
            "ranks/measure/ssh-vm1.example.log": b"",
            "shadows/shadow-0.log": b"shadow\n",
            "checkpoints/peer-0-000001.log": b"peer\n",
            "checkpoints/rank-0/slot-0": b"state",
            "lock": b"",
        },
    )


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return logs_beside(tmp_path / "results" / "r0.json")


def test_logs_lie_beside_the_record() -> None:
    assert logs_beside(Path("results/a.b/r0.json")) == Path("results/a.b/r0.logs")
    assert logs_beside(Path("out")) == Path("out.logs")


def test_all_logs_of_a_failure_are_kept_and_its_error_names_where_they_are_now(run: Path, kept: Path) -> None:
    rank, peer, lost = "ranks/measure/rank-00001.log", "checkpoints/peer-0-000001.log", "ranks/measure/rank-00007.log"
    said = (
        f"rank 1 on vm2 failed ({LOG_THERE}{run / rank})\n    see {run / peer}; and {run / lost}: gone\n{run / rank}:"
    )
    with pytest.raises(LaunchError) as caught, keep_logs_of_failure(run, kept, pytest.fail):
        raise LaunchError(said)
    assert str(caught.value).splitlines() == [
        f"rank 1 on vm2 failed (log: {kept / rank})",
        f"    see {kept / peer}; and {run / lost}: gone",
        f"{kept / rank}:",
        f"all logs of this attempt are kept until the next one: {kept}",
    ]
    assert files_of(kept) == {name: content for name, content in files_of(run).items() if name.endswith(".log")}


def test_a_folder_that_was_named_from_here_is_found_in_the_error(
    run: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    with pytest.raises(LaunchError) as caught, keep_logs_of_failure(Path(run.name), kept, pytest.fail):
        raise LaunchError(f"its log is {run.name}/shadows/shadow-0.log or {run}/shadows/shadow-0.log")
    now = f"{kept}/shadows/shadow-0.log"
    assert str(caught.value).splitlines()[0] == f"its log is {now} or {now}"


def test_the_next_attempt_replaces_logs_and_success_leaves_none(run: Path, kept: Path) -> None:
    for stale in ("ranks/live-1/rank-00000.log", "shadows/shadow-9.log"):
        fill(kept, {stale: b"of the attempt before"})
    with pytest.raises(LaunchError), keep_logs_of_failure(run, kept, pytest.fail):
        assert not kept.exists()
        raise LaunchError("again")
    assert set(files_of(kept)) == set(read_logs(run, 1 << 20))
    with keep_logs_of_failure(run, kept, pytest.fail):
        pass
    assert not kept.exists() and kept.parent.exists()


def test_what_is_no_log_of_ours_stays(run: Path, kept: Path) -> None:
    fill(kept, {"ranks/notes.txt": b"mine", "ranks/a.log": b"of a run"})
    with keep_logs_of_failure(run, kept, pytest.fail):
        pass
    assert files_of(kept) == {"ranks/notes.txt": b"mine"}


def test_a_failure_without_logs_says_nothing_of_them(tmp_path: Path, kept: Path) -> None:
    with pytest.raises(LaunchError, match=r"^no room$"), keep_logs_of_failure(tmp_path, kept, pytest.fail):
        raise LaunchError("no room")
    assert not kept.exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ZeroDivisionError])
def test_whoever_ends_a_run_is_told_where_its_logs_are(error: type[BaseException], run: Path, kept: Path) -> None:
    said: list[str] = []
    with pytest.raises(error), keep_logs_of_failure(run, kept, said.append):
        raise error
    assert said == [f"all logs of this attempt are kept until the next one: {kept}"]
    assert (kept / "shadows/shadow-0.log").read_bytes() == b"shadow\n"


def test_logs_that_cannot_be_kept_do_not_hide_the_failure(run: Path, kept: Path) -> None:
    kept.parent.mkdir()
    kept.write_text("a file stands there")
    with pytest.raises(LaunchError) as caught, keep_logs_of_failure(run, kept, pytest.fail):
        raise LaunchError(f"see {run}/shadows/shadow-0.log")
    first, second = str(caught.value).splitlines()
    assert first == f"see {run}/shadows/shadow-0.log"
    assert second == f"logs could not be kept in {kept}: Not a directory"


def test_hosts_with_disks_of_their_own_are_asked_and_a_silent_one_is_named(run: Path, kept: Path) -> None:
    mine, theirs = "ranks/measure/rank-00000.log", "ranks/measure/rank-00002.log"

    def elsewhere() -> dict[str, Logs | HostError]:
        return {"vm3": {theirs: b"two\n", mine: b"another's"}, "vm4": HostError("vm4: no answer\nwithin 10 s")}

    with pytest.raises(LaunchError) as caught, keep_logs_of_failure(run, kept, pytest.fail, elsewhere):
        raise LaunchError(f"{LOG_THERE}{run / theirs}")
    first, *lines = str(caught.value).splitlines()
    assert first == f"log: {kept / theirs}" and (kept / theirs).read_bytes() == b"two\n"
    assert (kept / mine).read_bytes() == b"zero\n"
    assert lines[-1] == "logs could not be fetched: vm4: no answer"


# -- bounds ----------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 400), max_size=8),
    limit_bytes=st.integers(0, 1000),
)
def test_logs_are_cut_to_their_ends(
    sizes: list[int], limit_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("logs")
    logs = {f"{number}.log": os.urandom(size) for number, size in enumerate(sizes)}
    found = read_logs(fill(folder, logs), limit_bytes)
    assert set(found) == set(logs)
    assert sum(map(len, found.values())) <= limit_bytes
    share = limit_bytes // max(1, len(sizes))
    for name, whole in logs.items():
        if len(whole) <= share:
            assert found[name] == whole
        elif share >= 60:
            assert len(found[name]) == share
            note, _, end = found[name].partition(b"\n")
            assert note == f"[the end of a log of {len(whole)} bytes]".encode()
            assert whole.endswith(end)


def test_of_one_long_log_a_mebibyte_is_kept(run: Path, kept: Path) -> None:
    long = run / "ranks/measure/rank-00000.log"
    long.write_bytes(b"x" * MAX_LOG_BYTES + b"the reason\n")
    with pytest.raises(LaunchError), keep_logs_of_failure(run, kept, pytest.fail):
        raise LaunchError("it failed")
    found = (kept / "ranks/measure/rank-00000.log").read_bytes()
    assert len(found) == MAX_LOG_BYTES and found.endswith(b"the reason\n")


def test_pipes_links_and_odd_names_are_no_logs(run: Path) -> None:
    before = read_logs(run, 1 << 20)
    os.mkfifo(run / "pipe.log")
    (run / "link.log").symlink_to("/etc/hostname")
    (run / "folder.log").mkdir()
    (run / "a name\n.log").write_text("odd")
    found: list[dict[str, bytes]] = []
    reader = threading.Thread(target=lambda: found.append(read_logs(run, 1 << 20)), daemon=True)
    reader.start()
    reader.join(60)
    assert found == [before]


# -- from other hosts ------------------------------------------------------------------------------------------------


class Answering(Remote):
    """Hosts that answer as the test says."""

    def __init__(self, answers: dict[str, Completed | HostError]) -> None:
        super().__init__()
        self._answers = answers

    def run_everywhere(
        self,
        hosts: Iterable[str],
        argv: Sequence[str],
        timeout_s: float,
        input: bytes | None = None,  # noqa: A002
        max_output_bytes: int = 0,
    ) -> dict[str, Completed | HostError]:
        assert all(len(one.stdout) <= max_output_bytes for one in self._answers.values() if isinstance(one, Completed))
        return {host: self._answers[host] for host in hosts}


def packed(run: Path, capsys: pytest.CaptureFixture[str], limit_bytes: int = 64 << 20) -> bytes:
    assert main([str(run), str(limit_bytes)]) == 0
    return capsys.readouterr().out.encode()


def test_a_host_sends_what_it_has(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "ranks/measure/rank-00000.log").write_bytes(os.urandom(2 * MAX_LOG_BYTES))
    remote = Answering({"vm1": Completed(0, packed(run, capsys), b""), "vm2": Completed(0, b"", b"")})
    assert fetch_logs(remote, ["vm1"], run) == {"vm1": read_logs(run, 64 << 20)}
    assert fetch_logs(remote, [], run) == {}


def test_all_that_a_host_sends_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As many logs, and as long names, as there can be, and a limit that all of them fill.
    monkeypatch.setattr("lastgood.experiments.runs.logs._MAX_LOGS", 40)
    fill(tmp_path, {f"{'f' * 120}/{number:0130d}.log": b"x" * 513 for number in range(50)})
    fill(tmp_path, {f"{'f' * 120}/{number:0131d}.log": b"longer than names may be" for number in range(3)})
    monkeypatch.setattr("lastgood.experiments.runs.logs._MAX_BYTES", 40 * 512)
    output = packed(tmp_path, capsys, 40 * 512)
    answer = fetch_logs(Answering({"vm1": Completed(0, output, b"")}), ["vm1"], tmp_path)["vm1"]
    assert not isinstance(answer, HostError)
    assert len(answer) == 40 and {len(end) for end in answer.values()} == {512}


def test_what_a_host_sends_is_not_trusted(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = packed(run, capsys)
    names = ["../out.log", "/etc/out.log", "a/../../out.log", "plain", ".hidden.log", "a/./b.log", "x" * 252 + ".log"]
    answers: dict[str, Completed | HostError] = {
        "cut": Completed(0, whole[: len(whole) // 2], b""),
        "talks": Completed(0, b"Welcome to this host!\n" + whole, b""),
        "other": Completed(0, b'{"a.log": 5}', b""),
        "fails": Completed(1, b"", b"Traceback\nNo module named lastgood"),
        "silent": HostError("silent: no answer"),
        "hostile": Completed(0, json.dumps(dict.fromkeys([*names, "good.log"], "YQ==")).encode(), b""),
    }
    found = fetch_logs(Answering(answers), list(answers), run)
    assert found.pop("hostile") == {"good.log": b"a"}
    assert all(isinstance(answer, HostError) for answer in found.values()), found
    assert "status 1: No module named lastgood" in str(found["fails"])
    assert str(found["talks"]).startswith("talks: something else than logs came from there")
