// poison_rows: debug mode's mark on what no request owns.
#include "common.cuh"

// Entries [first, stop) of rows [row, row + rows) of a table become `value`.
extern "C" __global__ void poison_rows(
    i32* table, i64 width, i64 row, i64 rows, i64 first, i64 stop, i32 value) {
    i64 span = stop - first;
    i64 stride = static_cast<i64>(gridDim.x) * blockDim.x;
    for (i64 at = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; at < rows * span;
         at += stride) {
        i64 down = at / span;
        table[(row + down) * width + first + at - down * span] = value;
    }
}
