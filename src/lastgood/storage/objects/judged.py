"""What was judged bad, beside the checkpoints among objects: a machine that knows nothing of it passes it over too."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator

from lastgood.errors import CorruptCheckpoint, MismatchError
from lastgood.storage.objects import format as objects
from lastgood.storage.objects.client import ObjectClient, ObjectInfo, ObjectMissing
from lastgood.storage.objects.format import BadVerdict, CommitName

__all__ = ["bad_verdicts", "list_verdicts"]

_log = logging.getLogger("lastgood.storage")


def list_verdicts(client: ObjectClient) -> Iterator[tuple[CommitName, ObjectInfo]]:
    """The verdicts that are there; checkpoints of some of them may be gone. Raises StorageError."""
    for info in client.list(objects.VERDICTS):
        name = CommitName.parse(info.key.removeprefix(f"{objects.VERDICTS}/"))
        if name is not None:
            yield name, info


def bad_verdicts(client: ObjectClient, names: Collection[CommitName]) -> dict[CommitName, str]:
    """Which of these checkpoints were judged bad, and why. Raises StorageError.

    One whose verdict cannot be read is bad: there is a verdict on bad ones only.
    """
    found: dict[CommitName, str] = {}
    for name, info in list_verdicts(client) if names else ():
        if name not in names:
            continue
        where = client.where(info.key)
        try:
            if info.nbytes > objects.MOST_VERDICT_BYTES:
                raise CorruptCheckpoint(f"{where}: {info.nbytes} bytes are no verdict")
            found[name] = BadVerdict.decode(client.get(info.key, objects.MOST_VERDICT_BYTES), where, name).reason
        except ObjectMissing:
            continue  # taken back meanwhile
        except (CorruptCheckpoint, MismatchError) as error:
            _log.warning("%s; the checkpoint counts as bad, since a verdict is there", error)
            found[name] = "its verdict cannot be read"
    return found
