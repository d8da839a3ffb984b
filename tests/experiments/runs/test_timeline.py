"""The trace of a run: every step, every checkpoint, and spans that lie in each other or apart."""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lastgood.checkpointers.baselines.none import NoCheckpointing
from lastgood.checkpointers.events import CheckpointEvent, Outcome
from lastgood.experiments.records.run import RunRecord
from lastgood.experiments.runs.timeline import Timeline, trace_events, write_timeline
from lastgood.workloads.data.prepare import prepare_dataset
from tests.experiments.support.run_specs import COMMAND, spec_of
from tests.experiments.support.warm_runs import WarmRun

STEPS = 6


def spans_of(events):
    return [event for event in events if event["ph"] == "X"]


def tracks_of(events):
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    tracks = {name: [] for name in names.values()}
    for span in spans_of(events):
        tracks[names[span["tid"]]].append(span)
    return tracks


def check_nesting(events):
    """No span is negative, and two of one track follow each other or lie in each other."""
    for name, spans in tracks_of(events).items():
        around = []
        # Whole nanoseconds; of two that begin together, the longer one is around the other.
        edges = [(round(span["ts"] * 1e3), round(span["dur"] * 1e3), span["name"]) for span in spans]
        for begin, length, what in sorted(edges, key=lambda edge: (edge[0], -edge[1])):
            assert begin >= 0 and length >= 0, (name, what)
            while around and around[-1] <= begin:
                around.pop()
            assert not around or begin + length <= around[-1], (name, what)
            around.append(begin + length)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    prepare_dataset("images", folder)
    return folder


@pytest.mark.parametrize(
    "system",
    [
        pytest.param("none", marks=pytest.mark.slow),
        pytest.param("sync", marks=pytest.mark.slow),
        "checkfreq",
        "pccheck",
    ],
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_real_run_is_all_in_its_trace(system, device, tmp_path, data_dir):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    spec = spec_of(system, interval=0 if system == "none" else 1, measured_steps=STEPS, proof=False, device=device)
    out, trace = tmp_path / "r0.json", tmp_path / "traces" / "run.json"
    paths = ["--out", out, "--data-dir", data_dir, "--scratch", tmp_path / "scratch", "--timeline", trace]
    arguments = ["--spec", spec.canonical_json(), *map(str, paths)]
    process = WarmRun(["run", *arguments])
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    record, events = RunRecord.load(out), json.loads(trace.read_text())["traceEvents"]
    check_nesting(events)
    counts = Counter(span["name"] for span in spans_of(events))
    assert counts["forward and backward"] == counts["update"] == STEPS
    first = spec.warmup_steps + 1
    tracks = tracks_of(events)
    steps = [span for span in tracks["training"] if span["name"].startswith("step ")]
    assert [span["name"] for span in steps] == [f"step {number}" for number in range(first, first + STEPS)]
    assert [span["dur"] / 1e6 for span in steps] == pytest.approx(record.clocks.step_s, abs=1e-5)
    checkpoints = [span for span in spans_of(events) if span["name"].startswith("checkpoint of step")]
    assert len(checkpoints) == record.counts.started == counts["save"] == (0 if system == "none" else STEPS)
    assert sum(span["dur"] for span in tracks["stalls: save"]) / 1e6 == pytest.approx(
        record.clocks.stall_save_s, abs=1e-6
    )
    waits = [*tracks["stalls: before update"], *tracks.get("stalls: on the device", ())]
    waited_s = sum(span["dur"] for span in waits) / 1e6
    assert waited_s == pytest.approx(record.clocks.stall_update_s, abs=STEPS * 5e-5)
    if system == "none":
        return
    assert sorted(span["dur"] / 1e6 for span in checkpoints) == pytest.approx(sorted(record.clocks.persist_s), abs=1e-6)
    assert counts["copy"] == counts["write"] == counts["drain"] + STEPS - 1 == STEPS
    if system == "pccheck":
        assert counts["void"] == STEPS and counts["commit"] == record.counts.durable
    else:
        assert counts["flush"] == counts["commit"] == STEPS
    # A checkpoint is asked for in its save, and the save goes on until it has waited for those before it.
    asked = sorted(checkpoints, key=lambda span: span["ts"])
    waits = sorted((span for span in spans_of(events) if span["name"] == "wait"), key=lambda span: span["ts"])
    for save, checkpoint, wait in zip(tracks["stalls: save"], asked, waits or asked, strict=True):
        assert save["ts"] <= checkpoint["ts"] <= save["ts"] + save["dur"]
        assert system == "sync" or wait["ts"] + wait["dur"] <= save["ts"] + save["dur"]
    # A checkpoint's parts lie in it.
    for lane in range(1, 9):
        for span in [*tracks.get(f"copy {lane}", ()), *tracks.get(f"storage {lane}", ())]:
            begin, end = span["ts"], span["ts"] + span["dur"]
            assert any(
                whole["ts"] - 0.01 <= begin and end <= whole["ts"] + whole["dur"] + 0.01
                for whole in tracks[f"checkpoint {lane}"]
            )


moments = st.integers(0, 10_000_000).map(lambda microseconds: 100 + microseconds / 1e6)


@st.composite
def checkpoints(draw):
    made = []
    for step in range(draw(st.integers(0, 8))):
        requested, waited, copied, written, flushed = sorted(draw(st.lists(moments, min_size=5, max_size=5)))
        event = CheckpointEvent(step, requested, copied, flushed, Outcome.DURABLE)
        if draw(st.booleans()):
            event.phases = [("wait", requested, waited), ("write", waited, written), ("flush", written, flushed)]
        made.append(event)
    return made


@given(checkpoints())
def test_checkpoints_that_overlap_get_lanes_of_their_own(made):
    events = trace_events("some run", Timeline(1, [], [], [], [], made, []))
    check_nesting(events)
    tracks = tracks_of(events)
    lanes = sum(name.startswith("checkpoint ") for name in tracks)
    most = max((sum(a.requested_s <= b.requested_s < a.finished_s for a in made) for b in made), default=0)
    assert lanes >= most
    assert min((span["ts"] for span in spans_of(events)), default=0) == 0
    assert sum(len(spans) for name, spans in tracks.items() if name.startswith("copy ")) == len(made)


def test_by_hand(tmp_path):
    steps = [(10.0, 10.6, 10.9), (10.9, 11.5, 12.0)]
    event = CheckpointEvent(8, 11.7, 12.2, 13.0, Outcome.FAILED, error="the disk is full")
    event.phases = [("wait", 11.7, 11.9)]
    path = tmp_path / "trace.json"
    write_timeline(path, "a run", Timeline(7, steps, [(8, 11.7, 12.0)], [(11.6, 11.65)], [], [event], [(12.0, 13.0)]))
    spans = spans_of(json.loads(path.read_text())["traceEvents"])
    seen = {span["name"]: (round(span["ts"] / 1e5), round(span["dur"] / 1e5)) for span in spans}
    assert seen["step 7"] == (0, 9) and seen["step 8"] == (9, 11)
    assert seen["update"] == (15, 2)  # of step 8, up to its save
    assert seen["save"] == (17, 3) and seen["drain"] == (20, 10)
    assert seen["checkpoint of step 8"] == (17, 13)
    assert seen["wait"] == (17, 2)
    assert seen["copy"] == (19, 3) and seen["write and flush"] == (22, 8)
    (whole,) = [span for span in spans if span["name"] == "checkpoint of step 8"]
    assert whole["args"] == {"outcome": "failed", "bytes_written": 0, "error": "the disk is full"}


class Slow(NoCheckpointing):
    def before_update(self):
        time.sleep(0.002)


def test_waits_of_optimizers_are_kept_from_when_they_are_asked_for(tmp_path):
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter])
    checkpointer = Slow(tmp_path)
    checkpointer.start({"parameter": parameter, "optimizer": optimizer})
    optimizer.step()
    before_s, asked_s = checkpointer.update_stall_s, time.perf_counter()
    checkpointer.keep_update_waits()
    for _ in range(3):
        optimizer.step()
    process, device = checkpointer.update_waits
    assert len(process) == 3 and device == []
    assert all(asked_s <= begin < end for begin, end in process)
    assert sum(end - begin for begin, end in process) == pytest.approx(checkpointer.update_stall_s - before_s)
    checkpointer.close()
    assert checkpointer.update_waits == ([], [])


def test_a_folder_is_refused_before_anything_runs(tmp_path):
    arguments = ["--spec", spec_of().canonical_json(), "--out", str(tmp_path / "r0.json"), "--timeline", str(tmp_path)]
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 2 and "is a folder" in done.stderr
    assert list(tmp_path.iterdir()) == []
