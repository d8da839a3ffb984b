"""The agent of the training, for the follower: asked for a state while the node is blind; its digests are compared."""

from __future__ import annotations

import logging

from lastgood.errors import LastgoodError
from lastgood.mirror.agent.door import AgentCame, AgentDoor, AgentEvent, AgentWent, NoState, StateArrived, WeightsSeen
from lastgood.mirror.node.follower import Follower
from lastgood.mirror.node.states import given_state

__all__ = ["AgentEar"]

_log = logging.getLogger("lastgood.mirror")


class AgentEar:
    """Between a door and a follower, whose thread calls `turn`."""

    def __init__(self, door: AgentDoor, follower: Follower) -> None:
        self._door = door
        self._follower = follower
        self._name = ""

    def turn(self) -> None:
        """Ask if a state is wanted, and pass on what came."""
        follower = self._follower
        if follower.wants_state and self._door.connected:
            self._door.ask(str(follower.blind))
        while (event := self._door.poll()) is not None:
            self._hear(event)

    def _hear(self, event: AgentEvent) -> None:
        if isinstance(event, AgentCame):
            self._name = event.name
            self._follower.digests.expect(event.digest_every)
        elif isinstance(event, AgentWent) and event.name == self._name:
            self._follower.digests.expect(0)
        elif isinstance(event, WeightsSeen):
            self._follower.digests.tell(event.step, event.digest)
        elif isinstance(event, StateArrived):
            try:
                given = given_state(self._follower.layout, event.state, event.step, "the agent's state")
            except LastgoodError as error:
                _log.error("%s", error)
            else:
                self._follower.give(given)
        elif isinstance(event, NoState):
            _log.warning("the agent gives no state: %s", event.why)
