"""Real traffic of NCCL over sockets: the conversation finds each gradient, weight and buffer in it, to the bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lastgood.mirror.conversation.nccl import NcclConversation
from lastgood.mirror.conversation.places import Buckets, Contradiction, Incarnation, LostStep
from lastgood.mirror.extract.extractor import Extractor
from lastgood.mirror.extract.slots import Filled, GradientSlots
from lastgood.mirror.job.description import Backend, DdpSettings, JobDescription, TensorInfo
from lastgood.mirror.job.rules import Rules
from lastgood.mirror.streams.nccl_sockets import NcclSocketParser
from lastgood.optim.rule import GroupRule
from lastgood.optim.spec import GroupSpec, OptimizerSpec
from tests.mirror.support.captures import captures
from tests.mirror.support.frames import batch, read, read_pcap
from tests.mirror.support.gather import Gathered
from tests.mirror.support.small_job import tensor

CHANNELS = {"simple-1ch": 1, "ll-1ch": 1, "simple-2ch-4sockets": 2, "default-proto": 2}
PROTOCOLS = {"simple-1ch": "simple", "ll-1ch": "ll", "simple-2ch-4sockets": "simple", "default-proto": ""}
STEPS = 4


def job_of(name: str, truth: dict[str, np.ndarray]) -> JobDescription:
    gradients = [key.removeprefix("grad.0.") for key in truth if key.startswith("grad.0.")]
    parameters: list[TensorInfo] = []
    buffers: list[TensorInfo] = []
    for key, value in truth.items():
        if key.startswith("init."):
            own = key.removeprefix("init.")
            kind = parameters if own in gradients else buffers
            kind.append(tensor(own, *value.shape, dtype=str(value.dtype), trainable=own in gradients))
    places = tuple(range(len(parameters)))
    return JobDescription(
        torch="2.11",
        parameters=tuple(parameters),
        buffers=tuple(buffers),
        optimizer=OptimizerSpec("sgd", "foreach", "cpu", (GroupSpec(places),), 1, "2.11").to_data(),
        optimized=places,
        rules=Rules(initial=(GroupRule(lr=0.05, momentum=0.9).to_data(),)),
        ranks=2,
        ddp=DdpSettings(first_cap=31457, cap=31457),
        backend=Backend(kind="nccl", version="2.28.9", protocol=PROTOCOLS[name], channels=CHANNELS[name]),  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module", params=sorted(CHANNELS))
def capture(request: pytest.FixtureRequest) -> tuple[Path, str]:
    return captures("nccl-socket-captures"), request.param


def test_gradients_weights_and_buffers_are_found_to_the_bit(capture: tuple[Path, str]) -> None:
    folder, name = capture
    truth = dict(np.load(folder / f"{name}.rank0.npz"))
    job = job_of(name, truth)
    gathered = Gathered(NcclConversation(job))
    gathered.read(read(NcclSocketParser(), read_pcap(folder / f"{name}.pcap.xz"), 1000))
    assert [one for one in gathered.events if isinstance(one, (LostStep, Contradiction))] == []
    assert [one.complete for one in gathered.events if isinstance(one, Incarnation)] == [True]
    told = [one for one in gathered.events if isinstance(one, Buckets)]
    assert [(one.step, one.rebuilt) for one in told] == [(0, False), (1, True)]
    gradients = gathered.of("gradient")
    assert len(gradients) == 1 + (STEPS - 1) * len(told[1].buckets)
    for expected, content in gradients:
        buckets = next(one.buckets for one in reversed(told) if one.step <= expected.step)
        assert expected.bucket is not None
        names = [job.parameters[job.trainable[index]].name for index in buckets[expected.bucket]]
        assert content == b"".join(truth[f"grad.{expected.step}.{one}"].tobytes() for one in names)
    for expected, content in gathered.of("parameters"):
        assert content == b"".join(truth[f"init.{one}"].tobytes() for one in expected.tensors)
    for expected, content in gathered.of("buffers"):
        before = f"after.{expected.step - 1}." if expected.step else "init."
        assert content == b"".join(truth[before + one].tobytes() for one in expected.tensors)


@pytest.mark.parametrize("name", ["simple-1ch", "ll-1ch"])
def test_weights_are_there_before_gradients_wherever_a_batch_ends(name: str) -> None:
    """Both ranks have one address here, so that weights wait for their place until a gradient's messages are seen."""
    folder = captures("nccl-socket-captures")
    frames = read_pcap(folder / f"{name}.pcap.xz")
    assert {one.content[26:34] for one in frames if one.content[12:14] == b"\x08\x00"} == {b"\x7f\0\0\1" * 2}
    job = job_of(name, dict(np.load(folder / f"{name}.rank0.npz")))
    for split in range(15, len(frames), 15):
        extractor, parser = Extractor(NcclConversation(job), GradientSlots(1 << 26), 1 << 26), NcclSocketParser()
        events = [
            *extractor.feed(parser.feed(batch(frames[:split]))),
            *extractor.feed(parser.feed(batch(frames[split:]))),
            *extractor.finish(parser.finish()),
        ]
        kinds = [one.expected.kind for one in events if isinstance(one, Filled)]
        assert kinds.count("parameters") == 2 and kinds[kinds.index("gradient") :].count("parameters") == 0, split
