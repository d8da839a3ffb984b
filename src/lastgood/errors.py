"""The one small hierarchy of errors: a message says what failed, where, and what to do."""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "ConfigError",
    "CorruptCheckpoint",
    "DataError",
    "HostError",
    "LastgoodError",
    "LaunchError",
    "LockHeld",
    "MismatchError",
    "NoCheckpoint",
    "NoGoodCheckpoint",
    "ProvisionError",
    "StateError",
    "StorageError",
    "WaitTimeout",
]


class LastgoodError(Exception):
    """Base of every error that Lastgood raises on purpose. The command line exits with `exit_code`."""

    exit_code = 1


class ConfigError(LastgoodError):
    """A configuration, command line or plan that cannot work: names file, key and allowed values."""

    exit_code = 2


class DataError(LastgoodError):
    """Data that a workload needs is missing or damaged: names the path and the command that makes it."""


class HostError(LastgoodError):
    """A host of a cluster, or of a testbed, does not do what it should: names the host, what failed, and what to do."""


class StateError(LastgoodError):
    """A training state holds something that cannot be stored to the bit: names the path inside the state."""


class CheckpointError(LastgoodError):
    """A save, a drain or a restore failed."""


class StorageError(CheckpointError):
    """The operating system refused a read or a write: names the file, the operation and the bytes needed."""

    errno: int | None = None
    """Its error number, if there is one: failures of one number are of one kind."""


class NoCheckpoint(CheckpointError):
    """There is no complete checkpoint to restore: names the directory and what was found there."""


class NoGoodCheckpoint(CheckpointError):
    """There are complete checkpoints, and none may be restored: judged bad, or training failed from them too often."""


class ProvisionError(LastgoodError):
    """Ansible or a host refused a provisioning: names the host, and how to go on."""


class CorruptCheckpoint(CheckpointError):
    """A stored checkpoint failed its checks: names the file, the chunk and both checksums."""


class MismatchError(CheckpointError):
    """A stored checkpoint belongs to another format version, job, layout or world: names both sides."""


class WaitTimeout(CheckpointError):
    """A bounded wait ended: names what was waited for and for how long."""


class LockHeld(LastgoodError):
    """Another process holds a lock: names that process."""


class LaunchError(LastgoodError):
    """A job on several hosts failed, or could not be started: names host, rank, exit status and log."""
