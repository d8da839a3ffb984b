"""Data of the workloads: small real data from packages, users' own files, tokenizers and streams of batches."""
