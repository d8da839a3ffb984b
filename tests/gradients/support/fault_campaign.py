"""Seeded schedules of bad days: a small training under Checkmate, faults at random moments, and a restore in the end.

Whatever happens, what is restored must be, to the bit, an undisturbed run's state at that step (torch alone computes
it), or nothing is restored, where the schedule allows that. What was called durable must come back unless a shadow was
lost.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lastgood.errors import CheckpointError, CorruptCheckpoint, LastgoodError, NoCheckpoint
from lastgood.gradients.protocol.client import ShadowClient
from lastgood.gradients.protocol.connection import connect_shadow
from lastgood.gradients.protocol.messages import GREETING, Hello
from lastgood.gradients.switch.faults import FaultPlan
from lastgood.ports import free_ports
from lastgood.wire.records import Record, RecordKind, pack_header
from tests.gradients.support.fault_net import Net
from tests.gradients.support.fault_shadow import ForkedShadow
from tests.gradients.support.fault_training import RANKS, Life, Oracle, on_all_ranks, ranks_in_threads, restore_afresh

SHADOWS = 2
TOKEN = b"a token of thirty-two bytes long"
PATIENCE_S = 0.3
_WAIT_S = 60.0
_FIRST_FAULT = 3
"""Steps that are let through and waited for, so that there is something to lose."""


# -- schedules ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """At a step, and a moment later: what happens, where, and a number that says how much."""

    step: int
    after_s: float
    what: str
    rank: int | None
    shadow: int | None
    size: float
    seed: int


@dataclass(frozen=True)
class LifePlan:
    """One life of the training, and how it ends."""

    steps: int
    faults: tuple[Fault, ...]
    end: str
    """``kill``: all ranks at once; ``rank``: one, then the other; ``settled``: when all saves have settled; ``zombie``:
    the next life begins while this one trains on."""
    end_step: int
    end_after_s: float
    kills: tuple[int, ...]
    """Shadows that die together with the trainers."""


@dataclass(frozen=True)
class Schedule:
    """All that a seed decides."""

    seed: int
    kind: str
    policy: str
    slots: int
    verify_every: int
    spill_every: int
    side_limit_bytes: int | None
    pace_s: float
    lives: tuple[LifePlan, ...]
    save_every: int
    """Steps; the last one of a life is saved as well."""

    @property
    def shadows_lost(self) -> bool:
        """Whether any shadow is killed."""
        return any(life.kills or any(fault.what == "kill" for fault in life.faults) for life in self.lives)


_FAULTS = {
    "break": 3, "cut": 3, "slow": 4, "loss": 2, "duplicate": 1, "reorder": 1, "late": 1, "corrupt": 2, "truncate": 2,
    "flip": 2, "garbage": 2, "token": 1, "stale": 1, "kill": 2, "pause": 1,
}  # fmt: skip


def make_schedule(seed: int) -> Schedule:
    """The schedule of a seed."""
    chance = random.Random(f"checkmate {seed}")
    lives, step = [], 0
    for number in range(chance.choice((1, 1, 2))):
        step += chance.randint(8, 16)
        first = step - 5 if number else _FIRST_FAULT
        faults = []
        for _ in range(chance.randint(1, 4)):
            what = chance.choices(list(_FAULTS), list(_FAULTS.values()))[0]
            faults.append(
                Fault(
                    chance.randint(first, step),
                    chance.uniform(0, 0.006),
                    what,
                    chance.choice((0, 1, None)),
                    chance.choice((0, 1, None) if what in ("cut", "slow") else (0, 1)),
                    chance.random(),
                    chance.randrange(1 << 30),
                )
            )
        end = chance.choices(("kill", "rank", "settled", "zombie"), (4, 2, 2, 1))[0]
        lives.append(
            LifePlan(
                step,
                tuple(sorted(faults, key=lambda fault: (fault.step, fault.after_s))),
                end,
                step if end == "settled" else chance.randint(first, step),
                chance.uniform(0, 0.01),
                () if chance.random() < 0.8 else tuple(chance.sample(range(SHADOWS), chance.choice((1, 1, 2)))),
            )
        )
    return Schedule(
        seed,
        chance.choice(("sgd", "adamw", "adamw clipped")),
        chance.choice(("block", "block", "queue", "drop")),
        chance.randint(2, 4),
        chance.choice((0, 1, 3)),
        chance.choice((0, 2, 3)),
        chance.choice((None,) * 9 + (4000,)),
        chance.choice((0.0, 0.001, 0.003)),
        tuple(lives),
        chance.choice((1, 1, 1, 2, 3)),
    )


# -- running one -------------------------------------------------------------------------------------------------------


@dataclass
class Report:
    """What a schedule came to."""

    restored: int | None
    why: str = ""
    counts: Counter[str] = field(default_factory=Counter)


class Bed:
    """Shadows, the network before them, and what happens to both."""

    def __init__(self, schedule: Schedule, folder: Path) -> None:
        self.schedule, self.folder = schedule, folder
        self.knobs: dict[str, Any] = {"slots": schedule.slots, "timeout_s": 10.0}
        if schedule.side_limit_bytes is not None:
            self.knobs["side_limit_bytes"] = schedule.side_limit_bytes
        # At ports that they find free again when they are replaced.
        made = [self._make(number, port) for number, port in enumerate(free_ports(SHADOWS))]
        self.shadows = [shadow.wait_ready() for shadow in made]
        self.dead: set[int] = set()
        self.died_s = float("-inf")
        """When the newest one died."""
        self.nets: list[Net] = []
        (folder / "token").touch(mode=0o600)
        (folder / "token").write_bytes(TOKEN)

    def _make(self, number: int, port: int) -> ForkedShadow:
        spills = self.folder / f"spills-{number}" if self.schedule.spill_every else None
        return ForkedShadow(number, TOKEN, spills, self.knobs, port)

    def options(self, addresses: list[str]) -> dict[str, Any]:
        """Of a checkpointer that finds shadows at these addresses."""
        return {
            "shadows": addresses,
            "token_file": str(self.folder / "token"),
            "policy": self.schedule.policy,
            "verify_every": self.schedule.verify_every,
            "spill_every": self.schedule.spill_every,
            "bucket_bytes": 256,
            "patience_s": PATIENCE_S,
            "timeout_s": 20.0,
            "queue_bytes": 1 << 20,
        }

    @property
    def addresses(self) -> list[str]:
        return [f"127.0.0.1:{shadow.port}" for shadow in self.shadows]

    def kill(self, number: int) -> None:
        """SIGKILL."""
        if number not in self.dead:
            self.shadows[number].kill()
            self.dead.add(number)
            self.died_s = time.perf_counter()
            for net in self.nets:
                net.shadow_down(number)

    def replace(self) -> None:
        """New processes in the places of dead ones, with nothing in their memory."""
        for number in sorted(self.dead):
            self.shadows[number] = self._make(number, self.shadows[number].port).wait_ready()
            for net in self.nets:
                net.shadow_up(number)
        self.dead.clear()

    def end(self) -> None:
        for net in self.nets:
            net.crash()
        for shadow in self.shadows:
            shadow.kill()

    # -- faults ----------------------------------------------------------------------------------------------------

    def strike(self, fault: Fault, net: Net) -> None:
        """Let a fault happen; those that last are over when this returns, or with `heal`."""
        chance = random.Random(fault.seed)
        rank, shadow = fault.rank or 0, fault.shadow or 0
        what, rate = fault.what, 0.05 + 0.4 * fault.size
        if what == "break":
            net.break_off(rank, shadow, int(4000 * fault.size))
        elif what == "cut":
            net.cut(fault.rank, fault.shadow)
            time.sleep(chance.choice((0.02, 0.1, 1.5 * PATIENCE_S)))
            net.heal()
        elif what == "slow":
            net.slow(fault.rank, fault.shadow, 0.02 * fault.size)
        elif what == "late":
            net.fault(fault.rank, shadow, FaultPlan(fault.seed, delay=rate, delay_s=0.01))
        elif what in ("loss", "duplicate", "reorder", "corrupt", "truncate"):
            net.fault(fault.rank, shadow, FaultPlan(fault.seed, **{what: rate}))
        elif what == "flip":
            net.flip(rank, shadow, chance.choice(("up", "down")))
        elif what == "pause":
            self._pause(shadow, 1.3 * PATIENCE_S * fault.size)
        elif what == "kill":
            self.kill(shadow)
            if fault.size < 0.8:
                time.sleep(0.1 * fault.size)
                self.replace()
        else:
            self._intrude(what, shadow, chance)

    def _pause(self, shadow: int, seconds: float) -> None:
        if shadow not in self.dead:
            pid = self.shadows[shadow].process.pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            try:
                time.sleep(seconds)
            finally:
                os.kill(pid, signal.SIGCONT)

    def _intrude(self, what: str, shadow: int, chance: random.Random) -> None:
        """Somebody else comes to a shadow's port; nothing of it is believed."""
        if shadow in self.dead:
            return
        address = self.addresses[shadow]
        if what == "token":
            try:
                connect_shadow(address, b"x" * 32, Hello(role="asker"), _WAIT_S)
            except CheckpointError:
                return
            raise AssertionError("a shadow believed who does not know the token")
        if what == "garbage":
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", self.shadows[shadow].port)) as one,
            ):
                one.sendall(chance.choice((b"", GREETING)) + chance.randbytes(chance.choice((1, 100, 5000))))
            return
        # One that knows the token, and an old epoch: it must not get a word in. It sends records all the same.
        with ShadowClient(address, TOKEN, _WAIT_S) as client:
            status = client.status()
        if status.job is None or status.layout is None:
            return
        hello = Hello(role="data", job=status.job, epoch=status.epoch - 1, rank=0, layout=status.layout)
        try:
            wire, _ = connect_shadow(address, TOKEN, hello, _WAIT_S)
        except CheckpointError:
            return
        job = int.from_bytes(bytes.fromhex(status.job)[:8], "little")
        with contextlib.suppress(CheckpointError):
            wire.write("a lie", pack_header(Record(RecordKind.END, job, status.epoch - 1, 0, 1 << 40)))
        wire.close()
        raise AssertionError("a shadow took a data connection of an incarnation that is over")


def _until(condition: Any, life: Life) -> None:
    """Wait for a life to get somewhere, or to end."""
    deadline = time.monotonic() + _WAIT_S
    while not condition() and not life.over.is_set():
        assert time.monotonic() < deadline, f"waited {_WAIT_S} s at step {life.step}"
        time.sleep(0.0005)


def run_schedule(schedule: Schedule, oracle: Oracle, folder: Path) -> Report:
    """Run a schedule. Raises AssertionError where what it says of itself does not hold."""
    folder.mkdir(parents=True)
    bed = Bed(schedule, folder)
    try:
        with ranks_in_threads():
            return _run(schedule, oracle, bed)
    finally:
        bed.end()
        shutil.rmtree(folder, ignore_errors=True)


def _run(schedule: Schedule, oracle: Oracle, bed: Bed) -> Report:
    run: list[tuple[int, int]] = []
    former: list[tuple[int, int]] = []
    counts: Counter[str] = Counter()
    job = bed.folder / "job"
    restored: int | None = None
    in_memory = spilled = 0
    why = ""
    for number, plan in enumerate(schedule.lives):
        net = Net([shadow.port for shadow in bed.shadows], RANKS, schedule.seed + number)
        bed.nets.append(net)
        began_s = time.perf_counter()
        life = Life(schedule.kind, number, [bed.options(net.addresses(rank)) for rank in range(RANKS)], job)
        life.start(restore=restored is not None)
        assert life.step == (restored or 0)
        # What this life has made is told from what the one before went on to make by the data that it saw.
        former = run
        run = [*(run if restored else []), (number, life.step + 1)]
        start = life.step
        life.train(plan.steps, schedule.pace_s, schedule.save_every)
        _live(plan, life, net, bed, start)
        durable, spilled = life.durable(bed.died_s), max(spilled, life.spilled())
        counts.update({name: count for name, count in life.facts().items() if name in ("torn", "diverged", "cut_off")})
        if plan.end != "zombie":
            _end(plan, life, net)
        for shadow in plan.kills:
            bed.kill(shadow)
        dead = bool(bed.dead)
        bed.replace()
        counts.update(fault.what for fault in plan.faults)
        try:
            restored, digests = restore_afresh(schedule.kind, bed.options(bed.addresses), job)
            why = ""
        except (CorruptCheckpoint, NoCheckpoint) as error:
            restored, digests, why = None, [], str(error)
        if plan.end == "zombie":
            _end(plan, life, net)
        # What memory held is gone with one shadow, unless all were whole again behind that; and where trainers went on
        # without a shadow, the others have left behind what it still has.
        counts["went on without a shadow"] += bool(life.lost)
        # And a seed behind a step that was not saved takes the place of what was, until the next saved one.
        jumped = schedule.save_every > 1 and life.floor > durable
        counts["jumped by a seed"] += jumped
        # And no shadow holds more iterations than it has slots for, if none of them could be given back.
        overrun = life.complete - durable >= schedule.slots
        counts["overrun"] += overrun
        gone = dead or bool(life.lost) or jumped or overrun
        in_memory = 0 if gone else max(durable, in_memory if bed.died_s < began_s else 0)
        promised = max(in_memory, spilled)
        if restored is None:
            lossy = gone or bed.died_s > began_s or schedule.side_limit_bytes is not None
            lossy |= durable < start + 2  # on a busy machine all its steps may be over before the first one is whole
            assert lossy, f"nothing can be given back, though no shadow was lost: {why}"
            assert not promised, f"step {promised} was durable, and nothing can be given back: {why}"
            former, run = [], []
            counts["began anew"] += 1
            continue
        assert restored >= promised, f"step {promised} was durable, and {restored} came back"
        expected = oracle.digests(schedule.kind, run, restored)
        if digests != expected and restored < run[-1][1]:
            expected = oracle.digests(schedule.kind, former, restored)  # what this life began with, and nothing newer
        assert digests == expected, f"step {restored} came back as another state than that of an undisturbed run"
        counts["lost steps"] += life.step - restored
    return Report(restored, why, counts)


def _live(plan: LifePlan, life: Life, net: Net, bed: Bed, start: int) -> None:
    """Let a life meet its faults until its end comes."""
    _until(lambda: life.durable(float("-inf")) >= start + 2 or bed.schedule.side_limit_bytes is not None, life)
    moments = [(fault.step, fault.after_s, fault) for fault in plan.faults]
    for step, after_s, fault in moments:
        if (step, after_s) > (plan.end_step, plan.end_after_s):
            break
        _until(lambda step=step: life.step >= step, life)
        time.sleep(after_s)
        bed.strike(fault, net)
    if plan.end == "settled":
        net.heal()
        _until(lambda: False, life)
        with contextlib.suppress(LastgoodError):
            on_all_ranks(lambda rank: life.checkpointers[rank].drain(_WAIT_S), life.meeting)
    else:
        _until(lambda: life.step >= plan.end_step, life)
        time.sleep(plan.end_after_s)


def _end(plan: LifePlan, life: Life, net: Net) -> None:
    """Kill the trainers: nothing that they had not sent is sent any more."""
    if plan.end == "rank":
        life.crash(net, plan.steps % RANKS)
        time.sleep(plan.end_after_s)
    life.crash(net, None)
    life.killed.set()
    life.meeting.end()
    life.join()
    life.bury()
