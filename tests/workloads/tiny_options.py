"""Two sizes of every workload, as small as their options allow."""

from __future__ import annotations

from typing import Any

TINY: dict[str, list[dict[str, Any]]] = {
    "vgg16": [
        {"batch_size": 2, "image_size": 32, "classes": 10, "classifier_width": 8},
        {"batch_size": 1, "image_size": 40, "classes": 13, "classifier_width": 11},
    ],
    "resnet18": [
        {"batch_size": 2, "image_size": 32, "classes": 10},
        {"batch_size": 1, "image_size": 40, "classes": 17},
    ],
    "resnet50": [
        {"batch_size": 2, "image_size": 32, "classes": 10},
        {"batch_size": 1, "image_size": 40, "classes": 17},
    ],
    "bert": [
        {
            "batch_size": 2,
            "sequence_length": 32,
            "layers": 2,
            "hidden": 16,
            "heads": 2,
            "feedforward": 24,
            "vocabulary": 600,
        },
        {
            "batch_size": 1,
            "sequence_length": 520,
            "layers": 1,
            "hidden": 24,
            "heads": 3,
            "feedforward": 20,
            "vocabulary": 700,
        },
    ],
    "transformer_xl": [
        {
            "batch_size": 2,
            "segment_length": 8,
            "memory_length": 12,
            "layers": 2,
            "hidden": 16,
            "heads": 2,
            "feedforward": 24,
            "vocabulary": 600,
        },
        {
            "batch_size": 3,
            "segment_length": 5,
            "memory_length": 0,
            "layers": 3,
            "hidden": 24,
            "heads": 3,
            "feedforward": 20,
            "vocabulary": 700,
        },
    ],
    "opt": [
        {
            "batch_size": 2,
            "sequence_length": 16,
            "layers": 2,
            "hidden": 16,
            "heads": 2,
            "feedforward": 24,
            "vocabulary": 600,
        },
        {
            "batch_size": 1,
            "sequence_length": 2050,
            "layers": 1,
            "hidden": 24,
            "heads": 3,
            "feedforward": 20,
            "vocabulary": 700,
        },
    ],
    "bloom": [
        {"batch_size": 2, "sequence_length": 16, "layers": 2, "hidden": 16, "heads": 2, "vocabulary": 600},
        {"batch_size": 1, "sequence_length": 24, "layers": 3, "hidden": 24, "heads": 3, "vocabulary": 700},
    ],
    "blob": [{"megabytes": 1}, {"megabytes": 65}],
}
