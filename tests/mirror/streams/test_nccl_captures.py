"""Real traffic of NCCL over sockets: every reduced gradient is in it, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lastgood.mirror.streams.nccl_sockets import NcclSocketParser
from lastgood.wire.nccl import messages, nccl_layout
from tests.mirror.support.captures import captures
from tests.mirror.support.frames import Message, Messages, read, read_pcap

RANKS = 2
STEPS = 4
PARAMETERS = ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias", "5.weight", "5.bias"]
REBUILT = [["5.bias", "5.weight", "3.bias", "3.weight"], ["1.weight", "1.bias", "0.bias", "0.weight"]]
NAMES = ["simple-1ch", "ll-1ch", "simple-2ch-4sockets", "default-proto"]


def parsed(name: str) -> tuple[Messages, dict[str, int], dict[str, np.ndarray], Path]:
    folder = captures("nccl-socket-captures")
    parser = NcclSocketParser()
    found = read(parser, read_pcap(folder / f"{name}.pcap.xz"), 1000)
    return found, parser.counters(), dict(np.load(folder / f"{name}.rank0.npz")), folder


def expected(elements: int, rank: int, channel: int, channels: int, protocol: str) -> list[tuple[int, int, int, bool]]:
    """Begin, end, bytes of the message, and whether it is final, for each message of one rank's channel."""
    layout = nccl_layout(elements, 4, RANKS, channels=channels, version="2.28", protocol=protocol)
    found = []
    for one in messages(layout, rank, protocol=protocol):
        if one.send.chunk.channel == channel:
            begin, nbytes = 4 * one.start, 4 * one.elements
            on_wire = -(-nbytes // 8) * 8 if protocol == "ll" else nbytes
            found.append((begin, begin + nbytes, on_wire, one.send.step >= RANKS - 1))
    return found


def find(flow: list[Message], at: int, wanted: list[int]) -> int | None:
    """Where messages of these sizes stand, from `at` on."""
    if not wanted:
        return at
    sizes = [message.nbytes for message in flow]
    return next((place for place in range(at, len(flow)) if sizes[place : place + len(wanted)] == wanted), None)


def reduced(flows: dict[tuple[int, int], list[Message]], sizes: list[int]) -> Iterator[bytes]:
    """The sums of all-reduces of these sizes, one after another. Raises LookupError where nothing fits."""
    channels = len(flows) // RANKS
    at = dict.fromkeys(flows, 0)
    for size in sizes:
        # Small buffers go over fewer channels.
        for protocol, used in ((protocol, used) for protocol in ("simple", "ll") for used in range(channels, 0, -1)):
            plans = {(rank, channel): expected(size // 4, rank, channel, used, protocol) for rank, channel in flows}
            places = {key: find(flows[key], at[key], [one[2] for one in plan]) for key, plan in plans.items()}
            if None not in places.values():
                break
        else:
            raise LookupError(size)
        buffer, known = bytearray(size), bytearray(size)
        for key, plan in plans.items():
            begin_at = places[key]
            assert begin_at is not None
            for (begin, end, _, final), message in zip(plan, flows[key][begin_at:], strict=False):
                if final:
                    buffer[begin:end] = message.content[: end - begin]
                    known[begin:end] = b"\1" * (end - begin)
            at[key] = begin_at + len(plan)
        assert all(known)
        yield bytes(buffer)


def test_flows_are_named_by_what_opened_them():
    found, counters, _, _ = parsed("simple-2ch-4sockets")
    assert counters["flows"] == 4 and not found.resynced
    assert all("nothing that is known" in text for text in found.refused), "the rendezvous is none of NCCL's data"


def sums_of(found: Messages, sizes: list[int]) -> Iterator[list[bytes]]:
    """All sums, for each assignment of flows to ranks and channels that fits: both ranks have one address here."""
    flows = [found.of(index) for index in found.flows]
    keys = [(rank, channel) for rank in range(RANKS) for channel in range(len(flows) // RANKS)]
    for order in permutations(flows):
        with suppress(LookupError):
            yield list(reduced(dict(zip(keys, order, strict=True)), sizes))


def gradients(truth: dict[str, np.ndarray]) -> list[bytes]:
    """The true content of each all-reduce."""
    buckets = [(0, PARAMETERS), *((step, bucket) for step in range(1, STEPS) for bucket in REBUILT)]
    return [b"".join(truth[f"grad.{step}.{name}"].tobytes() for name in bucket) for step, bucket in buckets]


@pytest.mark.parametrize("name", NAMES)
def test_every_reduced_gradient_is_rebuilt_to_the_bit(name):
    found, counters, truth, _ = parsed(name)
    assert not counters.get("lost_payload_bytes") and not counters.get("bad_flags")
    assert all(message.complete for message in found.all.values())
    wanted = gradients(truth)
    assert wanted in list(sums_of(found, [len(one) for one in wanted]))


def test_weights_and_buffers_are_in_the_broadcasts():
    found, _, truth, _ = parsed("simple-1ch")
    order = [name for name in truth if name.startswith("init.")]
    parameters = b"".join(truth[f"init.{name}"].tobytes() for name in PARAMETERS)
    buffers = b"".join(truth[name].tobytes() for name in order if "running" in name)
    contents: list[Any] = [bytes(message.content) for message in found.all.values()]
    assert parameters + buffers in contents


def broadcast_weights(found: Messages, nbytes: int) -> set[bytes]:
    """What may be the first `nbytes` of a broadcast buffer: some large messages of one flow, then of another one."""
    large = [[bytes(m.content) for m in found.of(index) if m.nbytes > 1024][:3] for index in found.flows]
    starts = {b"".join(one[:count]) for one in large for count in range(4)}
    return {(one + other)[:nbytes] for one in starts for other in starts}


@pytest.mark.parametrize("name", NAMES)
def test_four_steps_of_sgd_with_momentum_give_the_weights_to_the_bit(name):
    """From the broadcast weights and the sums alone. CUDA's kernel contracts the last multiplication and addition."""
    found, _, truth, _ = parsed(name)
    sizes = [truth[f"init.{parameter}"].nbytes for parameter in PARAMETERS]
    borders = np.cumsum(sizes).tolist()
    start = b"".join(truth[f"init.{parameter}"].tobytes() for parameter in PARAMETERS)
    assert start in broadcast_weights(found, len(start))
    weights = {
        parameter: np.frombuffer(start[end - size : end], np.float32)
        for parameter, size, end in zip(PARAMETERS, sizes, borders, strict=True)
    }
    wanted = gradients(truth)
    sums = next(one for one in sums_of(found, [len(one) for one in wanted]) if one == wanted)
    momentum: dict[str, np.ndarray] = {}
    for step in range(STEPS):
        buckets = [PARAMETERS] if step == 0 else REBUILT
        for bucket in buckets:
            rest = np.frombuffer(sums.pop(0), np.float32)
            for parameter in bucket:
                gradient, rest = np.split(rest, [weights[parameter].size])
                held = momentum.get(parameter)
                momentum[parameter] = gradient if held is None else held * np.float32(0.9) + gradient
                exact = weights[parameter].astype(np.float64) - np.float64(np.float32(0.1)) * momentum[parameter]
                weights[parameter] = exact.astype(np.float32)
                assert np.array_equal(weights[parameter], truth[f"after.{step}.{parameter}"].ravel()), (step, parameter)
