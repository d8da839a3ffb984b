"""The suite for torch.distributed.checkpoint (DCP): models over ranks, storages, timed saves and loads, their record.

`models` and `spread` make a model of which each rank holds its shards only; `contents` fills them and takes digests;
`storages` are the ways to write and read; `bench` is what each rank does, `execute` starts the ranks.
"""
