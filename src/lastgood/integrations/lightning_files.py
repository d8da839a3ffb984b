"""Lightning's own checkpoint files, made durable and read back with their checksums: for ``fit(ckpt_path=...)``.

The files are those of torch.save, as Lightning writes them; others read them as ever.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lastgood._lazy import torch
from lastgood.checkpointers.torch_files.archive import read_torch_file, reading_cost
from lastgood.checkpointers.torch_files.files import map_containers, save_durably
from lastgood.errors import ConfigError
from lastgood.files import ReadableBy, local_path, make_directory, readers_of, remove_tree, storage_errors
from lastgood.integrations.frameworks import import_framework

__all__ = ["LastgoodIO"]


def LastgoodIO(*, readable_by: ReadableBy | str = ReadableBy.OWNER) -> Any:  # noqa: N802 - the name of a plug-in
    """A plug-in for ``lightning.Trainer(plugins=[...])`` by which its checkpoints are durable, and checked when read.

    ModelCheckpoint, `save_checkpoint` and ``fit(ckpt_path=...)`` go by it. A file that is there is complete: it was
    flushed before it got its name, and a newer one is durable before Lightning removes an older one. It is read as
    data, nothing in it is run, and each tensor is compared with its CRC-32.

    Args:
        readable_by: who may read the files, as for a checkpointer.

    Saving raises StateError, naming the entry, for what could not be read again (an object of a class of your own in
    `on_save_checkpoint`), and StorageError; reading raises CorruptCheckpoint and StorageError. Raises ConfigError if
    Lightning is missing, for a URL, and for `storage_options`.
    """
    io = import_framework("lightning.fabric.plugins.io.checkpoint_io", "lightning")
    return _io_class(io.CheckpointIO)(readers_of(readable_by, "LastgoodIO"))


def _io_class(base: Any) -> Any:
    class LastgoodCheckpointIO(base):  # type: ignore[misc] # Lightning's class is known when it is imported
        """Writes and reads one file for each checkpoint."""

        def __init__(self, readable_by: ReadableBy) -> None:
            self._readable_by = readable_by

        def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
            """Durable at return."""
            if storage_options is not None:
                raise ConfigError("LastgoodIO: storage_options are of no use for files on a disk; leave them out")
            final = local_path(path)
            with storage_errors(final, "making the folder of checkpoints"):
                make_directory(final.parent, self._readable_by.directory_mode)
            save_durably(checkpoint, final, reading_cost(checkpoint, "checkpoint"), self._readable_by.file_mode)

        def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
            """On the CPU, or on the device that `map_location` names; nothing in the file is ever run."""
            del weights_only
            found = local_path(path)
            if not found.exists():
                raise FileNotFoundError(f"{found}: there is no checkpoint")  # as Lightning expects it
            return _on(read_torch_file(found), map_location)

        def remove_checkpoint(self, path: Any) -> None:
            """Of a newer one Lightning knows that it was saved."""
            found = local_path(path)
            with storage_errors(found, "removing a checkpoint"):
                if found.is_dir():
                    remove_tree(found)
                else:
                    Path(found).unlink(missing_ok=True)

    return LastgoodCheckpointIO


def _on(tree: Any, map_location: Any) -> Any:
    if not isinstance(map_location, str | torch.device):
        return tree  # a function, or none: Lightning moves what it loads
    device = torch.device(map_location)

    def moved(value: Any) -> Any:
        return value.to(device) if isinstance(value, torch.Tensor) else map_containers(moved, value)

    return moved(tree)
