"""`lastgood export`: a checkpoint as a file that other programs read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lastgood.cli._output import Progress, console, emit_json
from lastgood.cli._place import EndpointUrl, Profile, Region, s3_options
from lastgood.errors import ConfigError, CorruptCheckpoint, NoCheckpoint, NoGoodCheckpoint
from lastgood.names import nearest
from lastgood.units import format_bytes, format_seconds, option_bytes

if TYPE_CHECKING:
    from lastgood.checkpointers.export.formats import Exported, ExportFormat
    from lastgood.checkpointers.export.selected import Selection
    from lastgood.storage import SlotInfo, SlotView

__all__ = ["export"]

_TRIES = 3
"""A training beside may overwrite the newest checkpoint while it is read; then there is a newer one."""


def export(
    directory: Annotated[
        str,
        typer.Argument(
            metavar="DIRECTORY|s3://BUCKET/JOB",
            help="Checkpoint directory, may be in use; or that of a job of several ranks; or a job in a bucket.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Argument(help="File to write; for dcp, a directory.", show_default=False)],
    to: Annotated[str, typer.Option(metavar="safetensors|pt|dcp", help="What to write.")] = "safetensors",
    step: Annotated[
        int | None, typer.Option(help="Step of the checkpoint.", show_default="the newest good one")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
    threads: Annotated[int, typer.Option(min=1, max=64, help="Threads that read.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written to stdout as JSON.")] = False,
    region: Region = None,
    endpoint_url: EndpointUrl = None,
    profile: Profile = None,
    part: Annotated[
        list[str] | None, typer.Option(help="Only this entry of the state, as model; may be given again.")
    ] = None,
    prefix: Annotated[str, typer.Option(help="Only names that begin with it; it is left out, as model.")] = "",
    dtype: Annotated[str | None, typer.Option(help="Round floating point to it, as bfloat16.")] = None,
    shard_size: Annotated[
        str | None,
        typer.Option(help="OUT becomes a folder of files of at most this size, as 5GB, with an index."),
    ] = None,
) -> None:
    """Write a checkpoint as safetensors, as a torch.save file, or as a torch.distributed.checkpoint directory.

    Needs no code of the model. What is written appears complete and durable, or not at all. With --part, --prefix,
    --dtype or --shard-size it is plain safetensors for other programs, which `from_pretrained` takes: Lastgood reads
    only a complete one back.
    """
    from lastgood.checkpointers.export.formats import ExportFormat
    from lastgood.checkpointers.export.selected import Selection
    from lastgood.checkpointers.export.whole_job import export_job
    from lastgood.checkpointers.ranks.opened import open_job
    from lastgood.storage.standalone_slot import look_at_standalone_slots

    known = [one.value for one in ExportFormat]
    if to not in known:
        raise ConfigError(f"--to {to}{nearest(to, known)}: known are {', '.join(known)}")
    shard_bytes = None if shard_size is None else option_bytes("--shard-size", shard_size)
    selection = Selection(tuple(part or ()), prefix, dtype, shard_bytes)
    s3 = s3_options(directory, region, endpoint_url, profile)
    job = open_job(directory, s3)
    if job.several:
        done = export_job(
            directory, out, ExportFormat(to), step, force=force, threads=threads, s3=s3, selection=selection
        )
    elif job.remote is None and look_at_standalone_slots(Path(directory)) is not None:
        raise ConfigError(
            f"{directory}: written by DeepSpeed's save_checkpoint; lastgood.integrations.deepspeed.export_torch writes "
            "the folder of a tag as DeepSpeed would"
        )
    else:
        done = _export(job.views[0], out, ExportFormat(to), step, force, threads, selection, shown=not as_json)
    if as_json:
        emit_json(
            {
                "path": str(done.path),
                "format": done.format.value,
                "step": done.step,
                "tensors": done.tensors,
                "bytes": done.nbytes,
                "seconds": done.seconds,
                "aliases": dict(done.aliases),
            }
        )
        return
    console.print(
        f"{done.path}: step {done.step}, {done.tensors} tensors, {format_bytes(done.nbytes)} in "
        f"{format_seconds(done.seconds)}"
    )
    for alias, name in done.aliases.items():
        console.print(f"  {alias} is {name}: written once, and noted in the metadata")


def _export(
    view: SlotView,
    out: Path,
    to: ExportFormat,
    step: int | None,
    force: bool,
    threads: int,
    selection: Selection,
    *,
    shown: bool,
) -> Exported:
    from lastgood.checkpointers.export.formats import WINDOW_BYTES, export_checkpoint

    tries = 0
    while True:
        tries += 1
        info = _choose(view, step)
        # Beside a training all is read at once: the sooner it is read, the less likely its slot is reused before.
        window_bytes = info.stream_bytes if view.held else WINDOW_BYTES
        try:
            with Progress("export", info.stream_bytes, shown=shown) as progress:
                return export_checkpoint(
                    view,
                    info,
                    out,
                    to,
                    force=force,
                    threads=threads,
                    window_bytes=window_bytes,
                    selection=selection,
                    tell=progress.advance,
                )
        except CorruptCheckpoint as error:
            gone = view.why_gone(info)
            if not gone:
                raise
            if tries == _TRIES or step is not None:
                raise CorruptCheckpoint(
                    f"{info.path}: step {info.step} cannot be exported any more: {gone}; pause the training, keep "
                    "more checkpoints, or let it archive some"
                ) from error


def _choose(view: SlotView, step: int | None) -> SlotInfo:
    if step is None:
        book = view.book()
        good = next((info for info in view.committed() if not book.is_bad(info.sequence)), None)
        if good is not None:
            return good
        newest = view.newest()
        raise NoGoodCheckpoint(f"{view.directory}: all checkpoints are judged bad; --step {newest.step} takes one")
    found = view.committed()
    for info in found:
        if info.step == step:
            return info
    raise NoCheckpoint(
        f"{view.directory}: no complete checkpoint of step {step}; steps {[i.step for i in found] or 'none'}"
    )
