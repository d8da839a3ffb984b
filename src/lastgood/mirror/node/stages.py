"""The stages before the updates, as a job description wants them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lastgood.errors import ConfigError
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
        return RoceParser(protocol=job.backend.protocol or "auto", striped=job.backend.queue_pairs > 1)
    return NcclSocketParser()


def conversation_for(
    job: JobDescription, watched: Sequence[str], ranks: Mapping[str, int] | None = None
) -> Conversation:
    """Follows collectives of the job's backend; `ranks` are those of addresses, where they are known before.

    Raises ConfigError for a rank that cannot be.
    """
    wrong = next((address for address, rank in (ranks or {}).items() if rank >= job.ranks), None)
    if ranks and wrong is not None:
        raise ConfigError(f"--watch {wrong}={ranks[wrong]}: the job has ranks 0 to {job.ranks - 1}")
    if job.backend.kind == "gloo":
        return GlooConversation(job, watched, ranks=ranks)
    if ranks:
        raise ConfigError("--watch HOST=RANK: NCCL's traffic itself shows which rank is watched; leave =RANK out")
    return NcclConversation(job, watched)


def extractor_for(
    job: JobDescription, watched: Sequence[str], settings: NodeSettings, ranks: Mapping[str, int] | None = None
) -> Extractor:
    """Puts the bytes of the job's collectives together."""
    slots = GradientSlots(settings.buffers_bytes)
    return Extractor(conversation_for(job, watched, ranks), slots, settings.staged_bytes)


def local_stages(
    source: FrameSource,
    job: JobDescription,
    watched: Sequence[str],
    settings: NodeSettings,
    ranks: Mapping[str, int] | None = None,
) -> LocalStages:
    """All of them in one process."""
    return LocalStages(source, parser_for(job), extractor_for(job, watched, settings, ranks))
