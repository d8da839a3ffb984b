"""Whether a checkpointing system keeps its promises: a suite for any entry point of ``lastgood.checkpointers``.

    pip install 'lastgood[conformance]'
    pytest --pyargs lastgood.conformance --checkpointer NAME

A workload, a trace and a machine are tested the same way (``--workload``, ``--trace-file``, ``--machine``).
docs/conformance.md says what each test asks. A promise that a system cannot keep by its nature is declared among the
`limits` of its traits; its tests must fail then, so that no system declares more limits than it has.
"""
