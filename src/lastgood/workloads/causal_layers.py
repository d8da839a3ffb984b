"""OPT and BLOOM as a sequence of layers, each from one tensor to one tensor, as a pipeline cuts a model into stages.

The layers are the model's own modules, with its weights; what transformers computes once for all layers (the causal
mask, ALiBi's biases) each layer computes for itself, so that nothing but hidden states goes from stage to stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lastgood.errors import ConfigError

__all__ = ["CausalLayers", "causal_layers"]


@dataclass(frozen=True)
class CausalLayers:
    """A causal model, cut: tokens, [batch, length], go through `embedding`, `layers` and `head`, which gives logits."""

    embedding: nn.Embedding
    layers: list[nn.Module]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """From logits, [batch, length, vocabulary], and the same tokens to the mean loss of each token's successor."""

    @staticmethod
    def head(embedding: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """Logits; the output matrix is the embedding's, as both models tie them."""
        assert isinstance(embedding, nn.Embedding)
        return nn.functional.linear(hidden, embedding.weight)


def causal_layers(model: nn.Module) -> CausalLayers:
    """Cut a causal model of transformers, OPT or BLOOM. Raises ConfigError for another one."""
    cut = _CUTS.get(type(model).__name__)
    if cut is None:
        raise ConfigError(f"a {type(model).__name__} cannot be cut into a pipeline's stages; known: {', '.join(_CUTS)}")
    whole: Any = model
    embedding, layers = cut(whole)
    vocabulary, loss_function = whole.config.vocab_size, whole.loss_function

    def loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = loss_function(logits=logits, labels=tokens, vocab_size=vocabulary)
        return found

    return CausalLayers(embedding, layers, loss)


class _OptPositions(nn.Module):
    """Adds OPT's learned positions to embedded tokens."""

    def __init__(self, positions: nn.Module) -> None:
        super().__init__()
        self.positions = positions

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        everywhere = torch.ones(hidden.shape[:2], dtype=torch.long, device=hidden.device)
        found: torch.Tensor = self.positions(everywhere, 0, position_ids=everywhere.cumsum(dim=1) - 1)
        return hidden + found


class _OptLayer(nn.Module):
    """A decoder layer of OPT with its own causal mask."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return _first(self.layer(hidden, attention_mask=_causal_mask(hidden)))


class _BloomLayer(nn.Module):
    """A block of BLOOM with its own causal mask and ALiBi's biases (Press et al. 2021)."""

    def __init__(self, block: nn.Module, biases: Callable[..., torch.Tensor], heads: int) -> None:
        super().__init__()
        self.block = block
        self._biases = biases
        self._heads = heads

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        everywhere = torch.ones(hidden.shape[:2], dtype=torch.long, device=hidden.device)
        alibi = self._biases(everywhere, self._heads, hidden.dtype)
        return _first(self.block(hidden, alibi=alibi, attention_mask=_causal_mask(hidden)))


def _causal_mask(hidden: torch.Tensor) -> torch.Tensor:
    """What eager attention adds to its scores: the lowest number where a token would see a later one."""
    length = hidden.shape[1]
    lowest = torch.full((length, length), torch.finfo(hidden.dtype).min, dtype=hidden.dtype, device=hidden.device)
    return lowest.triu(1)[None, None]


def _first(found: Any) -> torch.Tensor:
    """Hidden states: older transformers give them in a tuple, as do BLOOM's blocks."""
    first: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return first


def _cut_opt(model: Any) -> tuple[nn.Embedding, list[nn.Module]]:
    decoder = model.model.decoder
    layers = [_OptPositions(decoder.embed_positions), *(_OptLayer(layer) for layer in decoder.layers)]
    return decoder.embed_tokens, [*layers, decoder.final_layer_norm]


def _cut_bloom(model: Any) -> tuple[nn.Embedding, list[nn.Module]]:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    inner = model.transformer
    blocks = [_BloomLayer(block, build_alibi_tensor, inner.num_heads) for block in inner.h]
    return inner.word_embeddings, [inner.word_embeddings_layernorm, *blocks, inner.ln_f]


_CUTS: dict[str, Callable[[Any], tuple[nn.Embedding, list[nn.Module]]]] = {
    "OPTForCausalLM": _cut_opt,
    "BloomForCausalLM": _cut_bloom,
}
