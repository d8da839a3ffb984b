"""Kept captures of real trainings over Gloo: the conversation finds each gradient, weight and buffer, to the bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lastgood.mirror.conversation.gloo import GlooConversation
from lastgood.mirror.conversation.places import Buckets, Contradiction, Incarnation, Learned, LostStep
from lastgood.mirror.job.describe import describe
from lastgood.mirror.job.description import JobDescription
from lastgood.mirror.job.factory import training_of
from tests.mirror.support.frames import Captured, read, read_pcap
from tests.mirror.support.gather import Gathered
from tests.mirror.support.plain.gloo import GlooParser
from tests.mirror.support.training import make

SAMPLES = Path(__file__).parents[1] / "samples"
STEPS = 4
CAP_MB = 0.002


def job_of(ranks: int, width: int = 24) -> JobDescription:
    training = training_of(make(width), "make")
    training.ddp = {"bucket_cap_mb": CAP_MB}
    return describe(training, ranks=ranks)


def gathered_of(job: JobDescription, frames: list[Captured]) -> Gathered:
    gathered = Gathered(GlooConversation(job))
    gathered.read(read(GlooParser(), frames))
    return gathered


@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_weights_and_buffers_are_found_to_the_bit(ranks: int) -> None:
    truth = dict(np.load(SAMPLES / f"gloo-{ranks}.npz"))
    job = job_of(ranks)
    gathered = gathered_of(job, read_pcap(SAMPLES / f"gloo-{ranks}.pcap.xz"))
    assert [one for one in gathered.events if isinstance(one, (LostStep, Contradiction))] == []
    assert [one.complete for one in gathered.events if isinstance(one, Incarnation)] == [True]
    assert sorted(rank for _, rank in [one for one in gathered.events if isinstance(one, Learned)][-1].ranks) == [
        *range(ranks)
    ]
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
    seen = set()
    for expected, content in gathered.of("buffers"):
        before = f"after.{expected.step - 1}." if expected.step else "init."
        assert content == b"".join(truth[before + one].tobytes() for one in expected.tensors)
        seen.add(expected.step)
    assert seen == set(range(STEPS))


def test_another_model_is_refused_by_the_parameters_name() -> None:
    gathered = gathered_of(job_of(2, width=25), read_pcap(SAMPLES / "gloo-2.pcap.xz"))
    texts = [one.text for one in gathered.events if isinstance(one, Contradiction)]
    assert any("first.weight has shape (24, 16)" in text and "(25, 16)" in text for text in texts), texts


def test_another_world_is_refused() -> None:
    gathered = gathered_of(job_of(2), read_pcap(SAMPLES / "gloo-3.pcap.xz"))
    assert any(
        "3 ranks" in one.text or "more ranks" in one.text for one in gathered.events if isinstance(one, Contradiction)
    )


@pytest.mark.parametrize("ranks", [2, 3])
def test_missing_frames_never_give_wrong_bytes(ranks: int) -> None:
    """Any frame of the middle is lost: what is complete is right, and other steps than those near it are."""
    truth = dict(np.load(SAMPLES / f"gloo-{ranks}.npz"))
    job = job_of(ranks)
    frames = read_pcap(SAMPLES / f"gloo-{ranks}.pcap.xz")
    for gone in range(len(frames) // 3, len(frames), max(1, len(frames) // 40)):
        gathered = gathered_of(job, frames[:gone] + frames[gone + 1 :])
        assert not [one for one in gathered.events if isinstance(one, Contradiction)]
        lost = {one.step for one in gathered.events if isinstance(one, LostStep) and one.what == "gradients"}
        told = [one for one in gathered.events if isinstance(one, Buckets)]
        for number, expected in gathered.expected.items():
            if expected.kind == "gradient" and expected.step not in lost and gathered.complete(number):
                buckets = next(one.buckets for one in reversed(told) if one.step <= expected.step)
                assert expected.bucket is not None
                names = [job.parameters[job.trainable[index]].name for index in buckets[expected.bucket]]
                wanted = b"".join(truth[f"grad.{expected.step}.{one}"].tobytes() for one in names)
                assert bytes(gathered.bytes[number]) == wanted, (gone, expected)
        whole = {one.step for number, one in gathered.expected.items() if one.kind == "gradient"} - lost
        assert len(whole) >= STEPS - 2, (gone, lost)
