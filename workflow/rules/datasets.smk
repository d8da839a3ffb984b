"""The small real data that Lastgood prepares from installed packages."""


rule dataset:
    output:
        touch(f"{DATA}/{{kind}}.ready"),
    log:
        "logs/data/{kind}.log",
    benchmark:
        "logs/benchmarks/data_{kind}.tsv"
    wildcard_constraints:
        kind="[a-z]+",
    # Before every run: a model whose data came late would be measured after all others, not in the planned order.
    priority: len(PLAN.specs) + 2
    conda:
        ENVIRONMENT
    params:
        folder=lambda wildcards, output: str(Path(output[0]).parent),
    message:
        "prepare data: {wildcards.kind}"
    shell:
        "lastgood data prepare {wildcards.kind} --data-dir {params.folder:q} > {log:q} 2>&1"
