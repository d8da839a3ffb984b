"""A shadow's state with simulated memory, disk and connections."""

from __future__ import annotations

from lastgood.gradients.shadow.actions import Apply, Check, Commit, Copy, DropSide, Open, Tell, Window
from lastgood.gradients.shadow.state import ShadowState

JOB = "a" * 32
LAYOUT = "b" * 64
SLOTS = 3
SHADOWS = 2
BUCKETS = {0: (0, 2), 1: (1, 3)}
RANKS = 2


class Slots:
    """What a receiver does for one bucket: windows of SLOTS iterations, floating until they are placed."""

    def __init__(self):
        self.first = None
        self.placed = False
        self.whole = {}

    def window(self, first):
        if not self.placed and self.first is not None and self.first > first:
            return False
        self.first, self.placed = first, True
        self.whole = {k: v for k, v in self.whole.items() if first <= k < first + SLOTS}
        return True

    def put(self, iteration, gradient):
        """True: held; None: it must wait (beyond the window); False: it is too old, or there already."""
        if self.first is None:
            self.first = iteration
        if iteration < self.first or iteration in self.whole:
            return False
        if iteration >= self.first + SLOTS:
            if self.placed:
                return None
            self.first = iteration - SLOTS + 1
            self.whole = {k: v for k, v in self.whole.items() if k >= self.first}
        self.whole[iteration] = gradient
        return True


class Shadow:
    """A state with the border around it: slots, values, side records, and what it said."""

    def __init__(self, number):
        self.number = number
        self.state = ShadowState(SLOTS)
        self.slots = {bucket: Slots() for bucket in BUCKETS[number]}
        self.values = {}
        self.staged = {}
        self.parked = []
        self.said = []
        self.sides = set()

    def flow(self):
        while outputs := self.state.take():
            for output in outputs:
                if isinstance(output, Tell):
                    self.say(output)
                elif isinstance(output, Open):
                    self.slots[output.bucket].placed = False
                elif isinstance(output, DropSide):
                    self.sides.discard(output.iteration)
                elif isinstance(output, Window):
                    slots = self.slots[output.bucket]
                    placed = slots.window(output.first)
                    if output.ask:
                        self.state.window_set(output.bucket, set(slots.whole) if placed else None)
                    else:
                        assert placed
        parked, self.parked = self.parked, []
        for bucket, iteration, gradient in parked:
            self.gradient(bucket, iteration, gradient)

    def say(self, output):
        self.said.append(output.message)

    def gradient(self, bucket, iteration, gradient):
        held = self.slots[bucket].put(iteration, gradient)
        if held is None:
            self.parked.append((bucket, iteration, gradient))
        elif held and iteration in self.slots[bucket].whole:
            self.state.received(bucket, iteration)
            self.flow()

    def work(self, world):
        """Do one piece of work, if there is one."""
        work = self.state.next_work()
        self.flow()
        if work is None:
            return False
        bucket = work.bucket
        if isinstance(work, Apply):
            assert self.state.declared or self.state._restoring is not None, "nothing is applied behind a fence"
            assert work.iteration in self.slots[bucket].whole, "only what is held is applied"
            if work.step.rule is not None:
                self.values[bucket] = (*self.values[bucket], self.slots[bucket].whole[work.iteration])
            world.check_applied(self, work.iteration)
        elif isinstance(work, Commit):
            self.values[bucket] = self.staged.pop(bucket)
        elif isinstance(work, Check):
            good = self.values[bucket] == world.truth(bucket, work.iteration)
            if not good:
                self.state.failed(work, "it differs")
                self.flow()
                return True
        else:
            assert isinstance(work, Copy)
            assert self.values[bucket] == world.truth(bucket, work.iteration), "a spill holds exactly its iteration"
        self.state.done(work)
        self.flow()
        return True
