"""From run records to the CSV files of one panel."""


rule collect:
    input:
        records=lambda wildcards: records_of(wildcards.figure, wildcards.model),
        ceilings=CEILINGS,
        reference=lambda wildcards: reference_of(wildcards.figure),
    output:
        tidy=f"{FIGURES}/{{figure}}_{{model}}.csv",
        wide=f"{FIGURES}/{{figure}}_{{model}}_wide.csv",
    log:
        "logs/collect/{figure}_{model}.log",
    benchmark:
        "logs/benchmarks/collect_{figure}_{model}.tsv"
    wildcard_constraints:
        figure="|".join(FIGURE_NAMES),
        model="|".join(PANEL_MODELS),
    conda:
        ENVIRONMENT
    params:
        made_of=lambda wildcards: records_of(wildcards.figure, wildcards.model),
        reference=lambda wildcards, input: f"--reference {shlex.quote(str(input.reference))}" if input.reference else "",
    message:
        "collect {wildcards.figure} {wildcards.model}"
    shell:
        "lastgood collect {wildcards.figure} {wildcards.model} --ceilings {input.ceilings:q} {params.reference}"
        " --out-tidy {output.tidy:q} --out-wide {output.wide:q} {input.records:q} > {log:q} 2>&1"
