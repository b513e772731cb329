"""The places that a kernel writes, filled by one that does nothing else: the least it may take."""

from __future__ import annotations

from math import gcd
from typing import Any, NamedTuple

import numpy as np

from profiling.gpu.clock import Gpu
from sgalloc.device.kernels import THREADS

FILL_VALUE = 0x5A5A5A5A
# Store `value` into so many pages, 16 bytes at a time where they are aligned (`width` 4 slots, else
# 1), each page by consecutive threads. `start`: the first page of the first row. Nothing is read:
# the order of the rows is a permutation, segment * step modulo the segments.
FILL = r"""
extern "C" __global__ void fill_pages_alone(
    int* start, long long row_width, unsigned page_size, unsigned width, unsigned segments,
    unsigned each, unsigned step, unsigned stores, int value) {
    unsigned per_page = page_size / width, stride = gridDim.x * blockDim.x;
    bool halves = (per_page & (per_page - 1)) == 0;
    unsigned shift = 0;
    while (halves && (1u << shift) < per_page) ++shift;
    for (unsigned at = blockIdx.x * blockDim.x + threadIdx.x; at < stores; at += stride) {
        unsigned page = halves ? at >> shift : at / per_page;
        unsigned segment = each == 1 ? page : page / each;
        unsigned row = step == 1 ? segment : segment * step % segments;
        long long number = page - segment * each;
        int* target = start + row * row_width + number * page_size;
        target += (at - page * per_page) * width;
        if (width == 4) *reinterpret_cast<int4*>(target) = make_int4(value, value, value, value);
        else *target = value;
    }
}
"""
_STRIDE = 1021


class Places(NamedTuple):
    """Where one launch writes: ``each`` pages in a row of ``segments`` rows one after the other.

    Attributes:
        starts: for each set, the address of the first page in the first row.
        shuffled: whether consecutive pages lie in rows far apart.
    """

    starts: list[int]
    row_width: int
    page_size: int
    segments: int
    each: int
    shuffled: bool

    def filling(self, gpu: Gpu, count: int) -> Any:
        """A graph of ``count`` launches that store `FILL_VALUE` there, over the sets in turn."""
        from sgalloc.device.streams import Handle

        aligned = self.page_size % 4 == 0 and self.row_width % 4 == 0
        width = 4 if aligned and all(start % 16 == 0 for start in self.starts) else 1
        stores = self.segments * self.each * self.page_size // width
        function = gpu.function(FILL, "fill_pages_alone")
        blocks = min(-(-stores // THREADS), 8 * gpu.sms)
        sizes = (self.page_size, width, self.segments, self.each, self.step, stores)
        fixed = (np.int64(self.row_width), *map(np.uint32, sizes), np.int32(FILL_VALUE))

        def put(stream: int) -> None:
            for n in range(count):
                start = self.starts[n % len(self.starts)]
                function((blocks,), (THREADS,), (start, *fixed), 0, Handle(stream))

        return gpu.capture(put)

    @property
    def step(self) -> int:
        """Rows from one segment to the next, such that all are met; products are 32 bits."""
        most = min(_STRIDE, (2**32 - 1) // self.segments) if self.shuffled else 1
        return next(step for step in range(most, 0, -1) if gcd(step, self.segments) == 1)
