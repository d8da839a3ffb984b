"""The native extension, built again in place. Records never depend on it: editing source throws no measurement away."""


rule native:
    input:
        sources=native_sources(),
        project=f"{workflow.basedir}/pyproject.toml",
    output:
        touch("logs/native.built"),
    log:
        "logs/native.log",
    benchmark:
        "logs/benchmarks/native.tsv"
    conda:
        ENVIRONMENT
    params:
        checkout=lambda wildcards, input: str(Path(input.project).parent),
    message:
        "build the native extension (log: {log})"
    shell:
        # As install.sh does it: build environments read constraints from this variable only, as a relative path.
        "(cd {params.checkout:q} && PIP_CONSTRAINT=constraints.txt python -m pip install --no-deps --editable . && "
        "python -c 'import lastgood._native') > {log:q} 2>&1"
