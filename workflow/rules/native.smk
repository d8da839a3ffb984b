"""The native extension, built again in place. Records never depend on it: editing source throws no measurement away."""


rule native:
    params:
        checkout=workflow.basedir,
    log:
        "logs/native.log",
    benchmark:
        "logs/benchmarks/native.tsv"
    conda:
        ENVIRONMENT
    message:
        "build the native extension (log: {log})"
    shell:
        "python -m pip install --no-build-isolation --no-deps --editable {params.checkout:q} > {log:q} 2>&1"
