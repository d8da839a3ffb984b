"""The stages before the updates, as a job description wants them."""

from __future__ import annotations

from collections.abc import Sequence

from lastgood.mirror.conversation.gloo import GlooConversation
from lastgood.mirror.conversation.nccl import NcclConversation
from lastgood.mirror.conversation.places import Conversation
from lastgood.mirror.job.description import JobDescription
from lastgood.mirror.streams.messages import Parser
from lastgood.mirror.streams.native import NativeGlooParser
from lastgood.mirror.streams.nccl_sockets import NcclSocketParser
from lastgood.mirror.streams.roce import RoceParser

__all__ = ["conversation_for", "parser_for"]


def parser_for(job: JobDescription) -> Parser:
    """Reads the traffic of the job's backend: Gloo over TCP; NCCL over TCP sockets or RoCEv2."""
    if job.backend.kind == "gloo":
        return NativeGlooParser()
    if job.backend.network == "roce":
        return RoceParser(protocol=job.backend.protocol or "auto")
    return NcclSocketParser()


def conversation_for(job: JobDescription, watched: Sequence[str]) -> Conversation:
    """Follows collectives of the job's backend."""
    return GlooConversation(job, watched) if job.backend.kind == "gloo" else NcclConversation(job, watched)
