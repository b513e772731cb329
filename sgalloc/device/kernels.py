"""The kernels: compiled once, checked before every launch; nothing above sees a pointer."""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import Any

import numpy as np

from sgalloc.cuda_source import read_text

SOURCES = ("assign_pages.cu", "page_watermarks.cu", "export_pages.cu", "row_digest.cu")
# Compiled by those alone who ask for it.
DEBUGGING = ("poison.cu",)
THREADS = 256
TILE_PAGES = 1024
LEAST_REQUESTS, TILE_REQUESTS = 32, 1024
# A block writes about so many slots a tile: enough to keep its threads busy, few enough to
# spread a middling step over many multiprocessors.
_TILE_SLOTS = 4096

# How page_watermarks is cut, measured on an H200 (profiling/gpu/LOG.md, entry 16).
_MARKED_PAGES = 512
_LEAST_PAGES = 256
_TILES_EACH = 5

_INCLUDE = re.compile(r'^#include "([\w.]+)"$\n?', re.MULTILINE)


def read_kernels(names: tuple[str, ...] = SOURCES) -> str:
    """The sources as one text, each header once.

    CuPy's disk cache knows a module by its text and not by what that includes, so headers are
    put into it.
    """
    seen: set[str] = set()

    def inline(text: str) -> str:
        def replace(found: re.Match[str]) -> str:
            name = found.group(1)
            if name in seen:
                return ""
            seen.add(name)
            return inline(read_text(name).replace("#pragma once\n", ""))

        return _INCLUDE.sub(replace, text)

    return "\n".join(inline(read_text(name)) for name in names)


@lru_cache(maxsize=2)
def _module(sources: tuple[str, ...]) -> Any:
    import cupy

    return cupy.RawModule(code=read_kernels(sources), options=("-std=c++17",))


@lru_cache(maxsize=64)
def kernel(name: str, device: int, sources: tuple[str, ...] = SOURCES) -> Any:
    """The function ``name`` on the current ``device``, ready to be called with a grid.

    A CuPy kernel builds this object anew at each look-up; the function itself is launched in
    less time than the kernel.
    """
    return _module(sources).get_function(name).kernel


def compiled() -> int:
    """How many functions were looked up so far: none may be added in a steady step."""
    return int(kernel.cache_info().currsize)


class Geometry:
    """How the table is addressed, and how a launch is cut into tiles.

    Attributes:
        arguments: the leading arguments of every kernel that writes the table.
        tile: pages of a tile.
        mapped_tile: the same of a step that is read from mapped memory; a page a thread.
    """

    def __init__(
        self, table: int, page_table: int, row_width: int, page_size: int, sms: int
    ) -> None:
        shift = -2
        if page_size % 4 == 0 and row_width % 4 == 0 and table % 16 == 0:
            quads = page_size // 4
            shift = quads.bit_length() - 1 if quads & (quads - 1) == 0 else -1
        self.page_size = page_size
        self.sms = sms
        self.tile = max(1, min(TILE_PAGES, _TILE_SLOTS // page_size))
        self.mapped_tile = max(4, min(THREADS, _TILE_SLOTS // page_size))
        self.arguments: tuple[Any, ...] = (
            table,
            page_table,
            np.int64(row_width),
            np.int32(row_width // page_size),
            np.int32(page_size),
            np.int32(shift),
        )

    def tile_for(self, pages: int) -> int:
        """Pages of a tile for a step of ``pages``: smaller where that fills more of the chip."""
        spread = -(-pages // self.sms)
        least = max(1, THREADS // max(1, self.page_size // 4))
        return max(1, min(self.tile, max(spread, least)))

    def most_tiles(self, pages: int) -> int:
        """Tiles that no step of up to ``pages`` has more of."""
        return max(self.sms, -(-pages // self.tile))

    def blocks(self, pages: int, tile: int, slots: int = 0) -> int:
        """Blocks for ``pages`` in tiles of ``tile`` and ``slots`` gathered; at least one."""
        return max(1, min(max(-(-pages // tile), -(-slots // THREADS)), 8 * self.sms))

    @property
    def marking_tile(self) -> int:
        """Pages that a block of page_watermarks stages at once."""
        return max(self.tile, _MARKED_PAGES)

    def tile_requests(self, requests: int, pages_each: int) -> int:
        """Requests of a tile of page_watermarks, which may need up to ``pages_each`` pages each.

        A power of two: five tiles a multiprocessor, of `_LEAST_PAGES` pages at least, since a
        tile is ticketed, summed and listened for whatever its size.
        """
        each = max(1, pages_each)
        pages = max(_LEAST_PAGES, requests * each / (_TILES_EACH * self.sms))
        wanted = 1 << max(0, round(math.log2(pages / each)))
        return max(LEAST_REQUESTS, min(TILE_REQUESTS, wanted))
