"""One trainer of ring_egress.py: reduces a tensor by gloo's ring, by Lastgood's, and by Lastgood's through a switch.

ring_egress_rank.py PLAN.json RANK

It prints, for each round, the bytes that left this host's eth0 for each all-reduce by each way, and the sum's digest.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from lastgood.gradients.layout.layout import GradientLayout, plan_layout
from lastgood.wire.records import DType
from lastgood.wire.ring_comm import Place, RingComm
from lastgood.wire.ring_link import listen_ring

TIMEOUT_S = 120.0
_SETTLE_S = 0.3
"""Until the last acknowledgements have gone out."""


def declared_layout(elements: int, ranks: int, shadows: int) -> GradientLayout:
    """One vector, in buckets of about 1 MiB, as many parameters as buckets."""
    size = 1 << 18
    counts = [size] * (elements // size) + ([elements % size] if elements % size else [])
    named = [(f"p{number}", (count,), "float32") for number, count in enumerate(counts)]
    return plan_layout(named, {}, ranks=ranks, shadows=shadows, bucket_bytes=4 * size)


def places_of(layout: GradientLayout) -> list[Place]:
    """The vector's parameters, one after another."""
    places, start = [], 0
    for one in layout.parameters:
        places.append(Place(start, one.nbytes, one.bucket, one.offset))
        start += one.nbytes
    return places


class Ways:
    """The three ways, each open until the end."""

    def __init__(self, plan: dict[str, Any], rank: int) -> None:
        self._ranks, self._elements = plan["ranks"], plan["elements"]
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{plan['meet']}",
            rank=rank,
            world_size=self._ranks,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        layout = declared_layout(self._elements, self._ranks, plan["shadows"])
        self._iteration = 0
        self._rings = {}
        for way in ("ring", "switch"):
            host, _, port = plan["listen"][way][rank].rpartition(":")
            comm = RingComm(
                rank,
                self._ranks,
                listener=listen_ring(host, int(port)),
                next_address=plan["next"][way][rank],
                token=bytes.fromhex(plan["token"]),
                job=plan["job"],
                epoch=1,
                layout=layout.digest,
                timeout_s=TIMEOUT_S,
            )
            self._rings[way] = (comm, comm.plan(self._elements, DType.float32, places_of(layout)))
        self._part = torch.randn(self._elements, generator=torch.Generator().manual_seed(rank))
        self._sum = torch.empty_like(self._part)

    def reduce(self, way: str) -> None:
        """One all-reduce of this rank's part."""
        self._sum.copy_(self._part)
        if way == "gloo":
            dist.all_reduce(self._sum)
            return
        comm, plan = self._rings[way]
        self._iteration += 1
        comm.all_reduce(plan, self._sum.data_ptr(), self._iteration)
        comm.end(self._iteration)

    def digest(self) -> str:
        """Of the last sum."""
        return hashlib.sha256(self._sum.numpy().tobytes()).hexdigest()

    def close(self) -> None:
        """End all of them."""
        dist.barrier()
        for comm, _ in self._rings.values():
            comm.close()
        dist.destroy_process_group()


def sent_bytes() -> int:
    """What has left this host's network interface, headers and acknowledgements included."""
    return int(psutil.net_io_counters(pernic=True)["eth0"].bytes_sent)


def main() -> None:
    plan, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(1)
    ways = Ways(plan, rank)
    for way in ("gloo", "ring", "switch"):
        ways.reduce(way)
    rows = []
    for number, way in plan["order"]:
        dist.barrier()
        time.sleep(_SETTLE_S)
        before, begin = sent_bytes(), time.perf_counter()
        for _ in range(plan["repeats"]):
            ways.reduce(way)
        seconds = time.perf_counter() - begin
        time.sleep(_SETTLE_S)
        egress = (sent_bytes() - before) / plan["repeats"]
        row = {"round": number, "way": way, "egress_bytes": egress, "seconds": seconds / plan["repeats"]}
        rows.append({**row, "digest": ways.digest()})
    ways.close()
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
