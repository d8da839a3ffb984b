"""Gemini (Wang et al., SOSP'23): checkpoints in the memory of peers, sent in the gaps of the training's own traffic.

A copy of the state stays in the own machine's memory (here: in the training's process, and lost with it), the other
replicas go to peers: small processes that outlive the training. `gemini_memory` has the parts: placement (the paper's
section 4), partition and traffic (section 5), and the peers. Nothing is on a disk: if all peers that hold a checkpoint
end, it is gone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, model_validator

from lastgood._lazy import lazy_module
from lastgood.checkpointers.base import DEFAULT_TIMEOUT_S, BaseOptions, Checkpointer, CheckpointEvent, Outcome
from lastgood.checkpointers.gemini_memory.partition import Network, partition
from lastgood.checkpointers.gemini_memory.peers import Held, Outgoing, PeerLink, Peers, PeerSettings
from lastgood.checkpointers.gemini_memory.placement import placement
from lastgood.checkpointers.gemini_memory.traffic import Traffic
from lastgood.checkpointers.gemini_memory.wire import MAX_CHUNK_BYTES, available_memory_bytes
from lastgood.checkpointers.snapshot import HostSnapshot, PinnedMemory, fresh_memory
from lastgood.errors import CheckpointError, CorruptCheckpoint, LastgoodError, NoCheckpoint, WaitTimeout
from lastgood.state import FlatState, Layout, apply_tree, flatten, unflatten

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_module("torch")

__all__ = ["Gemini", "GeminiOptions"]

_log = logging.getLogger("lastgood")


class GeminiOptions(BaseOptions):
    """Knobs of Gemini."""

    machines: int = Field(default=2, ge=2, le=65536)
    """Machines of the job (the paper's N)."""
    machine: int = Field(default=0, ge=0)
    """Which of them this process is on."""
    replicas: int = Field(default=2, ge=2, le=16)
    """Copies of each checkpoint (the paper's m), the own machine's among them."""
    buffer_bytes: int = Field(default=32 << 20, ge=4096)
    """The receive buffer of a peer (the paper's R)."""
    buffer_parts: int = Field(default=4, ge=1, le=64)
    """Parts of that buffer (the paper's p); a chunk is at most one part."""
    gamma: float = Field(default=0.8, gt=0, lt=1)
    """The share of each profiled gap that is used: gaps differ from one iteration to the next."""
    profile_steps: int = Field(default=20, ge=1, le=1000)
    """Iterations without checkpoint traffic that are profiled."""
    host: str = Field(default="127.0.0.1", min_length=1)
    """The address that a peer listens at."""
    peer_memory_bytes: int = Field(default=0, ge=0)
    """Memory that a peer may give to checkpoints, two for each machine that it serves; 0: what its machine has free."""
    peer_idle_s: float = Field(default=3600.0, gt=0)
    """A peer ends, and its checkpoints with it, when nobody was connected for so long."""
    peer_timeout_s: float = Field(default=30.0, gt=0, le=DEFAULT_TIMEOUT_S)
    """A peer that does not answer for so long counts as stuck."""

    @model_validator(mode="after")
    def _fits(self) -> GeminiOptions:
        if self.machine >= self.machines:
            raise ValueError(f"machine {self.machine} is none of {self.machines} machines (0 to {self.machines - 1})")
        if self.replicas > self.machines:
            raise ValueError(f"{self.replicas} replicas need as many machines; there are {self.machines}")
        if self.part_bytes > MAX_CHUNK_BYTES:
            raise ValueError(f"buffer_bytes / buffer_parts must be at most {MAX_CHUNK_BYTES}")
        return self

    @property
    def part_bytes(self) -> int:
        """Size of each part of the receive buffer."""
        return -(-self.buffer_bytes // self.buffer_parts)

    def disk_bytes(self, state_bytes: int) -> int:
        """Nothing goes to a disk but address files."""
        return 0 * state_bytes

    def host_bytes(self, state_bytes: int) -> int:
        """The own replica, and what peers have on this host: two areas and a receive buffer each."""
        return state_bytes + (self.replicas - 1) * (2 * state_bytes + self.buffer_bytes)


class Gemini(Checkpointer):
    """Snapshot to host memory, then to peers' memory in the gaps of the training's traffic; one checkpoint at a time.

    `traffic` is where training says when it communicates: ``with checkpointer.traffic.busy(): ...``, or, for
    DistributedDataParallel, ``model.register_comm_hook(checkpointer.traffic, marked_all_reduce)`` (gemini_memory/ddp).
    Without any mark every moment counts as idle.

    Durable means: complete in the memory of every peer that the placement names. It survives this process, not those.
    """

    name: ClassVar[str] = "gemini"
    Options: ClassVar[type[BaseOptions]] = GeminiOptions

    def __init__(self, directory: Path | str, options: GeminiOptions | None = None, **knobs: Any) -> None:
        super().__init__(directory, options, **knobs)
        assert isinstance(self.options, GeminiOptions)
        self._knobs: GeminiOptions = self.options
        self.traffic = Traffic(self._knobs.profile_steps)
        self._peers = Peers(
            self.directory,
            PeerSettings(
                self._knobs.host, self._knobs.peer_memory_bytes, self._knobs.peer_idle_s, self._knobs.peer_timeout_s
            ),
        )
        self._holders = list(placement(self._knobs.machines, self._knobs.replicas)[self._knobs.machine][1:])
        self._links: dict[int, tuple[PeerLink, Network]] = {}
        self._sequence = 0
        self._nbytes = 0
        self._updates = 0
        self._memory: torch.Tensor | None = None
        self._pinned: PinnedMemory | None = None
        self._snapshot: HostSnapshot | None = None
        self._worker: threading.Thread | None = None

    # -- saving ----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        flatten(self.state)
        for machine in self._holders:
            self._link(machine)
        held, _ = self._peers.holding(self._knobs.machine, self._holders)
        self._sequence = max((one.sequence for one in held), default=0)

    def save(self, step: int) -> None:
        """Wait for the checkpoint before, then start the snapshot."""
        event = self._request(step)
        try:
            self.drain()
            flat = flatten(self.state)
            snapshot = HostSnapshot(flat, self._buffers_for(flat), f"gemini's snapshot of step {step}")
            worker = threading.Thread(
                target=self._send, args=(snapshot, event), name=f"gemini-send-{step}", daemon=True
            )
            worker.start()
        except Exception as error:  # a save never stops training: whatever went wrong is counted and logged
            self._fail(event, error)
            return
        self._snapshot, self._worker = snapshot, worker

    def before_update(self) -> None:
        """Wait until the snapshot has left the training's memory. The last optimizer's update ends an iteration."""
        self._updates += 1
        if self._updates % max(len(self._hooks.optimizers), 1) == 0:
            self.traffic.update()
        if self._snapshot is not None:
            self._wait_for(self._snapshot.fence, DEFAULT_TIMEOUT_S)

    def drain(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Wait until the checkpoint under way is complete at its peers, or has failed."""
        if self._worker is None:
            return
        with self.traffic.hurried():
            self._worker.join(timeout_s)
        if self._worker.is_alive():
            raise WaitTimeout(f"waited {timeout_s:.0f} s for {self._worker.name} in {self.directory}")
        self._worker = None
        self._snapshot = None

    def _abandon(self) -> None:
        self.traffic.cancel()
        for link, _ in list(self._links.values()):
            link.abort()

    def _close(self) -> None:
        self.drain()
        for link, _ in self._links.values():
            link.close()
        self._links = {}
        self.traffic.close()
        self._release_memory()

    def _send(self, snapshot: HostSnapshot, event: CheckpointEvent) -> None:
        try:
            snapshot.copy()
            event.copied_s = time.perf_counter()
            assert self._memory is not None
            # Clocks only help where a peer that could not be asked holds something; they may jump back.
            self._sequence = max(self._sequence + 1, time.time_ns())
            outgoing = Outgoing(
                owner=self._knobs.machine,
                sequence=self._sequence,
                step=event.step,
                data=memoryview(self._memory.numpy().data),
                meta=memoryview(snapshot.layout.to_json()),
                part_bytes=self._knobs.part_bytes,
                parts=self._knobs.buffer_parts,
                gamma=self._knobs.gamma,
            )
            self._nbytes = outgoing.nbytes
            failures: list[Exception] = []
            for machine in self._holders:
                try:
                    self._send_to(machine, outgoing)
                    event.bytes_written += outgoing.nbytes
                except Exception as error:  # the other peers must get their copy all the same
                    failures.append(error)
            if failures:
                raise failures[0]
            event.finished_s = time.perf_counter()
            event.outcome = Outcome.DURABLE
        except Exception as error:  # this thread has no caller: the event and the log carry the failure
            self._fail(event, error)

    def _send_to(self, machine: int, outgoing: Outgoing) -> None:
        link, network = self._link(machine)
        try:
            link.send(outgoing, self.traffic, network, DEFAULT_TIMEOUT_S)
        except Exception:
            # Whatever is left of it on the way must not meet the next one; that one connects, or starts a peer, anew.
            self._links.pop(machine, None)
            link.close()
            raise
        self._peers.retire_older(link, machine)

    def _link(self, machine: int) -> tuple[PeerLink, Network]:
        if machine not in self._links:
            link = self._peers.reach(machine)
            try:
                self._links[machine] = link, link.measure()
            except BaseException:
                link.close()
                raise
        return self._links[machine]

    def _buffers_for(self, flat: FlatState) -> list[torch.Tensor]:
        """The snapshot's buffers: one range, laid out as the stream, made again only when its size changes."""
        size = flat.layout.stream_bytes
        if self._memory is None or self._memory.numel() != size:
            self._release_memory()
            if any(block.is_cuda for block in flat.blocks):
                self._pinned = PinnedMemory(size)
                self._memory = self._pinned.tensor[:size]
            else:
                self._memory = fresh_memory(size)
            self._memory.zero_()  # bytes between the blocks go on their way as well
        offsets = flat.layout.block_offsets()
        return [self._memory[at : at + count] for at, count in zip(offsets, flat.layout.block_bytes, strict=True)]

    def _release_memory(self) -> None:
        self._memory = None
        if self._pinned is not None:
            self._pinned.release()
            self._pinned = None

    # -- restoring -------------------------------------------------------------------------------------------------

    def latest(self) -> int | None:
        """The step of the newest checkpoint that a peer holds."""
        held, _ = self._peers.holding(self._knobs.machine, self._holders)
        return held[0].step if held else None

    def restore(self, state: Mapping[str, Any], step: int | None = None) -> int:
        """Read the newest whole checkpoint (or that of `step`) from a peer's memory into `state`.

        Raises NoCheckpoint where no peer holds one, and says which peers were asked.
        """
        self.drain()  # a copy under way reads what a restore overwrites
        held, reasons = self._peers.holding(self._knobs.machine, self._holders)
        for one in held:
            if step is not None and one.step != step:
                continue
            try:
                tree = self._read(one)
            except (LastgoodError, OSError) as error:
                _log.error("gemini: %s; trying the checkpoint before it", error)
                reasons.append(str(error))
                continue
            apply_tree(state, tree, f"{one.address}, step {one.step}")
            return one.step
        asked = "whole checkpoint" if step is None else f"whole checkpoint of step {step}"
        raise NoCheckpoint(
            f"{self.directory}: no {asked}; peers of machines {self._holders} hold steps "
            f"{[one.step for one in held] or 'none'} of machine {self._knobs.machine}. Gemini keeps checkpoints in "
            "peers' memory only, and what a peer held is gone with it" + "".join(f"; {reason}" for reason in reasons)
        )

    def _read(self, held: Held) -> dict[str, Any]:
        available = available_memory_bytes()
        if held.nbytes > available:
            raise CheckpointError(
                f"{held.address}: its checkpoint of step {held.step} declares {held.nbytes} bytes, and this machine "
                f"has {available} to read it into"
            )
        memory = fresh_memory(held.nbytes)
        with self._peers.connect(held.address.path) as link:
            try:
                link.read(self._knobs.machine, held, memoryview(memory.numpy().data))
            except CorruptCheckpoint:
                # A fresh connection: this one still has chunks on their way.
                with self._peers.connect(held.address.path) as second:
                    second.request("check", owner=self._knobs.machine, sequence=held.sequence)
                raise
        where = f"{held.address}, step {held.step}"
        data_bytes = held.nbytes - held.meta_bytes
        layout = Layout.from_json(memory[data_bytes:].numpy().tobytes(), where)
        if layout.stream_bytes != data_bytes:
            raise CorruptCheckpoint(f"{where}: {data_bytes} bytes, where its layout needs {layout.stream_bytes}")
        blocks = [memory[at : at + count] for at, count in zip(layout.block_offsets(), layout.block_bytes, strict=True)]
        return unflatten(layout, blocks, where)

    # -- facts -----------------------------------------------------------------------------------------------------

    def storage_facts(self) -> dict[str, Any]:
        """Where checkpoints are, what went through idle gaps, and what that cost the training's communication."""
        knobs = self._knobs
        holders = placement(knobs.machines, knobs.replicas)
        facts = {
            "direct_io": False,
            "durability": "in a peer's memory; nothing on disk",
            "group_size": knobs.replicas,
            "machines": knobs.machines,
            "placement": [list(machines) for machines in holders],
            "peers": {
                str(machine): {"bytes_per_s": network.bytes_per_s, "latency_s": network.latency_s}
                for machine, (_, network) in sorted(self._links.items())
            },
            **self.traffic.facts(),
        }
        gaps_s = self.traffic.profile
        networks = [network for _, network in self._links.values()]
        if len(gaps_s) > 1 and networks and self._nbytes:
            chunks = partition(gaps_s, self._nbytes * len(networks), knobs.part_bytes, networks[0], knobs.gamma)
            facts["planned_iterations"] = chunks[-1][0] // len(gaps_s) + 1
        return facts
