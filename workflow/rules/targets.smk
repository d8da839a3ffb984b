"""Targets that a person asks for, but for `all` (in the Snakefile) and `native` (in native.smk)."""


for figure in FIGURE_NAMES:

    rule:
        name:
            figure
        input:
            figure_files(figure),


for figure, model in itertools.product(FIGURE_NAMES, CONFIG.models):

    rule:
        name:
            f"{figure}_{model}"
        input:
            panel_files(figure, model),


rule datasets:
    input:
        [f"{DATA}/{kind}.ready" for kind in used_data_kinds()],


# Without an output, so that every call gives the verdict, measured now or before.
rule test_simple:
    input:
        record=records_of(SIMPLE, CONFIG.simple.model),
    log:
        "logs/test_simple.log",
    conda:
        ENVIRONMENT
    message:
        "verdict on the smoke test"
    shell:
        "lastgood check {input.record:q} 2>&1 | tee {log:q}"
