"""What switch mode costs the trainers on their links: bytes leaving each trainer, against gloo's plain ring.

Trainers are the nodes of a testbed (`lastgood testbed`; needs root); the switch and the shadows' receivers run on the
machine itself. Counted are the bytes of each node's own network interface.

    python benchmarks/ring_egress.py --ranks 2 --size 64MiB
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness import Comparison, Limit, Report, cannot, command_line, interleaved, judge, main, say
from ring_egress_rank import declared_layout

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from lastgood.cluster.testbed.testbed import Testbed, why_no_testbed
from lastgood.errors import HostError
from lastgood.ports import free_ports
from lastgood.units import parse_bytes
from tests.gradients.support.receiving_shadow import ReceivingShadow

WAYS = ("gloo", "ring", "switch")
GOAL = 1.02
_PORTS = {"ring": 21000, "switch": 22000}
_MEET_PORT = 23000
_RANK_TIMEOUT_S = 900.0


class RunningSwitch:
    """`lastgood shadow switch` on the machine itself, and its last counters."""

    def __init__(self, folder: Path, token: str, links: list[str], shadows: list[str]) -> None:
        path = folder / "token"
        path.touch(mode=0o600)
        path.write_text(token)
        words = [sys.executable, "-c", "from lastgood.cli import main; main()"]
        words += ["shadow", "switch", "--token-file", str(path)]
        words += [word for link in links for word in ("--link", link)]
        words += [word for shadow in shadows for word in ("--shadow", shadow)]
        self.counters: dict[str, Any] = {}
        self._process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        for _ in links:
            line = self._process.stderr.readline()
            if "goes to" not in line:
                raise HostError(f"this machine: the switch did not start: {line}{self._process.stderr.read()}")

    def __enter__(self) -> RunningSwitch:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            out, said = self._process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            out, said = self._process.communicate()
        if said:
            say(said.strip())
        if out:
            self.counters = json.loads(out.splitlines()[-1])


def measure_on(
    bed: Testbed, folder: Path, options: dict[str, Any]
) -> tuple[list[list[dict[str, Any]]], dict[str, Any]]:
    """Rows of every rank, and the switch's counters. `options`: elements, shadows, repeats, order."""
    nodes = bed.node_names
    ranks = len(nodes)
    layout = declared_layout(options["elements"], ranks, options["shadows"])
    token, job = secrets.token_hex(16), secrets.token_hex(16)
    addresses = [bed.address(node) for node in nodes]
    listen = {way: [f"{address}:{port}" for address in addresses] for way, port in _PORTS.items()}
    ports = free_ports(len(nodes), bed.host_address)
    following = {
        "ring": [listen["ring"][(rank + 1) % ranks] for rank in range(ranks)],
        "switch": [f"{bed.host_address}:{port}" for port in ports],
    }
    links = [f"{following['switch'][rank]}={listen['switch'][(rank + 1) % ranks]}" for rank in range(ranks)]
    plan = {**options, "ranks": ranks, "token": token.encode().hex(), "job": job, "listen": listen, "next": following}
    (folder / "plan.json").write_text(json.dumps({**plan, "meet": f"{addresses[0]}:{_MEET_PORT}"}))
    script = Path(__file__).with_name("ring_egress_rank.py")

    def run(rank: int) -> list[dict[str, Any]]:
        words = [sys.executable, str(script), str(folder / "plan.json"), str(rank)]
        done = bed.remote().run(nodes[rank], words, _RANK_TIMEOUT_S)
        if done.rc != 0:
            raise HostError(f"{nodes[rank]}: rank {rank} failed: {done.stderr.decode(errors='replace')[-2000:]}")
        found: list[dict[str, Any]] = json.loads(done.stdout)
        return found

    with contextlib.ExitStack() as stack:
        shadows = [ReceivingShadow(shadow, layout, token.encode(), job) for shadow in range(options["shadows"])]
        for shadow in shadows:
            stack.callback(shadow.close)
        switch = stack.enter_context(RunningSwitch(folder, token, links, [shadow.address for shadow in shadows]))
        with ThreadPoolExecutor(ranks) as pool:
            rows = list(pool.map(run, range(ranks)))
        last = options["repeats"] * sum(way != "gloo" for _, way in options["order"]) + 2
        whole = all(shadow.wait(last, 30.0) for shadow in shadows)
    return rows, {**switch.counters, "last_iteration_whole": whole}


def measure(options: argparse.Namespace, folder: Path) -> Report:
    reason = why_no_testbed()
    if reason is not None:
        cannot(reason)
    elements = (1 << 20 if options.quick else parse_bytes(options.size)) // 4
    order = list(interleaved(WAYS, options.rounds, options.seed))
    settings = {"elements": elements, "shadows": options.shadows, "repeats": options.repeats, "order": order}
    with Testbed.up(options.ranks, name=f"e{os.getpid() % 10**8}", guarded=True) as bed:
        rows, counters = measure_on(bed, folder, settings)
    report = Report(settings={**settings, "ranks": options.ranks}, results={"rows": rows, "switch": counters})
    ideal = 2 * (options.ranks - 1) / options.ranks * elements * 4

    def values(way: str, key: str) -> list[float]:
        """The worst rank of each round."""
        return [
            max(row[key] for row in rank_rows)
            for rank_rows in zip(*([row for row in rank if row["way"] == way] for rank in rows), strict=True)
        ]

    gloo = max(values("gloo", "egress_bytes"))
    for way in ("ring", "switch"):
        found = max(values(way, "egress_bytes"))
        report.limits.append(
            Limit(
                f"egress of a trainer, {way}, over gloo's",
                "ratio",
                found / gloo,
                GOAL,
                judge(found / gloo, at_most=GOAL),
                f"{found / 1e6:.2f} MB of {gloo / 1e6:.2f} MB; 2(N-1)/N of the tensor is {ideal / 1e6:.2f} MB",
            )
        )
    for way in ("ring", "switch"):
        rate = [elements * 4 / seconds / 1e6 for seconds in values(way, "seconds")]
        theirs = [elements * 4 / seconds / 1e6 for seconds in values("gloo", "seconds")]
        report.comparisons.append(Comparison(f"all-reduce, {way}", "MB/s", "ours", rate, "gloo", theirs))
    digests = {row["digest"] for rank in rows for row in rank if row["way"] != "gloo"}
    report.notes.append(f"sums equal on all ranks and by both ways: {'yes' if len(digests) == 1 else 'NO'}")
    report.notes.append(
        f"the shadows hold the last iteration whole: {'yes' if counters['last_iteration_whole'] else 'NO'}"
    )
    report.notes.append("all nodes share this machine's processors: the rates say little about a real network")
    return report


if __name__ == "__main__":
    parser = command_line(__doc__, rounds=5)
    parser.add_argument("--ranks", type=int, default=2, help="trainers (default: 2)")
    parser.add_argument("--shadows", type=int, default=2, help="shadows (default: 2)")
    parser.add_argument("--size", default="64MiB", help="of the tensor (default: 64MiB)")
    parser.add_argument("--repeats", type=int, default=5, help="all-reduces in a round (default: 5)")
    main(parser, measure, __file__)
