"""A rank of a training that is spread in one of several ways. Run as spread_rank.py; spoken to as reshard_rank.py."""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
import os
import signal
import sys
import traceback
import warnings
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, when cuBLAS starts

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lastgood import PCcheck
from lastgood.integrations.deepspeed_live import EngineCounters, LiveZero
from lastgood.processes import die_with_parent, keep_stdout
from lastgood.state import RngState, seed_everything, state_digest
from lastgood.training.deepspeed_engine import _prepare
from lastgood.training.loop import configure_compute

WAIT_S = 120.0
BATCH, BLOCKS, RATE = 8, 3, 1e-3
WIDTHS = {"cpu": 48, "cuda": 512}


class Block(torch.nn.Module):
    """A feed-forward layer beside a residual path; with running means, which differ between data-parallel ranks."""

    def __init__(self, width, running):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(width) if running else torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 2 * width)
        self.down = torch.nn.Linear(2 * width, width)
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Training:
    """On data that follow from step and rank; `parts` are what a checkpointer is given."""

    def __init__(self, kind, rank, world, device, seed):
        self.rank, self.device, self.width = rank, device, WIDTHS[device]
        torch.manual_seed(seed)
        running = kind in ("ddp", "sharded-optimizer")
        module = torch.nn.Sequential(*(Block(self.width, running) for _ in range(BLOCKS))).to(device)
        self.module = self.model = module
        self.plain = {"step": 0}
        self.scheduler = self.engine = None
        if kind.startswith("zero"):
            self._partition(int(kind.removeprefix("zero")))
            return
        if running:
            ids = [rank] if device == "cuda" else None
            self.model = DistributedDataParallel(module, device_ids=ids, bucket_cap_mb=0.05)
        elif world > 1:
            mesh = init_device_mesh(device, (world,))
            for block in module:
                fully_shard(block, mesh=mesh)
            fully_shard(module, mesh=mesh)
        self.parts = {"model": module, "plain": self.plain}
        if kind == "sharded-optimizer":
            self.optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=RATE)
            self.parts["optimizer"] = self.optimizer.optim  # this rank's part of it
        else:
            self.optimizer = self.parts["optimizer"] = torch.optim.AdamW(module.parameters(), lr=RATE)
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 7, gamma=0.9)
            self.parts["scheduler"] = self.scheduler

    def _partition(self, stage):
        """Under DeepSpeed's ZeRO."""
        os.environ.update(RANK=str(self.rank), LOCAL_RANK=str(self.rank), WORLD_SIZE=str(dist.get_world_size()))
        deepspeed = _prepare(self.device)
        elements = sum(parameter.numel() for parameter in self.module.parameters())
        zero = {"stage": stage, "sub_group_size": 10**12, "stage3_param_persistence_threshold": 40}
        zero |= {"reduce_bucket_size": elements, "allgather_bucket_size": elements}
        self.engine, *_ = deepspeed.initialize(
            model=self.module,
            optimizer=torch.optim.AdamW(self.module.parameters(), lr=RATE),
            config={
                "train_micro_batch_size_per_gpu": BATCH,
                "gradient_accumulation_steps": 1,
                "steps_per_print": sys.maxsize,
                "gradient_clipping": 0.0,
                "zero_optimization": zero,
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
            },
            dist_init_required=False,
        )
        self.live = LiveZero(self.engine)
        self.parts = {"model": self.live.weights, "optimizer": self.live.optimizer, "plain": self.plain}
        self.parts["engine"] = EngineCounters(self.engine)

    def step(self):
        """One step; its loss to the bit, as text."""
        data = torch.Generator().manual_seed(1000 * self.plain["step"] + self.rank)
        inputs = torch.randn(BATCH, self.width, generator=data).to(self.device)
        if self.engine is not None:
            loss = (self.engine(inputs) - inputs.flip(1)).square().mean()
            self.engine.backward(loss)
            self.engine.step()
            self.live.settle()
        else:
            loss = (self.model(inputs) - inputs.flip(1)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.scheduler is not None:
                self.scheduler.step()
        self.plain["step"] += 1
        return float(loss.detach()).hex()

    def digest(self):
        return state_digest({**self.parts, "rng": RngState()})

    def sums(self):
        """Of every whole parameter and its moments, by names that any number of ranks gives them."""
        found = dict(self.module.named_parameters())
        for number, entry in self.parts["optimizer"].state_dict()["state"].items():
            found |= {f"{number}.{name}": value for name, value in entry.items()}
        return {name: summed(value) for name, value in found.items()}


def summed(value):
    dense = (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu().contiguous()
    return hashlib.sha256(dense.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def train(
    rank,
    world,
    kind,
    steps,
    losses,
    device="cpu",
    job=None,
    interval=10,
    seed=7,
    drained=None,
    dying=None,
    resume_from=None,
    buffers="equal",
    sums=False,
):
    """Train up to `steps`, under PCcheck if `job` is given; each step's loss is a line of the rank's file in `losses`.

    Behind step `drained` all checkpoints are waited for. `dying` is [rank, step]: there that rank is killed.
    """
    configure_compute(1, deterministic=True)
    training = Training(kind, rank, world, device, seed)
    seed_everything(100 + rank)
    checkpointer, answer = None, {"began": 0}
    if job is not None:
        checkpointer = PCcheck(
            job, interval_steps=interval, chunk_bytes=65536, resume_from=resume_from, resume_buffers=buffers
        )
        checkpointer.events_kept = None
        answer["began"] = checkpointer.attach(**training.parts)
        if sums:
            answer["restored"] = training.sums()
    with (Path(losses) / f"rank-{rank}.txt").open("a") as file:
        for number in range(training.plain["step"] + 1, steps + 1):
            print(number, training.step(), file=file, flush=True)
            if checkpointer is not None:
                checkpointer.step()
                if number == drained:
                    checkpointer.drain(WAIT_S)
            if dying == [rank, number]:
                os.kill(os.getpid(), signal.SIGKILL)
    answer["digest"] = training.digest()
    if sums:
        answer["sums"] = training.sums()
    if checkpointer is not None:
        checkpointer.drain(WAIT_S)
        answer["outcomes"] = [(event.step, event.outcome.value, event.error) for event in checkpointer.events]
        dist.barrier()
        checkpointer.close()
    return answer


def main():
    die_with_parent()
    keep_stdout()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    # The second is where rank 0 lets the others ask what they agree on.
    os.environ.update(GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1")
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
                timeout=datetime.timedelta(seconds=WAIT_S),
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
