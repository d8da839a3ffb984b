"""Lastgood's workflow: run records, CSV files and figures. docs/workflow.md describes targets, files and failures."""

import os
import sys

# `lastgood` beside the running Python is the one to call, whether its environment is activated or not.
os.environ.update(PATH=os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)]))


include: "workflow/rules/common.smk"
include: "workflow/rules/targets.smk"
include: "workflow/rules/native.smk"
include: "workflow/rules/datasets.smk"
include: "workflow/rules/ceilings.smk"
include: "workflow/rules/measure.smk"
include: "workflow/rules/collect.smk"
include: "workflow/rules/plot.smk"
include: "workflow/rules/report.smk"
include: "workflow/rules/provision.smk"


# With an executor that sends jobs to other machines: these measure nothing, and their time is not worth a queue.
localrules:
    dataset,
    collect,
    plot,
    claims,
    report,
    native,


# Snakemake takes the default target from this file only, never from an included one.
rule all:
    input:
        [figure_files(figure) for figure in ALWAYS],


onstart:
    take_folder_lock()
    quieten_scheduler()
    offer_forks()
    start_progress()


onsuccess:
    end_progress()
    end_fork_server()
    remove_outdated_partial_figures()


onerror:
    end_progress()
    end_fork_server()
    remove_outdated_partial_figures()
    draw_partial_figures()
