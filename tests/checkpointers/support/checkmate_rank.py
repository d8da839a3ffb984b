"""A rank that trains under Checkmate. Run as: checkmate_rank.py; spoken to as reshard_rank.py is."""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lastgood.checkpointers.checkmate.system import Checkmate
from lastgood.errors import LastgoodError
from lastgood.gradients.link.shadow_link import ShadowLink as Link
from lastgood.gradients.tap.ddp_hook import checkmate_hook
from lastgood.processes import die_with_parent, keep_stdout
from lastgood.state import RngState, seed_everything, state_digest

WAIT_S = 120


def make_model(device="cpu"):
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Linear(37, 53),
        torch.nn.BatchNorm1d(53),
        torch.nn.Tanh(),
        torch.nn.Linear(53, 31),
        torch.nn.Linear(31, 5),
    ).to(device)


def make_optimizer(kind, model):
    parameters = list(model.parameters())
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)
    if kind == "adamw fused":
        return torch.optim.AdamW(parameters, lr=1e-2, fused=True)
    groups = [{"params": parameters[:4], "lr": 1e-2}, {"params": parameters[4:], "weight_decay": 0.1}]
    return torch.optim.AdamW(groups, lr=3e-3)


class Training:
    """What differs between ranks (noise, BatchNorm's running means before they are broadcast) is in the state."""

    def __init__(
        self,
        rank,
        world,
        optimizer="adamw",
        clip=None,
        accumulate=1,
        view=False,
        scaled=False,
        device="cpu",
        meddle=None,
    ):
        self.rank, self.device = rank, device
        self.clip, self.accumulate, self.meddle = clip, accumulate, meddle
        self.module = make_model(device)
        self.model = self.module
        if world > 1 or dist.is_initialized():
            self.model = DistributedDataParallel(self.module, bucket_cap_mb=0.005, gradient_as_bucket_view=view)
        self.optimizer = make_optimizer(optimizer, self.module)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, gamma=0.8)
        self.plain = {"step": 0}
        self.state = {
            "model": self.module,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "plain": self.plain,
            "rng": RngState(),
        }
        self.scaler = None
        if scaled:
            self.scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=4)
            self.state["scaler"] = self.scaler
        seed_everything(100 + rank)

    def step(self, checkpointer=None):
        step = self.plain["step"]
        for part in range(self.accumulate):
            data = torch.Generator().manual_seed(1000 * step + 10 * part + self.rank)
            inputs = torch.randn(6, 37, generator=data).to(self.device) + 0.1 * torch.rand(1).to(self.device)
            last = part == self.accumulate - 1
            if last or self.model is self.module:
                loss = (self.model(inputs) - 1).square().mean()
                self._scaled(loss, step).backward()
            else:
                with self.model.no_sync():
                    loss = (self.model(inputs) - 1).square().mean()
                    self._scaled(loss, step).backward()
        if step == self.meddle:
            for parameter in self.module.parameters():
                parameter.grad.mul_(2)
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.clip is not None:
            clip = torch.nn.utils.clip_grad_norm_ if checkpointer is None else checkpointer.clip_grad_norm_
            clip(self.module.parameters(), self.clip)
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.plain["step"] += 1
        return float(loss.detach()).hex()

    def _scaled(self, loss, step):
        if self.scaler is None:
            return loss
        # An overflow now and then: that step is skipped.
        return self.scaler.scale(loss * (float("inf") if step % 5 == 3 else 1.0))


def train(
    rank, world, steps, knobs=None, directory=None, restore=False, register="watch", again=(), unsaved=(), **made
):
    """Train to `steps`, under Checkmate where knobs are given: losses by step, digests, and what became of saves.

    The steps of `again` are saved twice, with nothing trained between; those of `unsaved` are not.
    """
    training = Training(rank, world, **made)
    if knobs is None:
        losses = {number: training.step() for number in range(1, steps + 1)}
        return {"losses": losses, "digest": state_digest(training.state)}
    checkpointer = Checkmate(directory, **knobs)
    if register == "watch":
        checkpointer.watch(training.model)
    elif register == "hook":
        training.model.register_comm_hook(checkpointer.tap, checkmate_hook)
    restored = checkpointer.restore(training.state) if restore else 0
    checkpointer.start(training.state)
    losses = {}
    checkpointer.events_kept = None
    for number in range(restored + 1, steps + 1):
        if made.get("meddle") == number - 1:
            checkpointer.drain(WAIT_S)  # what is held may count as failed if the next one tears before that is said
        losses[number] = training.step(checkpointer)
        for _ in range(1 + (number in again) - (number in unsaved)):
            checkpointer.save(number)
    checkpointer.drain(WAIT_S)
    facts = checkpointer.storage_facts()
    checkpointer.close()
    return {
        "restored": restored,
        "losses": losses,
        "digest": state_digest(training.state),
        "outcomes": [event.outcome.value for event in checkpointer.events],
        "errors": [event.error for event in checkpointer.events if event.error],
        "bytes": [event.bytes_written for event in checkpointer.events],
        "facts": facts,
    }


def train_until_killed(rank, world, knobs, directory, most, restore=False, **made):
    """Train and save, at a pace that lets a test kill it anywhere, `most` steps at most; and wait for the kill."""
    training = Training(rank, world, **made)
    checkpointer = Checkmate(directory, **knobs)
    checkpointer.watch(training.model)
    restored = checkpointer.restore(training.state) if restore else 0
    checkpointer.start(training.state)
    for number in range(restored + 1, most + 1):
        training.step(checkpointer)
        checkpointer.save(number)
        time.sleep(0.01)
    time.sleep(600)  # its SIGKILL comes before


def train_with_late_data(rank, world, knobs, directory, stop, late_s):
    """Train and save until a file is there. Rank 1 connects anew for its gradients `late_s` late: others come first."""
    connect, made = Link._connect_data, []

    def connect_late(link):
        if rank == 1 and link.shadow in made:
            time.sleep(late_s)
        made.append(link.shadow)
        return connect(link)

    Link._connect_data = connect_late
    torch.manual_seed(7)
    layers = [torch.nn.Linear(500, 500, bias=False) for _ in range(8)]  # more in some steps than sockets swallow
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    checkpointer = Checkmate(directory, **knobs)
    checkpointer.watch(model)
    checkpointer.start({"model": model.module, "optimizer": optimizer})
    number, going = 0, True
    while going:
        number += 1
        model(torch.ones(1, 500)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.save(number)
        ends = torch.tensor([int(Path(stop).exists())])
        dist.all_reduce(ends)
        going = not ends.item()
        time.sleep(0.01)
    checkpointer.drain(WAIT_S)
    outcomes = [event.outcome.value for event in checkpointer.events]
    checkpointer.close()
    return {"steps": number, "outcomes": outcomes}


def restore_only(rank, world, knobs, directory, **made):
    training = Training(rank, world, **made)
    step = Checkmate(directory, **knobs).restore(training.state)
    return {"step": step, "digest": state_digest(training.state)}


def restore_unlike(rank, world, knobs, directory):
    """One rank's state lacks a part: what each says, and whether it has changed anything."""
    training = Training(rank, world)
    if rank == 1:
        del training.state["plain"]
    before = state_digest(training.state)
    try:
        Checkmate(directory, **knobs).restore(training.state)
    except LastgoodError as error:
        return {"said": f"{type(error).__name__}: {error}", "changed": state_digest(training.state) != before}
    return None


def apart(rank, world, knobs, directory, steps, left_out=None, restore=False):
    """Ranks that share nothing, not even their parameters' number; rank 1's step `left_out` updates one less."""
    torch.manual_seed(rank)
    model = torch.nn.Sequential(*(torch.nn.Linear(9, 9) for _ in range(1 + rank)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plain = {"step": 0}
    state = {"model": model, "optimizer": optimizer, "plain": plain}
    checkpointer = Checkmate(directory, **knobs)
    if restore:
        checkpointer.restore(state)
    checkpointer.start(state)
    for number in range(plain["step"] + 1, steps + 1):
        model(torch.full((3, 9), float(number))).square().mean().backward()
        if (rank, number) == (1, left_out):
            model[1].bias.grad = None
        optimizer.step()
        optimizer.zero_grad()
        plain["step"] = number
        checkpointer.save(number)
        dist.barrier()
    checkpointer.drain(WAIT_S)
    answer = {"digest": state_digest(state)}
    answer["outcomes"] = [event.outcome.value for event in checkpointer.events]
    answer["errors"] = [event.error for event in checkpointer.events if event.error]
    checkpointer.close()
    return answer


class Detour(torch.nn.Module):
    """In some steps its layer gets no gradient, on no rank."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(31, 31)
        self.taken = False

    def forward(self, inputs):
        return inputs + self.layer(inputs) if self.taken else inputs


def sharded(rank, world, knobs, directory, steps, restore=False):
    """FSDP2: every rank has its own shards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = make_model()
    detour = Detour()
    model.insert(4, detour)
    mesh = init_device_mesh("cpu", (world,))
    for layer in (model[0], model[3], detour, model[5]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plain = {"step": 0}
    state = {"model": model, "optimizer": optimizer, "plain": plain, "rng": RngState()}
    seed_everything(100 + rank)
    checkpointer = None
    restored = 0
    if knobs is not None:
        checkpointer = Checkmate(directory, **knobs)
        restored = checkpointer.restore(state) if restore else 0
        checkpointer.start(state)
    losses = {}
    for number in range(restored + 1, steps + 1):
        data = torch.Generator().manual_seed(1000 * number + rank)
        detour.taken = number % 3 == 1
        loss = (model(torch.randn(6, 37, generator=data) + 0.1 * torch.rand(1)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        plain["step"] = number
        losses[number] = float(loss.detach()).hex()
        if checkpointer is not None:
            checkpointer.save(number)
    answer = {"restored": restored, "losses": losses, "digest": state_digest(state)}
    if checkpointer is not None:
        checkpointer.drain(WAIT_S)
        answer["outcomes"] = [event.outcome.value for event in checkpointer.events]
        answer["diverged"] = checkpointer.storage_facts()["diverged"]
        checkpointer.close()
    return answer


def written(rank, world, knobs, directory, loops):
    """Trainings of three steps whose loops are given as lines of Python: what became of their saves, and what was said.

    A loop has `beside` (more of the state), `before` (lines before the start), `loss`, `backward`, `clip` and `step`;
    `first` has those of its first step that are others.
    """
    return [_written(knobs, f"{directory}-{number}", **loop) for number, loop in enumerate(loops)]


_LINES = {
    "loss": "loss = model(inputs).square().mean()",
    "backward": "loss.backward()",
    "clip": "",
    "step": "optimizer.step()",
}


def _written(knobs, directory, before="checkpointer.watch(model)", beside="", first=(), **lines):
    module = make_model()
    model = DistributedDataParallel(module, bucket_cap_mb=0.005)
    optimizer = make_optimizer("sgd", module)
    checkpointer = Checkmate(directory, **knobs)
    checkpointer.events_kept = None
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    names = {"torch": torch, "model": model, "optimizer": optimizer, "scaler": scaler, "checkpointer": checkpointer}
    answer = {"said": ""}
    loop = _LINES | lines
    try:
        exec(before, names)
        checkpointer.start({"model": module, "optimizer": optimizer, **eval(f"dict({beside})", names)})
        for number in (1, 2, 3):
            names["inputs"] = torch.randn(6, 37, generator=torch.Generator().manual_seed(number))
            for line in (loop | (dict(first) if number == 1 else {})).values():
                exec(line, names)
            optimizer.zero_grad()
            checkpointer.save(number)
        checkpointer.drain(WAIT_S)
        answer["sent_bytes"] = checkpointer.storage_facts()["sent_bytes"]
    except LastgoodError as error:
        answer["said"] = str(error)
    answer["outcomes"] = [event.outcome.value for event in checkpointer.events]
    answer["errors"] = [event.error for event in checkpointer.events if event.error]
    checkpointer.close()
    return answer


def reduced_alike(rank, world, elements):
    """Whether gradients are DDP's own to the bit, with the hook and without it, for this number of ranks."""
    found = []
    for hooked in (False, True):
        torch.manual_seed(3)
        model = DistributedDataParallel(torch.nn.Linear(elements, 3))
        if hooked:
            model.register_comm_hook(Checkmate("unused").tap, checkmate_hook)
        data = torch.Generator().manual_seed(rank)
        model(torch.randn(4, elements, generator=data)).square().mean().backward()
        flat = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])
        found.append(hashlib.sha256(flat.numpy().tobytes()).hexdigest())
    return found


def main():
    die_with_parent()
    keep_stdout()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for line in sys.stdin:
        asked = json.loads(line)
        work, meeting = globals()[asked.pop("work")], Path(asked.pop("meeting"))
        cuda = asked.get("device", "cpu") != "cpu"
        if cuda:
            torch.cuda.set_device(asked["rank"])
        try:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if cuda else "gloo",
                init_method=f"file://{meeting}",
                rank=asked["rank"],
                world_size=asked["world"],
                timeout=datetime.timedelta(seconds=120),
            )
            answer = {"ok": work(**asked)}
            dist.barrier()
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
