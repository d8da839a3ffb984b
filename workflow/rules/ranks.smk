"""One measurement over several nodes: processes on all of them, one record. It measures itself, as `run` does."""


# Its records' variants begin with the number of ranks, which no other's do.
ruleorder: ranks > run


rule ranks:
    input:
        prepared_data_of,
    output:
        f"{RESULTS}/{{machine}}/{{scale}}/{{cell}}/r{{repetition}}.json",
    params:
        spec=lambda wildcards: spec_of(wildcards).canonical_json(),
        title=lambda wildcards: spec_of(wildcards).title(),
        data=DATA,
        scratch=SCRATCH,
        hosts=hosts_of,
    wildcard_constraints:
        machine="[^/]+",
        scale="[^/]+",
        cell="[^/]+/[^/]+/f[0-9]+/w[0-9]+-[^/]+",
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
        "exec lastgood run --end-with $PPID --spec {params.spec:q} --out {output:q} --data-dir {params.data:q}"
        " --scratch {params.scratch:q} {params.hosts} > {log:q} 2>&1"
