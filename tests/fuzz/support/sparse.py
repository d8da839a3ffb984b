"""What the ranks of a compressed training send each other: blocks, records, and what they say of themselves."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from lastgood import _native
from lastgood.errors import WaitTimeout
from lastgood.sparse.chunks import HEADER_BYTES, Chunk, Kind, cut, failure_payload, pack_header
from tests.fuzz.support.hostile import changed_bytes
from tests.fuzz.support.registry import Prepared, decoder
from tests.fuzz.support.text_files import text_of, tree_or_bits

_LIKE = Chunk(Kind.CHUNK, 0x1122334455667788, 3, 1, 7, 0)
_ELEMENTS = 5000


def _blocks() -> list[Any]:
    import numpy as np
    import torch

    from lastgood.sparse.blocks import SparseGradient
    from lastgood.sparse.coding import encode

    def block(count: int, width: int, dtype: Any, *, finite: bool = True) -> bytes:
        indices = np.linspace(0, -(-_ELEMENTS // width) - 2, count).astype(np.uint32)
        values = torch.arange(1, count * width + 1).to(dtype)
        return encode(SparseGradient(_ELEMENTS, width, indices, values, finite)).tobytes()

    return [
        block(40, 1, torch.float32),
        block(20, 16, torch.bfloat16),
        block(3000, 1, torch.float16),
        block(2, 1, torch.float32),
        block(0, 16, torch.float32, finite=False),
    ]


@decoder("sparse block", _blocks, change=changed_bytes, share=2.0)
def _block(thing: bytes, folder: Path) -> Prepared:
    from lastgood.sparse.coding import decode

    content = bytearray(thing)

    def read() -> None:
        found = decode(content, _ELEMENTS, "it")
        found.check("what was taken")
        assert found.elements == _ELEMENTS

    return len(content), read


def _records() -> list[Any]:
    payload = failure_payload(WaitTimeout("why"))
    failure = replace(_LIKE, kind=Kind.FAILURE, iteration=0, length=len(payload), checksum=_native.crc32c(payload))
    end = pack_header(replace(_LIKE, kind=Kind.END, iteration=0))
    chunks = [header for block in _blocks() for header, _ in cut(memoryview(block), _LIKE)]
    return [chunks, [end, pack_header(failure)]]


def _changed_headers(rng: random.Random, headers: list[bytes]) -> list[bytes]:
    """Fields set to extremes, mostly under a checksum that holds."""
    at = rng.randrange(len(headers))
    changed = changed_bytes(rng, headers[at][:-4])
    if rng.random() < 0.8:
        changed = changed[: HEADER_BYTES - 4].ljust(HEADER_BYTES - 4, b"\0")
    return [*headers[:at], changed + _native.crc32c(changed).to_bytes(4, "little"), *headers[at + 1 :]]


@decoder("header of a sparse record", _records, change=_changed_headers, share=0.5)
def _header(thing: list[bytes], folder: Path) -> Prepared:
    from lastgood.sparse.chunks import parse_header

    def read() -> None:
        for record in thing:
            parse_header(record, "it")

    return sum(map(len, thing)), read


@decoder(
    "failure of a sparse exchange", lambda: [{"error": "WaitTimeout", "why": "it"}], change=tree_or_bits, share=0.5
)
def _failure(thing: Any, folder: Path) -> Prepared:
    from lastgood.errors import CheckpointError
    from lastgood.sparse.chunks import parse_failure

    content = text_of(thing)

    def read() -> None:
        assert isinstance(parse_failure(content, "rank 1"), CheckpointError)

    return len(content), read


@decoder(
    "description of a rank of a sparse exchange",
    lambda: [{"kind": "sparse", "host": "h", "about": {"protocol": 1, "layers": 2, "compressor": "v16", "r": 0.99}}],
    change=tree_or_bits,
    share=0.5,
)
def _description(thing: Any, folder: Path) -> Prepared:
    from lastgood.sparse.meeting import _check_description, _compare
    from tests.fuzz.support.messages import framed, parsed

    def read() -> None:
        said = _check_description(parsed(thing), "it")
        _compare(0, {"protocol": 1, "layers": 2, "compressor": "v16", "r": 0.99}, ["rank 1"], [said["about"]])

    return len(framed(thing)), read


_REPORT = {
    "worker": 1,
    "iteration": 7,
    "samples": 32,
    "compute_s": 0.1,
    "waited_s": 0.0,
    "sent_bytes": 9,
    "sending_s": 0.1,
    "compression": 0.99,
    "energy_kept": 0.5,
    "residual_age_iterations": 3.5,
}
_JOIN = {
    "version": 1,
    "job": "ab" * 16,
    "rank": 1,
    "ranks": 2,
    "host": "h",
    "elements": 9,
    "value_bytes": 4.4,
    "staleness": 1,
    "compression": 0.99,
    "least_compression": 0.9,
}
_SETTING = {"number": 3, "from_iteration": 8, "samples": [3, 5], "compression": 0.98}


@decoder(
    "telemetry of a sparse training",
    lambda: [_JOIN, {"measured": [_REPORT, _REPORT], "forgotten": 0}, {"ok": True, "setting": _SETTING}],
    change=tree_or_bits,
)
def _telemetry(thing: Any, folder: Path) -> Prepared:
    from lastgood.sparse.control.controller import Controller, ControllerSettings, InForce
    from lastgood.sparse.control.telemetry import Join, read_join, read_setting, read_told
    from tests.fuzz.support.messages import framed, parsed

    def read() -> None:
        content = parsed(thing)
        if "ok" in content:
            setting = read_setting(content, 2, "it")
            if setting is not None:
                InForce(2).offer(setting)
        elif "measured" in content:
            measured, _ = read_told(content, Join(**_JOIN), "it")
            controller = Controller(ControllerSettings(elements=9, samples=64, starts=1), 2)
            for one in measured:
                controller.observe(one)
                controller.observe(one.model_copy(update={"worker": 0}))
            if not controller.silent():
                controller.problem()
        else:
            read_join(content, "it")

    return len(framed(thing)), read


_PROFILE = {
    "profile_version": 1,
    "wanted": {
        "workload": "w",
        "parameters": 9,
        "seed": 0,
        "compressor": "v16",
        "staleness": 1,
        "part_samples": 4096,
        "repeats": 1,
        "least_samples": 8,
        "most_samples": 64,
        "least_compression": 0.9,
        "most_compression": 0.99,
        "nodes": 2,
        "mbit_per_s": 100.0,
        "lambda_": 5.0,
        "g_scale": 1.0,
    },
    "baseline": {"losses": [1.0]},
    "probes": [{"samples": 8, "compression": 0.9, "losses": [1.5], "lag": 0.5, "steps": 3, "step_s": 0.1}],
    "surface": {
        "samples": [8, 64],
        "compressions": [0.9, 0.99],
        "lags": [[0, 1], [2, 3]],
        "uncertainties": [[0, 1]] * 2,
    },
}


@decoder("profile of a sparse training", lambda: [_PROFILE], change=tree_or_bits, share=0.5)
def _profile(thing: Any, folder: Path) -> Prepared:
    from lastgood.sparse.control.replay import read_surface

    content = text_of(thing)
    path = folder / "profile.json"
    path.write_bytes(content)

    def read() -> None:
        assert read_surface(path).lag(16, 0.95) >= 0

    return len(content), read
