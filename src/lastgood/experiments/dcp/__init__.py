"""Parts of the suite for torch's distributed checkpoint (DCP): models over ranks, contents, storages, clocks."""
