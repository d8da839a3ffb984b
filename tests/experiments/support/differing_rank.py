"""One rank of a run, as lastgood.experiments.multirank.process; rank 1 holds another parameter than rank 0.

Called as: differing_rank.py ORDER
"""

from __future__ import annotations

import sys

import torch

from lastgood.experiments.multirank import process as rank_main
from lastgood.experiments.multirank.part import JoinedPart

_parallelise = JoinedPart.parallelise


def _and_differ(part, workload):
    _parallelise(part, workload)  # which makes all ranks alike
    if part.rank == 1:
        with torch.no_grad():
            next(iter(workload.model.parameters())).view(-1)[:1].add_(1.0)


if __name__ == "__main__":
    JoinedPart.parallelise = _and_differ
    sys.exit(rank_main.main())
