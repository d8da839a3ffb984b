"""A model over ranks, each with its own shards only, and the state that is saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from lastgood._lazy import torch
from lastgood.experiments.dcp.models import layers_of
from lastgood.experiments.records.dcp import Sharding, Spread, StateKind

__all__ = ["make_optimizer", "spread", "state_of"]

_LEARNING_RATE: Final = 1e-4


def spread(
    model: torch.nn.Module, way: Spread, sharding: Sharding, device: Literal["cpu", "cuda"], replicas: int
) -> torch.nn.Module:
    """Give each rank its part of `model`, which is on the meta device, in memory that is not filled yet.

    FSDP wraps each layer and then the rest (Zhao et al. 2023). Hybrid: `replicas` groups of ranks hold the same shards.
    torch.distributed must be initialised, with as many ranks as a `DcpSpec` says.
    """
    world = torch.distributed.get_world_size()
    if way == "ddp":
        model.to_empty(device=device)
        return torch.nn.parallel.DistributedDataParallel(model, init_sync=False)
    from torch.distributed.device_mesh import init_device_mesh

    if sharding == "hybrid":
        mesh = init_device_mesh(device, (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(device, (world,), mesh_dim_names=("shard",))
    if way == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in layers_of(model):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.to_empty(device=device)
        return model
    return _fsdp1(model, sharding, device, mesh)


def _fsdp1(model: torch.nn.Module, sharding: Sharding, device: str, mesh: Any) -> torch.nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    wrapped: torch.nn.Module = FullyShardedDataParallel(
        model,
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD if sharding == "hybrid" else ShardingStrategy.FULL_SHARD,
        auto_wrap_policy=ModuleWrapPolicy({type(layer) for layer in layers_of(model)}),
        use_orig_params=True,
        device_id=torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device),
        # Ranks fill their shards afterwards; a unit is complete in memory only while it is cut.
        param_init_fn=_make_memory(torch.cuda.current_device() if device == "cuda" else device),
    )
    return wrapped


def _make_memory(device: int | str) -> Callable[[torch.nn.Module], None]:
    def make_memory(module: torch.nn.Module) -> None:
        module.to_empty(device=device, recurse=False)

    return make_memory


def state_of(model: torch.nn.Module, kind: StateKind, optimizer: torch.optim.Optimizer | None) -> Mapping[str, Any]:
    """What is saved: live tensors of the model, and for ``full`` of its optimizer's state, with names of parameters."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizer is not None and kind == "full":
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    return state


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """AdamW with moments in place, as after a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return optimizer
