"""A mirror node as a process: its folder, its port, its stages, and what it says of itself."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from pathlib import Path

from lastgood.errors import LastgoodError
from lastgood.files import make_directory, storage_errors
from lastgood.gradients.shadow.settings import ShadowSettings
from lastgood.locks import FileLock
from lastgood.mirror.agent.door import AgentDoor
from lastgood.mirror.handover.turn import Stages
from lastgood.mirror.job.description import JobDescription
from lastgood.mirror.node.agents import AgentEar
from lastgood.mirror.node.follower import Follower
from lastgood.mirror.node.pipeline import Pipeline
from lastgood.mirror.node.resync import Resync
from lastgood.mirror.node.service import MirrorService
from lastgood.mirror.node.settings import NodeSettings
from lastgood.mirror.node.status import LOCK_FILE, NodeStatus, Stands, write_status
from lastgood.tokens import read_token
from lastgood.wire.gate import open_listener

__all__ = ["MirrorNode"]

_log = logging.getLogger("lastgood.mirror")

SPILL_FOLDER = "spill"
_STATUS_S = 1.0
_END_S = 60.0


class MirrorNode:
    """Made, then `run` once, then `close`.

    Args:
        directory: of its lock, its status and its spills.
        stages: those before the updates; closed with the node.
        serves: host and port to listen at.
        resync: where states may come from while it is blind.
    """

    def __init__(
        self,
        job: JobDescription,
        directory: Path,
        stages: Stages,
        *,
        token_file: Path,
        serves: tuple[str, int] = ("127.0.0.1", 0),
        settings: NodeSettings,
        shadow: ShadowSettings,
        resync: Resync | None = None,
    ) -> None:
        self._directory = directory
        with storage_errors(directory, "making the mirror node's folder"):
            make_directory(directory, 0o700)
        self._lock = FileLock(directory / LOCK_FILE, f"mirror node's folder {directory}")
        self._lock.acquire()
        try:
            listener = open_listener(*serves)
            self.address = f"{serves[0]}:{listener.getsockname()[1]}"
            self.service = MirrorService(shadow, read_token(token_file, make=True), listener)
        except BaseException:
            self._lock.release()
            raise
        self.follower = Follower(job, self.service.core, self.service.ear, settings, secrets.token_hex(16))
        self._pipeline = Pipeline(stages, self.follower, self._each)
        self._stages = stages
        self._resync = resync
        self._agent: AgentEar | None = None
        self._stop = threading.Event()
        self._server = threading.Thread(target=self.service.run, name="mirror-service", daemon=True)
        self._said = 0.0
        self._stood = ""

    def take_agents(self, door: AgentDoor) -> None:
        """Agents of the training come there, who give a state if they are asked, and digests. Call it before `run`."""
        self._agent = AgentEar(door, self.follower)

    def stop(self) -> None:
        """Make `run` return soon; from another thread or a signal's handler."""
        self._stop.set()

    def run(self, *, serve_on: bool = True) -> None:
        """Follow until `stop`, or until the source ends; then serve what is held until `stop`, if `serve_on`."""
        self.service.warm_up()
        self._server.start()
        self._say()
        ended = self._pipeline.run(self._stop)
        self.follower.wait_idle(_END_S)
        self._say()
        while ended and serve_on and not self._stop.wait(_STATUS_S):
            self._say()

    def close(self) -> None:
        """Give everything back."""
        try:
            self.follower.close()
            self.service.stop()
            if self._server.ident is not None:
                self._server.join(_END_S)
            self._stages.close()
            self._say("ended")
        finally:
            self._lock.release()

    # -- between batches -------------------------------------------------------------------------------------------

    def _each(self) -> None:
        now = time.monotonic()
        stands = self._stands()
        if stands == "blind" and self._resync is not None and not self.follower.waits_for_state:
            given = self._resync.look(self.follower.layout)
            if given is not None:
                self.follower.give(given)
        if self._agent is not None:
            self._agent.turn()
        if now - self._said >= _STATUS_S or stands != self._stood:
            self._say()

    def _stands(self) -> Stands:
        if self.follower.blind is not None:
            return "blind"
        return "follows" if self.follower.following else "waits"

    def status(self, stands: Stands | None = None) -> NodeStatus:
        """How it stands."""
        held = self.service.core.status()
        follower = self.follower
        return NodeStatus(
            pid=os.getpid(),
            address=self.address,
            stands=stands or self._stands(),
            job=held.job,
            incarnation=held.epoch,
            iteration=follower.iteration,
            held=tuple(saved.step for saved in held.memory),
            durable=tuple(saved.step for saved in held.durable),
            blind="" if follower.blind is None else str(follower.blind),
            ranks=() if follower.learned is None else follower.learned.ranks,
            counters={**self._pipeline.counters(), "update": self._update_counters()},
        )

    def _update_counters(self) -> dict[str, float]:
        """Of the optimizer's thread; `waited`: of the node's own seconds, those in which a slot was waited for."""
        body = self.service.core.body
        with body.change:
            done, receiver = body.counters, body.receiver
            waited = receiver.counters().get("waited", 0.0) if receiver is not None else 0.0
            return {"seconds": done.optimizer_s, "steps": done.applied_iterations, "waited": waited}

    def _say(self, stands: Stands | None = None) -> None:
        self._said = time.monotonic()
        self._stood = stands or self._stands()
        try:
            write_status(self._directory, self.status(stands))
        except LastgoodError as error:  # a full disk does not end a node that holds a training's state
            _log.warning("%s", error)
