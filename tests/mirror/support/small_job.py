"""Job descriptions that need no torch: a few parameters, SGD."""

from __future__ import annotations

from math import prod
from typing import Any

from lastgood.mirror.job.description import JobDescription, TensorInfo
from lastgood.mirror.job.rules import Rules
from lastgood.optim.rule import GroupRule
from lastgood.optim.spec import GroupSpec, OptimizerSpec


def tensor(name: str, *shape: int, dtype: str = "float32", trainable: bool = True) -> TensorInfo:
    """A contiguous one."""
    stride = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return TensorInfo(name=name, shape=shape, stride=stride, dtype=dtype, trainable=trainable)


def small_job(
    elements: tuple[int, ...] = (70, 300, 50, 1200),
    *,
    buffers: bool = True,
    frozen: bool = True,
    ranks: int = 2,
    dtype: str = "float32",
    **more: Any,
) -> JobDescription:
    """Vectors of these sizes, then a frozen one; buffers of two dtypes. `more` are other keys of the description."""
    parameters = [tensor(f"layer{number}.weight", count, dtype=dtype) for number, count in enumerate(elements)]
    if frozen:
        parameters.insert(1, tensor("frozen", 3, 2, dtype=dtype, trainable=False))
    held = [tensor("norm.mean", 16, trainable=False), tensor("norm.count", dtype="int64", trainable=False)]
    optimized = tuple(index for index, one in enumerate(parameters) if one.trainable)
    spec = OptimizerSpec("sgd", "foreach", "cpu", (GroupSpec(tuple(range(len(optimized)))),), 1, "2.14.1")
    return JobDescription(
        torch="2.14.1",
        parameters=tuple(parameters),
        buffers=tuple(held) if buffers else (),
        optimizer=spec.to_data(),
        optimized=optimized,
        rules=Rules(initial=(GroupRule(lr=0.1, momentum=0.9).to_data(),)),
        ranks=ranks,
        **more,
    )
