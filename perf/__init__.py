"""Benchmarks of the optimizers on this machine: ``python -m perf``."""
