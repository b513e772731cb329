"""The version number; `setup.py` and `sgalloc.__version__` both read it here."""

from __future__ import annotations

__version__ = "0.1.0"
