"""Benchmarks of sgalloc: how they are run, what they measured, and the tables made of that."""
