"""The models of the suite, made on the meta device: names of published sizes, and small twins of each for laptops."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from lastgood._lazy import torch
from lastgood.errors import ConfigError

__all__ = ["MODELS", "build_on_meta", "layers_of", "model_bytes"]

_FLOAT_BYTES: Final = 4
_TWIN_MEGABYTES: Final = (2, 64, 256)
_LEAST_WIDTH: Final = 16
_LEAST_VOCABULARY: Final = 256


@dataclass(frozen=True)
class _Shape:
    """Of one model: the class of transformers that has its structure, and the sizes that differ from its defaults."""

    build: Callable[[Mapping[str, int]], torch.nn.Module]
    width: str
    """Which size is the width of the model; those in `follow` stay in proportion to it."""
    follow: tuple[str, ...]
    layers: tuple[str, ...]
    vocabulary: str | None
    sizes: Mapping[str, int] = field(default_factory=dict)


def _llama(sizes: Mapping[str, int]) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    model: torch.nn.Module = LlamaForCausalLM(LlamaConfig(**sizes))
    return model


def _vit(sizes: Mapping[str, int]) -> torch.nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    model: torch.nn.Module = ViTForImageClassification(ViTConfig(**sizes))
    return model


def _t5(sizes: Mapping[str, int]) -> torch.nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    gated: dict[str, Any] = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    model: torch.nn.Module = T5ForConditionalGeneration(T5Config(**sizes, **gated))
    return model


def _llama_shape(
    width: int, feedforward: int, layers: int, heads: int, key_heads: int | None = None, words: int = 32000
) -> _Shape:
    sizes = {
        "vocab_size": words,
        "hidden_size": width,
        "intermediate_size": feedforward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads or heads,
    }
    return _Shape(_llama, "hidden_size", ("intermediate_size",), ("num_hidden_layers",), "vocab_size", sizes)


_FULL: Final[Mapping[str, _Shape]] = {
    # Touvron et al. 2023, table 2 (7B to 65B), and Llama 2, table 1 (70B, with grouped keys).
    "L7b": _llama_shape(4096, 11008, 32, 32),
    "L13b": _llama_shape(5120, 13824, 40, 40),
    "L30b": _llama_shape(6656, 17920, 60, 52),
    "L65b": _llama_shape(8192, 22016, 80, 64),
    "L70b": _llama_shape(8192, 28672, 80, 64, 8),
    # MLPerf Storage, Rules.md, table 2, but for its 1T, whose heads do not divide its width; Llama 3's words.
    "llama3-8b": _llama_shape(4096, 14336, 32, 32, 8, 128256),
    "llama3-70b": _llama_shape(8192, 28672, 80, 128, 8, 128256),
    "llama3-405b": _llama_shape(16384, 53248, 126, 128, 8, 128256),
    # Dosovitskiy et al. 2021, table 1.
    "vit-base": _Shape(
        _vit,
        "hidden_size",
        ("intermediate_size",),
        ("num_hidden_layers",),
        None,
        {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    ),
    # Sanh et al. 2022: T5 1.1 XL (Raffel et al. 2020).
    "T0_3B": _Shape(
        _t5,
        "d_model",
        ("d_ff", "d_kv"),
        ("num_layers", "num_decoder_layers"),
        "vocab_size",
        {
            "vocab_size": 32128,
            "d_model": 2048,
            "d_kv": 64,
            "d_ff": 5120,
            "num_layers": 24,
            "num_decoder_layers": 24,
            "num_heads": 32,
        },
    ),
}
MODELS: Final = (*_FULL, *(f"{name}-{size}MB" for name in _FULL for size in _TWIN_MEGABYTES))
"""Names of published models, and of their twins, whose parameters take at most 2, 64 and 256 MB (10**6 bytes)."""


def build_on_meta(name: str) -> torch.nn.Module:
    """The model `name`, float32, all parameters on the meta device. Raises ConfigError for an unknown name."""
    if name not in MODELS:
        raise ConfigError(f"model {name!r} is unknown; known: {', '.join(MODELS)}")
    full, _, twin = name.partition("-")
    if name in _FULL:
        return _on_meta(_FULL[name], _FULL[name].sizes)
    full, _, twin = name.rpartition("-")
    return _twin(_FULL[full], int(twin.removesuffix("MB")) * 10**6)


def model_bytes(model: torch.nn.Module) -> int:
    """Bytes of all parameters, each counted once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def layers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers that are spread one by one: the members of each list of layers (an encoder's, a decoder's)."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    inside = {id(one) for outer in lists for layer in outer for one in layer.modules()}
    return [layer for outer in lists if id(outer) not in inside for layer in outer]


def _on_meta(shape: _Shape, sizes: Mapping[str, int]) -> torch.nn.Module:
    with torch.device("meta"):
        return shape.build(sizes)


def _twin(shape: _Shape, most_bytes: int) -> torch.nn.Module:
    """The largest one with the structure of `shape` that fits: fewer layers first, then narrower, with fewer words."""
    sizes = dict(shape.sizes)
    fewest = 2
    for name in shape.layers:
        sizes[name] = min(sizes[name], fewest)
    model = _on_meta(shape, sizes)
    while model_bytes(model) > most_bytes:
        if sizes[shape.width] <= _LEAST_WIDTH:
            raise ConfigError(f"no twin of this model fits into {most_bytes} bytes")
        _narrow(shape, sizes)
        model = _on_meta(shape, sizes)
    while True:
        more = {**sizes, **{name: sizes[name] + 1 for name in shape.layers}}
        deeper = _on_meta(shape, more)
        if more[shape.layers[0]] > shape.sizes[shape.layers[0]] or model_bytes(deeper) > most_bytes:
            return model
        sizes, model = more, deeper


def _narrow(shape: _Shape, sizes: dict[str, int]) -> None:
    """Three quarters of the width, rounded to what the heads share, and of all that follows it."""
    heads = next(name for name in sizes if name in ("num_attention_heads", "num_heads"))
    groups = sizes[heads] // sizes.get("num_key_value_heads", sizes[heads])
    while sizes[heads] > 4 and sizes[shape.width] // sizes[heads] <= 32:
        sizes[heads] //= 2
        if "num_key_value_heads" in sizes:
            sizes["num_key_value_heads"] = max(1, sizes[heads] // groups)
    unit = 2 * sizes[heads]
    for name in (shape.width, *shape.follow):
        sizes[name] = max(unit if name == shape.width else 4, math.floor(sizes[name] * 0.75 / unit) * unit)
    if shape.vocabulary is not None:
        sizes[shape.vocabulary] = max(_LEAST_VOCABULARY, sizes[shape.vocabulary] // 2)
