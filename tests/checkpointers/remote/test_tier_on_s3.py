"""The remote tier on a real server: it goes away, is full, refuses; and keys are nowhere to be read."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lastgood import PCcheck
from lastgood.checkpointers.remote.tier import RemoteTier
from lastgood.storage.objects.commits import find_commits
from lastgood.storage.objects.opening import ObjectPlace
from lastgood.storage.objects.s3 import S3Client, S3Options
from lastgood.storage.objects.view import RemoteView
from tests.checkpointers.support.stored_helpers import open_store, put
from tests.suggestions.following import advice, follows, refusal

WAIT_S = 120
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def keys(server, monkeypatch):
    """In the environment, as a user has them; and little patience."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.credentials.access_key_id)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.credentials.secret_access_key)
    monkeypatch.setattr(
        ObjectPlace,
        "options",
        property(
            lambda place: S3Options(
                region=place.region, endpoint_url=place.endpoint_url, retries=0, retry_s=1.0, request_s=20.0
            )
        ),
    )
    return server.credentials


def place_of(server, url, **given) -> ObjectPlace:
    return ObjectPlace(url, "us-east-1", given.get("endpoint_url", server.endpoint_url))


def steps(server, url) -> list[int]:
    client = S3Client(url, server.options())
    try:
        return [name.step for name in find_commits(client)]
    finally:
        client.close()


@pytest.mark.slow
def test_a_server_that_is_away_for_twenty_checkpoints(server, url, tmp_path, caplog, keys):
    caplog.set_level(logging.DEBUG, "lastgood")
    given = {"remote": url, "remote_region": "us-east-1", "remote_endpoint_url": server.endpoint_url}
    model = torch.nn.Linear(32, 32)
    ckpt = PCcheck(tmp_path / "job", interval_steps=1, remote_every=1, **given)
    ckpt.attach(model=model)
    ckpt.step()
    ckpt.drain()
    ckpt._beside.tier.drain(WAIT_S)
    assert steps(server, url) == [1]
    server.stop()
    try:
        for _ in range(20):
            with torch.no_grad():
                model.weight += 1
            ckpt.step()
            ckpt.drain()
        assert [event.outcome for event in ckpt.events] == ["durable"] * 21
        ckpt._beside.tier.drain(WAIT_S)
    finally:
        server.start()
    facts = ckpt.storage_facts()["remote"]
    assert facts["sent"] == 1 and facts["failed"] >= 1 and facts["sent"] + facts["failed"] + facts["replaced"] == 21
    assert (facts["step"], facts["lag_steps"]) == (1, 20)
    ckpt.step()
    ckpt.drain()
    ckpt._beside.tier.drain(WAIT_S)
    assert steps(server, url) == [22, 1]
    assert ckpt.storage_facts()["remote"]["lag_steps"] == 0
    written = "".join(path.read_text() for path in (tmp_path / "job").glob("*.json"))
    told = "".join(record.getMessage() for record in caplog.records)
    for text in (written, told, json.dumps(ckpt.storage_facts()), repr(ckpt.options), repr(ckpt._beside.tier.objects)):
        assert keys.access_key_id not in text and keys.secret_access_key not in text
    ckpt.close()
    client = S3Client(url, server.options())
    view = RemoteView(client)
    info = view.newest()
    assert model.weight.detach().numpy().tobytes() in view.read_bytes(info, 0, info.stream_bytes)
    client.close()


@follows("a place for checkpoints holds a user or a key")
def test_keys_in_a_place_are_refused_and_taken_from_where_it_says(server, url, tmp_path, monkeypatch, keys):
    both = (keys.access_key_id, keys.secret_access_key)
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    told = refusal(lambda: PCcheck(tmp_path / "job", remote=url.replace("s3://", f"s3://{both[0]}:{both[1]}@")))
    assert both[0] not in told and both[1] not in told
    for name, value in zip(advice(told, r"environment \((\w+, \w+)\)").split(", "), both, strict=True):
        monkeypatch.setenv(name, value)
    with open_store(tmp_path / "job") as store:
        tier = RemoteTier(place_of(server, url), store.directory, every=1, keep=2)
        tier.offer(store, put(store, 1, {"x": torch.ones(100)}))
        tier.close(WAIT_S)
    assert steps(server, url) == [1]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"fault": "refuse", "status": 507, "code": "InsufficientStorage"}, "the server is full"),
        ({"fault": "refuse", "status": 403, "code": "AccessDenied"}, "let this user"),
        ({"fault": "refuse", "status": 503, "code": "SlowDown"}, "SlowDown"),
        ({"fault": "reset"}, "put of"),
    ],
)
def test_what_a_server_refuses_is_told_and_the_next_one_arrives(server, proxy, url, tmp_path, caplog, fault, words):
    with open_store(tmp_path / "job") as store:
        place = place_of(server, url, endpoint_url=proxy.url)
        tier = RemoteTier(place, store.directory, every=1, keep=2)
        proxy.fail(method="PUT", path="/segments/", times=99, **fault)
        tier.offer(store, put(store, 1, {"x": torch.ones(100)}))
        tier.drain(WAIT_S)
        assert (tier.counts.done, tier.counts.failed) == (0, 1)
        assert words in caplog.text
        assert steps(server, url) == []
        proxy.heal()
        tier.offer(store, put(store, 2, {"x": torch.ones(100)}))
        tier.close(WAIT_S)
        assert (tier.counts.done, tier.counts.failed) == (1, 1) and steps(server, url) == [2]


def test_a_commit_whose_answer_is_lost_is_one_that_arrived(server, proxy, url, tmp_path):
    with open_store(tmp_path / "job") as store:
        tier = RemoteTier(place_of(server, url, endpoint_url=proxy.url), store.directory, every=1, keep=2)
        proxy.fail("lost", "PUT", "/commits/")
        tier.offer(store, put(store, 1, {"x": torch.ones(100)}))
        tier.close(WAIT_S)
        assert (tier.counts.done, tier.counts.failed) == (1, 0) and steps(server, url) == [1]


def test_what_is_missing_on_the_way_back_costs_only_a_retry(server, proxy, url, tmp_path):
    """Trouble with the retention of older ones does not make a checkpoint one that failed."""
    with open_store(tmp_path / "job") as store:
        tier = RemoteTier(place_of(server, url, endpoint_url=proxy.url), store.directory, every=1, keep=1)
        for step in (1, 2, 3):
            if step == 2:
                proxy.fail("refuse", "PUT", "/retired/", status=403, code="AccessDenied", times=99)
            if step == 3:
                proxy.heal()
            tier.offer(store, put(store, step, {"x": torch.full((100,), float(step))}))
            tier.drain(WAIT_S)
            assert steps(server, url) == [[1], [2, 1], [3]][step - 1]
        tier.close(WAIT_S)
        assert (tier.counts.done, tier.counts.failed) == (3, 0)


def test_a_fork_of_the_training_makes_no_use_of_its_connections(server, url, tmp_path):
    """A loader's worker is a fork: the tier's threads and clients stay in the training."""
    script = (
        "import os, torch\n"
        "from lastgood import PCcheck\n"
        f"ckpt = PCcheck({str(tmp_path / 'job')!r}, interval_steps=1, remote={url!r}, remote_every=1,\n"
        f"    remote_region='us-east-1', remote_endpoint_url={server.endpoint_url!r})\n"
        "class Data(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 8\n"
        "    def __getitem__(self, i): return torch.ones(4) * i\n"
        "model = torch.nn.Linear(4, 4)\n"
        "loader = torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=2, multiprocessing_context='fork')\n"
        "ckpt.attach(model=model)\n"
        "for _ in range(2):\n"
        "    for batch in loader:\n"
        "        model(batch)\n"
        "        ckpt.step()\n"
        "        ckpt.drain(); ckpt._beside.tier.drain(60)\n"
        "print(ckpt.storage_facts()['remote']['sent'])\n"
        "ckpt.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["8"]
    assert steps(server, url) == [8, 7]


def test_a_process_that_ends_while_it_sends_ends_in_order_and_the_next_one_goes_on(server, proxy, url, tmp_path):
    def script(lines: str, endpoint_url: str) -> subprocess.CompletedProcess:
        text = (
            "import sys, torch\n"
            "from lastgood import PCcheck\n"
            f"ckpt = PCcheck({str(tmp_path / 'job')!r}, interval_steps=1, remote={url!r}, remote_every=1,\n"
            f"    remote_region='us-east-1', remote_endpoint_url={endpoint_url!r}, exit_drain_s=1.0)\n"
            "print(ckpt.attach(model=torch.nn.Linear(4, 4)))\n"
        )
        return subprocess.run(
            [sys.executable, "-c", text + lines], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False
        )

    proxy.fail("wait", "PUT", "/segments/", seconds=8.0)
    done = script(
        "ckpt.step(); ckpt.drain()\nwhile not ckpt._beside.tier._current: pass\nraise SystemExit(3)", proxy.url
    )
    assert done.returncode == 3, done.stderr
    assert "panicked" not in done.stderr and "Fatal" not in done.stderr
    assert steps(server, url) == []
    done = script("ckpt.close()", server.endpoint_url)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert steps(server, url) == [1]


def test_a_checkpoint_is_pushed_looked_at_and_its_place_cleaned(server, url, tmp_path, keys):
    from typer.testing import CliRunner

    from lastgood.cli import app

    def call(*arguments: str) -> str:
        there = ["--region", "us-east-1", "--endpoint-url", server.endpoint_url]
        done = CliRunner().invoke(app, [*arguments, *there], catch_exceptions=False)
        assert done.exit_code == 0
        assert keys.access_key_id not in done.output and keys.secret_access_key not in done.output
        return done.output

    with open_store(tmp_path / "job") as store:
        put(store, 7, {"x": torch.ones(1000)})
    assert "step 7 of incarnation 1" in call("push", str(tmp_path / "job"), url)
    assert "is there already" in call("push", str(tmp_path / "job"), url)
    assert json.loads(call("inspect", "--json", url))["slots"][0]["step"] == 7
    assert "nothing to remove" in call("dcp", "clean", url)
