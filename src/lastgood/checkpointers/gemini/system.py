"""Gemini (Wang et al., SOSP'23): checkpoints in the memory of peers, sent in the gaps of the training's own traffic.

A copy of the state stays in the own machine's memory (on one host: in the training's process, and lost with it), the
other replicas go to peers: small processes that outlive the training. `gemini_memory` has the parts: placement (the
paper's section 4), partition and traffic (section 5), and the peers. Nothing is on a disk: if all peers that hold a
checkpoint end, it is gone.

Over a network (``peers="own"``) each machine has one peer, which its own rank starts. The own replica goes there too,
so that it outlives the training. Ranks tell each other where their peers are, and which checkpoints all of them have.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from lastgood._lazy import torch
from lastgood.checkpointers.base import DEFAULT_TIMEOUT_S
from lastgood.checkpointers.copies.host import HostSnapshot, PinnedMemory
from lastgood.checkpointers.events import CheckpointEvent
from lastgood.checkpointers.gemini.address_file import Address, address_for_peers
from lastgood.checkpointers.gemini.partition import Network, partition
from lastgood.checkpointers.gemini.peer_client import Held, Outgoing, PeerLink, Peers, PeerSettings
from lastgood.checkpointers.gemini.placement import placement
from lastgood.checkpointers.gemini.traffic import Traffic
from lastgood.checkpointers.one_at_a_time import OneAtATime
from lastgood.checkpointers.options import BaseOptions
from lastgood.checkpointers.ranks.exchange import RankExchange
from lastgood.checkpointers.traits import CostModel, Limit, Traits
from lastgood.errors import CheckpointError, CorruptCheckpoint, LastgoodError, NoCheckpoint, WaitTimeout
from lastgood.host_memory import fresh_memory
from lastgood.locations import Location
from lastgood.sinks import Sink
from lastgood.state import FlatState, Layout, apply_tree, stateful_paths, unflatten
from lastgood.state.compare import Keys
from lastgood.wire.frames import MAX_CHUNK_BYTES, available_memory_bytes

__all__ = ["Gemini", "GeminiOptions"]

_log = logging.getLogger("lastgood")


class GeminiOptions(BaseOptions):
    """Options of Gemini."""

    later_options: ClassVar[tuple[str, ...]] = ("peers",)

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
    peers: Literal["here", "own"] = "here"
    """Where peers run: on this host, all of them, started by whoever needs one; or, over a network, each on its own
    machine, started by its own rank of torch.distributed, one rank a machine. Then a rank never starts another's peer,
    the own replica is in the own peer, and all ranks restore one step."""
    host: str = Field(default="127.0.0.1", min_length=1)
    """The address that a peer listens at. With own peers, loopback stands for that of the way to MASTER_ADDR."""
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
        del state_bytes
        return 0

    def host_bytes(self, state_bytes: int) -> int:
        """The snapshot, and what peers have on this host: two areas and a receive buffer for each replica."""
        here = self.replicas if self.peers == "own" else self.replicas - 1
        return state_bytes + here * (2 * state_bytes + self.buffer_bytes)


class Gemini(OneAtATime):
    """Snapshot to host memory, then to peers' memory in the gaps of the training's traffic; one checkpoint at a time.

    Training tells `traffic` when it communicates: ``with checkpointer.traffic.busy(): ...``, or, for
    DistributedDataParallel, ``checkpointer.watch(model)``. Without any mark every moment counts as idle.

    Durable means: complete in the memory of every peer that the placement names. It survives this process, not those.
    """

    name: ClassVar[str] = "gemini"
    traits: ClassVar[Traits] = Traits(
        label="Gemini",
        colour="#CD7AA6",
        order=40,
        safe_in=Sink.MEMORY,
        safe_words="in its peers' memory",
        ranks_write="peers",
        helper="peers",
        cost=CostModel(waits=False, takes="slower", over=Sink.LINK),
        limits=(
            Limit("damage", "it keeps nothing on a disk that could be damaged there"),
            Limit("two writers", "its peers take what any training of the directory sends"),
            Limit("durable", "its checkpoints end with its peers' processes"),
        ),
    )
    Options: ClassVar[type[BaseOptions]] = GeminiOptions
    options: GeminiOptions

    def __init__(self, directory: Path | str | Location, options: GeminiOptions | None = None, **given: Any) -> None:
        super().__init__(directory, options, **given)
        self.traffic = Traffic(self.options.profile_steps)
        own = self.options.peers == "own"
        self._peers = Peers(
            self.directory,
            PeerSettings(
                address_for_peers(self.options.host) if own else self.options.host,
                self.options.peer_memory_bytes,
                self.options.peer_idle_s,
                self.options.peer_timeout_s,
                starts=self.options.machine if own else None,
            ),
        )
        self._holders = list(
            placement(self.options.machines, self.options.replicas)[self.options.machine][0 if own else 1 :]
        )
        self._links: dict[int, tuple[PeerLink, Network]] = {}
        self._together: RankExchange | None = None
        self._unmarked = Traffic(1)
        """For what does not share the network with the training: to the own machine's peer, and before it begins."""
        self._sequence = 0
        self._first_sequence = 0
        """This incarnation's checkpoints have higher ones, if ranks agree on them."""
        self._durable_sequence = 0
        self._nbytes = 0
        self._updates = 0
        self._memory: torch.Tensor | None = None
        self._pinned: PinnedMemory | None = None

    # -- saving ----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._look_at_weights()
        together = self._meet()
        fault = ""
        try:
            for machine in self._holders:
                self._link(machine)
        except (LastgoodError, OSError) as error:
            if together is None:
                raise
            fault = str(error)  # the others wait for what this rank tells
        held, _ = self._peers.holding(self.options.machine, self._holders)
        self._sequence = max((one.sequence for one in held), default=0)
        if together is not None:
            # The time is for what a peer may hold that cannot be asked now.
            told = together.tell((max(self._sequence, time.time_ns()), fault))
            for machine, (_, why) in enumerate(told):
                if why:
                    raise CheckpointError(f"machine {machine} cannot begin: {why}")
            self._sequence = self._first_sequence = max(sequence for sequence, _ in told)

    def _save(self, event: CheckpointEvent) -> None:
        """Wait for the checkpoint before, then start the snapshot. With own peers all ranks save the same steps."""
        kept = self._kept_by_all()
        self.drain()
        self._copy_then(event, functools.partial(self._send, self._sequence, kept))

    def watch(self, model: torch.nn.parallel.DistributedDataParallel) -> None:
        """Register `marked_all_reduce` as the communication hook, which marks in `traffic` when gradients are sent."""
        from lastgood.checkpointers.gemini.ddp_hook import marked_all_reduce

        model.register_comm_hook(self.traffic, marked_all_reduce)

    def before_update(self) -> None:
        """Wait until the snapshot has left the training's memory. The last optimizer's update ends an iteration."""
        self._updates += 1
        if self._updates % max(len(self._hooks.optimizers), 1) == 0:
            self.traffic.update()
        super().before_update()

    def _hurried(self) -> contextlib.AbstractContextManager[object]:
        return self.traffic.hurried()

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

    def _kept_by_all(self) -> int | None:
        """Number this save, and say which checkpoint all ranks have: no peer may overwrite that one.

        Not before the one in progress has ended here; a rank whose save failed says the one before. None if ranks do
        not tell each other.
        """
        if self._together is None:
            # Clocks only help if a peer that could not be asked holds something; they may jump back.
            self._sequence = max(self._sequence + 1, time.time_ns())
            return None
        self._sequence += 1
        fault: WaitTimeout | None = None
        try:
            self.drain()
        except WaitTimeout as error:
            fault = error  # the others wait for what this rank tells
        kept = int(min(self._together.tell(self._durable_sequence)))
        if fault is not None:
            raise fault
        return max(kept, self._first_sequence)

    def _send(self, sequence: int, kept: int | None, snapshot: HostSnapshot, event: CheckpointEvent) -> None:
        assert self._memory is not None
        data, meta = memoryview(self._memory.numpy().data), memoryview(snapshot.layout.to_json())
        outgoing = self._outgoing(sequence, event.step, data, meta)
        self._nbytes = outgoing.nbytes
        failures: list[Exception] = []
        for machine in self._holders:
            try:
                traffic = self._unmarked if machine == outgoing.owner else self.traffic
                self._send_to(machine, outgoing, traffic, kept)
                event.bytes_written += outgoing.nbytes
            except Exception as error:  # the other peers must get their copy all the same
                failures.append(error)
        if failures:
            raise failures[0]
        self._durable_sequence = sequence

    def _outgoing(self, sequence: int, step: int, data: memoryview, meta: memoryview) -> Outgoing:
        return Outgoing(
            owner=self.options.machine,
            sequence=sequence,
            step=step,
            data=data,
            meta=meta,
            part_bytes=self.options.part_bytes,
            parts=self.options.buffer_parts,
            gamma=self.options.gamma,
        )

    def _send_to(self, machine: int, outgoing: Outgoing, traffic: Traffic, kept: int | None) -> None:
        """`kept`: no newer one may stay there, so that it is not the one that is overwritten."""
        link, network = self._link(machine)
        try:
            if kept is not None:
                link.request("forget", owner=outgoing.owner, after=kept)
            link.send(outgoing, traffic, network, DEFAULT_TIMEOUT_S)
        except Exception:
            # Whatever is left of it on the way must not meet the next one; that one connects, or starts a peer, again.
            self._drop_link(machine)
            raise
        self._peers.retire_older(link, machine)

    def _drop_link(self, machine: int) -> None:
        link, _ = self._links.pop(machine, (None, None))
        if link is not None:
            link.close()

    def _link(self, machine: int) -> tuple[PeerLink, Network]:
        if machine not in self._links:
            link = self._peers.reach_or_start(machine)
            try:
                self._links[machine] = link, link.measure()
            except BaseException:
                link.close()
                raise
        return self._links[machine]

    def _buffers_for(self, flat: FlatState) -> list[torch.Tensor]:
        # One range, laid out as the stream.
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
        held, _ = self._peers.holding(self.options.machine, self._holders)
        return held[0].step if held else None

    def restore(self, state: Mapping[str, Any], step: int | None = None) -> int:
        """Read the newest complete checkpoint (or that of `step`) from a peer's memory into `state`.

        With own peers all ranks call this together and get one step, the newest that all can read; peers that lack it
        get it again, and forget newer ones. Raises NoCheckpoint if no peer holds one, and says which were asked.
        """
        self.drain()  # a copy in progress reads what a restore overwrites
        together = self._meet()
        held, reasons = self._peers.holding(self.options.machine, self._holders)
        wanted = list(dict.fromkeys((one.sequence, one.step) for one in held if step in (None, one.step)))
        alone = ""
        if together is not None:
            told = together.tell(wanted)
            wanted = sorted(set(wanted).intersection(*told), reverse=True)
            alone = f" (by machine: {[[number for _, number in one] for one in told]})"
        for identity in wanted:
            copies = [one for one in held if (one.sequence, one.step) == identity]
            found = self._read_one(copies, reasons)
            # All or none: a rank that went on from another step would not train with the others.
            if together is not None and not all(together.tell(found is not None)):
                found = None
            if found is not None:
                one, memory, tree, objects = found
                apply_tree(state, tree, f"{one.address}, step {one.step}", objects)
                if together is not None:
                    self._replicate(one, memory)
                return one.step
        asked = "complete checkpoint" if step is None else f"complete checkpoint of step {step}"
        common = f" that all machines have{alone}" if alone else ""
        raise NoCheckpoint(
            f"{self.directory}: no {asked}{common}; peers of machines {self._holders} hold steps "
            f"{[one.step for one in held] or 'none'} of machine {self.options.machine}. Gemini keeps checkpoints in "
            "peers' memory only, and what a peer held is gone with it" + "".join(f"; {reason}" for reason in reasons)
        )

    def _resume(self, state: Mapping[str, Any], step: int | None) -> None:
        try:
            super()._resume(state, step)
        except NoCheckpoint as error:
            doubtful = self._doubtful()
            if doubtful:
                raise CheckpointError(
                    f"{error}; a training would begin again beside what these peers may hold: {'; '.join(doubtful)}. "
                    "Try again when they answer; or, to begin again, end them and remove these files"
                ) from error
            if self._peers.known(self._holders):
                _log.warning("gemini: %s", error)  # attach() goes on from nothing
            raise

    def _doubtful(self) -> list[str]:
        """The peers that hold what was complete, or might: those of all machines, if ranks tell each other.

        There one step may be with some ranks only, since the incarnation that saved it ended before it was complete.
        With two of them the older one was complete: ranks save the next one, and tell peers what to forget, after that.
        """
        together = self._together
        found = self._peers.may_hold(self.options.machine, self._holders, at_least=1 if together is None else 2)
        if together is None:
            return found
        return list(dict.fromkeys(one for theirs in together.tell(found) for one in theirs))

    def _meet(self) -> RankExchange | None:
        """If each machine has its own peer: start this machine's, and learn where the others' are. Done once."""
        if self.options.peers != "own" or self._together is not None:
            return self._together
        machine = self.options.machine
        together = RankExchange(self.name, machine, self.options.machines, DEFAULT_TIMEOUT_S)
        addresses: list[Address] = []
        fault = ""
        try:
            self._link(machine)
            addresses = self._peers.own(machine)
        except (LastgoodError, OSError) as error:
            fault = str(error)  # the others wait for what this rank tells
        for other, (theirs, why) in enumerate(together.tell((addresses, fault))):
            if why:
                raise CheckpointError(f"machine {other} has no peer: {why}")
            if other != machine:
                self._peers.learn(other, theirs)
        self._together = together
        return together

    def _read_one(
        self, copies: list[Held], reasons: list[str]
    ) -> tuple[Held, torch.Tensor, dict[str, Any], frozenset[Keys]] | None:
        """The first of several copies that can be read; why others cannot goes to `reasons`."""
        for one in copies:
            try:
                return one, *self._read(one)
            except (LastgoodError, OSError) as error:
                _log.error("gemini: %s; trying the checkpoint before it, or another copy", error)
                reasons.append(str(error))
        return None

    def _replicate(self, one: Held, memory: torch.Tensor) -> None:
        """Bring what was restored to the peers that lack it: a machine that was lost has begun with none."""
        self._durable_sequence = one.sequence
        content = memoryview(memory.numpy().data)
        data_bytes = one.nbytes - one.meta_bytes
        outgoing = self._outgoing(one.sequence, one.step, content[:data_bytes], content[data_bytes:])
        for machine in self._holders:
            try:
                link, _ = self._link(machine)
                link.request("forget", owner=outgoing.owner, after=one.sequence)
                if all(known.sequence != one.sequence for known in link.held(outgoing.owner)):
                    self._send_to(machine, outgoing, self._unmarked, None)
            except (LastgoodError, OSError) as error:
                _log.warning("gemini: step %d has a copy less: machine %d: %s", one.step, machine, error)
                self._drop_link(machine)

    def _read(self, held: Held) -> tuple[torch.Tensor, dict[str, Any], frozenset[Keys]]:
        """Its bytes, the state that they make, and which of its entries are objects'."""
        available = available_memory_bytes()
        if held.nbytes > available:
            raise CheckpointError(
                f"{held.address}: its checkpoint of step {held.step} declares {held.nbytes} bytes, and this machine "
                f"has {available} to read it into"
            )
        memory = fresh_memory(held.nbytes)
        with self._peers.connect(held.address.path) as link:
            try:
                link.read(self.options.machine, held, memoryview(memory.numpy().data))
            except CorruptCheckpoint:
                # A fresh connection: this one still has chunks on their way.
                with self._peers.connect(held.address.path) as second:
                    second.request("check", owner=self.options.machine, sequence=held.sequence)
                raise
        where = f"{held.address}, step {held.step}"
        data_bytes = held.nbytes - held.meta_bytes
        layout = Layout.from_json(memory[data_bytes:].numpy().tobytes(), where, held.nbytes)
        if layout.stream_bytes != data_bytes:
            raise CorruptCheckpoint(f"{where}: {data_bytes} bytes, where its layout needs {layout.stream_bytes}")
        blocks = [memory[at : at + count] for at, count in zip(layout.block_offsets(), layout.block_bytes, strict=True)]
        return memory, unflatten(layout, blocks, where), stateful_paths(layout)

    # -- facts -----------------------------------------------------------------------------------------------------

    def storage_facts(self) -> dict[str, Any]:
        """Where checkpoints are, what went through idle gaps, and what that cost the training's communication."""
        options = self.options
        holders = placement(options.machines, options.replicas)
        facts = {
            "direct_io": False,
            "durability": "in a peer's memory; nothing on disk",
            "group_size": options.replicas,
            "machines": options.machines,
            "placement": [list(machines) for machines in holders],
            "peers": {
                str(machine): {"bytes_per_s": network.bytes_per_s, "latency_s": network.latency_s}
                for machine, (_, network) in sorted(self._links.items())
            },
            **self.traffic.facts(),
        }
        gaps_s = self.traffic.profile
        networks = [network for machine, (_, network) in self._links.items() if machine != options.machine]
        if len(gaps_s) > 1 and networks and self._nbytes:
            chunks = partition(gaps_s, self._nbytes * len(networks), options.part_bytes, networks[0], options.gamma)
            facts["planned_iterations"] = chunks[-1][0] // len(gaps_s) + 1
        return facts
