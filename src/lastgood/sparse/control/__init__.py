"""Batches and compression that follow the links: telemetry, controller, objective, and the profiler's surface."""
