"""The stages before the updates, as a job description wants them."""

from __future__ import annotations

from collections.abc import Sequence

from lastgood.mirror.capture.frames import FrameSource
from lastgood.mirror.conversation.gloo import GlooConversation
from lastgood.mirror.conversation.nccl import NcclConversation
from lastgood.mirror.conversation.places import Conversation
from lastgood.mirror.extract.extractor import Extractor
from lastgood.mirror.extract.slots import GradientSlots
from lastgood.mirror.handover.local import LocalStages
from lastgood.mirror.job.description import JobDescription
from lastgood.mirror.node.settings import NodeSettings
from lastgood.mirror.streams.messages import Parser
from lastgood.mirror.streams.native import NativeGlooParser
from lastgood.mirror.streams.nccl_sockets import NcclSocketParser
from lastgood.mirror.streams.roce import RoceParser

__all__ = ["conversation_for", "extractor_for", "local_stages", "parser_for"]


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


def extractor_for(job: JobDescription, watched: Sequence[str], settings: NodeSettings) -> Extractor:
    """Puts the bytes of the job's collectives together."""
    slots = GradientSlots(settings.buffers_bytes)
    return Extractor(conversation_for(job, watched), slots, settings.staged_bytes)


def local_stages(
    source: FrameSource, job: JobDescription, watched: Sequence[str], settings: NodeSettings
) -> LocalStages:
    """All of them in one process."""
    return LocalStages(source, parser_for(job), extractor_for(job, watched, settings))
