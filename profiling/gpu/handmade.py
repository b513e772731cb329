"""Steps made by hand in device memory, to launch the kernels as the device does, but alone."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from profiling.gpu.clock import Gpu
from profiling.gpu.strided import FILL_VALUE, Places
from sgalloc.device.kernels import THREADS, Geometry, kernel
from sgalloc.plan import Gather, Segments

MAPPED = ", mapped"
ANY_ORDER = ", rows in any order"
SHORT_ROWS = ", short rows"
_SECTOR = 32
# Slots of a row, where the table stays below so many bytes.
_ROW_SLOTS, _TABLE_BYTES = 4096, 12_000_000_000
_POISON = -1


class Launch(Protocol):
    """A kernel with everything that it reads and writes, in several sets.

    Attributes:
        geometry: as the device has it.
        memory: address of what it writes, as large as the outputs of all sets together.
    """

    geometry: Geometry
    memory: int

    def graph(self, count: int, tile: int = 0, blocks: int = 0, threads: int = THREADS) -> Any:
        """A graph of ``count`` launches, over the sets in turn; 0: as the device would."""

    def check(self, graph: Any) -> None:
        """Replay ``graph`` over poisoned outputs, and hold them against the row law.

        Raises:
            RuntimeError: they differ.
        """

    def filling(self, count: int) -> Any:
        """A graph of ``count`` launches that store into the same places, and do nothing else.

        None where the launch is held against a memset alone.
        """

    def check_filled(self, graph: Any) -> None:
        """Replay ``graph``, of `filling`, over poisoned outputs: it stores where `graph` does.

        Raises:
            RuntimeError: it stores elsewhere, too, or not everywhere.
        """


class Growing:
    """`assign_pages`: each of ``segments`` rows gets ``each`` pages, other ones in each set."""

    def __init__(
        self, gpu: Gpu, page_size: int, segments: int, each: int, form: str, sets: int
    ) -> None:
        self._gpu = gpu
        self._table = Grid(gpu, page_size, segments, each, sets, form.endswith(SHORT_ROWS))
        self.geometry, self.memory = self._table.geometry, self._table.memory
        rows = np.arange(1, segments + 1)
        if form.endswith(ANY_ORDER):
            np.random.default_rng(0).shuffle(rows)
        self._rows, self._each, self._total = rows, each, segments * each
        self._mapped, self._form, self._sets = form.endswith(MAPPED), form, sets
        self._steps: dict[int, list[tuple[Any, int]]] = {}

    def _steps_for(self, tile: int) -> list[tuple[Any, int]]:
        """The step of each set, its owner and its address; runs are told for tiles of ``tile``."""
        key = tile if self._form.startswith("runs") else 0
        if key not in self._steps:
            self._steps[key] = [self._step(n, tile) for n in range(self._sets)]
        return self._steps[key]

    def _step(self, n: int, tile: int) -> tuple[Any, int]:
        first, each, per_row = self._table.first(n), self._each, self._table.row_pages
        ids = made_up_ids(self._total, self.geometry.page_size, n)
        if self._mapped:
            owner, block = small_slot()
            fill_small_slot(block, self._rows, first, each, ids, per_row)
            return owner, block.ptr
        memory = np.zeros(self._bytes(tile), np.uint8)
        lay_out(memory, self._rows, first, each, ids, per_row, self._form, tile)
        owner = self._gpu.to_device(memory)
        return owner, owner.data.ptr

    def _bytes(self, tile: int) -> int:
        runs = self._form.startswith("runs")
        extra = 4 * (-(-self._total // tile) + 1) if runs else 8 * self._total
        return -(-(128 + extra + 12 * self._rows.size + 4 * self._total) // 128) * 128

    def graph(self, count: int, tile: int = 0, blocks: int = 0, threads: int = THREADS) -> Any:
        """See `Launch`."""
        from sgalloc.device.layout import SMALL_PAGES
        from sgalloc.device.streams import Handle

        geometry = self.geometry
        if self._mapped:
            # The graphs of small staging slots are captured once, for the most that they hold.
            tile = tile or geometry.mapped_tile
            blocks = blocks or geometry.blocks(SMALL_PAGES, tile)
        tile = tile or geometry.tile_for(self._total)
        blocks = blocks or geometry.blocks(self._total, tile)
        function = kernel("assign_mapped" if self._mapped else "assign_pages", self._gpu.device)
        steps = self._steps_for(tile)

        def put(stream: int) -> None:
            for n in range(count):
                _, step = steps[n % self._sets]
                arguments = (*geometry.arguments, np.int32(tile), step)
                function((blocks,), (threads,), arguments, 0, Handle(stream))

        return self._gpu.capture(put)

    def check(self, graph: Any) -> None:
        """See `Launch`."""
        order = self._rows.argsort()
        ids = [
            made_up_ids(self._total, self.geometry.page_size, n).reshape(-1, self._each)[order]
            for n in range(self._sets)
        ]
        self._table.check(graph, ids)

    def filling(self, count: int) -> Any:
        """See `Launch`."""
        places = self._table.places(self._sets, self._form.endswith(ANY_ORDER))
        return places.filling(self._gpu, count)

    def check_filled(self, graph: Any) -> None:
        """See `Launch`."""
        self._table.check_filled(graph, self._sets)


class Marking:
    """`page_watermarks`: each of ``segments`` requests needs ``each`` pages."""

    def __init__(
        self, gpu: Gpu, page_size: int, segments: int, each: int, form: str, sets: int
    ) -> None:
        self._gpu, self._sets = gpu, sets
        self._table = Grid(gpu, page_size, segments, each, sets)
        self.geometry, self.memory = self._table.geometry, self._table.memory
        self._requests, self._each, self._total = segments, each, segments * each
        self._reserve = each * page_size
        self._rows = gpu.to_device(np.arange(1, segments + 1, dtype=np.int32))
        self._reserves = None
        if form == "a reserve each":
            self._reserves = gpu.to_device(np.full(segments, self._reserve, np.int32))
        self._held = [
            gpu.to_device(np.full(segments, self._table.first(n) * page_size, np.int32))
            for n in range(sets)
        ]
        self._ids = [gpu.to_device(made_up_ids(self._total, page_size, n)) for n in range(sets)]
        self._keep: list[Any] = []

    def graph(self, count: int, tile: int = 0, blocks: int = 0, threads: int = THREADS) -> Any:
        """See `Launch`; every launch has scan words of its own, cleared at the graph's start."""
        from sgalloc.device.streams import Handle

        tile_requests = self.geometry.tile_requests(self._requests, self._each)
        tiles = -(-self._requests // tile_requests)
        size = count * (8 * tiles + 8)
        state = self._gpu.to_device(np.zeros(size, np.uint8))
        self._keep.append(state)
        words = state.data.ptr
        tickets = words + count * 8 * tiles
        function = kernel("page_watermarks", self._gpu.device)

        def put(stream: int) -> None:
            self._gpu.runtime.memsetAsync(words, 0, size, stream)
            for n in range(count):
                held = self._held[n % self._sets].data.ptr
                arguments = (
                    *self.geometry.arguments,
                    np.int32(tile or self.geometry.marking_tile),
                    np.int32(tile_requests),
                    np.int32(self._requests),
                    self._rows.data.ptr,
                    held,
                    held,
                    0 if self._reserves is None else self._reserves.data.ptr,
                    np.int32(self._reserve),
                    self._ids[n % self._sets].data.ptr,
                    words + n * 8 * tiles,
                    tickets + n * 8,
                    np.uint32(0),
                    np.uint32(1),
                )
                function((tiles,), (THREADS,), arguments, 0, Handle(stream))

        return self._gpu.capture(put)

    def check(self, graph: Any) -> None:
        """See `Launch`."""
        size = self.geometry.page_size
        ids = [made_up_ids(self._total, size, n).reshape(-1, self._each) for n in range(self._sets)]
        self._table.check(graph, ids)

    def filling(self, count: int) -> Any:
        """See `Launch`."""
        return self._table.places(self._sets).filling(self._gpu, count)

    def check_filled(self, graph: Any) -> None:
        """See `Launch`."""
        self._table.check_filled(graph, self._sets)


class Gathering:
    """`gather_slots`: ``each`` slots of each of ``segments`` requests, or half as many again."""

    def __init__(
        self, gpu: Gpu, page_size: int, segments: int, each: int, form: str, sets: int
    ) -> None:
        from sgalloc.device.cuda_tables import Out
        from sgalloc.device.layout import SMALL_GATHERED, fill, fill_small, uniform_length
        from sgalloc.device.staging import Block

        width = 1024
        self._gpu, self._sets, self._size = gpu, sets, segments * each
        ragged = form.endswith("ragged")
        # As the device does: few requests that ask for as many slots each are read in place.
        self._small = segments <= SMALL_GATHERED and not ragged
        # Each entry holds its own place, so that what was gathered tells where it came from.
        count = (segments + 1) * width
        self._table = gpu.to_device(np.arange(count, dtype=np.int32))
        self.geometry = Geometry(self._table.data.ptr, 0, width, page_size, gpu.sms)
        wide = form.startswith("int64")
        self._out = gpu.to_device(np.zeros(sets * self._size, np.int64 if wide else np.int32))
        self.memory = self._out.data.ptr
        rows = np.arange(1, segments + 1)
        lengths = np.full(segments, each)
        if ragged:
            lengths[: segments // 2 * 2 : 2] += each // 2
            lengths[1 : segments // 2 * 2 : 2] -= each // 2
        self._steps, self._keep, self._expected = [], [], []
        for n in range(sets):
            start = (rows * 37 + n * 2 * each) % (width - 2 * each)
            out = Out(self.memory + n * self._size * self._out.itemsize, wide)
            gather = Gather(rows, start, start + lengths, self._size, out)
            self._uniform = uniform_length(gather)
            if self._small:
                owner, block = small_slot()
                fill_small(block, None, None, gather, self._uniform)
                pointer = block.ptr
            else:
                memory = np.zeros(128 + 20 * segments + 64 & ~7, np.uint8)
                fill(Block(memory, 0), None, None, gather, self._uniform, width // page_size)
                owner = gpu.to_device(memory)
                pointer = owner.data.ptr
            self._keep.append(owner)
            self._steps.append(pointer)
            ends = lengths.cumsum()
            within = np.arange(self._size) - (ends - lengths).repeat(lengths)
            self._expected.append((rows * width + start).repeat(lengths) + within)

    def graph(self, count: int, tile: int = 0, blocks: int = 0, threads: int = THREADS) -> Any:
        """See `Launch`."""
        from sgalloc.device.layout import SMALL_GATHERED, SMALL_PAGES
        from sgalloc.device.streams import Handle

        geometry = self.geometry
        if self._small:
            tile = tile or geometry.mapped_tile
            blocks = blocks or geometry.blocks(SMALL_PAGES, tile, SMALL_GATHERED)
        tile = tile or geometry.tile_for(0)
        blocks = blocks or geometry.blocks(0, tile, self._size)
        function = kernel("assign_pages", self._gpu.device)

        def put(stream: int) -> None:
            for n in range(count):
                arguments = (*geometry.arguments, np.int32(tile), self._steps[n % self._sets])
                function((blocks,), (threads,), arguments, 0, Handle(stream))

        return self._gpu.capture(put)

    def check(self, graph: Any) -> None:
        """See `Launch`."""
        replay_over_poison(self._gpu, graph, self._out)
        if not np.array_equal(self._gpu.to_host(self._out), np.concatenate(self._expected)):
            raise RuntimeError("gather_slots wrote other slots than those asked for")

    def filling(self, count: int) -> Any:
        """See `Launch`; the slots of a set are one row of pages of 16 bytes."""
        size = self._size * self._out.itemsize
        starts = [self.memory + n * size for n in range(self._sets)]
        return Places(starts, size // 4, 4, 1, size // 16, False).filling(self._gpu, count)

    def check_filled(self, graph: Any) -> None:
        """See `Launch`."""
        replay_over_poison(self._gpu, graph, self._out)
        if not (self._gpu.to_host(self._out).view(np.int32) == FILL_VALUE).all():
            raise RuntimeError("the fill left slots out")


class Grid:
    """A table in which set n of a launch has the pages from `first` (n) on in every row.

    Attributes:
        geometry, memory: see `Launch`.
        row_pages: whole pages in a row; ``short`` rows have no more than the sets need.
    """

    def __init__(
        self, gpu: Gpu, page_size: int, segments: int, each: int, sets: int, short: bool = False
    ) -> None:
        # No two sets share a sector.
        self._pitch = max(each, -(-_SECTOR // (4 * page_size)))
        least = sets * self._pitch * page_size
        rows = segments + 1
        short = short or 4 * rows * _ROW_SLOTS > _TABLE_BYTES
        width = least if short else max(least, _ROW_SLOTS)
        self._gpu, self._each = gpu, each
        self._table = gpu.empty((rows, width))
        self.memory: int = self._table.data.ptr
        self.row_pages = width // page_size
        self.geometry = Geometry(self.memory, 0, width, page_size, gpu.sms)

    def first(self, n: int) -> int:
        """Number of the first page of set ``n`` in its row."""
        return n * self._pitch

    def check(self, graph: Any, ids: list[NDArray[np.int32]]) -> None:
        """Replay ``graph``; set n should have written the pages ``ids[n]``, and nobody more.

        Args:
            graph: launches over all sets.
            ids: of each set, int32 ``(segments, each)``, in the order of the rows from 1 on.

        Raises:
            RuntimeError: it wrote something else.
        """
        size = self.geometry.page_size
        replay_over_poison(self._gpu, graph, self._table)
        for n, wanted in enumerate(ids):
            begin = self.first(n) * size
            part = self._table[1:, begin : begin + self._each * size]
            pages = self._gpu.to_device(np.ascontiguousarray(wanted))[:, :, None]
            slots = pages * np.int32(size) + self._gpu.to_device(np.arange(size, dtype=np.int32))
            if not bool((part == slots.reshape(part.shape)).all()):
                raise RuntimeError(f"set {n} of a launch broke the row law")
        self._check_written(sum(wanted.size for wanted in ids) * size)

    def places(self, sets: int, shuffled: bool = False) -> Places:
        """Where the launches of ``sets`` sets write."""
        size, width = self.geometry.page_size, int(self._table.shape[1])
        starts = [self.memory + 4 * (width + self.first(n) * size) for n in range(sets)]
        rows = int(self._table.shape[0]) - 1
        return Places(starts, width, size, rows, self._each, shuffled)

    def check_filled(self, graph: Any, sets: int) -> None:
        """Replay ``graph``; each set should have filled its pages, and nobody more.

        Raises:
            RuntimeError: it wrote something else.
        """
        size = self.geometry.page_size * self._each
        replay_over_poison(self._gpu, graph, self._table)
        for n in range(sets):
            begin = self.first(n) * self.geometry.page_size
            if not bool((self._table[1:, begin : begin + size] == FILL_VALUE).all()):
                raise RuntimeError(f"the fill left entries of set {n} out")
        self._check_written(sets * (int(self._table.shape[0]) - 1) * size)

    def _check_written(self, wanted: int) -> None:
        written = int((self._table != _POISON).sum())
        if written != wanted:
            raise RuntimeError(f"{written} entries were written, more than were asked for")


def replay_over_poison(gpu: Gpu, graph: Any, outputs: Any) -> None:
    """Replay ``graph`` once, over ``outputs`` that hold what it never writes."""
    outputs.fill(_POISON)
    gpu.wait()
    gpu.launch(graph)
    gpu.wait()


def made_up_ids(count: int, page_size: int, salt: int) -> NDArray[np.int32]:
    """Page ids in no order whose slots are 32 bits, int32 ``(count,)``; repeats are no matter."""
    limit = (2**31 - 1) // page_size - 1
    ids = (np.arange(count, dtype=np.int64) * 2_654_435_761 + 7919 * salt) % limit + 1
    return ids.astype(np.int32)


def lay_out(
    memory: NDArray[np.uint8],
    rows: NDArray[np.int64],
    first: int,
    each: int,
    ids: NDArray[np.int32],
    row_pages: int,
    form: str,
    tile: int = 0,
) -> None:
    """Lay out a step by which every row gets ``each`` pages from number ``first`` on.

    Args:
        memory: uint8, all of the step.
        rows: int64 ``(n,)``.
        first: number of the first page in each row.
        each: pages of each row.
        ids: int32 ``(n * each,)``.
        row_pages: whole pages in a row.
        form: ``"runs..."``: one entry a row, as the device lays out large steps; else one a
            page, as it does small ones, and those of one page a row.
        tile: pages of a tile of the launch; 0: runs do not tell of tiles.
    """
    from sgalloc.device.layout import fill
    from sgalloc.device.staging import HEADER_BYTES, IDS_AT, PAGES, PLACES_AT, Block

    block = Block(memory, 0)
    start, count = np.full(rows.size, first), np.full(rows.size, each)
    pages = Segments(rows, start, count, ids.size, np.array(row_pages))
    if form.startswith("runs") or each == 1:
        fill(block, pages, ids, None, 0, row_pages, tile)
        return
    ids_at = HEADER_BYTES + 8 * ids.size
    block.longs[HEADER_BYTES // 8 : ids_at // 8] = pages.where
    block.ints[ids_at // 4 : ids_at // 4 + ids.size] = ids
    block.words[PAGES], block.words[PLACES_AT], block.words[IDS_AT] = ids.size, HEADER_BYTES, ids_at


def small_slot() -> tuple[Any, Any]:
    """A small staging slot in mapped memory, as the device has it: its owner, and its block."""
    from sgalloc.device.layout import NO_SIDE, SMALL_BYTES, lay_out_small
    from sgalloc.device.staging import Block, pinned

    owner, memory = pinned(SMALL_BYTES)
    block = Block(memory, int(owner.ptr))
    lay_out_small(block, NO_SIDE)
    return owner, block


def fill_small_slot(
    block: Any,
    rows: NDArray[np.int64],
    first: int,
    each: int,
    ids: NDArray[np.int32],
    row_pages: int,
) -> None:
    """Lay out a step in a small slot; see `lay_out`."""
    from sgalloc.device.layout import fill_pages

    start, count = np.full(rows.size, first), np.full(rows.size, each)
    fill_pages(block, Segments(rows, start, count, ids.size, np.array(row_pages)), ids)
