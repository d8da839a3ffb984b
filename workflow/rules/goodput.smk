"""One measured goodput run: one process and the lives that it starts, one record. It measures itself: no benchmark."""


rule goodput:
    input:
        prepared_data_of,
    output:
        f"{RESULTS}/{{machine}}/{{scale}}/{{cell}}/r{{repetition}}.json",
    params:
        spec=lambda wildcards: spec_of(wildcards).canonical_json(),
        title=lambda wildcards: spec_of(wildcards).title(),
        data=DATA,
        scratch=SCRATCH,
    wildcard_constraints:
        machine="[^/]+",
        scale="[^/]+",
        cell="goodput/[^/]+/[^/]+/f[0-9]+/[^/]+",
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
        "exec lastgood goodput run --end-with $PPID --spec {params.spec:q} --out {output:q} --data-dir {params.data:q}"
        " --scratch {params.scratch:q} > {log:q} 2>&1"
