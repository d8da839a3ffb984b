"""Options of every workload, with the exact number of parameters as a formula. Needs no torch.

Each formula counts what the optimizer updates, weights that are shared counted once. Buffers, such as BatchNorm's
running statistics, are outside it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from lastgood.workloads.base import WorkloadOptions

__all__ = [
    "BertOptions",
    "BlobOptions",
    "BloomOptions",
    "NetworkOptions",
    "OptOptions",
    "Resnet18Options",
    "Resnet50Options",
    "TransformerXLOptions",
    "Vgg16Options",
]

MINIMUM_VOCABULARY = 512
"""Byte-level tokenizers need 256 symbols and their special tokens before the first merge."""


class NetworkOptions(WorkloadOptions):
    """Base of those of networks."""

    later_options: ClassVar[tuple[str, ...]] = ("precision",)

    precision: Literal["float32", "bfloat16"] = "float32"
    """Of the forward pass: ``bfloat16`` is torch's autocast. Parameters, gradients and optimizer stay float32."""


class _VisionOptions(NetworkOptions):
    optimizer_moments: ClassVar[int] = 1

    batch_size: int = Field(ge=1, le=65536)
    image_size: int = Field(ge=32, le=1024)
    """Height and width in pixels."""
    classes: int = Field(ge=2, le=100_000)


class Vgg16Options(_VisionOptions):
    """VGG-16 (Simonyan and Zisserman 2014, configuration D)."""

    classifier_width: int = Field(ge=1, le=16384)
    """Width of the two hidden fully connected layers; 4096 in the original."""

    def parameters(self) -> int:
        """13 convolutions of 3 x 3, then three fully connected layers on a 7 x 7 map."""
        channels = (3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
        convolutions = sum(9 * a * b + b for a, b in pairwise(channels))
        width = self.classifier_width
        classifier = (512 * 49 + 1) * width + (width + 1) * width + (width + 1) * self.classes
        return convolutions + classifier


class _ResnetOptions(_VisionOptions):
    """A residual network on images (He et al. 2015), as torchvision has it."""

    stages: ClassVar[tuple[int, int, int, int]]
    """Blocks at widths 64, 128, 256 and 512."""
    bottleneck: ClassVar[bool]
    """Blocks of 1 x 1, 3 x 3 and 1 x 1 that leave four times their width, not of two 3 x 3."""

    def parameters(self) -> int:
        """Stem, the blocks of the four stages, one fully connected layer."""
        total = 7 * 7 * 3 * 64 + 2 * 64
        width_in = 64
        for blocks, width in zip(self.stages, (64, 128, 256, 512), strict=True):
            width_out = 4 * width if self.bottleneck else width
            if width_in != width_out:
                total += width_in * width_out + 2 * width_out  # the shortcut's projection
            for _ in range(blocks):
                total += self._block(width_in, width, width_out)
                width_in = width_out
        return total + (width_in + 1) * self.classes

    def _block(self, width_in: int, width: int, width_out: int) -> int:
        """Convolutions and their norms."""
        if self.bottleneck:
            return width_in * width + 9 * width * width + width * width_out + 2 * (2 * width + width_out)
        return 9 * width_in * width + 9 * width * width_out + 2 * (width + width_out)

    @model_validator(mode="after")
    def _batch_norm_has_a_spread(self) -> Self:
        last_map = -(-self.image_size // 32)
        if self.batch_size * last_map * last_map < 2:
            raise ValueError("BatchNorm needs more than one value per channel: batch_size 1 needs image_size above 32")
        return self


class Resnet18Options(_ResnetOptions):
    """ResNet-18."""

    stages = (2, 2, 2, 2)
    bottleneck = False


class Resnet50Options(_ResnetOptions):
    """ResNet-50, with the stride in the 3 x 3 convolution as torchvision has it."""

    stages = (3, 4, 6, 3)
    bottleneck = True


class _TransformerOptions(NetworkOptions):
    optimizer_moments: ClassVar[int] = 2

    batch_size: int = Field(ge=1, le=65536)
    layers: int = Field(ge=1, le=256)
    hidden: int = Field(ge=8, le=65536)
    heads: int = Field(ge=1, le=1024)
    vocabulary: int = Field(ge=MINIMUM_VOCABULARY, le=1_000_000)

    @model_validator(mode="after")
    def _heads_divide_hidden(self) -> Self:
        if self.hidden % self.heads:
            raise ValueError(f"hidden ({self.hidden}) must be divisible by heads ({self.heads})")
        return self


class _AttentionOptions(_TransformerOptions):
    later_options = (*NetworkOptions.later_options, "attention")

    attention: Literal["eager", "sdpa"] = "eager"
    """``sdpa`` takes torch's fused kernels, ``eager`` the matrix of scores. A proof of ``sdpa`` takes kernels that
    repeat their bits, which are slower."""


class BertOptions(_AttentionOptions):
    """BERT for span question answering (Devlin et al. 2018): the encoder and one linear layer for start and end."""

    sequence_length: int = Field(ge=16, le=8192)
    """Tokens of question and context together, special tokens included."""
    feedforward: int = Field(ge=1, le=262_144)

    @property
    def positions(self) -> int:
        """Rows of the table of learned positions: 512 as in the original, more if the sequence needs it."""
        return max(512, self.sequence_length)

    def parameters(self) -> int:
        """Embeddings and their norm, the layers, the head; no pooler."""
        h = self.hidden
        embeddings = (self.vocabulary + self.positions + 2) * h + 2 * h
        return embeddings + self.layers * _encoder_layer(h, self.feedforward) + 2 * (h + 1)


class OptOptions(_AttentionOptions):
    """OPT (Zhang et al. 2022): causal, learned positions, pre-norm, output tied to the embedding."""

    sequence_length: int = Field(ge=2, le=65536)
    feedforward: int = Field(ge=1, le=262_144)

    @property
    def positions(self) -> int:
        """Positions of the learned table: 2048 as in the original, more if the sequence needs it."""
        return max(2048, self.sequence_length)

    def parameters(self) -> int:
        """Embeddings (the table of positions has two rows more than positions), the layers, the last norm."""
        h = self.hidden
        return (self.vocabulary + self.positions + 2) * h + self.layers * _encoder_layer(h, self.feedforward) + 2 * h


class BloomOptions(_TransformerOptions):
    """BLOOM (BigScience 2022): causal, ALiBi, feed-forward four times as wide, output tied to the embedding."""

    sequence_length: int = Field(ge=2, le=65536)

    def parameters(self) -> int:
        """Embedding and its norm, the layers, the last norm."""
        h = self.hidden
        return self.vocabulary * h + 2 * h + self.layers * _encoder_layer(h, 4 * h) + 2 * h


class TransformerXLOptions(_TransformerOptions):
    """Transformer-XL language model (Dai et al. 2019): segment recurrence, relative positions, tied softmax."""

    segment_length: int = Field(ge=1, le=65536)
    """Tokens that one step trains on, per lane."""
    memory_length: int = Field(ge=0, le=65536)
    """Hidden states of earlier segments that attention reaches back to, per layer and lane."""
    feedforward: int = Field(ge=1, le=262_144)

    @model_validator(mode="after")
    def _sinusoid_has_halves(self) -> Self:
        if self.hidden % 2:
            raise ValueError(f"hidden ({self.hidden}) must be even: half of the position code is sine, half cosine")
        return self

    def parameters(self) -> int:
        """Embedding and output bias; per layer five projections, the biases u and v, the feed-forward, two norms."""
        h, f = self.hidden, self.feedforward
        layer = 5 * h * h + 2 * h + (2 * h * f + f + h) + 4 * h
        return self.vocabulary * (h + 1) + self.layers * layer

    def state_bytes(self) -> int:
        """Parameters, moments and the memory, a large part of the state when batch and memory are long."""
        memory = self.layers * self.batch_size * self.memory_length * self.hidden
        return super().state_bytes() + 4 * memory


class BlobOptions(WorkloadOptions):
    """A state of a given size and a step that costs almost nothing: for the time that one checkpoint takes."""

    TRAINED: ClassVar[int] = 64
    """Parameters that get a gradient."""

    megabytes: int = Field(ge=1, le=1_000_000)
    """Bytes of all parameters, in units of 10**6 as in PCcheck's figure 11."""

    def parameters(self) -> int:
        """All of them fp32."""
        return self.megabytes * 1_000_000 // 4

    def gradient_bytes(self) -> int:
        """Of the few that are trained."""
        return 4 * self.TRAINED


def _encoder_layer(hidden: int, feedforward: int) -> int:
    """Four biased projections, a biased two-layer feed-forward and two norms."""
    return 4 * (hidden + 1) * hidden + (hidden + 1) * feedforward + (feedforward + 1) * hidden + 4 * hidden
