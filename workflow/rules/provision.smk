"""Hosts of the configured hostfile, brought to this checkout's revision. docs/provisioning.md describes the steps."""


# Without an output: hosts change by themselves, and a second call finds out that there is nothing to do.
rule provision:
    log:
        "logs/provision.log",
    conda:
        ENVIRONMENT
    params:
        hostfile=lambda wildcards: configured_hostfile(),
        facts="logs/provision",
    message:
        "provision the hosts of {params.hostfile} (log: {log})"
    shell:
        "exec lastgood provision run {params.hostfile:q} --facts-dir {params.facts:q} > {log:q} 2>&1"
