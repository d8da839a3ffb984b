"""Configuration, plan, runs, records, ceilings, aggregation and plots."""
