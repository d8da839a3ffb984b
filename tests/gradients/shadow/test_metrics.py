"""The numbers of a shadow over HTTP, and the commands that show them."""

import json
import re
import urllib.error
import urllib.request

import pytest
from typer.testing import CliRunner

from lastgood.cli import app
from lastgood.errors import HostError
from lastgood.gradients.shadow.metrics import MetricsServer
from lastgood.tokens import read_token
from tests.gradients.support.scripted_trainer import Trainer
from tests.gradients.support.shadow_processes import shadow_threads

COUNTERS = {
    *("applied_buckets_total", "applied_iterations_total", "checks_total", "checksum_seconds_total"),
    *("cpu_seconds_total", "diverged_total", "fences_total", "optimizer_seconds_total", "received_bytes_total"),
    *("received_records_total", "refused_total", "seed_bytes_total", "seeds_total", "side_bytes_total"),
    *("spill_errors_total", "spills_total"),
}
GAUGES = {
    *("applied_iteration", "connections", "declared_memory_bytes", "durable_step", "epoch", "have_iteration"),
    *("newest_saved_step", "parked_connections", "peak_rss_bytes", "whole"),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two shadows that have applied two iterations."""
    folder = tmp_path_factory.mktemp("metrics")
    with shadow_threads(folder, 2) as started:
        trainer = Trainer([one.address for one in started], read_token(folder / "token"))
        trainer.fence()
        trainer.start()
        trainer.iterate()
        trainer.iterate()
        trainer.wait_applied(2)
        yield folder, started, trainer
        trainer.close()


def test_prometheus_text(trained):
    _, started, trainer = trained
    started[1].service.core.refuse('a quoted "cause"')
    server = MetricsServer(started[1].service.core, "127.0.0.1", 0)
    try:
        with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=30) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            text = answer.read().decode()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://{server.address}/other", timeout=30)
    finally:
        server.close()
    values = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, labels, value = re.fullmatch(r"(\w+)\{(.*)\} ([-+.e\d]+)", line).groups()
            caused = r'cause="a quoted \"cause\"",' if "refused" in name else ""
            assert labels == caused + 'shadow="1"'
            assert f"# HELP {name} " in text
            values[name.removeprefix("lastgood_shadow_")] = float(value)
    types = dict(re.findall(r"^# TYPE lastgood_shadow_(\w+) (\w+)$", text, flags=re.M))
    assert types == dict.fromkeys(COUNTERS, "counter") | dict.fromkeys(GAUGES, "gauge")
    assert values.keys() == types.keys()
    assert values["refused_total"] == 1
    assert values["applied_iterations_total"] == 2
    assert values["received_bytes_total"] == 2 * trainer.layout.bytes_of(1)
    assert values["have_iteration"] == values["applied_iteration"] == 2
    assert values["newest_saved_step"] == 20
    assert values["durable_step"] == -1
    assert values["optimizer_seconds_total"] > 0 < values["cpu_seconds_total"]


def run(*words):
    return CliRunner().invoke(app, ["shadow", *map(str, words)])


def test_status_and_watch(trained):
    folder, started, _ = trained
    addresses = [one.address for one in started]
    found = run("status", *addresses, "--token-file", folder / "token", "--json")
    document = json.loads(found.stdout)
    assert found.exit_code == 0
    assert (document["step"], document["iteration"], document["source"]) == (20, 2, "memory")
    assert [one["shadow"] for one in document["shadows"]] == [0, 1]
    shown = run("watch", *addresses, "--token-file", folder / "token", "--count", 2, "--every-s", 0.01)
    assert shown.exit_code == 0 and "step 20 can be restored" in shown.stdout


def test_what_some_shadows_hold_is_not_said_of_all(trained):
    folder, started, _ = trained
    found = run("status", started[0].address, "--token-file", folder / "token", "--json")
    document = json.loads(found.stdout)
    assert document["step"] is None and "shadow 0 of 2" in document["why"]


def test_a_shadow_that_does_not_answer_is_said(trained):
    folder, started, _ = trained
    found = run("status", started[0].address, "127.0.0.1:1", "--token-file", folder / "token", "--json")
    document = json.loads(found.stdout)
    assert found.exit_code == 1
    assert document["step"] is None and "do not answer" in document["why"]
    assert "cannot be reached" in document["shadows"][1]["error"]


@pytest.mark.parametrize("port", [70000, -1])
def test_a_port_that_is_none_is_said_so(trained, port):
    _, (shadow, _), _ = trained
    with pytest.raises(HostError, match=rf"127\.0\.0\.1:{port}"):
        MetricsServer(shadow.service.core, "127.0.0.1", port)
