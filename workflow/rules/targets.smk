"""Targets that a person asks for, but for `all` (in the Snakefile) and `native` (in native.smk)."""

for figure in FIGURE_NAMES:

    rule:
        name:
            figure
        input:
            figure_files(figure),


for figure, model in PANELS:

    rule:
        name:
            f"{figure}_{model}"
        input:
            panel_files(figure, model),


rule paper:
    input:
        [panel_files(figure, model) for figure, model in PANELS if figure in ALWAYS],


rule datasets:
    input:
        [f"{DATA}/{kind}.ready" for kind in used_data_kinds()],


# Without an output: a smoke test is run when it is asked for. A record of last week would pass on a tree that is broken today.
rule test_simple:
    input:
        prepared_data_of_spec(SIMPLE_SPEC),
    log:
        "logs/test_simple.log",
    conda:
        ENVIRONMENT
    resources:
        machine=1,
    params:
        spec=SIMPLE_SPEC.canonical_json(),
        record=f"{RESULTS}/test_simple.json",
        data=lambda wildcards: DATA,
        scratch=SCRATCH,
    message:
        "smoke test: train, save, restore in a new process, compare to the bit (log: {log})"
    shell:
        "exec lastgood run --check --spec {params.spec:q} --out {params.record:q} --data-dir {params.data:q}"
        " --scratch {params.scratch:q} --end-with $PPID 2> {log:q}"
