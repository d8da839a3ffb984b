"""OPT and BLOOM causal language models from transformers, with random weights, trained by AdamW."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers.models.bloom.configuration_bloom import BloomConfig
from transformers.models.bloom.modeling_bloom import BloomForCausalLM
from transformers.models.opt.configuration_opt import OPTConfig
from transformers.models.opt.modeling_opt import OPTForCausalLM

from lastgood.workloads.base import Batch, Setting, Workload
from lastgood.workloads.data.text_streams import BlockStream
from lastgood.workloads.data.tokens import load_tokens
from lastgood.workloads.options import BloomOptions, OptOptions
from lastgood.workloads.training_parts import adamw_with_warmup, seeded_build

__all__ = ["LEARNING_RATE", "build_bloom", "build_opt"]

LEARNING_RATE = 2e-4


def build_opt(options: OptOptions, setting: Setting) -> Workload:
    """Build the workload ``opt``."""

    def make() -> nn.Module:
        config = OPTConfig(
            vocab_size=options.vocabulary,
            hidden_size=options.hidden,
            word_embed_proj_dim=options.hidden,
            num_hidden_layers=options.layers,
            num_attention_heads=options.heads,
            ffn_dim=options.feedforward,
            max_position_embeddings=options.positions,
            use_cache=False,
            attn_implementation=options.attention,
        )
        model: nn.Module = OPTForCausalLM(config)
        return model

    return _build("opt", options, make, setting)


def build_bloom(options: BloomOptions, setting: Setting) -> Workload:
    """Build the workload ``bloom``."""

    def make() -> nn.Module:
        config = BloomConfig(
            vocab_size=options.vocabulary,
            hidden_size=options.hidden,
            n_layer=options.layers,
            n_head=options.heads,
            use_cache=False,
            attn_implementation="eager",
        )
        model: nn.Module = BloomForCausalLM(config)
        return model

    return _build("bloom", options, make, setting)


def _build(
    name: str, options: OptOptions | BloomOptions, make_model: Callable[[], nn.Module], setting: Setting
) -> Workload:
    tokens, facts = load_tokens(setting.data_dir, setting.data_path, options.vocabulary)
    stream = BlockStream(tokens, options.batch_size, options.sequence_length, setting.seed, facts["name"])
    with seeded_build(setting):
        model = make_model().train()
        optimizer, scheduler = adamw_with_warmup(model, LEARNING_RATE)

    def loss(batch: Batch) -> torch.Tensor:
        tokens = batch["input_ids"]
        found: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        return found

    return Workload(
        name=name,
        model=model,
        optimizer=optimizer,
        data=stream,
        loss=loss,
        data_facts=facts,
        scheduler=scheduler,
    )
