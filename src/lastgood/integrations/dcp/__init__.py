"""Lastgood behind torch.distributed.checkpoint (DCP): a StorageWriter and a StorageReader. docs/dcp.md.

::

    import torch.distributed.checkpoint as dcp
    from lastgood.integrations.dcp import LastgoodReader, LastgoodWriter

    dcp.save(state, storage_writer=LastgoodWriter("/nvme/run/step-100"))
    dcp.load(state, storage_reader=LastgoodReader("/nvme/run/step-100"))

`writer` and `reader` are what DCP calls. `roll_call` bounds its collectives. `folder` and `bucket` are where a
checkpoint lies and how it gets its name, and `places` tells them apart; `folder_save` and `sources` are the two sides
of it. `slot_items` writes a rank's items into one slot file, `object_items` into segments, `torch_items` into files of
torch's own format, and `item_files` reads all of them. `byte_items` is about what is no tensor.
"""

from lastgood._lazy import lazy_names

_HOMES = {
    "Credentials": "lastgood.storage.objects.s3",
    "LastgoodReader": "lastgood.integrations.dcp.reader",
    "LastgoodWriter": "lastgood.integrations.dcp.writer",
    "S3Options": "lastgood.storage.objects.s3",
}

__all__ = list(_HOMES)
__getattr__ = lazy_names(__name__, _HOMES)
