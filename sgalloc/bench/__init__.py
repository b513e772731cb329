"""Measures the host beside a plain Python loop, for ``sgalloc bench`` and ``profiling/``.

Nothing here is needed to serve.
"""
