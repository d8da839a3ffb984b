"""Ranks of DeepSpeed trainings, forked from one process that has imported DeepSpeed, which takes many seconds.

Run as: deepspeed_rank.py. Reads one JSON object a line, {"work", "world", "port", "folder", ...}, forks `world` ranks
that do the work, waits for them, and prints {"codes": [...], "answers": [...]}: their exit codes (negative: a signal)
and what they returned, None where they did not get that far.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import os
import signal
import time
from pathlib import Path

os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")

import deepspeed
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from deepspeed_shadowed import SHADOWED_WORKS
from deepspeed_training import Training, feed

from lastgood.checkpointers.gemini.traffic import Traffic
from lastgood.checkpointers.pccheck.system import PCcheck
from lastgood.integrations.deepspeed import export_torch, use_lastgood
from lastgood.integrations.deepspeed_live import EngineCounters, LiveZero
from lastgood.integrations.deepspeed_traffic import mark_communication
from lastgood.state import apply_tree, flatten, state_digest, unflatten
from lastgood.storage.write import SlotWrite
from tests.integrations.forked_ranks import serve


def save_twice(rank, asked):
    """Train, save with Lastgood and with DeepSpeed's own engine, train on, and die."""
    training = Training(**asked)
    training.train(3)
    client = {"mine": 5, "options": argparse.Namespace(depth=2)}
    training.engine.save_checkpoint(asked["torch"], client_state=dict(client))
    use_lastgood(training.engine, pool_bytes=1 << 22)
    training.engine.save_checkpoint(asked["lastgood"], client_state=dict(client))
    digests = training.digests()
    yield {"digests": digests, "losses": training.train(3)}
    os.kill(os.getpid(), signal.SIGKILL)


def load_both(rank, asked):
    """Fresh trainings, one from each folder: what they hold, and how they go on."""
    found = []
    for kind in ("lastgood", "torch"):
        training = Training(**asked)
        if kind == "lastgood":
            use_lastgood(training.engine)
        path, client = training.engine.load_checkpoint(asked[kind])
        ours = {key: client[key] for key in ("mine", "options")}
        digests = training.digests()
        found.append({"path": path, "client": repr(ours), "digests": digests, "losses": training.train(3)})
    yield found


def compare_files(rank, asked):
    """Each file of a tag, read by Lastgood and by torch from the other folder: the same types and bits."""
    from lastgood.integrations.deepspeed import LastgoodFiles, SaveOptions

    files, kinds = LastgoodFiles(torch.device("cpu"), lambda: 0, SaveOptions()), set()
    names = {}
    for path in sorted(Path(asked["lastgood"]).rglob("*.pt")):
        one, other = hashlib.sha256(), hashlib.sha256()
        state = files.load(str(path))
        feed(one, state)
        feed(other, torch.load(Path(asked["torch"]) / path.relative_to(asked["lastgood"]), weights_only=False))
        names[path.name] = one.hexdigest() == other.hexdigest()
        kinds |= {type(item).__name__ for item in walk(state)}
    weights = []
    if asked.get("stage"):  # what DeepSpeed's zero_to_fp32.py makes of an export
        exported = Path(asked["folder"]) / "exported"
        export_torch(Path(asked["lastgood"]) / "global_step3", exported / "global_step3")
        (exported / "latest").write_text("global_step3")
        weights = [get_fp32_state_dict_from_zero_checkpoint(str(one)) for one in (exported, asked["torch"])]
        assert weights[0].keys() == weights[1].keys() and weights[0]
        assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    yield {"same": names, "kinds": sorted(kinds), "exported": len(weights)}


def walk(value):
    yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        yield from walk(item)


def die_in_save(rank, asked):
    """Save a first tag; in the second save one rank (or all) is killed while its data is being written."""
    training = Training(**asked)
    training.train(1)
    use_lastgood(training.engine)
    training.engine.save_checkpoint(asked["lastgood"], tag="first")
    training.train(1)
    if rank in asked["dying"]:
        SlotWrite.commit = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    yield {"first": True}
    training.engine.save_checkpoint(asked["lastgood"], tag="second")
    yield {"second": True}


def load_newest(rank, asked):
    training = Training(**asked)
    use_lastgood(training.engine)
    path, _ = training.engine.load_checkpoint(asked["lastgood"])
    step = training.engine.global_steps
    training.engine.save_16bit_model(asked["folder"], "exported.bin")
    torch.distributed.barrier()
    weights = torch.load(Path(asked["folder"]) / "exported.bin", weights_only=True)
    alike = all(torch.equal(weights[name], tensor) for name, tensor in training.engine.module.state_dict().items())
    yield {"path": path, "step": step, "exported": alike and len(weights)}
    training.train(1)


def fail_in_save(rank, asked):
    """One rank cannot save, and all ranks are told; then saving goes on."""
    training = Training(**asked)
    training.train(1)
    placed = use_lastgood(training.engine, background=asked.get("background", False))
    training.engine.save_checkpoint(asked["lastgood"], tag="first")
    training.train(1)
    client = {"held": [{"lock": lambda: None}]} if rank == asked["failing"] else {}
    said = ""
    try:
        training.engine.save_checkpoint(asked["lastgood"], tag="second", client_state=client)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    losses = training.train(1)
    latest = (Path(asked["lastgood"]) / "latest").read_text()
    training.engine.save_checkpoint(asked["lastgood"], tag="third")
    if placed.is_decoupled():
        placed.drain()
    outcomes = [(event.step, event.outcome.value) for event in placed.events]
    yield {"said": said, "latest": latest, "outcomes": outcomes, "losses": losses}


def in_background(rank, asked):
    """Saves that DeepSpeed commits at later steps; `latest` follows, and the last one is drained."""
    training = Training(**asked)
    placed = use_lastgood(training.engine, background=True)
    training.train(1)
    latest = Path(asked["lastgood"]) / "latest"
    training.engine.save_checkpoint(asked["lastgood"], tag="a")
    digests = training.digests()
    deadline = time.monotonic() + 120
    while placed._saves.pending is not None:
        assert time.monotonic() < deadline, "DeepSpeed never committed the save"
        training.train(1)
    torch.distributed.barrier()
    named = latest.read_text()
    training.engine.save_checkpoint(asked["lastgood"], tag="b")
    placed.drain()
    torch.distributed.barrier()
    yield {"latest": [named, latest.read_text()], "digests": digests}


def refuse(rank, asked):
    """What `use_lastgood` says of engines that it cannot serve."""
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

    from lastgood.errors import ConfigError

    training = Training(**asked)
    said = []

    def attempt(**knobs):
        try:
            use_lastgood(knobs.pop("engine", training.engine), **knobs)
            said.append("")
        except ConfigError as error:
            said.append(str(error))

    attempt(engine=torch.nn.Linear(1, 1))
    attempt(writer_threads=0)
    training.engine.checkpoint_engine = object()
    attempt()
    training.engine.checkpoint_engine = training.own_engine
    known = CheckpointEngine.save
    CheckpointEngine.save = lambda self, state_dict, path, extra=None: None
    attempt()
    CheckpointEngine.save = known
    attempt()
    attempt()  # twice does no harm
    yield said


def live_again(rank, asked):
    """Train on from a copy of the live state, twice; and what of Gemini's marks is there after a step."""
    training = Training(**asked)
    engine = training.engine
    live = LiveZero(engine)

    def train(steps):
        losses = training.train(steps)
        live.settle()
        live.settle()  # as behind a step that only accumulates gradients
        return losses

    train(3)
    state = {"model": live.weights, "optimizer": live.optimizer, "engine": EngineCounters(engine)}
    state["scheduler"] = engine.lr_scheduler

    def digest():
        return state_digest({**state, "derived": live.model_tensors()})

    flat = flatten(state)
    updated = sum(block.numel() for block in flat.blocks[: flat.layout.deferred_blocks])
    kept = unflatten(flat.layout, [block.clone() for block in flat.blocks], "a copy")
    before, losses = digest(), train(3)
    other = digest()
    # Loading keeps the tensors of an optimizer's state, so the second time they have been trained on.
    apply_tree(state, copy.deepcopy(kept), "a copy")
    after, again = digest(), train(3)
    traffic = Traffic(100)
    mark_communication(traffic)
    for _ in range(3):
        train(1)
        traffic.update()
    facts = traffic.facts()["communication_s"]
    found = {"before": before, "other": other, "after": after, "losses": losses, "again": again, "updated": updated}
    buffers = [name for name in live.weights.state_dict() if name.startswith("buffer")]
    found["groups"] = [len(group["params"]) for group in live.optimizer.param_groups]
    yield {**found, "buffers": buffers, "busy": traffic.is_busy, "traffic": facts}


def attach_live(rank, asked):
    """Attach PCcheck to the live parts, train, and die; the second life goes on."""
    training = Training(**asked)
    engine = training.engine
    live = LiveZero(engine)
    parts = {"model": live.weights, "optimizer": live.optimizer, "scheduler": engine.lr_scheduler}
    checkpointer = PCcheck(f"{asked['job']}/rank-{rank:05d}", rank=rank, world_size=2, interval_steps=3)
    resumed = checkpointer.attach(**parts, engine=EngineCounters(engine))
    losses = []
    for _ in range(5 - resumed):
        losses += training.train(1)
        live.settle()
        checkpointer.step()
    checkpointer.drain()
    yield {"resumed": resumed, "losses": losses}
    torch.distributed.barrier()  # a rank that is gone answers no agreement
    os.kill(os.getpid(), signal.SIGKILL)


def refuse_live(rank, asked):
    """What `LiveZero` says of engines that it cannot serve."""
    from lastgood.errors import ConfigError

    said = []
    for kind in ({"stage": 0}, {"stage": 2, "precision": "fp16"}):
        try:
            LiveZero(Training(**kind).engine)
        except ConfigError as error:
            said.append(str(error))
    training = Training(stage=3)
    del training.engine.optimizer.persistent_parameters
    try:
        LiveZero(training.engine)
    except ConfigError as error:
        said.append(str(error))
    yield said


WORKS = {one.__name__: one for one in (save_twice, load_both, compare_files, die_in_save, load_newest, fail_in_save)}
WORKS |= {one.__name__: one for one in (in_background, refuse, live_again, attach_live, refuse_live)}
WORKS |= SHADOWED_WORKS


def one_rank(rank, asked):
    """In a forked process: do the work."""
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    yield from WORKS[asked["work"]](rank, asked)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    serve(one_rank)
