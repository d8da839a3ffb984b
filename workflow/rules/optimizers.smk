"""A shadow's updates, timed: one process, one record. It measures itself: no benchmark."""


rule optimizers:
    output:
        f"{RESULTS}/{{machine}}/{{scale}}/{{cell}}/r{{repetition}}.json",
    params:
        spec=lambda wildcards: spec_of(wildcards).canonical_json(),
        title=lambda wildcards: spec_of(wildcards).title(),
    wildcard_constraints:
        machine="[^/]+",
        scale="[^/]+",
        cell="optimizer/[^/]+/[^/]+/t[0-9]+-m[0-9]+-c[0-9a-f]+",
        repetition="[0-9]+",
    resources:
        machine=1,
    priority: priority_of
    log:
        "logs/{machine}/{scale}/{cell}/r{repetition}.log",
    conda:
        ENVIRONMENT
    message:
        "measure {params.title} (log: {log})"
    shell:
        "exec lastgood optimizers run --end-with $PPID --spec {params.spec:q} --out {output:q} > {log:q} 2>&1"
