"""Configuration, plan and helper functions. The only rule file with functions; what they call lives in src/lastgood."""

import shlex
import subprocess
from collections import UserString
from pathlib import Path

from snakemake.exceptions import WorkflowError
from snakemake.logging import logger
from snakemake.settings.types import RerunTrigger

try:
    from lastgood.errors import LastgoodError
    from lastgood.experiments.config.yaml_file import parse_overrides
    from lastgood.experiments.figures.progress import Progress
    from lastgood.experiments.figures.registry import figure_kind, figure_names
    from lastgood.experiments.machine.facts import machine_label
    from lastgood.experiments.figures.workflow_plan import (
        SIMPLE,
        grids_of_records,
        has_record,
        left_out,
        plan_figure,
        plan_workflow,
    )
    from lastgood.experiments.plan.load import load_config, parse_config
    from lastgood.experiments.runs.fork_server import ADDRESS, start_fork_server
    from lastgood.locks import FileLock
    from lastgood.workloads.registry import workload_data_kind
except ModuleNotFoundError as error:
    # An exit and not an exception, here and below: a message for the user, without a traceback into these files.
    sys.exit(
        f"{error}, Python {sys.executable}: run `bash install.sh` and `. .venv/bin/activate` in the checkout first"
    )


# Whether jobs go to other machines, as with profiles/slurm: what a machine can do is then checked where a job runs. Jobs
# have a number and cores have none then (a dry run says one core).
SUBMITS = (
    workflow.is_main_process
    and workflow.resource_settings.nodes is not None
    and workflow.resource_settings.cores in (None, 1)
)
# A site's copy of profiles/slurm would lose its settings for these rules unseen.
replaced = {"run", "ranks", "goodput", "optimizers"} & set(workflow.resource_settings.overwrite_resources or {})
if workflow.is_main_process and replaced:
    sys.exit(f"set-resources of {', '.join(sorted(replaced))}: these rules are one now; write `measure` in their place")


def read_configuration():
    """The one file (config/laptop.yaml unless --configfile names another) and the overrides of --config, as typed."""
    settings = workflow.config_settings
    files = settings.configfiles or [Path(workflow.basedir, "config", "laptop.yaml")]
    if len(files) > 1:
        names = ", ".join(map(str, files))
        sys.exit(
            f"--configfile takes one file, not {len(files)}: {names}; a file names the one it changes as its `base`"
        )
    try:
        overrides = parse_overrides(settings.config_args or [])
        return parse_config(Path(files[0]), overrides)[0] if SUBMITS else load_config(Path(files[0]), overrides)
    except LastgoodError as error:
        sys.exit(f"This configuration cannot work:\n{error}")


CONFIG = read_configuration()
PLAN = plan_workflow(CONFIG)
LEFT_OUT = left_out(CONFIG)
if workflow.is_main_process:  # each job reads these files again
    for skipped, reason in LEFT_OUT.items():
        logger.warning(f"{skipped} is left out: {reason}")
SIMPLE_SPEC = plan_figure(CONFIG, SIMPLE)[0]
FIGURE_NAMES = figure_names()
PANELS = [(figure, model) for figure in FIGURE_NAMES for model in figure_kind(figure).panels(CONFIG)]
# What nobody gets unasked, as a testbed of nodes, is in no target but its own.
ALWAYS = [name for name in FIGURE_NAMES if figure_kind(name).always(CONFIG)]
PANEL_MODELS = sorted({model for _, model in PANELS})
MACHINE = CONFIG.machine or machine_label()
RESULTS = CONFIG.results_dir
FIGURES = CONFIG.figures_dir
SCRATCH = str(CONFIG.scratch_folder)
DATA = CONFIG.data_dir
CEILINGS = f"{RESULTS}/{MACHINE}/ceilings.json"
ENVIRONMENT = f"{workflow.basedir}/workflow/envs/lastgood.yaml"
ELSEWHERE = (
    f". This node plans for {MACHINE} and {CONFIG.thread_count} threads; where it is not like the machine that submitted "
    "its job, name both: --config machine=LABEL threads=N (docs/slurm.md)"
)
PANEL_ENDINGS = (".csv", "_wide.csv", ".pdf", ".png", ".svg")


def record_of(wildcards):
    """The record file that the wildcards of rule `measure` stand for."""
    return f"{RESULTS}/{wildcards.machine}/{wildcards.scale}/{wildcards.cell}/r{wildcards.repetition}.json"


def spec_of(wildcards):
    """The run that makes a record. Refuses records that are not in the plan: nothing else knows their settings."""
    record = record_of(wildcards)
    if record not in PLAN.specs:
        elsewhere = "" if workflow.is_main_process else ELSEWHERE
        raise WorkflowError(f"{record} is not in the plan of this configuration; see `lastgood plan fig8`{elsewhere}")
    return PLAN.specs[record]


def matters(to_this_run, text):
    """A parameter. Snakemake makes again what had another text, and does not look into a UserString."""
    return text if to_this_run else UserString(text)


def hosts_of(wildcards):
    """Options of `lastgood run` for a run over several nodes: where they are. No part of the run's settings."""
    section = PLAN.hosts.get(record_of(wildcards))
    if section is None:
        return matters(False, "")
    given = (("--hostfile", section.hostfile), ("--ssh-config", section.ssh_config), ("--rate", section.rate))
    return " ".join(f"{option} {shlex.quote(value)}" for option, value in given if value is not None)


def priority_of(wildcards):
    """The plan's order, as Snakemake's priority."""
    return PLAN.priorities[record_of(wildcards)]


def prepared_data_of(wildcards):
    """The prepared data that the run of a record reads. A record without data, moved or copied here, needs none."""
    found = prepared_data_of_spec(spec_of(wildcards))
    there = all(Path(file).exists() for file in found)
    # With this trigger, which our profiles leave out, Snakemake would make the run again since it had an input once.
    if there or RerunTrigger.INPUT in workflow.rerun_triggers:
        return found
    return [] if has_record(Path(record_of(wildcards)), spec_of(wildcards)) else found


def prepared_data_of_spec(spec):
    """The prepared data that a run reads; none if the user gave a path, or if nothing is trained."""
    kind = None if spec.data or spec.workload is None else workload_data_kind(spec.workload)
    return [] if kind is None else [ancient(f"{DATA}/{kind}.ready")]


def records_of(figure, model):
    """Record files of one panel."""
    return PLAN.records[figure, model]


def panel_files(figure, model):
    """All that a panel's target makes."""
    return [f"{FIGURES}/{figure}_{model}{ending}" for ending in PANEL_ENDINGS]


def figure_files(figure):
    """All that a figure's target makes. What is left out is refused only where it is asked for."""
    if figure in LEFT_OUT:
        return lambda wildcards: refuse(figure)
    return [file for name, model in PANELS if name == figure for file in panel_files(figure, model)]


def refuse(figure):
    """Say why there is no such figure here."""
    raise WorkflowError(f"{figure} cannot be made here: {LEFT_OUT[figure]}")


def reference_of(figure):
    """The file of published numbers to show beside ours, if the checkout has one for this figure."""
    path = Path(workflow.basedir, "figures", "reference", f"{figure}.csv")
    return [str(path)] if path.is_file() else []


def used_data_kinds():
    """Kinds of prepared data that the configuration reads."""
    kinds = {workload_data_kind(model) for model in CONFIG.used_models if not CONFIG.data.of_workload(model)}
    return sorted(kind for kind in kinds if kind is not None)


def configured_hostfile():
    """The hostfile of the configuration. Refuses a configuration without one."""
    if CONFIG.hostfile is None:
        raise WorkflowError("provision needs hosts: snakemake provision --config hostfile=FILE (a DeepSpeed hostfile)")
    return CONFIG.hostfile


def native_sources():
    """Files that the native extension is built from."""
    return sorted(str(path) for path in Path(workflow.basedir, "native").rglob("*") if path.is_file())


def take_folder_lock():
    """One workflow in a folder at a time. A kernel lock: it ends with this process, so there is nothing to unlock."""
    lock = FileLock(Path(".snakemake", "lastgood.lock"), "this folder's workflow")
    try:
        lock.acquire()
    except LastgoodError as error:
        sys.exit(f"{error}. Wait for it, or work in another folder (snakemake -d FOLDER).")
    if SUBMITS and None in (CONFIG.machine, CONFIG.threads):
        logger.warning(f"nodes must be like this machine ({MACHINE}, {CONFIG.thread_count} threads): docs/slurm.md")
    # Kept for as long as this process lives.
    workflow.globals.update(FOLDER_LOCK=lock)


def quieten_scheduler():
    """Without Snakemake's limit of jobs per second, which no measurement reaches.

    It begins a timer at each job's end that begins another one for ever: after fifty runs they took a fifth of a core.
    """
    if not SUBMITS:
        workflow.scheduler.job_rate_limiter = None


def offer_forks():
    """Runs begin as forks of one process that has torch imported. Where jobs go to other machines, each imports it."""
    server = None if SUBMITS else start_fork_server(logger.warning)
    if server is not None:
        os.environ[ADDRESS] = server.address
        workflow.globals.update(FORK_SERVER=server)


def end_fork_server():
    """It ends with this process anyway; so that it is gone before the last line."""
    server = workflow.globals.get("FORK_SERVER")
    if server is not None:
        server.close()


def start_progress():
    """Say how far the measurements are, and draw what there is of the panels that were asked for."""
    jobs = [job for job in workflow.dag.needrun_jobs() if job.rule.name == "measure"]
    specs = {str(job.output[0]): PLAN.specs[str(job.output[0])] for job in jobs}
    panels = {panel: PLAN.records[panel] for panel in asked_panels()}
    grids = grids_of_records(Path(workflow.basedir), CONFIG, PLAN, panels)
    progress = Progress(specs, Path(RESULTS), grids, panels, draw_partial_figure)
    workflow.globals.update(PROGRESS=progress)
    if not SUBMITS:
        progress.start()


def end_progress():
    """Before the last lines of a call."""
    progress = workflow.globals.get("PROGRESS")
    if progress is not None:
        progress.stop()


def asked_panels():
    """Figure and model of the panels that this call makes."""
    wildcards = [job.wildcards for job in workflow.dag.jobs if job.rule.name == "collect"]
    return sorted({(one.figure, one.model) for one in wildcards})


def draw_partial_figures():
    """Draw what there is of every panel that was asked for and misses runs, under figures/partial/, and name those."""
    # Records of a panel that nobody asked for may be there since another figure shares them.
    for figure, model in asked_panels():
        records, missing = records_of(figure, model), missing_records(figure, model)
        if not missing or len(missing) == len(records):
            continue
        names = ", ".join(PLAN.specs[record].title() for record in missing)
        logger.error(f"{figure} {model}: {len(records) - len(missing)} of {len(records)} runs; missing: {names}")
        try:
            draw_partial_figure(figure, model)
        except LastgoodError as error:
            logger.error(f"no partial figure: {error}")
        else:
            logger.error(
                f"partial figure: {partial_stem(figure, model)}.pdf; the next call makes the missing runs only"
            )


def draw_partial_figure(figure, model):
    """Draw what there is of a panel under figures/partial/. Raises LastgoodError, with what the failing command says."""
    stem = partial_stem(figure, model)
    collect = ["lastgood", "collect", figure, model, "--partial", "--ceilings", CEILINGS]
    for reference in reference_of(figure):
        collect += ["--reference", reference]
    collect += ["--out-tidy", f"{stem}.csv", "--out-wide", f"{stem}_wide.csv", *records_of(figure, model)]
    plot = ["lastgood", "plot", figure, f"{stem}.csv", "--out-stem", stem, "--partial"]
    for command in (collect, plot):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise LastgoodError(f"{shlex.join(command[:4])} failed: {done.stderr.strip()}")


def remove_outdated_partial_figures():
    """Remove partial figures of panels that are complete now."""
    for figure, model in PLAN.records:
        if not missing_records(figure, model):
            for ending in PANEL_ENDINGS:
                Path(f"{partial_stem(figure, model)}{ending}").unlink(missing_ok=True)


def missing_records(figure, model):
    """Record files of a panel that are not there."""
    return [record for record in records_of(figure, model) if not Path(record).exists()]


def partial_stem(figure, model):
    """Where a partial panel is drawn, without the files' endings."""
    return f"{FIGURES}/partial/{figure}_{model}"
