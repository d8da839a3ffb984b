"""Real traffic of NCCL over sockets: every reduced gradient is in it, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
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
    """The sums of all-reduces of these sizes, one after another. Raises StopIteration's kin where none fits."""
    channels = len(flows) // RANKS
    at = dict.fromkeys(flows, 0)
    for size in sizes:
        for protocol in ("simple", "ll"):
            plans = {(rank, channel): expected(size // 4, rank, channel, channels, protocol) for rank, channel in flows}
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


@pytest.mark.parametrize("name", NAMES)
def test_every_reduced_gradient_is_rebuilt_to_the_bit(name):
    found, counters, truth, _ = parsed(name)
    assert not counters.get("lost_payload_bytes") and not counters.get("bad_flags")
    assert all(message.complete for message in found.all.values())

    def joined(step: int, bucket: list[str]) -> bytes:
        return b"".join(truth[f"grad.{step}.{parameter}"].tobytes() for parameter in bucket)

    wanted = [joined(0, PARAMETERS)] + [joined(step, bucket) for step in range(1, 4) for bucket in REBUILT]
    flows = [found.of(index) for index in found.flows]
    channels = len(flows) // RANKS
    keys = [(rank, channel) for rank in range(RANKS) for channel in range(channels)]
    # Both ranks have one address here, so only the content says whose flow is whose.
    for order in permutations(flows):
        try:
            sums = list(reduced(dict(zip(keys, order, strict=True)), [len(one) for one in wanted]))
        except LookupError:
            continue
        if sums == wanted:
            return
    pytest.fail("no assignment of flows to ranks and channels gives the gradients")


def test_weights_and_buffers_are_in_the_broadcasts():
    found, _, truth, _ = parsed("simple-1ch")
    order = [name for name in truth if name.startswith("init.")]
    parameters = b"".join(truth[f"init.{name}"].tobytes() for name in PARAMETERS)
    buffers = b"".join(truth[name].tobytes() for name in order if "running" in name)
    contents: list[Any] = [bytes(message.content) for message in found.all.values()]
    assert parameters + buffers in contents
