"""One measurement of any kind: one command, one record. It measures itself: no benchmark, which would stop it to look."""


rule measure:
    input:
        prepared_data_of,
    output:
        f"{RESULTS}/{{machine}}/{{scale}}/{{cell}}/r{{repetition}}.json",
    log:
        "logs/{machine}/{scale}/{cell}/r{repetition}.log",
    wildcard_constraints:
        machine="[^/]+",
        scale="[^/]+",
        cell="[^/]+(/[^/]+)+",
        repetition="[0-9]+",
    priority: priority_of
    conda:
        ENVIRONMENT
    resources:
        machine=1,
    params:
        spec=lambda wildcards: spec_of(wildcards).canonical_json(),
        title=lambda wildcards: spec_of(wildcards).title(),
        data=lambda wildcards: matters(spec_of(wildcards).workload, DATA),
        scratch=lambda wildcards: matters(spec_of(wildcards).workload, SCRATCH),
        hosts=hosts_of,
    message:
        "measure {params.title} (log: {log})"
    shell:
        "exec lastgood run --spec {params.spec:q} --out {output:q} --data-dir {params.data:q} --scratch {params.scratch:q}"
        " {params.hosts} --end-with $PPID > {log:q} 2>&1"
