"""DistributedDataParallel's communication hook: ``model.register_comm_hook(checkpointer.tap, checkmate_hook)``."""

# DDP compares the hook's annotations with torch's classes, so they may not be text: no `annotations` from __future__.
import torch
import torch.distributed as dist

from lastgood.gradients.tap.bucket import BucketTap

__all__ = ["checkmate_hook"]


def checkmate_hook(
    tap: BucketTap,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # torch has it where it has distributed
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients over all ranks, as DDP does without a hook, and send this rank's range of it."""
    averaged: torch.futures.Future[torch.Tensor] = tap.reduce(bucket)
    return averaged
