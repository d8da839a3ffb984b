"""The trainer's side of peers: finding, starting and talking to them."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import statistics
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lastgood
from lastgood.checkpointers.gemini.address_file import Address
from lastgood.checkpointers.gemini.areas import DESCRIBED
from lastgood.checkpointers.gemini.partition import Network, chunks_for_gap
from lastgood.checkpointers.gemini.traffic import Traffic
from lastgood.cluster.ssh.remote import REMOTE_MARK
from lastgood.errors import CheckpointError, CorruptCheckpoint, LastgoodError, WaitTimeout
from lastgood.files import PRIVATE, ReadableBy, make_directory, open_log, read_end, storage_errors
from lastgood.locks import FileLock
from lastgood.wire.frames import Kind, Wire, chunk_checksum, prove_trainer, reach

_log = logging.getLogger("lastgood")

__all__ = ["Held", "Outgoing", "PeerLink", "PeerSettings", "Peers"]

_PROBES = 5
_PROBE_BYTES = 4 << 20


@dataclass(frozen=True)
class PeerSettings:
    """How a peer that must be started is to be."""

    host: str
    limit_bytes: int
    """Memory for checkpoints; 0: what its machine has free."""
    idle_s: float
    timeout_s: float
    """Of every wait on either side."""
    starts: int | None = None
    """The only machine whose peers are started here: this one, if each machine has its own. None: any."""


@dataclass(frozen=True)
class Held:
    """A complete checkpoint in a peer's memory."""

    sequence: int
    step: int
    nbytes: int
    meta_bytes: int
    address: Address


@dataclass(frozen=True)
class Outgoing:
    """A checkpoint to send: two ranges of memory that make one stream."""

    owner: int
    sequence: int
    step: int
    data: memoryview
    meta: memoryview
    part_bytes: int
    parts: int
    gamma: float

    @property
    def nbytes(self) -> int:
        """Length of the stream."""
        return len(self.data) + len(self.meta)

    def view(self, position: int, length: int) -> memoryview:
        """At most `length` bytes of the stream from `position` on; no view has bytes of both ranges."""
        if position < len(self.data):
            return self.data[position : position + length]
        start = position - len(self.data)
        return self.meta[start : start + length]


class PeerLink:
    """A connection to a peer that has proved itself."""

    def __init__(self, address: Address, timeout_s: float) -> None:
        self.address = address
        connection = reach(address.host, address.port, timeout_s, str(address))
        self._wire = Wire(connection, str(address), timeout_s)
        try:
            prove_trainer(self._wire, address.token)
        except BaseException:
            connection.close()
            raise

    def request(self, operation: str, **content: Any) -> dict[str, Any]:
        """Ask the peer for something. Raises CheckpointError, with the peer's words, if it refuses."""
        self._wire.send_message(op=operation, **content)
        return self._granted(self._wire.receive_message(f"the answer to {operation!r}"))

    def measure(self) -> Network:
        """Time empty and long probes: medians of a few."""
        alone: list[float] = []
        loaded: list[float] = []
        content = memoryview(bytearray(_PROBE_BYTES))
        for _ in range(_PROBES):
            for data, times in ((content[:0], alone), (content, loaded)):
                began = time.perf_counter()
                self._wire.send_message(op="probe")
                self._wire.send_chunk(data, 0, 0)
                self._granted(self._wire.receive_message("the answer to a probe"))
                times.append(time.perf_counter() - began)
        latency_s = statistics.median(alone)
        return Network(_PROBE_BYTES / max(statistics.median(loaded) - latency_s, 1e-6), latency_s)

    def send(self, checkpoint: Outgoing, traffic: Traffic, network: Network, timeout_s: float) -> None:
        """Send a checkpoint in the gaps of the training's traffic; on return it is complete at the peer.

        `timeout_s` bounds the wait for each gap. At most `parts` chunks are sent at once, as many as the peer has
        buffers for.
        """
        self.request(
            "begin",
            owner=checkpoint.owner,
            sequence=checkpoint.sequence,
            step=checkpoint.step,
            nbytes=checkpoint.nbytes,
            meta_bytes=len(checkpoint.meta),
            part_bytes=checkpoint.part_bytes,
            parts=checkpoint.parts,
        )
        under_way: deque[int] = deque()
        position = 0
        while position < checkpoint.nbytes:
            remaining = checkpoint.nbytes - position
            span_s = traffic.wait_for_gap(network.least_span_s(remaining), checkpoint.gamma, timeout_s)
            for size in chunks_for_gap(span_s, remaining, checkpoint.part_bytes, network):
                while size:
                    view = checkpoint.view(position, size)
                    if len(under_way) == checkpoint.parts:
                        self._await_ack(under_way)
                    self._wire.send_chunk(view, position, chunk_checksum(view, checkpoint.sequence, position))
                    under_way.append(position)
                    traffic.moved(len(view))
                    position, size = position + len(view), size - len(view)
                if traffic.is_busy:
                    break
        while under_way:
            self._await_ack(under_way)
        self.request("commit")

    def held(self, owner: int) -> list[Held]:
        """The complete checkpoints of machine `owner`, newest first."""
        found = self.request("list", owner=owner).get("checkpoints")
        if not isinstance(found, list):
            raise CorruptCheckpoint(f"{self.address} did not say what it holds")
        return [self._described(item) for item in found]

    def read(self, owner: int, held: Held, target: memoryview) -> None:
        """Read a checkpoint into `target`, of its size. Raises CorruptCheckpoint if a checksum does not hold."""
        found = self._described(self.request("read", owner=owner, sequence=held.sequence))
        if found != held or len(target) != held.nbytes:
            raise CorruptCheckpoint(f"{self.address} announced {found} where {held} was asked for")
        position = 0
        while position < held.nbytes:
            frame = self._wire.receive_frame(f"the chunk at byte {position}")
            if (
                frame.kind is not Kind.CHUNK
                or frame.offset != position
                or not 0 < frame.length <= held.nbytes - position
            ):
                raise CorruptCheckpoint(f"{self.address} sent {frame} where the chunk at byte {position} was due")
            chunk = target[position : position + frame.length]
            self._wire.read_into(chunk, f"the chunk at byte {position}")
            checksum = chunk_checksum(chunk, held.sequence, position)
            if checksum != frame.checksum:
                raise CorruptCheckpoint(
                    f"{self.address}: the checkpoint of step {held.step} is damaged: the chunk at byte {position} has "
                    f"checksum {checksum:08x}, not {frame.checksum:08x}"
                )
            position += frame.length

    def abort(self) -> None:
        """Make every call that another thread is in fail at once."""
        self._wire.abort()

    def close(self) -> None:
        """Close the connection. Safe to call twice."""
        self._wire.close()

    def __enter__(self) -> PeerLink:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _await_ack(self, under_way: deque[int]) -> None:
        offset = under_way.popleft()
        what = f"the chunk at byte {offset} to be acknowledged"
        frame = self._wire.receive_frame(what)
        if frame.kind is Kind.MESSAGE:
            self._granted(self._wire.read_message(frame))
        if frame.kind is not Kind.ACK or frame.offset != offset:
            raise CorruptCheckpoint(f"{self.address} sent {frame}, waiting for {what}")

    def _granted(self, answer: dict[str, Any]) -> dict[str, Any]:
        if answer.get("ok") is not True:
            raise CheckpointError(f"{self.address} refused: {str(answer.get('why'))[:500]}")
        return answer

    def _described(self, item: Any) -> Held:
        try:
            values = [item[key] for key in DESCRIBED]
        except (TypeError, KeyError) as error:
            raise CorruptCheckpoint(f"{self.address} described no checkpoint: {item!r:.200}") from error
        if any(type(value) is not int or value < 0 for value in values) or values[3] > values[2]:
            raise CorruptCheckpoint(f"{self.address} described no checkpoint: {item!r:.200}")
        return Held(values[0], values[1], values[2], values[3], self.address)


class Peers:
    """The peers of one directory. Several of one machine's may live: the newest receives, older ones still hold.

    A peer that does not answer is replaced, but its address file stays until its successor has a complete checkpoint.
    """

    def __init__(self, directory: Path, settings: PeerSettings) -> None:
        self._directory = directory
        self._settings = settings

    def addresses(self, machine: int) -> list[Path]:
        """The address files of `machine`'s peers, newest first."""
        name = re.compile(rf"peer-{machine}-(\d{{6,12}})\.json")
        try:
            found = [
                (int(match[1]), path) for path in self._directory.iterdir() if (match := name.fullmatch(path.name))
            ]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [path for _, path in sorted(found, reverse=True)]

    def reach(self, machine: int) -> PeerLink:
        """A connection to the newest peer of `machine`. Starts nothing; raises LastgoodError if none answers."""
        newest = next(iter(self.addresses(machine)), None)
        if newest is None:
            raise self._told_of_none(machine)
        return self.connect(newest)

    def reach_or_start(self, machine: int) -> PeerLink:
        """A connection to the newest peer of `machine`, which is started if there is none that answers.

        Raises CheckpointError if none can be started (or may be, from here), LockHeld if another process has
        tried to for too long.
        """
        with storage_errors(self._directory, "making the checkpoint directory"):
            make_directory(self._directory, ReadableBy.OWNER.directory_mode)
        lock = FileLock(self._directory / f"peer-{machine}.lock", f"starting a peer of machine {machine}", mode=PRIVATE)
        # Others that need this peer as well connect and start it in their turn: each does so within two waits.
        lock.acquire(4 * self._settings.timeout_s)
        try:
            newest = next(iter(self.addresses(machine)), None)
            if newest is not None:
                try:
                    return self.connect(newest)
                except (LastgoodError, OSError) as error:
                    if not self._may_start(machine):
                        raise CheckpointError(
                            f"machine {machine}: {error}; when all ranks begin again, its own starts another peer"
                        ) from error
                    # Unless it has ended, it keeps what it has until its successor has something.
                    _log.error("gemini: %s; starting another peer for machine %d", error, machine)
                    self._forget_if_ended(newest)
            elif not self._may_start(machine):
                raise self._told_of_none(machine)
            return self._start(machine, self._serial(newest) + 1)
        finally:
            lock.release()

    def own(self, machine: int) -> list[Address]:
        """The addresses of `machine`'s peers, newest first, for other machines to `learn`; not of those that ended."""
        for path in self.addresses(machine):
            self._forget_if_ended(path)
        return [Address.read(path) for path in self.addresses(machine)]

    def learn(self, machine: int, addresses: list[Address]) -> None:
        """Note where `machine`'s peers are, as that machine has told: all of them. Raises OSError, CorruptCheckpoint.

        What it did not tell of is forgotten. A machine that has lost its disk counts its peers from 1 again, and one of
        an earlier incarnation with a higher number would be taken for the newest for ever.
        """
        make_directory(self._directory, ReadableBy.OWNER.directory_mode)
        told = []
        for address in addresses:
            path = Address.path_of(self._directory, machine, self._serial(address.path))
            dataclasses.replace(address, path=path).note()
            told.append(path)
        for path in self.addresses(machine):
            if path not in told:
                path.unlink(missing_ok=True)

    def connect(self, path: Path) -> PeerLink:
        """A connection to the peer of one address file."""
        return PeerLink(Address.read(path), self._settings.timeout_s)

    def holding(self, owner: int, machines: list[int]) -> tuple[list[Held], list[str]]:
        """What all peers of `machines` hold of `owner`, newest first, and why some did not answer."""
        held: list[Held] = []
        silent = []
        for path in self.known(machines):
            try:
                with self.connect(path) as link:
                    held += link.held(owner)
            except (LastgoodError, OSError) as error:
                silent.append(f"{path.name}: {error}")
        return sorted(held, key=lambda one: -one.sequence), silent

    def retire_older(self, link: PeerLink, machine: int) -> None:
        """Let the predecessors of `link`'s peer end: it has a complete checkpoint of its own now."""
        for path in self.addresses(machine):
            if self._serial(path) < self._serial(link.address.path):
                path.unlink(missing_ok=True)

    def _told_of_none(self, machine: int) -> CheckpointError:
        return CheckpointError(f"machine {machine} has told of no peer in {self._directory}")

    def _may_start(self, machine: int) -> bool:
        return self._settings.starts in (None, machine)

    def known(self, machines: list[int]) -> list[Path]:
        """The address files of these machines' peers."""
        return [path for machine in machines for path in self.addresses(machine)]

    def may_hold(self, owner: int, machines: list[int], at_least: int = 1) -> list[str]:
        """The peers that hold so many checkpoints of `owner`, or might: not those that have ended."""
        found = []
        for path in self.known(machines):
            try:
                with self.connect(path) as link:
                    steps = [one.step for one in link.held(owner)]
                if len(steps) >= at_least:
                    found.append(f"{path} (steps {steps})")
            except (LastgoodError, OSError) as error:
                if not self._has_ended(path):
                    found.append(f"{path} ({error})")
        return found

    def _forget_if_ended(self, path: Path) -> None:
        if self._has_ended(path):
            path.unlink(missing_ok=True)

    def _has_ended(self, path: Path) -> bool:
        """Whether that is known: of a peer on another machine it is not."""
        try:
            address = Address.read(path)
        except (CorruptCheckpoint, OSError):
            return False
        if not address.on_this_machine and address.host != self._settings.host:
            return False
        try:
            state = Path("/proc", str(address.pid), "stat").read_text(encoding="ascii", errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            return True
        except OSError:
            return False
        return state.rpartition(")")[2].split()[0] in "ZX"  # its parent has not asked how it ended

    @staticmethod
    def _serial(path: Path | None) -> int:
        return int(path.stem.rsplit("-", 1)[1]) if path is not None else 0

    def _start(self, machine: int, serial: int) -> PeerLink:
        settings = self._settings
        command = [sys.executable, "-m", "lastgood.checkpointers.gemini.peer"]
        command += ["--directory", str(self._directory.absolute()), "--machine", str(machine), "--serial", str(serial)]
        command += ["--host", settings.host, "--limit-bytes", str(settings.limit_bytes)]
        command += ["--idle-s", str(settings.idle_s), "--timeout-s", str(settings.timeout_s)]
        path = Address.path_of(self._directory, machine, serial)
        log = path.with_suffix(".log")
        source = str(Path(lastgood.__file__).parent.parent)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")])),
        }
        if settings.starts is not None:
            # A launch over ssh ends all that its job has started, daemons too. Peers stay for the job's next
            # incarnation.
            environment.pop(REMOTE_MARK, None)
        try:
            with open_log(log) as output:
                # Of its own session and with no open file of ours: it must live on when we and our group are killed,
                # and whoever reads our pipes must see their end then.
                starter = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment,
                    close_fds=True, start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            raise CheckpointError(f"{self._directory}: a peer could not be started: {error}") from error
        try:
            code = starter.wait(settings.timeout_s)
        except subprocess.TimeoutExpired:
            starter.kill()
            starter.wait()
            raise WaitTimeout(f"waited {settings.timeout_s:g} s for a peer to start; its log is {log}") from None
        if code != 0:
            last = read_end(log, 4096).decode(errors="replace").strip().splitlines()[-1:]
            raise CheckpointError(f"a peer ended with {code} at its start: {' '.join(last)[:300]}; its log is {log}")
        return self.connect(path)
