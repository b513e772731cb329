"""Steps with pages of a second group, made by hand in device memory, as `handmade` makes others."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from profiling.gpu.clock import Gpu
from profiling.gpu.handmade import made_up_ids, replay_over_poison
from sgalloc.device.kernels import THREADS, Geometry, kernel
from sgalloc.plan import Segments, SideWrite

CLEARS, MAP = "clears", ", map"
_SECTOR, _POISON = 32, -1
# Slots of a row, where the tables stay below so many bytes.
_ROW_SLOTS, _TABLE_BYTES = 4096, 12_000_000_000


class Siding:
    """`assign_both`, or `assign_both_mapped`: ``segments`` rows get a page of both groups each, or
    lose one of one.

    The forms are ``"grows"``, which writes a page of the main group and of the second one, and
    ``"clears"``, which clears pages of the second alone; with ``", map"`` the map, too.

    Attributes:
        geometry, memory: see `handmade.Launch`; the tables lie in one piece, then the map.
    """

    def __init__(
        self, gpu: Gpu, page_size: int, segments: int, each: int, form: str, sets: int
    ) -> None:
        if each != 1:
            raise ValueError(f"a row gets one page in a launch here, not {each}")
        self._gpu, self._sets, self._count, self._size = gpu, sets, segments, page_size
        self._clears, self._mapped = form.startswith(CLEARS), form.endswith(MAP)
        # No two sets share a sector.
        self._pitch = max(1, -(-_SECTOR // (4 * page_size)))
        least, rows = sets * self._pitch * page_size, segments + 1
        self._width = least if 8 * rows * _ROW_SLOTS > _TABLE_BYTES else max(least, _ROW_SLOTS)
        table = rows * self._width
        entries = (sets * segments + 1) * page_size if self._mapped else 0
        self._all = gpu.empty((2 * table + entries,))
        self.memory: int = self._all.data.ptr
        self._tables = [
            self._all[n * table : (n + 1) * table].reshape(rows, self._width) for n in (0, 1)
        ]
        self._map = self._all[2 * table :].reshape(-1, page_size)
        self.geometry = Geometry(self.memory, 0, self._width, page_size, gpu.sms)
        self._rows = np.arange(1, rows)
        self._steps = [self._step(n) for n in range(sets)]

    def _ids(self, n: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Page ids of set ``n`` in the main group, in no order, and in the second one."""
        order = np.random.default_rng(n).permutation(self._count) + 1 + n * self._count
        sides = made_up_ids(self._count, self._size, n)
        return order.astype(np.int32), np.zeros_like(sides) if self._clears else sides

    def _step(self, n: int) -> tuple[Any, int]:
        """The step of set ``n``: its owner, and its address."""
        from sgalloc.device.layout import (
            SMALL_BYTES,
            SideAddresses,
            fill,
            fill_both,
            lay_out_small,
        )
        from sgalloc.device.staging import HEADER_BYTES, Block, pinned

        count, per_row = self._count, self._width // self._size
        mains, sides = self._ids(n)
        ones = np.ones(count, np.int64)
        pages = Segments(self._rows, n * self._pitch * ones, ones, count, np.array(per_row))
        beside = SideWrite(pages.where, sides, mains if self._mapped else np.zeros_like(mains))
        grown, ids = (None, None) if self._clears else (pages, mains)
        addresses = SideAddresses(*self._addresses)
        if self._small:
            owner, memory = pinned(SMALL_BYTES)
            block = Block(memory, int(owner.ptr))
            lay_out_small(block, addresses)
            fill_both(block, grown, ids, beside)
            return owner, block.ptr
        memory = np.zeros(-(-(HEADER_BYTES + 32 * count + 64) // 128) * 128, np.uint8)
        fill(Block(memory, 0), grown, ids, None, 0, per_row, 0, beside, addresses)
        owner = self._gpu.to_device(memory)
        return owner, owner.data.ptr

    @property
    def _addresses(self) -> tuple[int, int]:
        """Of the second table and of the map, 0 for none."""
        shown = int(self._map.data.ptr) if self._mapped else 0
        return int(self._tables[1].data.ptr), shown

    @property
    def _small(self) -> bool:
        """Whether the device reads such a step from mapped memory."""
        from sgalloc.device.layout import SMALL_SIDE

        return self._count <= min(SMALL_SIDE, 16384 // 28)

    def graph(self, count: int, tile: int = 0, blocks: int = 0, threads: int = THREADS) -> Any:
        """See `handmade.Launch`."""
        from sgalloc.device.layout import SMALL_PAGES
        from sgalloc.device.streams import Handle

        geometry = self.geometry
        if self._small:
            # As the graphs of small staging slots, which are captured once for all.
            tile = tile or geometry.mapped_tile
            blocks = blocks or geometry.blocks(SMALL_PAGES, tile)
        else:
            pages = 0 if self._clears else self._count
            tile = tile or geometry.tile_for(pages)
            work = self._count * max(1, self._size // 4)
            blocks = blocks or geometry.blocks(pages, tile, work)
        name = "assign_both_mapped" if self._small else "assign_both"
        function = kernel(name, self._gpu.device)
        arrays = self._addresses if self._small else ()

        def put(stream: int) -> None:
            for n in range(count):
                step = self._steps[n % self._sets][1]
                arguments = (*geometry.arguments, np.int32(tile), step, *arrays)
                function((blocks,), (threads,), arguments, 0, Handle(stream))

        return self._gpu.capture(put)

    def check(self, graph: Any) -> None:
        """See `handmade.Launch`."""
        size, put = self._size, self._gpu.to_device
        replay_over_poison(self._gpu, graph, self._all)
        offsets = put(np.arange(size, dtype=np.int32))
        for n in range(self._sets):
            mains, sides = self._ids(n)
            begin = n * self._pitch * size
            slots = put(sides)[:, None] * np.int32(size) + offsets
            if self._clears:
                slots[:] = 0
            wanted = [(self._tables[1][1:, begin : begin + size], slots)]
            if self._mapped:
                wanted.append((self._map[put(mains.astype(np.int64))], slots))
            if not self._clears:
                full = put(mains)[:, None] * np.int32(size) + offsets
                wanted.append((self._tables[0][1:, begin : begin + size], full))
            if not all(bool((found == right).all()) for found, right in wanted):
                raise RuntimeError(f"set {n} of a launch broke the row law, or that of the map")
        written = int((self._all != _POISON).sum())
        parts = 1 + self._mapped + (not self._clears)
        if written != parts * self._sets * self._count * size:
            raise RuntimeError(f"{written} entries were written, more than were asked for")

    def filling(self, count: int) -> Any:
        """None: it is held against a memset alone."""
        return None

    def check_filled(self, graph: Any) -> None:
        """There is no fill."""
