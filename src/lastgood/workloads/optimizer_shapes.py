"""Shapes of models whose optimizer is timed: what a shadow holds does not depend on anything else of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from lastgood._lazy import torch
from lastgood.errors import ConfigError

__all__ = ["MODELS", "model_shapes"]

_VISION: Final = ("resnet50", "resnet152", "vgg11", "vit_h_14")
# Layers and width (Brown et al. 2020, "Language Models are Few-Shot Learners", table 2.1); GPT-2's vocabulary.
_GPT3: Final[Mapping[str, tuple[int, int]]] = {
    "gpt3_medium": (24, 1024),
    "gpt3_large": (24, 1536),
    "gpt3_xl": (24, 2048),
    "gpt3_6_7B": (32, 4096),
}
_VOCABULARY: Final = 50257
_CONTEXT: Final = 2048

MODELS: Final = (*_VISION, *_GPT3)
"""Those of Checkmate's own optimizer benchmark."""


def model_shapes(name: str) -> list[tuple[int, ...]]:
    """Shapes of all parameters, in order of registration. Raises ConfigError for a model that is not in MODELS."""
    if name in _GPT3:
        return _gpt_shapes(*_GPT3[name])
    if name not in _VISION:
        raise ConfigError(f"--model {name}: unknown; known: {', '.join(MODELS)}")
    import torchvision

    with torch.device("meta"):
        model = getattr(torchvision.models, name)()
    return [tuple(parameter.shape) for parameter in model.parameters()]


def _gpt_shapes(layers: int, width: int) -> list[tuple[int, ...]]:
    """GPT-2's parameters, with weights of the embedding and the head in one."""
    norm: list[tuple[int, ...]] = [(width,), (width,)]
    attention: list[tuple[int, ...]] = [(width, 3 * width), (3 * width,), (width, width), (width,)]
    feed_forward: list[tuple[int, ...]] = [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    embeddings: list[tuple[int, ...]] = [(_VOCABULARY, width), (_CONTEXT, width)]
    return embeddings + layers * (norm + attention + norm + feed_forward) + norm
