"""Serves what a mirror node holds: a shadow's port, for those who ask and restore. No trainer connects to it."""

from __future__ import annotations

import socket

from lastgood.errors import MismatchError
from lastgood.gradients.protocol.messages import Hello, Message
from lastgood.gradients.shadow.core import ShadowCore
from lastgood.gradients.shadow.service import ShadowService
from lastgood.gradients.shadow.settings import ShadowSettings
from lastgood.mirror.node.link import Ear
from lastgood.mirror.node.receiver import open_mirror_receiver

__all__ = ["MirrorService"]


class MirrorService(ShadowService):
    """A `ShadowService` whose gradients come from the mirror; `ear` hears what it would tell to trainers."""

    def __init__(self, settings: ShadowSettings, token: bytes, listener: socket.socket) -> None:
        self.ear = Ear()
        super().__init__(settings, token, listener)

    def _make_core(self) -> ShadowCore:
        return ShadowCore(self.settings, self._told, open_mirror_receiver)

    def _told(self, message: Message, everyone: bool) -> None:
        del everyone
        self.ear(message)

    def _admit(self, hello: Hello) -> None:
        raise MismatchError(
            f"this is a mirror node: it follows a training from its packets, and rank {hello.rank} cannot join it"
        )
