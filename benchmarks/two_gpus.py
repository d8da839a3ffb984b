"""All that wants two GPUs of one host, in one command: tests and benchmarks, each in a process with its own time limit.

    python benchmarks/two_gpus.py --out FOLDER                  # all, about eleven minutes on two H200
    python benchmarks/two_gpus.py --out FOLDER --only 1,3,4,2   # its halves, of six and seven minutes
    python benchmarks/two_gpus.py --out FOLDER --only 5,6

What a step has said (LOG), found (JSON) and whether it passed is in FOLDER as soon as it has ended: one that fails,
hangs or is cut off by the budget takes no other with it. Without two CUDA devices the ranks train on CPUs over Gloo, at
small sizes: that shows that the command works, and no more. Exit codes: 0 all passed, 1 something did not.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("ddp", "fsdp2", "sharded-optimizer", "zero1", "zero3")
ORDER = (1, 3, 4, 2, 5, 6)
BUDGET_S = 840.0
LEAST_S = 15.0
"""A step with less time left than this is not begun; steps that are known to take longer have a number of their own."""
GRACE_S = 10.0
"""For a step to write what it has found, once it was interrupted."""
IN_OWN_NETWORK, FACTS = "--in-own-network", "--facts"
"""What this script is told when it starts itself."""
_TAIL = 1500
_NEW_NETWORK = 0x40000000
_SET_FLAGS, _UP = 0x8914, 0x1 | 0x40


@dataclass(frozen=True)
class Step:
    """One process."""

    name: str
    words: Sequence[str]
    limit_s: float
    result: Path
    """What it writes: a report of pytest, the JSON of a benchmark, or a record of `lastgood dcp`."""
    kind: Literal["tests", "benchmark", "dcp"]
    least_s: float = LEAST_S
    """It is not begun with less time left: it would be cut off, and show nothing."""
    together: bool = False
    """Whether it runs at once with the neighbours that do so too."""


@dataclass(frozen=True)
class Item:
    """A part of the work."""

    number: int
    title: str
    steps: Sequence[Step]


@dataclass
class Done:
    """What became of a step."""

    step: Step
    rc: int | None = None
    """None: it was not begun, or ended at its limit."""
    wall_s: float = 0.0
    cut: str = ""
    """Why it has no exit code."""
    found: Any = None
    rows: list[str] = field(default_factory=list)
    """What the table says of it."""
    tail: str = ""
    """The end of its log, if it did not pass."""

    @property
    def passed(self) -> bool:
        return self.rc == 0


# -- what there is to do -----------------------------------------------------------------------------------------------


class Plan:
    """The items, for a machine with two GPUs or for one without."""

    def __init__(self, folder: Path, logs: Path, *, gpus: bool, splits_network: bool) -> None:
        self._folder = folder
        self._logs = logs
        self._gpus = gpus
        self._splits = splits_network
        self._device = "cuda" if gpus else "cpu"

    def _takes(self, seconds: float) -> float:
        """What a step takes on two H200; a small one on CPUs is short."""
        return seconds if self._gpus else LEAST_S

    def items(self) -> dict[int, Item]:
        """By number."""
        made = (
            Item(1, "a rank is killed, all go on to the bit (PCcheck)", list(self._killed())),
            Item(2, "Checkmate's tap and shadows", list(self._checkmate())),
            Item(3, "FlowCheck on live NCCL over sockets", list(self._flowcheck())),
            Item(4, "StellaTrain's engine on CUDA parameters", list(self._sparse())),
            Item(5, "Gemini's gaps", list(self._gemini())),
            Item(6, "LastgoodWriter behind DCP, FSDP2", list(self._dcp())),
        )
        return {item.number: item for item in made}

    def _tests(self, name: str, limit_s: float, *words: str, marks: str = "gpu", own_network: bool = False) -> Step:
        report = self._folder / f"{name}.xml"
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--durations=5", "-m", marks]
        command += [f"--junitxml={report}", f"--basetemp={self._folder / name}", *words]
        if own_network:
            command = [sys.executable, __file__, IN_OWN_NETWORK, *command]
        return Step(name, command, limit_s, report, "tests", together=True)

    def _killed(self) -> Iterator[Step]:
        test = "tests/checkpointers/ranks/test_killed_ranks.py::test_a_killed_job_goes_on_to_the_bit"
        for kind in KINDS:
            yield self._tests(f"killed-{kind}", 200, f"{test}[{kind}-{self._device}]", marks="")
        yield self._tests(
            "others",
            200,
            "tests/checkpointers/ranks/test_resharding.py",
            "tests/checkpointers/test_protocol.py",
            "tests/checkpointers/copies/test_on_cuda.py",
            "-k",
            "parts_on_cuda or two_devices or collective_of_nccl",
        )

    def _flowcheck(self) -> Iterator[Step]:
        live = "tests/mirror/node/test_live_nccl.py"
        yield self._tests("flowcheck-between", 120, "tests/mirror/node/test_between.py", marks="")
        if not self._splits:  # all would capture each other's frames
            whole = self._tests("flowcheck-live", 400, live)
            yield Step(whole.name, whole.words, whole.limit_s, whole.result, "tests")
            return
        for kind in ("sgd", "adamw"):
            for protocol in ("simple", "ll"):
                one = ("-k", f"{kind}-{protocol}")
                yield self._tests(f"flowcheck-{kind}-{protocol}", 150, live, *one, own_network=True)

    def _sparse(self) -> Iterator[Step]:
        yield self._tests("sparse-on-cuda", 120, "tests/sparse/test_host_copies.py", marks="gpu" if self._gpus else "")
        yield self._benchmark("sparse-overlap", 80, "sparse_overlap.py")

    def _gemini(self) -> Iterator[Step]:
        test = "tests/checkpointers/gemini/test_ranks.py"
        yield self._tests("gemini-tests", 120, test, "-k", "nccl or comes_back_on_cuda")
        how = ("--systems", "gemini", "--batches", "96", "--rounds", "3")
        yield self._benchmark("gemini-cost", 72, "data_parallel.py", *how)

    def _checkmate(self) -> Iterator[Step]:
        yield self._tests("checkmate-tests", 150, "tests/checkpointers/checkmate/test_ranks.py", "-k", "two_devices")
        how = ("--systems", "checkmate", "--batches", "32,96", "--rounds", "3")
        yield self._benchmark("checkmate-cost", 90, "data_parallel.py", *how)

    def _benchmark(self, name: str, takes_s: float, script: str, *how: str) -> Step:
        result = self._folder / f"{name}.json"
        command = [sys.executable, f"benchmarks/{script}", "--out", str(result), *how]
        if not self._gpus:  # of an option given twice the last counts
            command += ["--quick", "--batches", "4", "--rounds", "1"]
        takes_s = self._takes(takes_s)
        return Step(name, command, 60 + 2 * takes_s, result, "benchmark", takes_s)

    def _dcp(self) -> Iterator[Step]:
        model = ["vit-base", "--state", "full"] if self._gpus else ["vit-base-2MB"]
        times = ["--iterations", "4", "--warmup", "1"] if self._gpus else ["--iterations", "1", "--warmup", "0"]
        backend = "nccl" if self._gpus else "gloo"
        sides = {"lastgood": ["lastgood"], "torch-4": ["disk", "--thread-count", "4"], "torch-1": ["disk"]}
        for turn, name in enumerate((*sides, *reversed(sides))):
            record = self._folder / f"dcp-{turn}-{name}.json"
            uri = own_scratch() / str(turn)
            uri.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-m", "lastgood", "dcp", "save-and-load", "--uri", str(uri), "--model", *model]
            command += ["--backend", backend, "--fsdp", "2", "--world-size", "2", "--storage", *sides[name], *times]
            command += ["--record", str(record), "--logs", str(self._logs)]
            yield Step(f"dcp-{name}-{turn}", command, 100, record, "dcp", self._takes(45))


# -- running it --------------------------------------------------------------------------------------------------------


class Running:
    """A step's process, and its log."""

    def __init__(self, step: Step, log: Path, limit_s: float) -> None:
        self.step = step
        self.log = log
        self._output: IO[bytes] = log.open("wb")
        self._began = time.monotonic()
        self._deadline = self._began + limit_s
        self._limit_s = limit_s
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            step.words,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )

    def ended(self) -> Done | None:
        """What became of it; None while it may still run."""
        rc, cut = self._process.poll(), ""
        if rc is None:
            if time.monotonic() < self._deadline:
                return None
            cut = f"ended after {self._limit_s:.0f} s"
        self.end()
        return Done(self.step, rc, time.monotonic() - self._began, cut)

    def end(self) -> None:
        """It, and what it has started and left."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)
        self._output.close()


def run_steps(steps: Sequence[Step], out: Path, number: int, deadline: float) -> Iterator[Done]:
    """Each as it ends: those that go together at once, then the others one after another."""
    groups = [[step for step in steps if step.together], *([step] for step in steps if not step.together)]
    for group in groups:
        running: list[Running] = []
        try:
            for step in group:
                left_s = deadline - time.monotonic()
                if left_s < step.least_s:
                    cut = f"not begun: {max(0.0, left_s):.0f} s were left, and it takes {step.least_s:.0f}"
                    yield Done(step, cut=cut, rows=[cut])
                    continue
                running.append(Running(step, out / f"item-{number}-{step.name}.log", min(step.limit_s, left_s)))
            while running:
                for one in list(running):
                    if (done := one.ended()) is not None:
                        running.remove(one)
                        look_at(done)
                        if not done.passed:
                            done.tail = one.log.read_text(errors="replace")[-_TAIL:]
                        yield done
                time.sleep(0.1)
        finally:
            for one in running:
                one.end()


def look_at(done: Done) -> None:
    """Read what a step has written."""
    try:
        if done.step.kind == "tests":
            done.found = tests_of(done.step.result)
        else:
            done.found = json.loads(done.step.result.read_text())
        done.rows = {"tests": rows_of_tests, "benchmark": rows_of_benchmark, "dcp": rows_of_dcp}[done.step.kind](done)
    except (OSError, ValueError, ElementTree.ParseError, KeyError) as error:
        done.rows = [f"no result: {type(error).__name__}"]
    if done.cut:
        done.rows.insert(0, done.cut)
    elif done.rc != 0:
        done.rows.insert(0, f"exit code {done.rc}")


def tests_of(report: Path) -> list[dict[str, Any]]:
    """Name, outcome and seconds of each test."""
    found = []
    for case in ElementTree.parse(report).iter("testcase"):
        outcome, said = "passed", ""
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                outcome, said = {"failure": "failed"}.get(child.tag, child.tag), (child.get("message") or "")[:2000]
        seconds = float(case.get("time", 0))
        found.append({"name": case.get("name"), "outcome": outcome, "seconds": seconds, "said": said})
    return found


def rows_of_tests(done: Done) -> list[str]:
    counts: dict[str, int] = {}
    for test in done.found:
        counts[test["outcome"]] = counts.get(test["outcome"], 0) + 1
    rows = [", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) or "no test ran"]
    return rows + [
        f"{test['outcome']} {test['name']}: {test['said'].splitlines()[0][:100] if test['said'] else ''}"
        for test in done.found
        if test["outcome"] != "passed"
    ]


def rows_of_benchmark(done: Done) -> list[str]:
    rows = []
    for one in done.found["comparisons"]:
        by_round, goal = one["round_ratios"], one["goal"]
        rows.append(
            f"{one['what']}: {one['our_median']:.3g} against {one['their_median']:.3g} {one['unit']}, "
            f"ratio {one['ratio_of_medians']:.3f} (by round {min(by_round):.3f}..{max(by_round):.3f})"
        )
        if goal is not None:
            rows[-1] += f", goal {goal}: {one['verdict']}"
    if "overlap" in done.found["results"]:
        return rows + list(done.found["notes"])
    for name, ranks in done.found["results"].items():
        first, gaps = ranks[0], ranks[0]["facts"].get("profiled_gaps_s")
        durable = sum(outcome == "durable" for rank in ranks for outcome in rank["outcomes"])
        equal = all(rank["restored_equal"] for rank in ranks)
        rows.append(
            f"{name}: {durable} of {sum(len(rank['outcomes']) for rank in ranks)} saves durable, "
            f"restored {'equal' if equal else 'DIFFERENT'} in {max(rank['restore_s'] for rank in ranks):.2f} s"
        )
        if gaps is not None:
            busy = first["facts"]["communication_s"]
            rows.append(f"{name}: {len(gaps)} gaps of {[round(gap, 4) for gap in gaps]} s, communication {busy}")
    return rows


def rows_of_dcp(done: Done) -> list[str]:
    spec = done.found["spec"]
    rows = []
    for operation in ("save", "load"):
        rates = [
            min(rank["nbytes"] / rank["total_s"] for rank in one["ranks"]) / (1 << 20)
            for one in done.found["iterations"]
            if one["operation"] == operation and not one["warmup"]
        ]
        low, middle, high = min(rates), statistics.median(rates), max(rates)
        rows.append(f"{operation} by {spec['storage']}: {middle:.0f} ({low:.0f}..{high:.0f}) MiB/s a rank")
    equal = all(one["equal"] is not False for one in done.found["iterations"])
    rows[-1] += f", loads {'equal' if equal else 'DIFFERENT'}, durable: {done.found['durable']}"
    return rows + [f"not to be compared: {reason}" for reason in done.found["invalid"]]


# -- networks ----------------------------------------------------------------------------------------------------------


def in_own_network(words: Sequence[str]) -> None:
    """Become `words`, with a loopback that nobody else's frames pass. Raises OSError where that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_NETWORK) != 0:
        raise OSError(ctypes.get_errno(), "a network of its own")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        fcntl.ioctl(asking, _SET_FLAGS, struct.pack("16sh22x", b"lo", _UP))
    os.execvp(words[0], list(words))


def networks_can_be_split() -> bool:
    """Whether processes of this machine can have a network each."""
    probe = "import socket; socket.create_server(('127.0.0.1', 0)).close()"
    words = [sys.executable, __file__, IN_OWN_NETWORK, sys.executable, "-c", probe]
    return subprocess.run(words, capture_output=True, timeout=60, check=False).returncode == 0


# -- the command -------------------------------------------------------------------------------------------------------


def facts() -> dict[str, Any]:
    """What this ran on."""
    import torch

    from lastgood.experiments.machine.facts import machine_label, where_run

    cuda = torch.cuda.is_available()
    return {
        "machine": machine_label(),
        "where": {**where_run(ROOT).model_dump(mode="json"), "scratch_path": ""},
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "devices": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
        "cores": len(os.sched_getaffinity(0)),
    }


def asked_facts() -> dict[str, Any]:
    """`facts`, of a process that ends, so that this one stays without CUDA."""
    words = [sys.executable, __file__, FACTS]
    found = subprocess.run(words, stdout=subprocess.PIPE, timeout=120, check=True).stdout
    document: dict[str, Any] = json.loads(found)
    return document


def own_scratch() -> Path:
    """On the disk that is measured."""
    return ROOT / "scratch" / f"two-gpus-{os.getpid()}"


def write(path: Path, document: Any, names: Mapping[str, str]) -> None:
    """As JSON, with names in place of folders."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(named(json.dumps(document, indent=1, default=str), names) + "\n")
    temporary.replace(path)


def names_of(scratch: Path, out: Path) -> dict[str, str]:
    """What results say in place of folders of this machine, which are nobody's business."""
    names = {scratch: "SCRATCH", own_scratch(): "DISK", out: "FOLDER"}
    return {**{str(path): name for path, name in names.items()}, f"{ROOT}/": "", sys.executable: "python"}


def named(text: str, names: Mapping[str, str]) -> str:
    for place in sorted(names, key=len, reverse=True):  # one may lie in another
        text = text.replace(place, names[place])
    return text


def as_json(done: Done) -> dict[str, Any]:
    step = done.step
    return {
        "name": step.name,
        "command": " ".join(step.words),
        "passed": done.passed,
        "rc": done.rc,
        "cut": done.cut,
        "wall_s": round(done.wall_s, 1),
        "rows": done.rows,
        "tail": done.tail,
        "found": done.found,
    }


def table(number: int, title: str, steps: Sequence[Done]) -> str:
    """For people."""
    lines = [f"{number}. {title}"]
    for done in steps:
        lines.append(f"   {'passed' if done.passed else 'FAILED'} {done.step.name} ({done.wall_s:.0f} s)")
        lines += [f"          {row}" for row in (*done.rows, *done.tail.splitlines())]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for all that is found")
    parser.add_argument("--only", default=",".join(map(str, ORDER)), help=f"items, of {','.join(map(str, ORDER))}")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help=f"seconds for all (default: {BUDGET_S:g})")
    options = parser.parse_args()
    deadline = time.monotonic() + options.budget_s
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, so that nothing is left running
    wanted = {int(word) for word in options.only.split(",")}
    if not wanted <= set(ORDER):
        parser.error(f"--only {options.only}: items are {', '.join(map(str, sorted(ORDER)))}")
    out: Path = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    machine = asked_facts()
    gpus = len(machine["devices"]) >= 2
    scratch = Path(tempfile.mkdtemp(prefix="lastgood-two-gpus-"))
    summaries: list[str] = []
    failed = False
    try:
        names = names_of(scratch, out)
        write(out / "machine.json", machine, names)
        plan = Plan(scratch, out / "dcp-logs", gpus=gpus, splits_network=gpus and networks_can_be_split())
        items = plan.items()
        for number in ORDER:
            if number not in wanted:
                continue
            item, steps = items[number], []
            for done in run_steps(item.steps, out, number, deadline):
                steps.append(done)
                failed = failed or not done.passed
                written = {"item": number, "title": item.title, "gpus": gpus, "steps": [as_json(one) for one in steps]}
                write(out / f"item-{number}.json", written, names)
                print(f"{'passed' if done.passed else 'FAILED'} {done.step.name} {done.wall_s:.0f} s", flush=True)
            summaries.append(named(table(number, item.title, steps), names))
            (out / "summary.txt").write_text("\n".join(summaries) + "\n")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.rmtree(own_scratch(), ignore_errors=True)
    if not gpus:
        summaries.append("no two CUDA devices: on CPUs over Gloo, which says nothing of GPUs")
    print("\n".join(summaries))
    return int(failed)


if __name__ == "__main__":
    if sys.argv[1:2] == [IN_OWN_NETWORK]:
        in_own_network(sys.argv[2:])
    if sys.argv[1:] == [FACTS]:
        print(json.dumps(facts(), default=str))
        sys.exit(0)
    sys.exit(main())
