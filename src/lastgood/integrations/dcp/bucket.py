"""Where a checkpoint of DCP lies in a bucket: below its URL, as segments, manifests and a commit (docs/s3-format.md).

Each rank's stream is a part of the checkpoint, and DCP's metadata is one more, the last. So the commit names all of it,
and nothing is there before. A save has a name of its own: under the job id that stands for DCP, its incarnation is the
time at which it began. Saves of one URL therefore stand there in the order of their begins, and the newest counts.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
import secrets
from collections.abc import Sequence

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from lastgood.errors import CheckpointError, MismatchError, StorageError
from lastgood.integrations.dcp.folder import METADATA, file_name
from lastgood.integrations.dcp.object_items import send_bytes, send_stream
from lastgood.integrations.dcp.roll_call import RollCall
from lastgood.integrations.dcp.slot_items import RankStream, SlotOptions
from lastgood.locations import Location
from lastgood.storage import format as fmt
from lastgood.storage.objects import format as objects
from lastgood.storage.objects.client import ObjectClient
from lastgood.storage.objects.commits import commits_of, find_commits, retire
from lastgood.storage.objects.format import CommitName, Part, UploadNote
from lastgood.storage.objects.opening import open_objects
from lastgood.storage.objects.s3 import S3Options
from lastgood.storage.objects.sweep import sweep
from lastgood.storage.objects.upload import PartUpload, commit_parts

__all__ = ["ObjectSave", "job_id_of", "save_time_ns"]

_log = logging.getLogger("lastgood")


def job_id_of(rank: int | None) -> bytes:
    """Of a checkpoint of all ranks, or of one that saves by itself (``use_collectives=False``): always the same."""
    alone = "" if rank is None else f" of rank {rank} alone"
    return hashlib.sha256(f"lastgood: a checkpoint of DCP{alone}".encode()).digest()[: fmt.JOB_ID_BYTES]


def save_time_ns(save_id: bytes) -> int:
    """When a save began, by the clock of its coordinator, in nanoseconds since 1970."""
    return int.from_bytes(save_id[8:], "big")


class ObjectSave:
    """A `Save` below a URL. Its client is made here, in the process that saves."""

    def __init__(self, place: Location, s3: S3Options | None, roll: RollCall, options: SlotOptions) -> None:
        self.rank = roll.rank
        self.together = True
        self._roll = roll
        self._options = options
        self._client: ObjectClient = open_objects(place, s3)
        self._upload: PartUpload | None = None
        self._others: list[CommitName] = []
        """Earlier saves of this name, as far as they were committed."""
        self._left = False
        """Whether there are notes of saves that were not."""

    def prepare(self) -> None:
        """Say that this save is in progress. Raises StorageError, also if this host's clock runs behind."""
        name, client = self._name, self._client
        note = f"{name.uploads}/{self.rank:07d}-{secrets.token_hex(8)}"
        client.put(note, UploadNote(name, self.rank).encode())
        self._left = any(info.key != note for info in client.list(f"{objects.UPLOADS}/{name.job_id.hex()}"))
        found = commits_of(client)
        self._others = [one for one in found if one.job_id == name.job_id]
        if not self.together and any(one.job_id == job_id_of(None) and info.nbytes for one, info in found.items()):
            raise StorageError(
                f"{client.place}: holds a checkpoint of all ranks, which a load would take before rank {self.rank}'s "
                "own; save under another name, or remove it first"
            )
        later = max(self._others, default=name)
        if later > name:
            ahead_s = (later.incarnation - name.incarnation) / 1e9
            raise StorageError(
                f"{client.where(later.key)}: a save of this name began {ahead_s:.1f} s later than this one, which "
                "begins only now: the clock of this host is behind; set it"
            )

    def write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """As `Save.write`; the part itself, which a rank without items has too, is told in one result more."""
        stream = RankStream(plan, planner, self._options)
        part_of, count = (self.rank, self._count) if self.together else (0, self._count)
        self._upload, part = send_stream(self._client, self._name, part_of, count, stream, self._options)
        told = WriteResult(MetadataIndex(""), 0, _Sent(part_of, part))
        return [*stream.results(file_name(part_of, 0, self._roll.id, "lgs")), told]

    def finish(self, metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> None:
        """Send the metadata, and create the commit; then earlier checkpoints of this name are taken away."""
        written = [one for some in results for one in some]
        sent = {one.storage_data.rank: one.storage_data.part for one in written if isinstance(one.storage_data, _Sent)}
        lacking = sorted(set(range(self._count - 1)) - set(sent))
        if lacking or self._upload is None:
            raise CheckpointError(f"{self._client.place}: the parts of ranks {lacking[:8]} were not sent")
        metadata.storage_data = {
            one.index: one.storage_data.info for one in written if not isinstance(one.storage_data, _Sent)
        }
        content, last = pickle.dumps(metadata), self._count - 1
        parts = [sent[rank] for rank in range(last)]
        parts.append(send_bytes(self._client, self._name, last, self._count, METADATA, content))
        newer = [one for one in find_commits(self._client, self._name.job_id) if one > self._name]
        if newer:
            raise MismatchError(
                f"{self._client.where(newer[0].key)}: a save of this name that began later is complete already; this "
                "one is given up, so that the name does not go back to it"
            )
        commit_parts(self._upload, parts)
        try:
            self._tidy()
        except (StorageError, CheckpointError) as error:
            _log.warning("%s: saved, and what earlier saves left there stays for now: %s", self._client.place, error)

    def end(self) -> None:
        """Let go of the connection. What was sent and is not named by a commit is nobody's, and swept a day later."""
        self._client.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    @property
    def _name(self) -> CommitName:
        return CommitName(job_id_of(None if self.together else self.rank), save_time_ns(self._roll.id), 0)

    @property
    def _count(self) -> int:
        """Parts: of the ranks, and the metadata."""
        return (self._roll.world_size if self.together else 1) + 1

    def _tidy(self) -> None:
        client, name = self._client, self._name
        client.delete([info.key for info in client.list(name.uploads)])
        for other in self._others:
            if other < name:
                retire(client, other)
        if self._others or self._left:
            sweep(client)


class _Sent:
    """Tells rank 0 of a rank's part."""

    def __init__(self, rank: int, part: Part) -> None:
        self.rank = rank
        self.part = part
