"""From one CSV file to one panel, drawn three times over: PDF, PNG, SVG."""


rule plot:
    input:
        f"{FIGURES}/{{figure}}_{{model}}.csv",
    output:
        pdf=f"{FIGURES}/{{figure}}_{{model}}.pdf",
        png=f"{FIGURES}/{{figure}}_{{model}}.png",
        svg=f"{FIGURES}/{{figure}}_{{model}}.svg",
    log:
        "logs/plot/{figure}_{model}.log",
    benchmark:
        "logs/benchmarks/plot_{figure}_{model}.tsv"
    wildcard_constraints:
        figure="|".join(FIGURE_NAMES),
        model="|".join(PANEL_MODELS),
    conda:
        ENVIRONMENT
    params:
        stem=lambda wildcards, output: str(Path(output.pdf).with_suffix("")),
    message:
        "plot {wildcards.figure} {wildcards.model}"
    shell:
        "lastgood plot {wildcards.figure} {input:q} --out-stem {params.stem:q} > {log:q} 2>&1"
