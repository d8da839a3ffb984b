"""The conversation that a job description asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lastgood.mirror.conversation.gloo import GlooConversation
from lastgood.mirror.conversation.nccl import NcclConversation
from lastgood.mirror.conversation.places import Conversation
from lastgood.mirror.job.description import JobDescription

__all__ = ["open_conversation"]


def open_conversation(
    job: JobDescription,
    watched: Sequence[str] = (),
    *,
    ranks: Mapping[str, int] | None = None,
    buckets: Sequence[Sequence[int]] | None = None,
) -> Conversation:
    """The conversation of a job's backend. `watched`, `ranks` and `buckets` are those of `GlooConversation`."""
    if job.backend.kind == "gloo":
        return GlooConversation(job, watched, ranks=ranks, buckets=buckets)
    return NcclConversation(job, watched)
