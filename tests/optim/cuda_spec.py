"""The optimizer's specification as a CUDA trainer gives it."""

from dataclasses import replace

from lastgood.optim.spec import OptimizerSpec


def as_cuda(optimizer, parameters=None, **lanes):
    spec = OptimizerSpec.of(optimizer, parameters)
    return replace(spec, arithmetic="cuda", groups=tuple(replace(group, **lanes) for group in spec.groups))
