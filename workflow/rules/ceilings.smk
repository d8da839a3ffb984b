"""What this machine can do at best. An input of the CSV files, never of runs. It measures itself, so no benchmark."""


rule ceilings:
    output:
        CEILINGS,
    log:
        "logs/ceilings.log",
    # Before the first run: a figure that a failure cuts short can still be drawn with its bound.
    priority: len(PLAN.specs) + 1
    conda:
        ENVIRONMENT
    resources:
        machine=1,
    params:
        scratch=SCRATCH,
        machine=MACHINE,
    message:
        "measure this machine's ceilings"
    shell:
        "exec lastgood ceilings --end-with $PPID --scratch {params.scratch:q} --machine {params.machine:q} --out {output:q}"
        " > {log:q} 2>&1"
