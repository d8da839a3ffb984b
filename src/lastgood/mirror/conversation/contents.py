"""What the contents of a training's small collectives say, compared with the job description. Pure."""

from __future__ import annotations

from lastgood.mirror.conversation.expected import CollectiveSequence, shapes_difference
from lastgood.mirror.job.description import JobDescription

__all__ = ["content_fault"]


def content_fault(job: JobDescription, sequence: CollectiveSequence, kind: str, data: bytes) -> str | None:
    """What is not as described in a collective of a kind in `CONTENT_KINDS`; the sequence learns buckets of it."""
    if kind == "count":
        counts = {int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)}
        if counts == {len(job.trainable)}:
            return None
        return f"the ranks have {sorted(counts)[:4]} trainable parameters, not {len(job.trainable)}"
    if kind == "sizes":
        return shapes_difference(job, data)
    return sequence.bucket_order(data) if kind == "bucket-order" else sequence.bucket_sizes(data)
