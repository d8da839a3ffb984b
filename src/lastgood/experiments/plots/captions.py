"""The sentences under a figure. With them a picture that was cut out of its page still says what it shows."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pandas as pd

from lastgood.checkpointers.registry import BASELINE, system_traits
from lastgood.experiments.systems.labels import system_label, system_rank
from lastgood.experiments.systems.papers import PCCHECK
from lastgood.experiments.tables.marked import above_bound, disturbed_cells, disturbed_pairs, noisy_cells
from lastgood.sinks import Sink
from lastgood.units import MIB, format_bytes, format_rate, format_seconds

__all__ = [
    "checkmate_caption",
    "dcp_caption",
    "flowcheck_caption",
    "goodput_caption",
    "joined",
    "joined_sentences",
    "optimizer_caption",
    "persist_caption",
    "remote_caption",
    "revision_words",
    "sweep_caption",
    "throughput_caption",
]

_NUMBER_AND_UNIT = re.compile(r"(\d) ((?:[KMGT]?i?B(?:/s)?|s|ms|us|min|cores|threads?)\b)")


def throughput_caption(frame: pd.DataFrame) -> str:
    """Machine, scale, repetitions, threads, state, iteration time, how to read the bars, the bound and the revision."""
    points = "bar (and number under it) median, whisker range, circles single runs"
    sentences = [
        _machine(frame),
        _nodes(frame),
        _set_up(frame, points),
        _reading(frame),
        _pairs(frame),
        _bound(frame),
        _published(frame),
    ]
    return joined_sentences([*sentences, revision_words(frame)])


def checkmate_caption(frame: pd.DataFrame) -> str:
    """Machine, nodes, repetitions, how each panel is to be read, what the paper says, bound and revision."""
    shadows, kills = int(frame["shadows"].max()), int(frame["kills"].max())
    sharing = " They and the trainers share these cores." if str(frame["scale"].iloc[0]) == "laptop" else ""
    sentences = [
        _machine(frame),
        _nodes(frame),
        f"Checkmate with {shadows} shadow{'' if shadows == 1 else 's'}.{sharing}" if shadows else "",
        _set_up(frame, "bar (and number under it) median, circles single runs"),
        "(a) Pale: lost to the drain.",
        "(b) The shortest measured interval at which a system trains as fast as Checkmate with a checkpoint every "
        "iteration; > and pale: none of those measured does.",
        f"(c) The last step done less the step restored in fresh processes, at the interval f of (b), or the longest "
        f"measured; {kills} SIGKILL to all ranks a run, at seeded moments."
        if kills
        else "",
        f"(d), (e) Over measured steps and drain at the shortest interval{_received(frame)}; Gemini's peers are not "
        "counted.",
        _checkmate_published(frame),
        _bound(frame),
        revision_words(frame),
    ]
    return joined_sentences(sentences)


def _received(frame: pd.DataFrame) -> str:
    """What shadows got in one iteration, the other side of what trainers handed on."""
    each = (frame["shadow_received_bytes"] / frame["measured_steps"]).dropna()
    return f"; shadows received {format_bytes(float(each.median()))} an iteration" if len(each) else ""


def _checkmate_published(frame: pd.DataFrame) -> str:
    sources = sorted(set(frame["paper_source"].dropna()))
    if not sources:
        return ""
    return (
        "Dashed: the paper's ranges: (a) how far others would be below Checkmate, (b) its frequency over theirs, "
        f"(c) how far it would be below their mean ({'; '.join(sources)})."
    )


def optimizer_caption(frame: pd.DataFrame) -> str:
    """Machine, scale, what was timed, how to read it, revision."""
    first = frame.iloc[0]
    warning = " (compare shapes and ratios, not absolute numbers, with a paper's)" if first["scale"] == "laptop" else ""
    runs = frame["record"].nunique()
    together = "" if frame["shadows"].max() == 1 else " Several shadows work at the same time, on this machine."
    sentences = [
        f"Machine {joined(frame['machine'])} ({first['cpu']}, {int(first['cores'])} cores), scale {first['scale']}"
        f"{warning}.",
        f"{int(first['parameters']) / 1e6:.4g} million parameters in buckets, shared out over the shadows; of each "
        f"update the shadow that takes longest counts.{together}",
        f"{runs} run{'' if runs == 1 else 's'} of {_joined_range(frame['updates'])} updates for each point: marker "
        "median, whisker fastest to slowest.",
        revision_words(frame),
    ]
    return joined_sentences(sentences)


def dcp_caption(frame: pd.DataFrame) -> str:
    """Machine, scale, what was saved, how to read it, what cannot be compared, revision."""
    first = frame.iloc[0]
    runs = frame["record"].nunique()
    bounds = frame.dropna(subset=["bound_mib_per_s"])
    values = [
        f"{_joined_range(rows['bound_mib_per_s'].round().astype(int))} MiB/s by {name}"
        for name, rows in bounds.groupby("bound_of", sort=False)
    ]
    reasons = sorted({reason for text in frame["invalid"].dropna() for reason in str(text).split("; ") if reason})
    sentences = [
        f"Machine {joined(frame['machine'])} ({first['cpu']}, {int(first['cores'])} cores), scale {first['scale']}.",
        f"State of {format_bytes(float(first['state_bytes']))} ({first['model']}, {joined(frame['state'])}), every "
        "load compared with what was saved and read without the page cache.",
        f"{runs} run{'' if runs == 1 else 's'} of {_joined_range(frame['iterations'])} saves and loads: bar median, "
        "whisker slowest to fastest; all bytes over the slowest rank's time.",
        f"Bound: {'; '.join(values)}." if values else "No bound was measured.",
        f"Not to be compared: {'; '.join(reasons)}." if reasons else "",
        _on_s3(frame[frame["medium"] == "s3"]),
        f"torch {joined(frame['torch'])}.",
        revision_words(frame),
    ]
    return joined_sentences(sentences)


def flowcheck_caption(frame: pd.DataFrame) -> str:
    """Machine, scale, what the part was asked for, published numbers with their sources, revision."""
    first = frame.iloc[0]
    warning = " (compare shapes and ratios, not absolute numbers, with a paper's)" if first["scale"] == "laptop" else ""
    published = frame[frame["source"] == "published"]
    notes = sorted(set(frame["note"].dropna()))
    sentences = [
        f"Machine {joined(frame['machine'])} ({first['cpu']}, {int(first['cores'])} cores), scale {first['scale']}"
        f"{warning}.",
        str(first["words"]),
        *(f"{note}." for note in notes),
        *(
            f"Published: {row['series']}, {row['setting']} ({row['paper_source']})."
            for _, row in published.drop_duplicates(["series", "setting"]).iterrows()
        ),
        revision_words(frame),
    ]
    return joined_sentences(sentences)


def _on_s3(frame: pd.DataFrame) -> str:
    """Whose server it is, and what CPU time both sides of it take."""
    if frame.empty:
        return ""
    parts = []
    for operation, rows in frame.groupby("operation", sort=False):
        own, server = (rows[name].dropna() for name in ("cpu_s_per_gib", "server_cpu_s_per_gib"))
        if len(own) and len(server):
            parts.append(
                f"a {operation} takes {_tenths(own)} CPU seconds of its ranks a GiB, and {_tenths(server)} of the "
                "server"
            )
    told = f": {'; '.join(parts)}" if parts else ""
    return f"S3: an S3 server (SeaweedFS) of each run's own on the same machine{told}."


def remote_caption(frame: pd.DataFrame) -> str:
    """Machine, scale, what was trained, how to read it, whose server it is, revision."""
    first = frame.iloc[0]
    state = f"{int(first['layers'])} layers of {int(first['width'])} x {int(first['width'])}"
    size = f"{state} in float32 with AdamW ({format_bytes(float(frame['state_bytes'].max()))})"
    if first["part"] == "training":
        interval, every = int(first["interval_steps"]), int(first["remote_every"])
        reading = (
            f"PCcheck saves every {interval} steps, and to S3 every {interval * every}, as DCP does. Number: "
            "ratio to training without checkpoints in the same run. Lag: from the newest checkpoint in S3 to each "
            "step, median."
        )
    elif first["part"] == "return":
        reading = (
            f"{int(frame['ranks'].max())} ranks that hold the same state, or the number under a bar, come back in "
            "fresh processes, nothing of it in the page cache: from attach to the end of the first step, without the "
            "start of processes and model."
        )
    else:
        reading = "From the third checkpoint on: the first two tell what changes."
    failed = int(frame["failed"].fillna(0).sum())
    sentences = [
        f"Machine {joined(frame['machine'])} ({first['cpu']}, {int(first['cores'])} cores), scale {first['scale']}.",
        f"State: {size}.",
        reading,
        f"{frame.groupby('way').size().max()} measurements of each: bar median, circles single ones.",
        f"{failed} checkpoints failed." if failed else "",
        f"S3: {first['server']}, on the same machine.",
        f"torch {joined(frame['torch'])}.",
        revision_words(frame),
    ]
    return joined_sentences(sentences)


def sweep_caption(frame: pd.DataFrame) -> str:
    """As `throughput_caption`, for slowdowns under one system."""
    points = "marker median, whisker range, circles single runs"
    reading = (
        "Slowdown: throughput without checkpoints over durable throughput, which counts the time until the last "
        f"checkpoint is {_durable(frame['system'])}. 1 is no slowdown."
    )
    sentences = [
        _machine(frame),
        _set_up(frame, points),
        _fixed_options(frame),
        reading,
        _pairs(frame, passes="better than"),
        _bound(frame),
        revision_words(frame),
    ]
    return joined_sentences(sentences)


def persist_caption(frame: pd.DataFrame) -> str:
    """Machine, scale, repetitions, how a checkpoint was timed, the bound and the revision."""
    checkpoints = _joined_range(frame["checkpoints_started"])
    threads = joined(frame["threads"])
    rate = format_rate(float(frame["persist_ceiling_bytes_per_s"].median()))
    day = str(frame["ceilings_measured_at"].iloc[0])[:10]
    sentences = [
        _machine(frame),
        f"{_repetitions(frame, 'marker median of the runs, circles their medians')}; {checkpoints} checkpoints a run "
        f"(whisker: fastest to slowest), {threads} thread{'' if threads == '1' else 's'}.",
        _fixed_options(frame),
        f"One checkpoint at a time, from save() until it is {_durable(frame['system'])}.",
        f"Bound: size over the disk's write ceiling of {day}, {rate}{_not_bounded(frame)}.{_beyond(frame)}",
        revision_words(frame),
    ]
    return joined_sentences(sentences)


def _beyond(frame: pd.DataFrame) -> str:
    """A sentence on checkpoints that were faster than the bound says a disk can be."""
    on_disk = frame[~frame["system"].map(_in_memory)]
    faster = (on_disk["persist_bound_s"] / on_disk["persist_p50_s"]).max()
    if not faster > 1.05:
        return ""
    return f" Up to {faster:.2f} times as fast: the disk's speed changes with time, and its ceiling is of one moment."


def goodput_caption(frame: pd.DataFrame) -> str:
    """Machine, scale, the window and its trace, what counts, how far formula and measurement are apart, revision."""
    first = frame.iloc[0]
    measured = frame[frame["source"] == "measured"]
    threads = joined(frame["threads"])
    iteration_s = frame["iteration_s"].dropna()
    counts = measured.groupby(["system", "interval_steps"]).size()
    runs = "" if counts.empty else f"{_joined_range(counts)} measured run{'' if counts.max() == 1 else 's'} a bar"
    parts = [
        f"{runs}; {threads} thread{'' if threads == '1' else 's'}; state {_bytes_range(frame['state_bytes'])}",
        f"{format_seconds(float(iteration_s.median()))} per iteration without checkpoints" if len(iteration_s) else "",
    ]
    kills = int(first["failures"])
    window = (
        f"Bars: useful iterations of a training that is killed {kills} time{'' if kills == 1 else 's'} in "
        f"{first['window_s']:.3g} s of restoring and training (process start-up stands outside), as in "
        f"{format_seconds(float(first['window_s'] * first['compression']))} of the trace {first['trace_name']}."
    )
    formula = (
        "Lines: the formula of PCcheck's artefact for the same failures and time, its terms from runs without failures."
    )
    set_up = f"{'; '.join(part for part in parts if part)}."
    sources = sorted(set(frame["paper_source"].dropna()))
    published = (
        f"Diamond: PCcheck's published gain over another system's line here ({'; '.join(sources)})." if sources else ""
    )
    verdicts = [_deviations(measured), _goodput_faults(measured), _goodput_bound(frame), published]
    return joined_sentences([_machine(frame), set_up, window, formula, *verdicts, revision_words(frame)])


def _deviations(measured: pd.DataFrame) -> str:
    found = measured.dropna(subset=["deviation"])
    if found.empty:
        return ""
    cells = found.groupby(["system", "interval_steps"])["deviation"].median()
    worst = max(cells, key=abs)
    places = [str(system_label(str(system))) + f" {interval}" for system, interval in cells.index]
    named = ", ".join(f"{place}: {value:+.0%}" for place, value in zip(places, cells, strict=True))
    own = found["own_deviation"].dropna()
    with_own = "" if own.empty else f", {abs(max(own, key=abs)):.0%} with a measured run's own terms (t_c, L)"
    return f"Formula over measurement (median, by interval): {named}; at most {abs(worst):.0%} apart{with_own}."


def _goodput_faults(measured: pd.DataFrame) -> str:
    checked, restores = int(measured["restores_checked"].sum()), int(measured["restores"].sum())
    if not restores:
        return ""
    wrong = int(measured["faults"].notna().sum())
    verdict = f"{wrong} RUN{'' if wrong == 1 else 'S'} WITH WRONG RESTORES" if wrong else "none was wrong"
    return f"{restores} restores; the next loss was known for {checked}; {verdict}."


def _goodput_bound(frame: pd.DataFrame) -> str:
    if frame["bound_iterations_per_s"].isna().all():
        return ""
    day = str(frame["ceilings_measured_at"].iloc[0])[:10]
    return f"Bound: Ideal at the throughput that the ceilings of {day} allow."


def joined_sentences(sentences: list[str]) -> str:
    """One text, without those that are empty."""
    text = " ".join(sentence for sentence in sentences if sentence)
    # A number and its unit stay on one line.
    return _NUMBER_AND_UNIT.sub("\\1\N{NO-BREAK SPACE}\\2", text)


def _machine(frame: pd.DataFrame) -> str:
    first = frame.iloc[0]
    processor = str(first["gpu"]) if first["device"] == "cuda" else f"{first['cpu']}, {int(first['cores'])} cores"
    scale = str(first["scale"])
    warning = " (compare shapes and ratios, not absolute numbers, with a paper's)" if scale == "laptop" else ""
    disk = f"{first['scratch_filesystem']} on {first['scratch_device']}"
    return f"Machine {joined(frame['machine'])} ({processor}; {disk}), scale {scale}{warning}."


def _nodes(frame: pd.DataFrame) -> str:
    """Of a run over several ranks: nodes, ranks, how they share the work, the link's rate."""
    first = frame.iloc[0]
    ranks, nodes = int(first["ranks"]), int(first["nodes"])
    if ranks == 1:
        return ""
    rate = first["link_bits_per_s"]
    link = "link rate not known" if pd.isna(rate) else f"links of {float(rate) / 1e9:g}\N{NO-BREAK SPACE}Gbit/s"
    where = f"{nodes} node{'' if nodes == 1 else 's'}"
    of_each = "batch and threads are of each rank"
    if first["parallel"] == "pipeline":
        of_each = f"batch is of each of {ranks} micro-batches, threads are of each rank"
    state = "" if first["parallel"] == "ddp" else " The state is that of the rank with most of it."
    return f"{ranks} ranks ({first['parallel']}) on {where}, {link}; {of_each}.{state}"


def _set_up(frame: pd.DataFrame, points: str) -> str:
    threads = joined(frame["threads"])
    parts = [
        _repetitions(frame, points),
        f"{threads} thread{'' if threads == '1' else 's'}",
        f"{_joined_range(frame['measured_steps'])} iterations after {_joined_range(frame['warmup_steps'])} of warm-up",
        f"state {_bytes_range(frame['state_bytes'])}",
    ]
    iteration_s = frame["iteration_s"].dropna()
    if len(iteration_s):
        parts.append(f"{format_seconds(float(iteration_s.median()))} per iteration without checkpoints")
    return f"{'; '.join(parts)}."


def _repetitions(frame: pd.DataFrame, points: str) -> str:
    if frame["ratio_low"].notna().any():
        rounds = _joined_range(frame["rounds"].dropna())
        point = points.split()[0]
        what = "ratios, times training without checkpoints" if point == "bar" else "slowdowns"
        return (
            f"{rounds} pairs of blocks, with checkpoints and without in turn: {point} the median of their {what}; "
            "whisker its 95 % bootstrap interval"
        )
    counts = frame.groupby(["system", "interval_steps", "axis_value"], dropna=False).size()
    text = _joined_range(counts)
    if text == "1":
        return "One run each, no repetition"
    return f"{text} repetitions: {points}"


def _fixed_options(frame: pd.DataFrame) -> str:
    """PCcheck's options that the panel holds fixed: those it varies are on an axis."""
    swept = frame[frame["system"] == PCCHECK]
    words = []
    for column, name in (("max_in_flight", "N"), ("writer_threads", "p")):
        values = set(swept[column].dropna())
        if len(values) == 1 and str(frame["axis"].iloc[0]) != column:
            words.append(f"{name}\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}{int(values.pop())}")
    if not words:
        return ""
    return f"PCcheck with {', '.join(words)} (N checkpoints in flight, p writer threads for each)."


def _published(frame: pd.DataFrame) -> str:
    sources = sorted(set(frame["paper_source"].dropna()))
    if not sources:
        return ""
    return f"Diamonds: published slowdowns, taken from this machine's line without checkpoints ({'; '.join(sources)})."


def _reading(frame: pd.DataFrame) -> str:
    if set(frame["system"]) == {BASELINE}:
        return ""
    return (
        "Solid bar: durable throughput, which counts the time until the last checkpoint is "
        f"{_durable(frame['system'])}."
    )


def _pairs(frame: pd.DataFrame, passes: str = "above") -> str:
    """Of pairs of blocks: what was disturbed, which cells stayed noisy. Of all: what is above its bound, and why."""
    left_out, noisy, above = disturbed_pairs(frame), noisy_cells(frame), above_bound(frame)
    unknown = disturbed_cells(frame)
    sentences = [
        f"{left_out}." if left_out else "",
        f"Could not be measured, others disturbed all pairs: {unknown}." if unknown else "",
        f"Dashed whisker: the time was used up before the interval was narrow ({noisy})." if noisy else "",
        f"Triangle: {passes} its bound ({above})." if above else "",
    ]
    return " ".join(sentence for sentence in sentences if sentence)


def _durable(systems: Iterable[str]) -> str:
    """When a checkpoint of these systems counts, after "it is": on the disk, unless a system keeps it elsewhere."""
    shown = sorted(set(systems) - {BASELINE}, key=system_rank)
    elsewhere = [
        f"{system_traits(system).safe_words or 'durable by its own word'} under {system_label(system)}"
        for system in shown
        if system_traits(system).safe_in is not Sink.DISK
    ]
    if shown and len(elsewhere) == len(shown):
        return " or ".join(elsewhere)
    return ", or ".join(["flushed to the disk (fsync, msync, or direct I/O and flush)", *elsewhere])


def _not_bounded(frame: pd.DataFrame) -> str:
    """A remark on systems that write to no disk, if the bound is a disk's."""
    names = [system_label(system) for system in sorted(filter(_in_memory, set(frame["system"])), key=system_rank)]
    return f", which does not bind {' and '.join(names)}" if names else ""


def _in_memory(system: str) -> bool:
    return system_traits(system).safe_in is Sink.MEMORY


def _may_pass(frame: pd.DataFrame) -> str:
    """Of systems that write to no disk and whose bound is a disk's: that of a run with shadows is not."""
    passing = [name for name in set(frame["system"]) if _in_memory(name) and not system_traits(name).takes_gradients]
    if not passing:
        return ""
    names = [system_label(system) for system in sorted(passing, key=system_rank)]
    return f"; {' and '.join(names)}, which {'writes' if len(names) == 1 else 'write'} to no disk, may pass it"


def _bound(frame: pd.DataFrame) -> str:
    if frame["bound_iterations_per_s"].isna().all():
        return "No bound: no run without checkpoints."
    disk = format_rate(float(frame["persist_ceiling_bytes_per_s"].median()))
    shared = frame["stored_bytes"].max() if int(frame["ranks"].iloc[0]) > 1 else None
    more = (
        ""
        if shared is None or pd.isna(shared)
        else f"; one checkpoint puts up to {format_bytes(float(shared))} on a disk or link"
    )
    copy = format_rate(float(frame["copy_ceiling_bytes_per_s"].median()))
    day = str(frame["ceilings_measured_at"].iloc[0])[:10]
    alone = _may_pass(frame) if shared is None else ""  # over several ranks, what is sent counts on its link
    seen = ", or the fastest that a run saw," if frame["ratio_low"].notna().any() else ""
    return f"Bound: what the ceilings measured on {day}{seen} allow (disk write {disk}, copy {copy}{more}{alone})."


def revision_words(frame: pd.DataFrame) -> str:
    """Which revisions measured it."""
    revisions = set()
    for revision, dirty in zip(frame["git_revision"], frame["git_dirty"], strict=True):
        name = "unknown" if pd.isna(revision) else str(revision)[:10]
        revisions.add(f"{name} + uncommitted changes" if str(dirty) == "True" else name)
    return f"Revision{'' if len(revisions) == 1 else 's (MIXED)'} {', '.join(sorted(revisions))}."


def joined(column: pd.Series) -> str:
    """Different values, in order."""
    return ", ".join(str(value) for value in sorted(set(column)))


def _tenths(column: pd.Series) -> str:
    low, high = f"{column.min():.1f}", f"{column.max():.1f}"
    return low if low == high else f"{low} to {high}"


def _joined_range(column: pd.Series) -> str:
    low, high = int(column.min()), int(column.max())
    return str(low) if low == high else f"{low} to {high}"


def _bytes_range(column: pd.Series) -> str:
    """One size if all are the same to a MiB: systems may differ by the few bytes of a schedule's state."""
    low, high = float(column.min()), float(column.max())
    return format_bytes(high) if high - low < MIB else f"{format_bytes(low)} to {format_bytes(high)}"
