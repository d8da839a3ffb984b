"""What all figures say together: one HTML page, and published claims put to the test."""

REPORT_STEMS = [f"{FIGURES}/{figure}_{model}" for figure, model in PLAN.records if figure in ALWAYS]
CLAIMS = [f"{FIGURES}/claims.csv", f"{FIGURES}/claims.md"]


rule claims:
    input:
        csvs=[f"{stem}.csv" for stem in REPORT_STEMS],
        reference=sorted(map(str, Path(workflow.basedir, "figures", "reference").glob("*.csv"))),
    output:
        csv=CLAIMS[0],
        markdown=CLAIMS[1],
    log:
        "logs/claims.log",
    benchmark:
        "logs/benchmarks/claims.tsv"
    conda:
        ENVIRONMENT
    params:
        made_of=REPORT_STEMS,
        reference=lambda wildcards, input: str(Path(input.reference[0]).parent),
    message:
        "published claims against these figures"
    shell:
        "lastgood claims --out {output.csv:q} --markdown {output.markdown:q} --reference {params.reference:q} {input.csvs:q}"
        " > {log:q} 2>&1"


rule report:
    input:
        csvs=[f"{stem}.csv" for stem in REPORT_STEMS],
        pictures=[f"{stem}.svg" for stem in REPORT_STEMS],
        ceilings=CEILINGS,
        claims=CLAIMS[0],
    output:
        f"{FIGURES}/report.html",
    log:
        "logs/report.log",
    benchmark:
        "logs/benchmarks/report.tsv"
    conda:
        ENVIRONMENT
    params:
        made_of=REPORT_STEMS,
        figures=lambda wildcards, output: str(Path(output[0]).parent),
    message:
        "one page of all figures: {output}"
    shell:
        "lastgood report --figures-dir {params.figures:q} --out {output:q} --ceilings {input.ceilings:q} --claims {input.claims:q}"
        " {input.csvs:q} > {log:q} 2>&1"
