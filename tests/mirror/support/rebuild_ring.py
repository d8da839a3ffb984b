"""Gradients out of a RoCE parser's messages, by NCCL's layout: the conversation and extractor in the simplest form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lastgood.mirror.generate.life import Collective, DdpLife
from lastgood.mirror.generate.traffic import RingTraffic, Wire, reduced
from lastgood.wire.nccl import messages, nccl_broadcast, nccl_layout
from lastgood.wire.ring import is_final
from tests.mirror.support.roce_messages import CAME, Found


@dataclass
class Slot:
    """A reduced bucket as far as it was found."""

    content: bytearray
    known: np.ndarray
    truth: bytes

    @property
    def complete(self) -> bool:
        return bool(self.known.all())


def flow_places(found: Found, traffic: RingTraffic) -> dict[tuple[int, int], int]:
    """Flow by (sending rank, channel)."""
    places = {}
    for index, flow in found.flows.items():
        number = (flow.detail["queue_pair"] - traffic.first_queue) // 2
        rank, channel = divmod(number, 64)
        assert flow.source == traffic.address(rank)
        assert flow.destination == traffic.address((rank + 1) % traffic.ranks)
        places[rank, channel] = index
    return places


def plan(collective: Collective, rank: int, ranks: int, wire: Wire) -> dict[int, list[tuple[int, int, bool]]]:
    """For each channel the messages of `rank`: begin and end in bytes, and whether they are the result."""
    options = {"channels": wire.channels, "version": wire.version, "protocol": wire.protocol}
    of_channel: dict[int, list[tuple[int, int, bool]]] = {}
    size = collective.parts[0].nbytes
    if collective.kind == "allreduce":
        element = collective.parts[0].itemsize
        layout = nccl_layout(size // element, element, ranks, buffer_bytes=wire.buffer_bytes, **options)
        for one in messages(layout, rank, protocol=wire.protocol, buffer_bytes=wire.buffer_bytes):
            end = one.start + one.elements
            final = is_final(ranks, one.send.step)
            of_channel.setdefault(one.send.chunk.channel, []).append((one.start * element, end * element, final))
    elif collective.kind == "broadcast":
        if rank != ranks - 1:
            for chunk in nccl_broadcast(size, ranks, buffer_bytes=wire.buffer_bytes, **options):
                place = (chunk.start, chunk.start + chunk.elements, True)
                of_channel.setdefault(chunk.channel, []).append(place)
    else:
        for _ in range(ranks - 1):
            of_channel.setdefault(0, []).append((0, size, True))
            if wire.protocol == "simple":
                of_channel[0].append((size, size, True))
    return of_channel


def rebuild(found: Found, life: DdpLife, traffic: RingTraffic) -> list[Slot]:
    """All results of all collectives but the all-gather, in order. Flows count until their first resynchronisation."""
    broken = {flow for flow, _ in found.resynced}
    next_message = dict.fromkeys(found.flows, 0)
    places = flow_places(found, traffic)
    slots = []
    for collective in life.collectives():
        truth = reduced(collective.parts, traffic.wire) if collective.kind == "allreduce" else collective.parts[0]
        slot = Slot(bytearray(truth.nbytes), np.zeros(truth.nbytes, bool), truth.tobytes())
        for (rank, channel), flow in places.items():
            if flow in broken:
                continue
            for begin, end, final in plan(collective, rank, traffic.ranks, traffic.wire).get(channel, []):
                number = next_message[flow]
                next_message[flow] = number + 1
                message = found.messages[flow].get(number)
                if message is None or not final:
                    continue
                unit = 8 if traffic.wire.protocol == "ll" else 1
                assert message.nbytes == -(-(end - begin) // unit) * unit, (collective.content, rank, number)
                came = np.frombuffer(message.known, np.uint8)[: end - begin] == CAME
                content = np.frombuffer(slot.content, np.uint8)[begin:end]
                content[came] = np.frombuffer(message.content, np.uint8)[: end - begin][came]
                slot.known[begin:end] |= came
        if collective.kind != "allgather":
            slots.append(slot)
    return slots


def right_where_known(slots: list[Slot]) -> Iterator[bool]:
    """For each slot whether everything that was found is right."""
    for slot in slots:
        content, truth = np.frombuffer(slot.content, np.uint8), np.frombuffer(slot.truth, np.uint8)
        yield bool((content == truth)[slot.known].all())
