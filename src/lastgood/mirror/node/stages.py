"""The stages before the updates, as a job description wants them."""

from __future__ import annotations

from collections.abc import Sequence

from lastgood.mirror.conversation.places import Conversation
from lastgood.mirror.job.description import JobDescription
from lastgood.mirror.streams.messages import Parser

__all__ = ["conversation_for", "parser_for"]


def parser_for(job: JobDescription) -> Parser:
    """Reads the traffic of the job's backend. Raises ConfigError for one that is not read yet."""
    if job.backend.kind == "gloo":
        from lastgood.mirror.streams.native import NativeGlooParser

        return NativeGlooParser()
    if job.backend.network == "roce":
        from lastgood.mirror.streams.roce import RoceParser

        return RoceParser(protocol=job.backend.protocol or "auto")
    from lastgood.mirror.streams.nccl_sockets import NcclSocketParser

    return NcclSocketParser()


def conversation_for(job: JobDescription, watched: Sequence[str]) -> Conversation:
    """Follows collectives of the job's backend."""
    from lastgood.mirror.conversation.opening import open_conversation

    return open_conversation(job, watched)
