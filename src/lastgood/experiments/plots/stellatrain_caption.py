"""The sentences under StellaTrain's figure."""

from __future__ import annotations

from typing import Final

import pandas as pd

from lastgood.experiments.plots.captions import joined, joined_sentences, revision_words
from lastgood.experiments.records.stellatrain import ALONE
from lastgood.units import format_seconds

__all__ = ["stellatrain_caption"]

_MODELS: Final = {"resnet18": "ResNet-18", "mlp": "A small network"}


def stellatrain_caption(frame: pd.DataFrame) -> str:
    """Machine, scale, what was measured, how to read it, what it was compared with, revision."""
    first = frame.iloc[0]
    warning = " (compare shapes and ratios, not absolute numbers, with a paper's)" if first["scale"] == "laptop" else ""
    sentences = [
        f"Machine {joined(frame['machine'])} ({first['cpu']}, {int(first['cores'])} cores), scale {first['scale']}"
        f"{warning}.",
        *(_links(frame) if first["part"] == "links" else _kernels(frame)),
        f"torch {joined(frame['torch'])}.",
        revision_words(frame),
    ]
    return joined_sentences(sentences)


def _links(frame: pd.DataFrame) -> list[str]:
    first = frame.iloc[0]
    threads = int(first["threads"])
    shown = frame[frame["way"] != ALONE]
    blocks = shown.groupby(["rate_bits_per_s", "way"]).size()
    lowest = shown[shown["rate_bits_per_s"] == shown["rate_bits_per_s"].min()]
    sent = "; ".join(
        f"{rows['label'].iloc[0]}: {rows['sent_bytes_per_step'].median() / 1e6:.3g}"
        for _, rows in lowest.groupby("way", sort=False)
    )
    compute = frame[frame["way"] == ALONE]["steps_per_s"]
    over = []
    for _, rows in shown.groupby(["rate_bits_per_s", "way"], sort=False):
        if rows["of_bound"].median() > 1:
            rate, label = int(rows["rate_bits_per_s"].iloc[0]), rows["label"].iloc[0]
            over.append(f"{label} at {rate / 1e6:g} Mbit/s ({rows['of_bound'].median():.2f})")
    millions, sent_percent = int(first["parameters"]) / 1e6, 100 - 100 * float(first["compression"])
    return [
        f"{_MODELS[str(first['model'])]} with {millions:.3g} million parameters, SGD with momentum, "
        f"batch {int(first['batch'])} and {threads} thread{'' if threads == 1 else 's'} on each of two nodes of a "
        f"testbed inside this machine, made-up data. With Lastgood the two send {sent_percent:.3g} % of a gradient.",
        f"{blocks.max()} block{'' if blocks.max() == 1 else 's'} of each, in another order each round: bar (and number "
        "over it) median, circles blocks.",
        f"MB sent by a node in an iteration: {sent}.",
        "Bound, in the same round: both nodes' forward and backward at the same time with nothing sent "
        f"({format_seconds(float((1 / compute).median()))}), or the link's rate over the bytes sent."
        if len(compute)
        else "",
        f"ABOVE ITS BOUND, SO COMPUTE ALONE WAS DISTURBED: {', '.join(over)}." if over else "",
    ]


def _kernels(frame: pd.DataFrame) -> list[str]:
    first = frame.iloc[0]
    threads, rounds = int(first["threads"]), frame.groupby("way").size().max()
    return [
        f"{int(first['elements']) / 1e6:.4g} million float32 (Student's t, 3 degrees of freedom), of which "
        f"{100 - 100 * float(first['compression']):.3g} % are sent, {threads} thread{'' if threads == 1 else 's'}.",
        f"{rounds} round{'' if rounds == 1 else 's'}, in another order each: marker (and number over it) median, "
        "whisker fastest to slowest. Updates are of other places each round; compressors keep a residual.",
        "Per cent: of the sum of squares that is sent, of one gradient without a residual.",
    ]
