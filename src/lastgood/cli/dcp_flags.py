"""The flags of `lastgood dcp`, and the kinds of their values."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "LOGS",
    "SCRATCH",
    "Async",
    "Backend",
    "Cache",
    "Ddp",
    "Endpoint",
    "Fsdp",
    "Gbps",
    "Hostfile",
    "Iterations",
    "Logs",
    "Model",
    "PartSize",
    "Prefixes",
    "Reader",
    "Record",
    "Region",
    "Replicas",
    "SavedStorage",
    "SavedWorldSize",
    "Scratch",
    "Seed",
    "Server",
    "Sharding",
    "SshConfig",
    "State",
    "Storage",
    "Suffix",
    "Sync",
    "Threads",
    "Uri",
    "Warmup",
    "WorldSize",
]

Uri = Annotated[str, typer.Option("--uri", help="Folder for checkpoints, file://FOLDER, or s3://BUCKET/PREFIX.")]
Suffix = Annotated[str, typer.Option("--suffix", help="Name of the checkpoint, as `save` printed it last.")]
Model = Annotated[
    str | None,
    typer.Option("--model", help="L7b to L70b, llama3-8b to -405b, vit-base, T0_3B; a twin: L7b-64MB [default: L7b]."),
]
Backend = Annotated[str, typer.Option("--backend", help="gloo: the state is in host memory; nccl: on GPUs.")]
Iterations = Annotated[int, typer.Option("--iterations", help="Timed saves or loads.")]
Warmup = Annotated[int, typer.Option("--warmup", help="Untimed ones before them.")]
WorldSize = Annotated[
    int, typer.Option("--world-size", "--world_size", help="Ranks, on this machine. Under torchrun it says how many.")
]
SavedWorldSize = Annotated[
    int | None, typer.Option("--world-size", "--world_size", help="Ranks [default: as many as saved it].")
]
SavedStorage = Annotated[
    str | None,
    typer.Option("--storage", help="disk, fsspec, hf, lastgood or s3torchconnector [default: what saved it]."),
]
Hostfile = Annotated[Path | None, typer.Option("--hostfile", help="Hosts for the ranks, one a line: NAME slots=N.")]
SshConfig = Annotated[
    Path | None, typer.Option("--ssh-config", help="With --hostfile: an ssh configuration [default: your own].")
]
Storage = Annotated[
    str | None,
    typer.Option(
        "--storage", help="disk, fsspec, hf, lastgood or s3torchconnector [default: disk; lastgood in a bucket]."
    ),
]
Threads = Annotated[
    int | None, typer.Option("--thread-count", "--thread_count", help="Threads of each rank's writer or reader.")
]
Sync = Annotated[
    bool | None, typer.Option("--sync-files/--no-sync-files", help="Whether files are flushed to the disk.")
]
State = Annotated[str | None, typer.Option("--state", help="model, or full: with AdamW's moments [default: model].")]
Sharding = Annotated[
    str | None,
    typer.Option("--sharding", help="full, or hybrid: groups of ranks hold the same shards [default: full]."),
]
Replicas = Annotated[int | None, typer.Option("--replicas", help="With --sharding hybrid: how many groups.")]
Fsdp = Annotated[int | None, typer.Option("--fsdp", help="2: fully_shard; 1: FullyShardedDataParallel [default: 2].")]
Ddp = Annotated[bool, typer.Option("--ddp", help="A complete copy on each rank, in place of FSDP.")]
Async = Annotated[
    str | None, typer.Option("--async", help="thread or process: save by async_save [default: save, which waits].")
]
Cache = Annotated[bool, typer.Option("--planner-cache", "--planner_cache", help="Keep plans from save to save.")]
Seed = Annotated[int, typer.Option("--seed", help="Of the numbers in the state.")]
Scratch = Annotated[Path, typer.Option("--scratch", help="Folder for the run's own files, on a disk.")]
Logs = Annotated[Path, typer.Option("--logs", help="Folder for logs of ranks that fail.")]
Record = Annotated[Path | None, typer.Option("--record", help="Write the record, one JSON file, there.")]
Region = Annotated[str | None, typer.Option("--region", help="Of the bucket [default: the environment's].")]
Endpoint = Annotated[
    str | None, typer.Option("--endpoint-url", "--endpoint_url", help="Of an S3 server that is not AWS.")
]
Server = Annotated[
    Path | None,
    typer.Option(
        "--server", help="Run an S3 server, SeaweedFS, inside this command; it keeps its data in this folder."
    ),
]
PartSize = Annotated[
    int | None, typer.Option("--part-size", "--part_size", help="Of s3torchconnector: MiB of each part of an upload.")
]
Gbps = Annotated[
    float | None,
    typer.Option("--target-gbps", "--target_gbps", help="Of s3torchconnector: throughput that it aims at."),
]
Prefixes = Annotated[
    str | None,
    typer.Option(
        "--prefix-strategy", "--prefix_strategy", help="Of s3torchconnector: default, numeric, binary or hex."
    ),
]
Reader = Annotated[
    str | None, typer.Option("--s3-reader", "--s3_reader", help="Of s3torchconnector: optimized, sequential or range.")
]
SCRATCH = Path("scratch")
LOGS = Path("logs/dcp")
