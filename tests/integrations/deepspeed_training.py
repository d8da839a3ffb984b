"""A small DeepSpeed training, for ranks that a test forks. Importing it takes many seconds."""

from __future__ import annotations

import enum
import hashlib
import importlib
import sys
from contextlib import suppress
from pathlib import Path

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

__all__ = ["Training", "feed"]

# Its shared-memory transport would be compiled for a minute; gloo does without.
# (deepspeed.comm.torch, as an attribute, is torch itself.)
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
# torch computes with fp16 on any CPU; DeepSpeed asks for one that does so fast.
get_accelerator().is_fp16_supported = lambda: True
# What a first optimizer, and DeepSpeed's look at it, import takes seconds: here once, not in each rank that is forked.
torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
with suppress(ImportError):  # older ones have none
    importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")


class Capture(TorchCheckpointEngine):
    """Takes a digest of all that DeepSpeed gives to be saved, and writes nothing."""

    def __init__(self):
        super().__init__()
        self.digests = {}

    def makedirs(self, path, exist_ok=False):
        pass

    def save(self, state_dict, path):
        hasher = hashlib.sha256()
        feed(hasher, state_dict)
        self.digests[Path(path).name] = hasher.hexdigest()


def feed(hasher, value):
    """Types, values and tensors' bytes; of objects, their attributes."""
    hasher.update(type(value).__name__.encode())
    if isinstance(value, torch.Tensor):
        hasher.update(f"{value.dtype}{tuple(value.shape)}".encode())
        hasher.update(value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key, item in value.items():
            hasher.update(repr(key).encode())
            feed(hasher, item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            feed(hasher, item)
    elif isinstance(value, enum.Enum) or not hasattr(value, "__dict__"):
        hasher.update(repr(value).encode())
    else:
        feed(hasher, vars(value))


class Counted(torch.nn.Module):
    """Holds a buffer that changes in forward, alike on all ranks: DeepSpeed saves that of one of them."""

    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, inputs):
        self.seen += 1
        return self.norm(inputs) * (1 + self.seen.to(inputs.dtype) / 64)


def decayed_and_not(model, groups):
    """Its parameters in one group, or as they are usually cut in two."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if groups == 1:
        return parameters
    weights, others = ([p for p in parameters if (p.dim() > 1) == wide] for wide in (True, False))
    return [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


class Training:
    """A small model with buffers, on data that depends on rank and step alone."""

    def __init__(self, stage=0, precision="fp32", pipeline=False, groups=1, clip=0.0, sub_group_size=10**12, **_):
        torch.manual_seed(11)
        layers = [torch.nn.Linear(16, 32), Counted(32), torch.nn.ReLU(), torch.nn.Linear(32, 4)]
        self.dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        self.pipeline = pipeline
        config = {
            "train_micro_batch_size_per_gpu": 8,
            "gradient_accumulation_steps": 2,
            "steps_per_print": 10**9,
            "gradient_clipping": clip,
            "zero_optimization": {
                "stage": stage,
                "stage3_param_persistence_threshold": 40,
                "sub_group_size": sub_group_size,
            },
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 0.01}},
        }
        if precision == "fp16":
            config["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}
        if precision == "bf16":
            config["bf16"] = {"enabled": True}
        model = torch.nn.Sequential(*layers)
        if pipeline:
            model = PipelineModule(layers=layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss)
        self.engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(decayed_and_not(model, groups), lr=0.01),
            config=config,
            dist_init_required=False,
        )
        self.own_engine = self.engine.checkpoint_engine

    def batch(self, number):
        random = torch.Generator().manual_seed(1000 * number + (0 if self.pipeline else torch.distributed.get_rank()))
        return (
            torch.randn(8, 16, generator=random).to(self.dtype),
            torch.randn(8, 4, generator=random).to(self.dtype),
        )

    def train(self, steps):
        """The losses of so many optimizer steps, as text, to the bit."""
        losses = []
        for _ in range(steps):
            first = 2 * self.engine.global_steps
            if self.pipeline:
                loss = self.engine.train_batch(iter([self.batch(first), self.batch(first + 1)]))
                losses.append(float(loss).hex())
                continue
            for number in (first, first + 1):
                inputs, targets = self.batch(number)
                loss = torch.nn.functional.mse_loss(self.engine(inputs), targets)
                self.engine.backward(loss)
                self.engine.step()
                losses.append(float(loss).hex())
        return losses

    def digests(self):
        """Of everything that DeepSpeed would save now."""
        placed, self.engine.checkpoint_engine = self.engine.checkpoint_engine, Capture()
        Path("captured").mkdir(exist_ok=True)  # for zero_to_fp32.py, which DeepSpeed puts beside its tags
        try:
            self.engine.save_checkpoint("captured", tag="now", client_state={"mine": 5}, save_latest=False)
            return self.engine.checkpoint_engine.digests
        finally:
            self.engine.checkpoint_engine = placed
