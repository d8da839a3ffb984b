"""From run records to the CSV files of one panel."""


rule collect:
    input:
        records=lambda wildcards: records_of(wildcards.figure, wildcards.model),
        ceilings=CEILINGS,
    output:
        tidy=f"{FIGURES}/{{figure}}_{{model}}.csv",
        wide=f"{FIGURES}/{{figure}}_{{model}}_wide.csv",
    wildcard_constraints:
        figure="|".join(FIGURE_NAMES),
        model="|".join(CONFIG.models),
    log:
        "logs/collect/{figure}_{model}.log",
    benchmark:
        "logs/benchmarks/collect_{figure}_{model}.tsv"
    conda:
        ENVIRONMENT
    message:
        "collect {wildcards.figure} {wildcards.model}"
    shell:
        "lastgood collect {wildcards.figure} {wildcards.model} --ceilings {input.ceilings:q}"
        " --out-tidy {output.tidy:q} --out-wide {output.wide:q} {input.records:q} > {log:q} 2>&1"
