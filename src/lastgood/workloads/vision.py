"""VGG-16 and residual networks from torchvision, with random weights, trained by SGD with momentum."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torchvision.models.resnet import resnet18, resnet50
from torchvision.models.vgg import VGG, cfgs, make_layers

from lastgood.workloads.base import Batch, Setting, Workload
from lastgood.workloads.data.images import open_images
from lastgood.workloads.options import Resnet18Options, Resnet50Options, Vgg16Options
from lastgood.workloads.training_parts import seeded_build

__all__ = ["build_resnet18", "build_resnet50", "build_vgg16"]

_VGG_LEARNING_RATE = 0.001
"""Without BatchNorm the full size diverges within a hundred steps at ten times this rate."""
_RESNET_LEARNING_RATE_PER_IMAGE = 0.1 / 256
"""Scaled with the batch size (Goyal et al. 2017): BatchNorm over a laptop's small batches diverges otherwise."""
_MOMENTUM = 0.9
_WEIGHT_DECAY = 1e-4
_PIXEL_MEAN, _PIXEL_SPREAD = 127.5, 63.75


def build_vgg16(options: Vgg16Options, setting: Setting) -> Workload:
    """Build the workload ``vgg16``."""
    return _build("vgg16", options, lambda: _vgg16(options), _VGG_LEARNING_RATE, setting)


def build_resnet18(options: Resnet18Options, setting: Setting) -> Workload:
    """Build the workload ``resnet18``."""
    return _build_resnet("resnet18", resnet18, options, setting)


def build_resnet50(options: Resnet50Options, setting: Setting) -> Workload:
    """Build the workload ``resnet50``."""
    return _build_resnet("resnet50", resnet50, options, setting)


def _build_resnet(
    name: str, network: Callable[..., nn.Module], options: Resnet18Options | Resnet50Options, setting: Setting
) -> Workload:
    learning_rate = _RESNET_LEARNING_RATE_PER_IMAGE * options.batch_size
    return _build(name, options, lambda: network(weights=None, num_classes=options.classes), learning_rate, setting)


def _vgg16(options: Vgg16Options) -> nn.Module:
    # torchvision's class always makes the 4096 wide classifier: on the meta device that costs nothing.
    device = torch.get_default_device()
    with torch.device("meta"):
        model: nn.Module = VGG(make_layers(cfgs["D"]), num_classes=options.classes, init_weights=False)
        width = options.classifier_width
        model.set_submodule(
            "avgpool", nn.Identity() if options.image_size // 32 == 7 else _PoolTo7(options.image_size // 32)
        )
        model.set_submodule("classifier.0", nn.Linear(512 * 7 * 7, width))
        model.set_submodule("classifier.3", nn.Linear(width, width))
        model.set_submodule("classifier.6", nn.Linear(width, options.classes))
    model.to_empty(device=device)
    for module in model.modules():
        # The rules of torchvision's own VGG.
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, 0, 0.01)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            nn.init.zeros_(parameter)
    return model


class _PoolTo7(nn.Module):
    """Adaptive average pooling from size x size to 7 x 7, as two matrix products.

    torch's own backward of it on CUDA adds in an order that differs from run to run, and a restored training must
    repeat the losses of the one that never stopped.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        pool = torch.zeros(7, self._size, device=maps.device, dtype=maps.dtype)
        for row in range(7):
            first, last = row * self._size // 7, -(-(row + 1) * self._size // 7)
            pool[row, first:last] = 1 / (last - first)
        return pool @ maps @ pool.T


def _build(
    name: str,
    options: Vgg16Options | Resnet18Options | Resnet50Options,
    make_model: Callable[[], nn.Module],
    learning_rate: float,
    setting: Setting,
) -> Workload:
    stream, facts = open_images(
        setting.data_dir,
        setting.data_path,
        batch_size=options.batch_size,
        image_size=options.image_size,
        classes=options.classes,
        seed=setting.seed,
    )
    with seeded_build(setting):
        model = make_model().train()
        optimizer = torch.optim.SGD(
            model.parameters(),
            lr=learning_rate,
            momentum=_MOMENTUM,
            weight_decay=_WEIGHT_DECAY,
            fused=True,
        )

    def loss(batch: Batch) -> torch.Tensor:
        pixels = (batch["images"].float() - _PIXEL_MEAN) / _PIXEL_SPREAD
        return cross_entropy(model(pixels), batch["labels"])

    return Workload(name=name, model=model, optimizer=optimizer, data=stream, loss=loss, data_facts=facts)
