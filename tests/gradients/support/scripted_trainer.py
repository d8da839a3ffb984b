"""A trainer without DDP or tap: parameters, a torch optimizer, and records sent by the native sender.

The parameters here are the oracle. `main` trains until it is killed, and writes down what it was at every step.
"""

import hashlib
import json
import threading
import time
from pathlib import Path

import torch

from lastgood import _native
from lastgood.gradients.layout.entries import Side
from lastgood.gradients.layout.layout import plan_layout
from lastgood.gradients.protocol import messages
from lastgood.gradients.protocol.client import fence, fetch, fetch_side
from lastgood.gradients.protocol.connection import connect_shadow
from lastgood.gradients.protocol.messages import Complete, Declare, Hello, Seed, Step, Verify
from lastgood.gradients.protocol.payload import send_stream
from lastgood.gradients.shadow.memory import tensor_bytes
from lastgood.optim.rule import UpdateRule
from lastgood.optim.spec import OptimizerSpec
from lastgood.tokens import read_token
from lastgood.wire.records import DType

JOB = "0123456789abcdef" * 2
SHAPES = [(7, 5), (11,), (), (3, 4, 2), (64,), (0, 3), (33, 3)]
WAIT_S = 60.0


def make_parameters(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in SHAPES]


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(
        [{"params": parameters[:3], "lr": 1e-2}, {"params": parameters[3:], "weight_decay": 0.1}], lr=3e-3
    ),
}


class Trainer:
    """`ranks` senders to each shadow in one process; rank 0's control connection, and one for each other rank."""

    def __init__(self, addresses, token, kind="adamw", ranks=2, bucket_bytes=300, job=JOB):
        self.addresses, self.token, self.ranks, self.job = list(addresses), token, ranks, job
        self.parameters = make_parameters()
        self.optimizer = OPTIMIZERS[kind](self.parameters)
        named = [(f"p{i}", tuple(p.shape), "float32") for i, p in enumerate(self.parameters)]
        spec = OptimizerSpec.of(self.optimizer).to_data()
        self.layout = plan_layout(named, spec, ranks=ranks, shadows=len(addresses), bucket_bytes=bucket_bytes)
        self.iteration = 0
        self.heard = [[] for _ in addresses]
        self.change = threading.Condition()
        self.controls = {}
        self.senders = {}
        self.incarnation = 0

    # -- connections

    def fence(self):
        statuses = fence(self.addresses, self.token, job=self.job, timeout_s=WAIT_S)
        self.incarnation = statuses[0].epoch
        return statuses

    def connect(self, shadow, adopt=None, data=True):
        for rank in range(self.ranks):
            layout = None if rank == 0 else self.layout.digest
            hello = Hello(role="control", job=self.job, epoch=self.incarnation, rank=rank, layout=layout)
            wire, _ = connect_shadow(self.addresses[shadow], self.token, hello, WAIT_S)
            self.controls[shadow, rank] = wire
            if rank == 0:
                self.say(shadow, Declare(layout=self.layout.to_data(), adopt=adopt))
                threading.Thread(target=self._listen, args=(shadow, wire), daemon=True).start()
                self.wait(shadow, lambda one: one.kind in ("welcome", "refused"), "the answer to Declare")
        if data:
            for rank in range(self.ranks):
                self.connect_data(shadow, rank)

    def connect_data(self, shadow, rank):
        hello = Hello(role="data", job=self.job, epoch=self.incarnation, rank=rank, layout=self.layout.digest)
        wire, _ = connect_shadow(self.addresses[shadow], self.token, hello, WAIT_S)
        job = int.from_bytes(bytes.fromhex(self.job)[:8], "little")
        self.senders[shadow, rank] = _native.Sender(wire._socket.fileno(), job, self.incarnation, rank, wire.other)
        wire.close()

    def start(self, adopt=None):
        for shadow in range(len(self.addresses)):
            self.connect(shadow, adopt)
        if adopt is None:
            self.seed_all(self.iteration)

    def _listen(self, shadow, wire):
        wire.timeout_s = 3600.0
        try:
            while True:
                message = messages.parse_message(wire.receive_message("a word"), wire.other)
                with self.change:
                    self.heard[shadow].append(message)
                    self.change.notify_all()
        except Exception:
            return

    def wait(self, shadow, met, what, seconds=WAIT_S):
        with self.change:
            found = self.change.wait_for(lambda: [one for one in self.heard[shadow] if met(one)], seconds)
            assert found, f"waited for {what} of shadow {shadow}; heard {self.heard[shadow][-5:]}"
            return found

    def of_kind(self, shadow, kind):
        with self.change:
            return [one for one in self.heard[shadow] if one.kind == kind]

    def wait_have(self, shadow, iteration):
        self.wait(shadow, lambda one: one.kind == "have" and one.iteration >= iteration, f"have {iteration}")

    def wait_applied(self, iteration):
        for shadow in range(len(self.addresses)):
            self.wait(shadow, lambda one: one.kind == "applied" and one.iteration >= iteration, f"applied {iteration}")

    def say(self, shadow, message, rank=0):
        self.controls[shadow, rank].send_message(**message.content())

    def close(self):
        for sender in self.senders.values():
            sender.abort()
            sender.join(5.0)
        for wire in self.controls.values():
            wire.abort()
            wire.close()

    # -- seeds

    def state_entries(self, bucket):
        entries = []
        for index in self.layout.buckets[bucket].parameters:
            parameter = self.parameters[index]
            tensors = {"parameter": parameter.detach(), **self.optimizer.state.get(parameter, {})}
            for key in ["parameter", *sorted(key for key in tensors if key != "parameter")]:
                tensor = tensors[key]
                if tensor is None:
                    continue
                entry = messages.Entry(
                    parameter=index,
                    key=key,
                    dtype=str(tensor.dtype).removeprefix("torch."),
                    shape=tuple(tensor.shape),
                    nbytes=tensor.numel() * tensor.element_size(),
                )
                entries.append((entry, tensor))
        return entries

    def seed(self, bucket, iteration, wait=True):
        shadow = self.layout.shadow_of(bucket)
        held = self.state_entries(bucket)
        self.say(shadow, Seed(bucket=bucket, iteration=iteration, entries=tuple(entry for entry, _ in held)))
        send_stream(self.controls[shadow, 0], iteration, [tensor_bytes(tensor) for _, tensor in held])
        if wait:
            self.wait(
                shadow, lambda m: m.kind == "seeded" and m.bucket == bucket and m.iteration == iteration, "seeded"
            )

    def seed_all(self, iteration):
        for bucket in range(len(self.layout.buckets)):
            self.seed(bucket, iteration)

    def checksum(self, bucket):
        checksum = 0
        for _, tensor in self.state_entries(bucket):
            if tensor.numel():
                checksum = _native.crc32c(tensor_bytes(tensor), checksum)
        return checksum

    # -- training

    def make_gradients(self, iteration):
        generator = torch.Generator().manual_seed(1000 + iteration)
        for parameter in self.parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)

    def send_gradients(self, iteration, skip=(), end=True):
        """Each bucket in pieces, taken in turn by the ranks; (bucket, piece) in `skip` are lost."""
        for number, bucket in enumerate(self.layout.buckets):
            flat = torch.cat([self.parameters[index].grad.reshape(-1) for index in bucket.parameters])
            shadow = self.layout.shadow_of(number)
            cut = max(1, flat.numel() // 3)
            for piece, begin in enumerate(range(0, flat.numel(), cut)):
                if (number, piece) in skip:
                    continue
                part = flat[begin : begin + cut]
                sender = self.senders[shadow, piece % self.ranks]
                nbytes = part.numel() * 4
                assert sender.put(
                    iteration,
                    number,
                    DType.float32,
                    begin * 4,
                    part.data_ptr(),
                    nbytes,
                    borrowed=False,
                    timeout_s=WAIT_S,
                )
        if end:
            self.send_end(iteration)

    def send_end(self, iteration):
        for sender in self.senders.values():
            assert sender.end(iteration, timeout_s=WAIT_S)

    def side_content(self, rank, iteration):
        return f"side of rank {rank} at {iteration}, {self.digest()}".encode()

    def send_side(self, rank, iteration, step):
        content = self.side_content(rank, iteration)
        shadow = rank % len(self.addresses)
        layout = {"iteration": iteration}
        self.say(shadow, Side(rank=rank, iteration=iteration, step=step, layout=layout, nbytes=len(content)), rank)
        send_stream(self.controls[shadow, rank], iteration, [memoryview(content)])

    def send_step(self, iteration, rule, saved=True, spill=(), keep=None):
        step = Step(iteration=iteration, rule=rule, saved=saved, step=iteration * 10 if saved else None)
        for shadow in range(len(self.addresses)):
            asks = {"spill": True, "keep": keep} if shadow in spill else {}
            self.say(shadow, step.model_copy(update=asks))

    def update(self, *, skip_update=False):
        """The next update of the parameters here; the rule that shadows need for it."""
        if skip_update:
            return None
        rule = UpdateRule.of(self.optimizer).to_data()
        self.optimizer.step()
        return rule

    def iterate(self, *, lost=(), saved=True, spill=(), keep=None, skip_update=False, complete=True, to=None):
        """One whole iteration; returns once it is complete everywhere. `spill`: these shadows make it durable."""
        self.iteration += 1
        self.make_gradients(self.iteration)
        self.send_gradients(self.iteration, lost)
        rule = self.update(skip_update=skip_update)
        self.send_step(self.iteration, rule, saved, spill, keep)
        if saved:
            for rank in range(self.ranks):
                self.send_side(rank, self.iteration, self.iteration * 10)
        if complete:
            self.complete(to)

    def complete(self, shadows=None, lost=()):
        for shadow in range(len(self.addresses)) if shadows is None else shadows:
            self.wait_have(shadow, self.iteration)
        for shadow in range(len(self.addresses)):
            self.say(shadow, Complete(iteration=self.iteration, lost=tuple(lost)))

    def verify(self, bucket):
        self.say(
            self.layout.shadow_of(bucket),
            Verify(iteration=self.iteration, bucket=bucket, checksum=self.checksum(bucket)),
        )

    # -- restore

    def digest(self):
        hasher = hashlib.sha256()
        for parameter in self.parameters:
            hasher.update(tensor_bytes(parameter.detach()))
            state = self.optimizer.state.get(parameter, {})
            for key in sorted(state):
                if state[key] is not None:
                    hasher.update(key.encode() + bytes(tensor_bytes(state[key])))
        return hasher.hexdigest()

    def load(self, choice):
        """Become what the shadows give back. Returns the side records of all ranks."""
        fetched = {}
        lock = threading.Lock()

        def take(entry):
            tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
            with lock:
                fetched[entry.parameter, entry.key] = tensor
            return tensor_bytes(tensor)

        known = {"job": self.job, "incarnation": self.incarnation, "timeout_s": WAIT_S}
        fetch(self.addresses, self.token, choice, take=take, **known)
        sides = [fetch_side(self.addresses, self.token, choice, rank=rank, **known) for rank in range(self.ranks)]
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters):
                parameter.copy_(fetched.pop((index, "parameter")))
                self.optimizer.state.pop(parameter, None)
        for (index, key), tensor in fetched.items():
            self.optimizer.state[self.parameters[index]][key] = tensor
        self.iteration = choice.iteration
        return sides


def main(folder, addresses):
    """Train until killed; write each step's digest down before it is sent, so that whatever is held is known."""
    trainer = Trainer(addresses, read_token(Path(folder) / "token"))
    trainer.fence()
    trainer.start()
    with (Path(folder) / "digests.jsonl").open("a") as file:
        while True:
            trainer.iterate(complete=False)
            file.write(json.dumps([trainer.iteration, trainer.digest()]) + "\n")
            file.flush()
            trainer.complete()
            time.sleep(0.001)
