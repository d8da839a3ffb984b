"""The bound on throughput, and the model of goodput."""
