"""BERT for span question answering, from transformers, with random weights, trained by AdamW."""

from __future__ import annotations

import torch
from transformers.models.bert.configuration_bert import BertConfig
from transformers.models.bert.modeling_bert import BertForQuestionAnswering

from lastgood.workloads.base import Batch, Setting, Workload
from lastgood.workloads.data.squad import open_squad
from lastgood.workloads.options import BertOptions
from lastgood.workloads.training_parts import adamw_with_warmup, seeded_build

__all__ = ["build_bert"]

_LEARNING_RATE = 5e-5


def build_bert(options: BertOptions, setting: Setting) -> Workload:
    """Build the workload ``bert``."""
    stream, facts = open_squad(
        setting.data_dir,
        setting.data_path,
        batch_size=options.batch_size,
        length=options.sequence_length,
        vocabulary=options.vocabulary,
        seed=setting.seed,
    )
    config = BertConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        intermediate_size=options.feedforward,
        max_position_embeddings=options.positions,
        attn_implementation=options.attention,
    )
    with seeded_build(setting):
        model = BertForQuestionAnswering(config).train()
        optimizer, scheduler = adamw_with_warmup(model, _LEARNING_RATE)

    def loss(batch: Batch) -> torch.Tensor:
        found: torch.Tensor = model(**batch).loss
        return found

    return Workload(
        name="bert",
        model=model,
        optimizer=optimizer,
        data=stream,
        loss=loss,
        data_facts=facts,
        scheduler=scheduler,
    )
