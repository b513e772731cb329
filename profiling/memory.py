"""What memory this process and its GPU hold. Linux only."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_PAGE = os.sysconf("SC_PAGE_SIZE")


class Memory(NamedTuple):
    """Memory at one moment.

    Attributes:
        resident: bytes of the process in memory; the kernel counts some pages late.
        native: bytes that ``malloc`` has out: the data of arrays, above all. None where the C
            library cannot tell.
        blocks: blocks that Python's own allocator has out: objects of up to 512 bytes.
        objects: objects that the cyclic garbage collector knows of.
        device: bytes that CuPy's pool has out; None without a GPU.
        device_pool: bytes that this pool holds.
        device_taken: bytes of the GPU that are taken, by anybody.
    """

    resident: int
    native: int | None
    blocks: int
    objects: int
    device: int | None = None
    device_pool: int | None = None
    device_taken: int | None = None


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def settle() -> None:
    """Fill NumPy's cache of small blocks, up to 7 of each size below 1 KiB, which it keeps.

    It would fill in the course of millions of calls, and look like growth of 3.5 MiB.
    """
    kept = [np.empty(size, np.uint8) for size in range(1, 1024) for _ in range(7)]
    kept.clear()


def memory(gpu: bool = False) -> Memory:
    """What is held now, after a run of the garbage collector."""
    gc.collect()
    objects, blocks = len(gc.get_objects()), sys.getallocatedblocks()
    resident = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE
    return Memory(resident, _native(), blocks, objects, *(_device() if gpu else ()))


def _native() -> int | None:
    info: Any = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if info is None:
        return None
    info.restype = _Mallinfo2
    found = info()
    return int(found.uordblks + found.hblkhd)


def _device() -> tuple[int, int, int]:
    import cupy

    pool = cupy.get_default_memory_pool()
    free, total = cupy.cuda.runtime.memGetInfo()
    return int(pool.used_bytes()), int(pool.total_bytes()), int(total - free)
