"""Benchmarks on a GPU: the allocator's steps, its kernels, and how a plan gets there."""
