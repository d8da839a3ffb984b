"""`lastgood inspect`: what a checkpoint directory, bucket or file of DeepSpeed's holds, without the model's code."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lastgood.cli._output import emit_json, emit_table
from lastgood.cli._place import EndpointUrl, Profile, Region, s3_options
from lastgood.errors import CheckpointError, CorruptCheckpoint, NoCheckpoint
from lastgood.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lastgood.checkpointers.ranks.opened import OpenedJob
    from lastgood.state import Layout
    from lastgood.storage import GlobalCommit, SlotInfo, SlotStatus, SlotView, Verdict
    from lastgood.storage.standalone_slot import StandaloneSlots

__all__ = ["Directory", "held_by_all", "inspect", "listed", "none_here", "noted", "of_step"]

Directory = Annotated[
    str,
    typer.Argument(
        metavar="DIRECTORY|s3://BUCKET/JOB",
        help="Checkpoint directory, which may be in use, or a job in a bucket; or a file, or the folder of a tag, of "
        "use_lastgood's.",
        show_default=False,
    ),
]
_TRIES = 3
"""A training beside may overwrite a checkpoint between the look at its slot and the look into it."""


def inspect(
    directory: Directory,
    layout: Annotated[
        bool, typer.Option("--layout", help="Also show the tensors and values of the newest complete checkpoint.")
    ] = False,
    step: Annotated[
        int | None, typer.Option(help="Show the tensors and values of the checkpoint of this step.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print all to stdout as JSON.")] = False,
    region: Region = None,
    endpoint_url: EndpointUrl = None,
    profile: Profile = None,
) -> None:
    """Show the slots of a checkpoint directory: which are complete, and which is the newest; and what is in one.

    Of a job in a bucket it shows the checkpoints that were committed there. Of systems without slots (sync, checkfreq,
    dcp, ...) it says which steps are there. Reads records and layouts, not the data; `lastgood verify` does. Exit 1 if
    something that was asked for is not readable; all else is shown before.
    """
    from lastgood.checkpointers.ranks.opened import open_job
    from lastgood.storage.standalone_slot import look_at_standalone_slots

    job = open_job(directory, s3_options(directory, region, endpoint_url, profile))
    ranks = job.several
    standalone = None if ranks or job.remote else look_at_standalone_slots(Path(directory))
    if standalone is not None:
        _inspect_standalone(standalone, layout, step, json)
        return
    shown = [_look(job, rank, layout, step) for rank in job.views]
    troubles = [trouble for one, _ in shown for trouble in one["trouble"]]
    slots = any(one["slots"] for one, _ in shown)
    others = any(one["other_checkpoints"] for one, _ in shown)
    common = _common(job, troubles) if ranks and (slots or not others) else []
    if json:
        whole = {"directory": str(job.place), "ranks": [one for one, _ in shown], "whole": common}
        emit_json(whole if ranks else shown[0][0])
    else:
        for rank, (one, contents) in zip(job.views, shown, strict=True):
            if not one["slots"]:
                sys.stdout.write(f"{none_here(job, rank)}\n")
                continue
            for other in one["other_checkpoints"]:
                sys.stdout.write(f"{one['directory']}: beside the slots {other['what']} of steps {other['steps']}\n")
            _show_slots(
                f"{job.where(rank)}{' (in use)' if one['in_use'] else ''}{held_by_all(one)}{_age(one)}", one["slots"]
            )
            if "remote" in one:
                _show_remote(one["remote"])
            if contents is not None:
                _show_contents(contents)
        if ranks and (slots or not others):
            sys.stdout.write(f"complete on all ranks: {listed(common)}\n")
    if troubles:
        raise CheckpointError("; ".join(troubles))


def none_here(job: OpenedJob, rank: int) -> str:
    """What to say of a rank's part that holds nothing."""
    from lastgood.checkpointers.recovery.found_here import words_on_none

    if job.remote is not None:
        return f"{job.where(rank)}: there is no checkpoint here"
    return words_on_none(Path(job.where(rank)))


@contextmanager
def noted(troubles: list[str]) -> Iterator[None]:
    """What a checkpoint refuses is a trouble to be told, and the rest is shown all the same."""
    try:
        yield
    except CheckpointError as error:
        troubles.append(str(error))


def held_by_all(described: Mapping[str, Any]) -> str:
    """What all ranks of a job hold, for the title of one rank's directory."""
    commit = described.get("global")
    return f", all ranks hold step {commit['step']} of incarnation {commit['incarnation']}" if commit else ""


def listed(whole: Sequence[Mapping[str, Any]]) -> str:
    """The checkpoints that all ranks hold, in words."""
    named = [f"{one['step']} (incarnation {one['incarnation']}{', bad' if one['bad'] else ''})" for one in whole]
    return ", ".join(named) or "none"


def of_step(statuses: Sequence[SlotStatus], step: int | None) -> list[SlotStatus]:
    """Those of `step`; all if it is None."""
    return [one for one in statuses if step is None or one.step == step]


def _inspect_standalone(standalone: StandaloneSlots, layout: bool, step: int | None, json: bool) -> None:
    """Files that stand alone: each with its records, and with its contents if they are asked for."""
    from lastgood.checkpointers.slots.contents import read_layout
    from lastgood.storage import SlotView
    from lastgood.storage.standalone_slot import ROOT

    troubles = list(standalone.troubles)
    statuses = of_step(standalone.statuses, step)
    contents = []
    for info in (status.info for status in statuses):
        if info is not None and (layout or step is not None):
            with noted(troubles):
                contents.append(_describe_layout(info, read_layout(SlotView(info.path.parent), info), ROOT))
    if (layout or step is not None) and not any(status.info for status in statuses):
        asked = "complete file" if step is None else f"complete file of step {step}"
        steps = sorted({status.info.step for status in standalone.statuses if status.info is not None})
        troubles.append(f"{standalone.place}: no {asked}; steps {steps or 'none'}")
    described = [_describe(status, None, {}, None) for status in statuses]
    if json:
        others = [path.name for path in standalone.others]
        found: dict[str, Any] = {"directory": str(standalone.place), "files": described, "other_files": others}
        if layout or step is not None:
            found["layouts"] = contents
        emit_json({**found, "trouble": troubles})
    else:
        _show_slots(str(standalone.place), described)
        for one in contents:
            _show_contents(one)
        if standalone.others:
            names = ", ".join(path.name for path in standalone.others)
            sys.stdout.write(f"not in Lastgood's format: {names}\n")
    if troubles:
        raise CheckpointError("; ".join(troubles))


def _common(job: OpenedJob, troubles: list[str]) -> list[dict[str, Any]]:
    """The checkpoints of a job of which all ranks hold a complete part, the newest first."""
    found = []
    with noted(troubles):
        for one in job.checkpoints():
            if job.remote is not None:
                try:
                    _ = one.infos
                except CheckpointError:
                    continue  # the ranks' own tables say what is wrong
            found.append({"step": one.step, "incarnation": one.incarnation, "bad": one.bad})
    return found


def _look(job: OpenedJob, rank: int, layout: bool, step: int | None) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """What one rank's part holds, and the contents of the checkpoint that was asked for."""
    from lastgood.checkpointers.recovery.found_here import others_in
    from lastgood.checkpointers.slots.contents import look_at_slots

    with job.views[rank] as view:
        held = view.held
        statuses, troubles = look_at_slots(view)
        newest = next(iter(view.complete(statuses)), None)
        verdicts: Mapping[int, Verdict] = {}
        commit, contents = None, None
        with noted(troubles):
            verdicts = view.book().verdicts
        with noted(troubles):
            commit = view.global_commit()
        described = [_describe(status, newest, verdicts, commit) for status in statuses]
        if layout or step is not None:
            with noted(troubles):
                contents = _contents(view, step)
    beside = others_in(view.directory) if job.remote is None else []
    others = [{"what": one.what, "steps": list(one.steps)} for one in beside]
    found: dict[str, Any] = {
        "directory": str(job.place) if job.remote else job.where(rank),
        "in_use": held,
        "slots": described,
        "other_checkpoints": others,
    }
    if commit is not None:
        found["global"] = commit._asdict()
    status = next((one for one in statuses if newest is not None and one.info == newest), None)
    sent = _remote(view.directory, status) if job.remote is None else None
    if sent is not None:
        found["remote"] = sent
    if layout or step is not None:
        found["layout"] = contents
    return {**found, "trouble": troubles}, contents


def _remote(directory: Path, newest: SlotStatus | None) -> dict[str, Any] | None:
    """What a training has sent from here to a place that outlives the machine; None if it has none."""
    from lastgood.checkpointers.remote.status import Which, read_status

    status = read_status(directory)
    if status is None:
        return None
    age_s = None if newest is None else _age_s(newest)
    info = None if newest is None else newest.info
    lag = None if info is None or age_s is None else status.lag(Which.of(info, time.time() - age_s))
    return {
        "place": status.place,
        "step": None if status.committed is None else status.committed.step,
        "sending": None if status.sending is None else status.sending.step,
        "lag_steps": None if lag is None else lag[0],
        "lag_s": None if lag is None else lag[1],
        **{name: getattr(status, name) for name in ("sent", "replaced", "failed", "sent_bytes", "kept_bytes")},
        "last_error": status.last_error,
    }


def _show_remote(sent: Mapping[str, Any]) -> None:
    holds = "holds nothing of this yet" if sent["step"] is None else f"holds step {sent['step']}"
    behind = ""
    if sent["lag_steps"]:
        behind = f", {sent['lag_steps']} steps and {format_seconds(sent['lag_s'])} behind the newest here"
    counts = f"{sent['sent']} sent, {sent['replaced']} replaced, {sent['failed']} failed"
    nbytes = f"{format_bytes(sent['sent_bytes'])} sent, {format_bytes(sent['kept_bytes'])} were there"
    sys.stdout.write(f"remote: {sent['place']} {holds}{behind}; {counts}; {nbytes}\n")
    if sent["sending"] is not None:
        sys.stdout.write(f"remote: step {sent['sending']} is being sent, or was when the training ended\n")
    if sent["last_error"]:
        sys.stdout.write(f"remote: the last one failed: {sent['last_error']}\n")


def _age(described: Mapping[str, Any]) -> str:
    """How long ago the newest checkpoint was written, for a title: a training may run on, and save no more."""
    ages = [slot["age_s"] for slot in described["slots"] if slot["newest"]]
    return f", the newest was written {format_seconds(ages[0])} ago" if ages and ages[0] is not None else ""


def _show_slots(title: str, described: list[dict[str, Any]]) -> None:
    rows: list[tuple[Any, ...]] = [
        (
            slot["file"],
            slot["state"]
            + (", newest" if slot["newest"] else "")
            + (", on all ranks" if slot["global"] else "")
            + (", bad" if slot["good"] is False else ""),
            slot["step"],
            slot["incarnation"],
            slot["sequence"],
            _size(slot["stream_bytes"]),
            _size(slot["meta_bytes"]),
            "; ".join(filter(None, [slot["detail"], slot["verdict"]])),
        )
        for slot in described
    ]
    columns = ["file", "state", "step", "incarnation", "sequence", "size", "meta", "detail"]
    if not any(row[-1] for row in rows):
        rows, columns = [row[:-1] for row in rows], columns[:-1]
    emit_table(title, columns, rows)


def _contents(view: SlotView, step: int | None) -> dict[str, Any]:
    """The tensors and values of the newest complete checkpoint, or of the newest one of `step`."""
    from lastgood.checkpointers.slots.contents import look_at_slots, read_layout

    tries = 0
    while True:
        tries += 1
        whole = view.complete(look_at_slots(view)[0])
        info = next((info for info in whole if step is None or info.step == step), None)
        if info is None:
            asked = "complete checkpoint" if step is None else f"complete checkpoint of step {step}"
            raise NoCheckpoint(f"{view.directory}: no {asked}; steps {[info.step for info in whole] or 'none'}")
        try:
            return _describe_layout(info, read_layout(view, info))
        except CorruptCheckpoint:
            if tries == _TRIES or not view.why_gone(info):
                raise


def _describe_layout(info: SlotInfo, layout: Layout, root: str | None = None) -> dict[str, Any]:
    """`root`: the one name under which all lies, which is left out."""
    from lastgood.checkpointers.slots.contents import find_sharing, named_tensors, named_values

    if root is not None and layout.tree[0] == "d" and [key for key, _ in layout.tree[1]] == [["s", root]]:
        inside = layout.tree[1][0][1]
        layout = replace(layout, tree=inside) if inside[0] in "do" else layout
    tensors = named_tensors(layout)
    sharing = find_sharing(tensors)
    parts: dict[str, dict[str, int]] = {}
    for tensor, shared in zip(tensors, sharing, strict=True):
        part = parts.setdefault(tensor.part, {"tensors": 0, "bytes": 0})
        part["tensors"] += 1
        part["bytes"] += shared.own_bytes
    return {
        "file": info.path.name,
        "step": info.step,
        "sequence": info.sequence,
        "tensors": [
            {
                "name": tensor.name,
                "kind": "array" if tensor.is_array else "tensor",
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "stride": list(tensor.stride),
                "bytes": tensor.nbytes,
                "block": tensor.block,
                "offset": tensor.offset,
                "shares_with": shared.shares_with,
                **({} if tensor.shard is None else {"whole_shape": list(tensor.shard.shape)}),
                **({} if tensor.owner is None else {"written_by": tensor.owner}),
            }
            for tensor, shared in zip(tensors, sharing, strict=True)
        ],
        "values": [{"name": name, "value": text} for name, text in named_values(layout)],
        "parts": parts,
    }


def _show_contents(contents: dict[str, Any]) -> None:
    # Whole lines, however long: a name that is cut cannot be searched for.
    _print_lines(
        f"\nstep {contents['step']}, {contents['file']}: tensors",
        ("name", "dtype", "shape", "size", ""),
        [
            (
                tensor["name"],
                tensor["dtype"] + (" (numpy)" if tensor["kind"] == "array" else ""),
                "x".join(map(str, tensor["shape"])) or "scalar",
                format_bytes(tensor["bytes"]),
                _remark(tensor),
            )
            for tensor in contents["tensors"]
        ],
    )
    _print_lines("\nplain values", ("name", "value"), [(value["name"], value["value"]) for value in contents["values"]])
    parts = contents["parts"]
    total = [sum(part[key] for part in parts.values()) for key in ("tensors", "bytes")]
    rows = [(name, part["tensors"], format_bytes(part["bytes"])) for name, part in parts.items()]
    emit_table(
        "parts, shared memory counted once",
        ("part", "tensors", "size"),
        [*rows, ("all", total[0], format_bytes(total[1]))],
    )


def _remark(tensor: Mapping[str, Any]) -> str:
    remarks: list[str] = []
    if "whole_shape" in tensor:
        remarks.append(f"part of {'x'.join(map(str, tensor['whole_shape']))}")
    if "written_by" in tensor:
        remarks.append(f"written by rank {tensor['written_by']}")
    if tensor["shares_with"]:
        remarks.append(f"shares with {tensor['shares_with']}")
    return ", ".join(remarks)


def _print_lines(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print rows in columns of their own width to stdout."""
    cells = [[str(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(len(row[number]) for row in cells) for number in range(len(columns))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    sys.stdout.write("\n".join([title, *lines]) + "\n")


def _describe(
    status: SlotStatus, newest: SlotInfo | None, verdicts: Mapping[int, Verdict], commit: GlobalCommit | None
) -> dict[str, Any]:
    record = status.record
    whole = status.info
    verdict = None if record is None or status.info is None else verdicts.get(record.sequence)
    return {
        "file": status.path.name,
        "state": status.state.value,
        "newest": newest is not None and status.info == newest,
        "global": whole is not None
        and commit is not None
        and (whole.incarnation, whole.step) == (commit.incarnation, commit.step),
        "good": None if verdict is None else verdict.ok,
        "verdict": "" if verdict is None else verdict.reason,
        "step": status.step,
        "incarnation": status.incarnation,
        "sequence": None if record is None else record.sequence,
        "stream_bytes": None if record is None else record.stream_bytes,
        "meta_bytes": None if record is None else record.meta_bytes,
        "chunk_bytes": None if record is None else record.chunk_bytes,
        "job_id": None if record is None else record.job_id.hex(),
        "rank": None if record is None else record.rank,
        "world_size": None if record is None else record.world_size,
        "layout_digest": None if record is None else record.layout_digest.hex(),
        "file_bytes": status.file_bytes,
        "age_s": None if whole is None else _age_s(status),
        "detail": status.detail,
    }


def _age_s(status: SlotStatus) -> float | None:
    """Seconds since it was last written, by the times that its storage keeps."""
    written_s = status.written_s
    return None if written_s is None else max(0.0, round(time.time() - written_s, 3))


def _size(nbytes: int | None) -> str:
    return "" if nbytes is None else format_bytes(nbytes)
