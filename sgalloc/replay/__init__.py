"""Trace replay: workloads in, a continuous-batching scheduler in miniature, a report out."""
