"""RoCEv2 traffic of a seeded training, for tests and benchmarks without such a network."""
