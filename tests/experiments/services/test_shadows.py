"""Shadows of a run on this machine: real ones, which come up, tell what they use, and end with the run."""

from __future__ import annotations

import contextlib
import http.server
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from lastgood.errors import HostError, LastgoodError
from lastgood.experiments.services import shadows as rank_shadows
from lastgood.experiments.services.registry import begin_meters, services_of, trainer_options
from lastgood.experiments.services.service import run_services
from lastgood.experiments.services.shadows import ShadowPlaces, places_path, shadow_meter, shadow_options
from tests.experiments.support.specs import make_spec


def spec_of(shadows: int = 2) -> Any:
    return make_spec(system="checkmate", system_options={}, interval_steps=1, shadows=shadows)


def children() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # of another test, and at its end
            if "shadow" in child.cmdline():
                found.append(child)
    return found


def test_shadows_come_up_tell_what_they_use_and_end_with_the_block(tmp_path: Path) -> None:
    said: list[str] = []
    with (
        pytest.raises(LastgoodError, match=r"shadow 1 on localhost has ended while the run went on: signal SIGKILL"),
        run_services(services_of(spec_of()), tmp_path, said.append),
    ):
        serving = children()
        assert len(serving) == 2 and "2 shadows" in said[0]
        checkpoints = tmp_path / "checkpoints"
        options = shadow_options(checkpoints)
        assert len(set(options["shadows"])) == 2
        token = Path(options["token_file"])
        assert stat.S_IMODE(token.stat().st_mode) == 0o600 and len(token.read_text().strip()) >= 32
        meter = shadow_meter(checkpoints)
        facts = meter()["shadows"]
        assert [one.received_bytes for one in facts] == [0, 0]
        for one, process in zip(facts, serving, strict=True):
            used_by_now_s = sum(process.cpu_times()[:2])
            assert 0 <= one.cpu_s <= used_by_now_s and one.optimizer_s == 0 and one.peak_rss_bytes > 1 << 20
        serving[1].send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, serving[1].pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(HostError, match=r"shadow at 127\.0\.0\.1:\d+: no metrics"):
            meter()
    assert not [process for process in serving if process.is_running()]
    with pytest.raises(HostError):
        shadow_meter(checkpoints)


def test_a_run_without_shadows_asks_nobody(tmp_path: Path) -> None:
    spec = make_spec()
    assert services_of(spec) == [] and trainer_options(spec, tmp_path) == {}
    assert begin_meters(spec, tmp_path)() == {}


@pytest.mark.parametrize("answer", [b'a_total{shadow="1} 2\n', b"# TYPE a nothing\n", b"<html>\n"])
def test_another_service_at_a_shadows_address_is_said(tmp_path: Path, answer: bytes) -> None:
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer)

    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.handle_request, daemon=True)
        thread.start()
        address = f"127.0.0.1:{server.server_port}"
        places = ShadowPlaces(hosts=["a"], addresses=["a:1"], metrics=[address], token_file="/t")
        places_path(tmp_path).write_text(places.model_dump_json())
        with pytest.raises(HostError, match=rf"shadow at {address}: tells no metrics"):
            shadow_meter(tmp_path)
        thread.join(60)


def test_a_run_whose_shadows_nobody_started_says_so(tmp_path: Path) -> None:
    with pytest.raises(LastgoodError, match=r"shadows\.json: cannot be read: No such file .*; run again"):
        shadow_options(tmp_path)


def test_a_shadow_that_cannot_start_is_named_with_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_shadows, "_SERVE", (sys.executable, "-c", "import sys; sys.exit('no such luck')"))
    with (
        pytest.raises(
            LastgoodError,
            match=r"(?s)shadow 0 on localhost has ended before it could be used: exit status 1; .*no such luck",
        ),
        run_services(services_of(spec_of()), tmp_path, lambda _: None),
    ):
        raise AssertionError("it came up")
    assert not places_path(tmp_path / "checkpoints").exists()


@pytest.mark.slow
def test_shadows_end_with_a_run_that_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path\n"
        "from lastgood.experiments.services.registry import services_of\n"
        "from lastgood.experiments.services.service import run_services\n"
        "from lastgood.experiments.records.spec import RunSpec\n"
        "services = services_of(RunSpec.model_validate_json(sys.argv[1]))\n"
        "with run_services(services, Path(sys.argv[2]), print):\n"
        "    print('up', flush=True); time.sleep(600)\n"
    )
    command = [sys.executable, "-c", script, spec_of(1).canonical_json(), str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        assert process.stdout is not None
        assert "1 shadows" in process.stdout.readline() and process.stdout.readline() == "up\n"
        (serving,) = psutil.Process(process.pid).children()
    finally:
        process.kill()
        process.wait(60)
    deadline = time.monotonic() + 60
    with contextlib.suppress(psutil.NoSuchProcess):
        while serving.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "the shadow lives on"
            time.sleep(0.05)


def test_places_are_read_back(tmp_path: Path) -> None:
    places = ShadowPlaces(hosts=["a"], addresses=["10.0.0.1:4"], metrics=["10.0.0.1:5"], token_file="/t")
    places_path(tmp_path).write_text(places.model_dump_json())
    assert shadow_options(tmp_path) == {"shadows": ["10.0.0.1:4"], "token_file": "/t"}
