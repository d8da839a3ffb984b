"""`lastgood stellatrain train` and `node`, and the two scripts that call it: refusals, two ranks, and a restart."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lastgood.cli import app
from lastgood.errors import ConfigError, WaitTimeout
from lastgood.ports import free_ports
from lastgood.sparse.control.telemetry import ask_view
from lastgood.workloads.data.prepare import prepare_dataset
from tests.support.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "lastgood", "stellatrain"]
RIGHT = {
    "--master-ip-address": "127.0.0.1",
    "--my-ip-address": "127.0.0.1",
    "--world-size": "2",
    "--num-gpus": "0",
    "--rank": "0",
}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    prepare_dataset("images", folder)
    return folder


def words(changed: dict[str, str]) -> list[str]:
    return [word for pair in {**RIGHT, **changed}.items() for word in pair]


def ended(commands: list[list[str]], environments: list[dict[str, str]], cwd: Path = ROOT) -> list[str]:
    """Run all at once, to their ends; what each printed to stdout."""
    started = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )
        for command, environment in zip(commands, environments, strict=True)
    ]
    try:
        found = [process.communicate(timeout=120 * PATIENCE) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [0] * len(started), found
    return [output for output, _ in found]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"--rank": "2"}, r"^--rank 2: with --world-size 2 ranks go from 0 to 1$"),
        ({"--world-size": "0"}, r"^--rank 0: with --world-size 0 ranks"),
        ({"--master-ip-address": "here"}, r"^--master-ip-address here: not an IP address$"),
        ({"--my-ip-address": "192.0.2.1"}, r"^--my-ip-address 192\.0\.2\.1: this machine has no such address$"),
        ({"--master-ip-address": "127.0.0.2"}, r"^--rank 0 is the master, and --master-ip-address 127\.0\.0\.2 is not"),
        ({"--num-gpus": "2"}, r"^--num-gpus 2: the sparse engine trains on CPUs so far; give 0$"),
        ({"--dataset": "/nowhere"}, r"^--dataset /nowhere: no folder of CLASS/IMAGE"),
    ],
)
def test_a_wrong_argument_is_one_line_before_anything_starts(changed: dict[str, str], message: str) -> None:
    done = CliRunner().invoke(app, ["stellatrain", "node", *words(changed)])
    assert isinstance(done.exception, ConfigError)
    with pytest.raises(ConfigError, match=message):
        raise done.exception


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        done = CliRunner().invoke(app, ["stellatrain", "node", *words({"--port": port})])
    with pytest.raises(ConfigError, match=rf"^--port {port}: Address already in use; name another on all nodes$"):
        raise done.exception  # type: ignore[misc]  # None would fail as well


def test_a_rank_that_does_not_come_is_waited_for_a_bounded_time(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = str(free_ports()[0])
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    words = ["stellatrain", "train", "--timeout-s", "1", "--config", f"data_dir={data_dir}"]
    done = CliRunner().invoke(app, words)
    with pytest.raises(WaitTimeout, match=rf"^2 ranks did not meet at 127\.0\.0\.1:{port} \(MASTER_ADDR\) in 1 s"):
        raise done.exception  # type: ignore[misc]  # None would fail as well


def test_checkpoints_need_a_place() -> None:
    done = CliRunner().invoke(app, ["stellatrain", "train", "--system", "pccheck"])
    with pytest.raises(ConfigError, match=r"--system pccheck needs a place for its checkpoints: --directory FOLDER"):
        raise done.exception  # type: ignore[misc]  # None would fail as well


def test_two_nodes_by_the_script_come_to_the_same_model(data_dir: Path) -> None:
    port = str(free_ports()[0])
    more = ["--dataset", "dummy", "--steps", "2", "--threads", "1", "--data-dir", str(data_dir), "--json"]
    commands = [
        [str(ROOT / "test_script.sh"), *words({"--rank": str(rank), "--port": port}), *more] for rank in range(2)
    ]
    binaries = {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])}
    found = [json.loads(output) for output in ended(commands, [binaries, binaries])]
    assert [one["rank"] for one in found] == [0, 1]
    assert found[0]["digest"] == found[1]["digest"]
    assert found[0]["losses"] != found[1]["losses"]
    # Of 11.2 million parameters half a per cent each, at about 4.4 bytes a value.
    assert 0 < found[0]["sent_bytes"] < 2 * 11.2e6 * 0.005 * 5


@pytest.mark.slow
def test_ranks_follow_a_server_and_go_on_without_it(data_dir: Path, tmp_path: Path) -> None:
    """Its setting holds on both, and still does when the server is killed in the middle of the training."""
    serve = [*COMMAND, "serve", "--token-file", str(tmp_path / "token"), "--port", "0"]
    server = subprocess.Popen(serve, stderr=subprocess.PIPE, text=True)
    port, steps = str(free_ports()[0]), 48
    places = [
        {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} for rank in range(2)
    ]
    try:
        assert server.stderr is not None
        found = re.search(r"telemetry at (\S+)", server.stderr.readline())
        assert found
        address = found[1]
        follow = ["--controller", address, "--token-file", str(tmp_path / "token"), "--least-compression", "0.5"]
        train = [*COMMAND, "train", "--steps", str(steps), "--threads", "1", "--config", f"data_dir={data_dir}"]

        def kill_once_a_setting_holds() -> None:
            deadline = time.monotonic() + 120 * PATIENCE
            while time.monotonic() < deadline:
                ranks = ask_view(address, (tmp_path / "token").read_bytes().strip())["ranks"]
                if any(one["last"] and one["last"]["setting_number"] for one in ranks):
                    break
                time.sleep(0.05)
            server.kill()

        with ThreadPoolExecutor(1) as pool:
            killing = pool.submit(kill_once_a_setting_holds)
            outcomes = [json.loads(output) for output in ended([[*train, *follow, "--json"]] * 2, places)]
            killing.result(1.0)
    finally:
        server.kill()
        server.wait()
    assert outcomes[0]["digest"] == outcomes[1]["digest"] and [one["last_step"] for one in outcomes] == [steps] * 2
    assert outcomes[0]["setting"] == outcomes[1]["setting"] != None  # noqa: E711  # all three
    assert sum(outcomes[0]["setting"]["samples"]) == 2 * 8 and outcomes[0]["setting"]["compression"] >= 0.5


@pytest.mark.slow
def test_a_restart_goes_on_to_the_bit(data_dir: Path, tmp_path: Path) -> None:
    def train(steps: int, folder: Path) -> list[dict[str, object]]:
        port = str(free_ports()[0])
        train = ["train", "--steps", str(steps), "--threads", "1", "--config", f"data_dir={data_dir}", "--json"]
        kept = ["--system", "pccheck", "--directory", str(folder), "--interval-steps", "2"]
        places = [
            {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} for rank in range(2)
        ]
        return [json.loads(output) for output in ended([[*COMMAND, *train, *kept]] * 2, places)]

    train(4, tmp_path / "twice")
    again = train(7, tmp_path / "twice")
    once = train(7, tmp_path / "once")
    assert [one["first_step"] for one in again] == [4, 4]
    for rank in range(2):
        assert again[rank]["losses"] == once[rank]["losses"][4:]  # type: ignore[index]
        assert again[rank]["digest"] == once[rank]["digest"]
