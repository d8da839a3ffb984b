"""Benchmarks of optimizer steps on hosts and devices."""
