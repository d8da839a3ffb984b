"""A training, as data: what passes on the wire, and what its updates are made of.

Made by `describe` from the objects that the training script itself makes; read here without any code of the training.
Files may come from anywhere: types are strict, unknown keys are refused, and every length is bounded.
"""

from __future__ import annotations

from functools import cached_property
from math import prod
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from lastgood.errors import CorruptCheckpoint
from lastgood.files import write_result
from lastgood.mirror.job.columns import StrictModel
from lastgood.mirror.job.rules import Rules
from lastgood.optim.spec import OptimizerSpec
from lastgood.text import read_model
from lastgood.units import MIB

__all__ = [
    "ITEM_BYTES",
    "MAX_FILE_BYTES",
    "VERSION",
    "Backend",
    "DataPosition",
    "DdpSettings",
    "JobDescription",
    "TensorInfo",
    "read_job",
    "write_job",
]

VERSION: Final = 1
MAX_FILE_BYTES: Final = 256 * MIB
MAX_TENSORS: Final = 1 << 20
MAX_BYTES: Final = 1 << 50
ITEM_BYTES: Final = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
"""Of dtypes that a module's parameters and buffers may have."""

Name = Annotated[str, Field(min_length=1, max_length=1000)]
Size = Annotated[int, Field(ge=0, le=MAX_BYTES)]
Cap = Annotated[int, Field(ge=1, le=(1 << 63) - 1)]


class TensorInfo(StrictModel):
    """A parameter or buffer. Strides are those of torch, in elements; it is a dense block of memory."""

    name: Name
    shape: Annotated[tuple[Size, ...], Field(max_length=64)]
    stride: Annotated[tuple[Size, ...], Field(max_length=64)]
    dtype: str
    trainable: bool = False
    """Whether it has requires_grad, so that DDP reduces its gradient."""
    persistent: bool = True
    """Of a buffer: whether it is in the module's state_dict."""

    @cached_property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.elements * ITEM_BYTES[self.dtype]

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The dimensions, from the one whose steps in memory are largest to the smallest, as `memory_order` has it."""
        if _contiguous(self.shape, self.stride):
            return tuple(range(len(self.shape)))
        return tuple(sorted(range(len(self.shape)), key=lambda dim: (-self.stride[dim], dim)))

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"{self.name}: dtype {self.dtype[:40]!r} is not known; known: {', '.join(ITEM_BYTES)}")
        if len(self.stride) != len(self.shape):
            raise ValueError(f"{self.name}: {len(self.shape)} dimensions and {len(self.stride)} strides")
        if self.nbytes > MAX_BYTES:
            raise ValueError(f"{self.name}: more than {MAX_BYTES} bytes")
        order = self.order
        if not _contiguous([self.shape[dim] for dim in order], [self.stride[dim] for dim in order]):
            raise ValueError(f"{self.name}: shape {self.shape} with strides {self.stride} is no dense block of memory")
        return self


def _contiguous(shape: tuple[int, ...] | list[int], stride: tuple[int, ...] | list[int]) -> bool:
    if prod(shape) == 0:
        return True
    step = 1
    for size, one in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and one != step:
            return False
        step *= size
    return True


class DdpSettings(StrictModel):
    """What of DistributedDataParallel's arguments shows on the wire. Caps are in bytes."""

    first_cap: Cap = 1 * MIB
    cap: Cap = 25 * MIB
    cap_list: Annotated[tuple[Cap, ...], Field(max_length=1 << 16)] = ()
    """Of bucket_cap_mb_list; empty: `first_cap`, then `cap`."""
    broadcast_cap: Cap = 250 * MIB
    find_unused_parameters: bool = False
    static_graph: bool = False
    hook: Literal["none", "fp16", "bf16"] = "none"
    """torch's compression hooks: the dtype of gradients on the wire."""
    init_sync: bool = True
    init_buffers: bool = True
    """Whether the first synchronisation carries buffers too (not with broadcast_buffers=False)."""
    forward_buffers: bool = True
    """Whether rank 0's buffers are broadcast before each synchronised forward."""


class Backend(StrictModel):
    """The library that carries the collectives."""

    kind: Literal["gloo", "nccl"] = "gloo"
    network: Literal["sockets", "roce"] = "sockets"
    """NCCL's."""
    version: Annotated[str, Field(max_length=20, pattern=r"^(\d+(\.\d+)*)?$")] = ""
    """NCCL's, as 2.28."""
    protocol: Literal["", "simple", "ll", "ll128"] = ""
    """NCCL's; empty: as NCCL picks it by size, which must then be said for each size by the traffic itself."""
    channels: Annotated[int, Field(ge=1, le=64)] = 1
    threads: Annotated[int, Field(ge=64, le=1024)] = 512
    """Of a channel, which the layouts up to NCCL 2.19 depend on."""
    buffer_bytes: Annotated[int, Field(ge=1024, le=1 << 40)] = 4 * MIB
    """NCCL_BUFFSIZE."""
    queue_pairs: Annotated[int, Field(ge=1, le=128)] = 1
    """NCCL_IB_QPS_PER_CONNECTION, over RoCE."""
    split_data: bool = False
    """NCCL_IB_SPLIT_DATA_ON_QPS: whether each message is cut over them; otherwise they take turns."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.queue_pairs > 1 and (self.network != "roce" or self.protocol not in ("simple", "ll")):
            raise ValueError(
                "backend: several queue pairs a connection are followed only over RoCE, and in one protocol "
                "that is said (simple or ll), since each shows only some of the messages that tell them apart"
            )
        if self.queue_pairs > 1 and self.channels > 1:
            raise ValueError(
                "backend: several queue pairs and several channels: their messages have the same sizes, so which is "
                "which is not on the wire (NCCL_MAX_NCHANNELS=1, or NCCL_IB_QPS_PER_CONNECTION=1, is followed)"
            )
        if self.split_data and self.queue_pairs > 2:
            raise ValueError(
                "backend: messages that are cut over more than two queue pairs (NCCL_IB_SPLIT_DATA_ON_QPS): all parts "
                "but the last one have the same size, so which is which is not told by it"
            )
        if self.kind == "nccl" and not self.version:
            raise ValueError("backend: NCCL's layouts depend on its version; it must be given")
        return self


class DataPosition(StrictModel):
    """Where the data stream is after step t (t updates): `start + t * per_step` batches are consumed."""

    start: Annotated[int, Field(ge=0, lt=1 << 62)] = 0
    per_step: Annotated[int, Field(ge=0, lt=1 << 40)] = 1


class JobDescription(StrictModel):
    """One data-parallel training."""

    version: Literal[1] = VERSION
    name: Annotated[str, Field(max_length=200)] = ""
    torch: Annotated[str, Field(max_length=64)]
    parameters: Annotated[tuple[TensorInfo, ...], Field(min_length=1, max_length=MAX_TENSORS)]
    """As named_parameters() gives them: each once, frozen ones too."""
    buffers: Annotated[tuple[TensorInfo, ...], Field(max_length=MAX_TENSORS)] = ()
    """As named_buffers() gives them, those that are in no state_dict too."""
    optimizer: dict[str, object]
    """What `OptimizerSpec.to_data` wrote; its places count in `optimized`."""
    optimized: Annotated[tuple[Size, ...], Field(min_length=1, max_length=MAX_TENSORS)]
    """The optimizer's parameters, in the order of its groups, as indices in `parameters`."""
    rules: Rules
    ddp: DdpSettings = DdpSettings()
    ranks: Annotated[int, Field(ge=2, le=1 << 16)]
    backend: Backend = Backend()
    reductions_per_step: Annotated[int, Field(ge=1, le=1 << 16)] = 1
    """Backward passes with a reduction before each update. Those under no_sync are not on the wire."""
    data: DataPosition = DataPosition()

    @cached_property
    def trainable(self) -> tuple[int, ...]:
        """Indices of the trainable parameters, in module order: DDP's parameter i is `parameters[trainable[i]]`."""
        return tuple(index for index, one in enumerate(self.parameters) if one.trainable)

    @cached_property
    def spec(self) -> OptimizerSpec:
        """The optimizer."""
        return OptimizerSpec.from_data(self.optimizer)

    def wire_dtype(self, parameter: int) -> str:
        """The dtype in which the gradient of `parameters[parameter]` is reduced."""
        hook = {"none": None, "fp16": "float16", "bf16": "bfloat16"}[self.ddp.hook]
        return hook or self.parameters[parameter].dtype

    @model_validator(mode="after")
    def _check(self) -> Self:
        for what, tensors in (("parameters", self.parameters), ("buffers", self.buffers)):
            if len({one.name for one in tensors}) != len(tensors):
                raise ValueError(f"{what}: two have one name")
            if sum(one.nbytes for one in tensors) > MAX_BYTES:
                raise ValueError(f"{what}: more than {MAX_BYTES} bytes")
        if not self.trainable:
            raise ValueError("parameters: none is trainable")
        if len(set(self.optimized)) != len(self.optimized) or max(self.optimized) >= len(self.parameters):
            raise ValueError("optimized: indices of parameters, each once")
        try:
            spec = OptimizerSpec.from_data(self.optimizer)
        except CorruptCheckpoint as error:
            raise ValueError(str(error)) from error
        if sorted(spec.group_of()) != list(range(len(self.optimized))):
            raise ValueError("optimizer: its groups do not name each of `optimized` once")
        if self.rules.groups != len(spec.groups):
            raise ValueError(f"rules: for {self.rules.groups} groups, and the optimizer has {len(spec.groups)}")
        return self


def write_job(job: JobDescription, path: Path) -> None:
    """Write a description as JSON, durably, in place of what was there. Raises StorageError."""
    write_result(path, (job.model_dump_json(indent=1) + "\n").encode())


def read_job(path: Path) -> JobDescription:
    """Read a description. Raises ConfigError, which names file and key, for anything that is none of this version."""
    return read_model(
        JobDescription,
        path,
        f"a job description of version {VERSION}",
        most_bytes=MAX_FILE_BYTES,
        advice="`lastgood mirror describe` makes one",
    )
