"""A communication hook for DistributedDataParallel that tells Gemini when gradients are on the network.

``model.register_comm_hook(checkpointer.traffic, marked_all_reduce)``
"""

# DDP compares the hook's annotations with torch's classes, so they may not be text: no `annotations` from __future__.
import torch
import torch.distributed as dist

from lastgood.checkpointers.gemini.traffic import Traffic

__all__ = ["marked_all_reduce"]


def marked_all_reduce(
    traffic: Traffic,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # torch has it where it has distributed
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients over all ranks, as DDP does without a hook, and mark it in `traffic`.

    On CUDA the mark ends when the device has come past the operation, not when it was launched.
    """
    gradients = bucket.buffer()
    gradients.div_(dist.get_world_size())
    traffic.begin()
    try:
        future = dist.all_reduce(gradients, async_op=True).get_future()
    except BaseException:
        traffic.end()
        raise

    def finished(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        if gradients.is_cuda:
            event = torch.cuda.Event(blocking=True)
            event.record(torch.cuda.current_stream(gradients.device))
            traffic.end_after(event)
        else:
            traffic.end()
        return future.value()[0]

    return future.then(finished)
