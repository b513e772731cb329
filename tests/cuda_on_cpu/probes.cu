// What cannot be seen from outside a kernel, made visible for the tests.
#include "common.cuh"

extern "C" __global__ void probe_entry_of(
    i64 row_width, i32 row_pages, i32 page_size, i32 count, const i64* places, i64* entries) {
    Tables t = {nullptr, nullptr, row_width, row_pages, page_size, -2};
    for (i32 at = blockIdx.x * blockDim.x + threadIdx.x; at < count; at += gridDim.x * blockDim.x)
        entries[at] = entry_of(t, places[at]);
}

extern "C" __global__ void probe_insertion(
    const i32* offsets, i32 first, i32 last, i32 count, const i32* values, i32* found) {
    for (i32 at = blockIdx.x * blockDim.x + threadIdx.x; at < count; at += gridDim.x * blockDim.x)
        found[at] = insertion(offsets, first, last, values[at]);
}
