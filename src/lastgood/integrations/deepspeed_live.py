"""A rank's part of a ZeRO training (Rajbhandari et al. 2020) as live tensors, for any checkpointer.

Under ZeRO the optimizer is an ordinary one of torch over flat fp32 partitions: this rank's share of all weights. Its
partitions and its moments are all that a checkpoint needs of weights and optimizer; the model's own weights are made
from them, as DeepSpeed itself makes them in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from lastgood._lazy import torch
from lastgood.errors import ConfigError

__all__ = ["EngineCounters", "LiveZero", "import_deepspeed"]

_NEEDED: Final[Mapping[int, tuple[str, ...]]] = {
    1: ("optimizer", "dynamic_loss_scale", "single_partition_of_fp32_groups", "update_lp_params"),
    3: (
        "optimizer",
        "dynamic_loss_scale",
        "fp16_groups",
        "fp32_partitioned_groups_flat",
        "persistent_parameters",
        "_set_fp32_optimizer_param_groups",
        "_partition_all_parameters",
        "_reassign_or_swap_out_partitioned_parameters",
    ),
}
"""What is relied on of DeepSpeed's optimizer, by the first stage that has it."""


def import_deepspeed() -> Any:
    """The package. Raises ConfigError if it cannot be imported."""
    try:
        import deepspeed
    except ImportError as error:
        raise ConfigError(f"DeepSpeed cannot be imported ({error}); pip install 'lastgood[deepspeed]'") from error
    return deepspeed


class LiveZero:
    """What rank r keeps of a training under ZeRO 1, 2 or 3, in fp32 or bf16, without offload.

    Raises ConfigError if the engine's optimizer is not what this module knows, or has a loss scale that changes.
    """

    def __init__(self, engine: Any) -> None:
        self._module = engine.module
        self._zero = zero = engine.optimizer
        self._stage = int(engine.zero_optimization_stage())
        _check(zero, self._stage)
        partitions = zero.fp32_partitioned_groups_flat if self._stage == 3 else zero.single_partition_of_fp32_groups
        self.weights = _flat_weights(partitions, self._module.named_buffers(), self._remake_model)
        """This rank's partitions, and the model's buffers. Loading them makes the model's weights again, which is a
        collective operation: all ranks load, or none."""
        self.optimizer: torch.optim.Optimizer = zero.optimizer
        """torch's own, over the partitions."""
        self.settle()

    def settle(self) -> None:
        """Put back all entries of the optimizer; after every step, before its state is read. Twice does no harm.

        ZeRO 3 takes the partitions out of the optimizer's groups at the end of a step.
        """
        if self._stage == 3:
            for group in self.optimizer.param_groups:
                group["params"] = []  # DeepSpeed appends, and where no step was made they are still there
            self._zero._set_fp32_optimizer_param_groups()

    def model_tensors(self) -> dict[str, torch.Tensor]:
        """The model's own weights as this rank holds them; under ZeRO 3 its part, and what is not partitioned."""
        found: dict[str, torch.Tensor] = {}
        for name, parameter in self._module.named_parameters():
            if self._stage == 3:
                found[f"{name} part"] = parameter.ds_tensor.detach()
            if parameter.numel():
                found[name] = parameter.detach()
        return found

    def _remake_model(self) -> None:
        """As DeepSpeed does at the end of a step."""
        zero = self._zero
        if self._stage < 3:
            zero.update_lp_params()
            return
        with torch.no_grad():
            zero._partition_all_parameters()
            for number in range(len(zero.fp16_groups)):
                zero._reassign_or_swap_out_partitioned_parameters(number)
            if zero.persistent_parameters:
                zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


class EngineCounters:
    """Steps and samples that an engine has counted: part of a state."""

    _NAMES = ("global_steps", "global_samples", "micro_steps", "skipped_steps")

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, int]:
        """All of them."""
        return {name: int(getattr(self._engine, name)) for name in self._NAMES}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on counting from `state`."""
        for name in self._NAMES:
            setattr(self._engine, name, int(state[name]))


def _check(zero: Any, stage: int) -> None:
    import deepspeed

    needed = _NEEDED[3 if stage == 3 else 1] if stage else ()
    lacking = [name for name in needed if not hasattr(zero, name)]
    if lacking or not needed:
        raise ConfigError(
            f"DeepSpeed {deepspeed.__version__}: the {type(zero).__name__} of ZeRO stage {stage} has no "
            f"{', '.join(lacking) or 'partitions'}, which this Lastgood takes its live state from; docs/deepspeed.md "
            "names the versions that it knows"
        )
    if getattr(zero, "cpu_offload", False) or getattr(zero, "offload_optimizer", False):
        raise ConfigError(
            "an optimizer that is offloaded is no part of this live state; leave offload_optimizer out, or use "
            "lastgood.integrations.deepspeed.use_lastgood"
        )
    if zero.dynamic_loss_scale:
        raise ConfigError("a dynamic loss scale (fp16) is no part of this live state; train in bf16 or fp32")


def _flat_weights(
    partitions: Iterable[torch.Tensor], buffers: Iterable[tuple[str, torch.Tensor]], loaded: Callable[[], None]
) -> torch.nn.Module:
    """A module over this memory, so that it is known for memory that a restore may read into."""
    weights = torch.nn.Module()
    for number, partition in enumerate(partitions):
        weights.register_buffer(f"partition {number}", partition.detach())
    for name, buffer in buffers:
        weights.register_buffer(f"buffer {name.replace('.', '/')}", buffer)
    weights.register_load_state_dict_post_hook(lambda *_: loaded())
    return weights
