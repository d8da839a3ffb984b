"""The gradient layout of a job description, and where gradients of the wire belong in it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from lastgood.errors import ConfigError
from lastgood.gradients.layout.layout import BUCKET_BYTES, GradientLayout, plan_layout
from lastgood.mirror.job.description import ITEM_BYTES, JobDescription, TensorInfo

__all__ = ["NodeLayout", "WirePart", "memory_shape"]


@dataclass(frozen=True)
class WirePart:
    """One parameter's gradient in a bucket of the wire."""

    index: int | None
    """In the layout; None: no optimizer updates it."""
    begin: int
    """In the bucket's bytes."""
    nbytes: int
    dtype: str
    """Of the wire."""


class NodeLayout:
    """A job's parameters as a shadow holds them: in the order of the optimizer's groups, each in memory order.

    Raises ConfigError for a training that cannot be followed from its packets.
    """

    def __init__(self, job: JobDescription, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.job = job
        still = [job.parameters[one].name for one in job.optimized if not job.parameters[one].trainable]
        if still:
            raise ConfigError(
                f"{', '.join(still[:3])}: the optimizer has it, and no gradient of it is ever reduced "
                "(requires_grad=False); leave it out of the optimizer"
            )
        if job.buffers and not job.ddp.forward_buffers:
            raise ConfigError(
                f"the model has buffers ({job.buffers[0].name} ...) that DDP does not broadcast "
                "(broadcast_buffers=False): they are not on the wire, so no step could be given back"
            )
        if not job.ddp.init_sync:
            raise ConfigError("DDP does not broadcast the initial weights (init_sync=False): they are not on the wire")
        left = set(job.trainable) - set(job.optimized)
        if left and job.rules.clip is not None and job.rules.clip.kind == "norm":
            raise ConfigError(
                f"{job.parameters[min(left)].name} is trainable and in no optimizer: the norm that gradients are "
                "clipped by cannot be told"
            )
        self.gradients: GradientLayout = plan_layout(
            [_declared(job.parameters[one]) for one in job.optimized],
            job.optimizer,
            ranks=1,
            shadows=1,
            bucket_bytes=bucket_bytes,
        )
        self.index_of = {parameter: index for index, parameter in enumerate(job.optimized)}
        """The layout's index of a parameter of the job."""

    @cached_property
    def module_order(self) -> list[int]:
        """Layout indices in the order of the module's parameters, as a clipping goes through them."""
        return [index for _, index in sorted(self.index_of.items())]

    @cached_property
    def grouped(self) -> list[int]:
        """The optimizer's group of each layout index."""
        group_of = self.job.spec.group_of()
        return [group_of[index] for index in range(len(self.job.optimized))]

    def optimized(self, trainable: frozenset[int]) -> tuple[int, ...]:
        """Layout indices of those trainable parameters that an optimizer updates, in order."""
        found = (self.index_of.get(self.job.trainable[one]) for one in trainable)
        return tuple(sorted(one for one in found if one is not None))

    def parts(self, bucket: tuple[int, ...]) -> list[WirePart]:
        """The gradients of a bucket of the wire; it holds indices into the job's trainable parameters."""
        found, begin = [], 0
        for one in bucket:
            parameter = self.job.trainable[one]
            dtype = self.job.wire_dtype(parameter)
            nbytes = self.job.parameters[parameter].elements * ITEM_BYTES[dtype]
            found.append(WirePart(self.index_of.get(parameter), begin, nbytes, dtype))
            begin += nbytes
        return found


def memory_shape(tensor: TensorInfo) -> tuple[int, ...]:
    """The shape of a tensor's memory: its dimensions in memory order."""
    return tuple(tensor.shape[dim] for dim in tensor.order)


def _declared(tensor: TensorInfo) -> tuple[str, tuple[int, ...], str]:
    """As `TrackedParameters.declared` writes it."""
    name = tensor.name
    if tensor.order != tuple(range(len(tensor.order))):
        name = f"{name}@{','.join(map(str, tensor.order))}"
    return name, memory_shape(tensor), tensor.dtype
