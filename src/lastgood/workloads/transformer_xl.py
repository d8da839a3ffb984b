"""Transformer-XL (Dai et al. 2019, arXiv 1901.02860): a language model with segment recurrence and relative positions.

Written from the paper, since the original is gone from transformers. Of the paper's base model it keeps the attention
of section 3.3 with biases u and v of its own in each layer, the cached memory of section 3.2, post-norm, and sinusoids
for relative positions. Unlike it, the softmax is plain and tied to the embedding (no adaptive softmax), which suits the
size of a BPE vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear

from lastgood.errors import MismatchError
from lastgood.workloads.base import Batch, Setting, Workload
from lastgood.workloads.data.text_streams import LaneStream
from lastgood.workloads.data.tokens import load_tokens
from lastgood.workloads.options import TransformerXLOptions
from lastgood.workloads.training_parts import adamw_with_warmup, seeded_build

__all__ = ["Memory", "RelativeAttention", "TransformerXL", "build_transformer_xl", "sinusoid"]

_DROPOUT = 0.1
_INIT_SPREAD = 0.02
_LEARNING_RATE = 2.5e-4


def sinusoid(distances: torch.Tensor, hidden: int) -> torch.Tensor:
    """The paper's R: a row per distance, the first half sines, the second cosines, of `distance * 10000^(-2i/hidden)`.

    Args:
        distances: Relative distances, shape (length,).
        hidden: Even width of a row.

    Returns:
        Shape (length, hidden), in the type of `distances`, or the default float type if that is integral.
    """
    dtype = distances.dtype if distances.is_floating_point() else torch.get_default_dtype()
    exponents = torch.arange(0, hidden, 2, device=distances.device, dtype=dtype) / hidden
    angles = distances.to(dtype)[:, None] * 10000.0**-exponents
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class RelativeAttention(nn.Module):
    """Causal attention of a segment over its memory and itself, with relative positions (section 3.3).

    Head `h` uses features `h * head_dim` to `(h + 1) * head_dim`. The score of query i for key j is, before scaling,
    `(q_i + u) k_j + (q_i + v) W_r R_(i-j)`; no residual and no norm are applied.
    """

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, hidden, bias=False)
        self.value = nn.Linear(hidden, hidden, bias=False)
        self.position = nn.Linear(hidden, hidden, bias=False)
        self.output = nn.Linear(hidden, hidden, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(heads, hidden // heads))
        self.position_bias = nn.Parameter(torch.zeros(heads, hidden // heads))

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """Attend.

        Args:
            x: The segment, shape (batch, length, hidden).
            memory: Hidden states that precede it, oldest first, shape (batch, memory, hidden); memory may be 0. No
                gradient flows into it.

        Returns:
            Shape (batch, length, hidden).
        """
        batch, length, hidden = x.shape
        context = torch.cat([memory.detach(), x], dim=1)
        reach = context.shape[1]
        query = self._split(self.query(x))
        key, value = self._split(self.key(context)), self._split(self.value(context))
        # Distances above 256 are not exact in bfloat16.
        distances = torch.arange(reach - 1, -1, -1, device=x.device).to(torch.promote_types(x.dtype, torch.float32))
        position = self._split(self.position(sinusoid(distances, hidden).to(x.dtype))[None])

        by_content = (query + self.content_bias[:, None]) @ key.transpose(2, 3)
        by_position = _relative_shift((query + self.position_bias[:, None]) @ position.transpose(2, 3))
        future = torch.ones(length, reach, dtype=torch.bool, device=x.device).triu(1 + reach - length)
        scores = (by_content + by_position) / (hidden // self.heads) ** 0.5
        weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
        mixed: torch.Tensor = self.output((weights @ value).transpose(1, 2).reshape(batch, length, hidden))
        return mixed

    def _split(self, features: torch.Tensor) -> torch.Tensor:
        """(batch, length, hidden) to (batch, heads, length, head_dim)."""
        batch, length, hidden = features.shape
        return features.view(batch, length, self.heads, hidden // self.heads).transpose(1, 2)


def _relative_shift(scores: torch.Tensor) -> torch.Tensor:
    """Turn columns by distance into columns by key: row i of (..., length, reach) moves left by `length - 1 - i`.

    The paper's appendix B: pad a column, read the rows one off, drop the first. What moves in from the neighbouring row
    lands beyond the diagonal, where the causal mask hides it.
    """
    *front, length, reach = scores.shape
    padded = torch.cat([scores.new_zeros(*front, length, 1), scores], dim=-1)
    return padded.view(*front, reach + 1, length)[..., 1:, :].reshape(*front, length, reach)


class _Layer(nn.Module):
    """Attention and a feed-forward network, each with dropout, a residual and then a norm."""

    def __init__(self, hidden: int, heads: int, feedforward: int) -> None:
        super().__init__()
        self.attention = RelativeAttention(hidden, heads)
        self.attention_norm = nn.LayerNorm(hidden)
        self.feedforward = nn.Sequential(
            nn.Linear(hidden, feedforward), nn.ReLU(), nn.Dropout(_DROPOUT), nn.Linear(feedforward, hidden)
        )
        self.feedforward_norm = nn.LayerNorm(hidden)
        self.dropout = nn.Dropout(_DROPOUT)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x, memory)))
        normed: torch.Tensor = self.feedforward_norm(x + self.dropout(self.feedforward(x)))
        return normed


class TransformerXL(nn.Module):
    """The language model. It holds no memory of its own: `forward` takes one and returns the next."""

    def __init__(self, vocabulary: int, layers: int, hidden: int, heads: int, feedforward: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.output_bias = nn.Parameter(torch.zeros(vocabulary))
        self.layers = nn.ModuleList(_Layer(hidden, heads, feedforward) for _ in range(layers))
        self.dropout = nn.Dropout(_DROPOUT)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0, _INIT_SPREAD)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: torch.Tensor, memories: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one segment.

        Args:
            tokens: Shape (batch, length).
            memories: Each layer's earlier inputs, oldest first, shape (layers, batch, memory, hidden).

        Returns:
            Logits, shape (batch, length, vocabulary), and each layer's input of this segment, without gradient, shape
            (layers, batch, length, hidden).
        """
        scale = self.embedding.embedding_dim**0.5
        x = self.dropout(self.embedding(tokens) * scale)
        inputs = []
        for layer, memory in zip(self.layers, memories, strict=True):
            inputs.append(x.detach())
            x = layer(x, memory)
        return linear(self.dropout(x), self.embedding.weight, self.output_bias), torch.stack(inputs)


class Memory:
    """The hidden states of the last segments, a part of the training state: it changes in the forward pass.

    The tensor has its full size from the start and keeps its place in memory, so that every checkpoint has one layout;
    `filled` says how many of its newest entries are real.
    """

    def __init__(self, layers: int, batch: int, length: int, hidden: int, device: str) -> None:
        self.hidden = torch.zeros(layers, batch, length, hidden, device=device)
        self.filled = 0

    def read(self) -> torch.Tensor:
        """The real entries, oldest first, shape (layers, batch, filled, hidden)."""
        return self.hidden[:, :, self.hidden.shape[2] - self.filled :]

    def push(self, states: torch.Tensor) -> None:
        """Append a segment's states, shape (layers, batch, length, hidden); the oldest fall out."""
        capacity = self.hidden.shape[2]
        with torch.no_grad():
            joined = torch.cat([self.hidden, states], dim=2)
            self.hidden.copy_(joined[:, :, joined.shape[2] - capacity :])
        self.filled = min(capacity, self.filled + states.shape[2])

    def state_dict(self) -> dict[str, Any]:
        """The states and how many of them are real."""
        return {"hidden": self.hidden, "filled": self.filled}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take saved states. Raises MismatchError if they have another shape."""
        hidden, filled = state["hidden"], int(state["filled"])
        if hidden.shape != self.hidden.shape or not 0 <= filled <= self.hidden.shape[2]:
            raise MismatchError(
                f"Transformer-XL memory of shape {tuple(hidden.shape)} with {filled} entries filled does not fit this "
                f"run's {tuple(self.hidden.shape)}; restore with the options that it was saved with"
            )
        self.hidden.copy_(hidden)
        self.filled = filled


def build_transformer_xl(options: TransformerXLOptions, setting: Setting) -> Workload:
    """Build the workload ``transformer_xl``."""
    tokens, facts = load_tokens(setting.data_dir, setting.data_path, options.vocabulary)
    stream = LaneStream(tokens, options.batch_size, options.segment_length, setting.seed, facts["name"])
    with seeded_build(setting):
        model = TransformerXL(
            options.vocabulary, options.layers, options.hidden, options.heads, options.feedforward
        ).train()
        optimizer, scheduler = adamw_with_warmup(model, _LEARNING_RATE)
    memory = Memory(options.layers, options.batch_size, options.memory_length, options.hidden, setting.device)

    def loss(batch: Batch) -> torch.Tensor:
        logits, states = model(batch["input_ids"], memory.read())
        memory.push(states)
        return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    return Workload(
        name="transformer_xl",
        model=model,
        optimizer=optimizer,
        data=stream,
        loss=loss,
        data_facts=facts,
        scheduler=scheduler,
        extra={"memory": memory},
    )
