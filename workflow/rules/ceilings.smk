"""What this machine can do at best. An input of the CSV files, never of runs. It measures itself, so no benchmark."""


rule ceilings:
    output:
        CEILINGS,
    params:
        scratch=SCRATCH,
        machine=MACHINE,
    resources:
        machine=1,
    # Before the first run: a figure that a failure cuts short can still be drawn with its bound.
    priority: len(PLAN.specs) + 1
    log:
        "logs/ceilings.log",
    conda:
        ENVIRONMENT
    message:
        "measure this machine's ceilings"
    shell:
        "exec lastgood ceilings --end-with $PPID --scratch {params.scratch:q} --machine {params.machine:q} --out {output:q}"
        " > {log:q} 2>&1"
