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

// A warp a value; `found` has what each of its lanes was told, (values, 32).
extern "C" __global__ void probe_warp_insertion(
    const i32* offsets, i32 count, i32 values_count, const i32* values, i32* found) {
    i32 lane = threadIdx.x & 31;
    i32 warps = gridDim.x * blockDim.x / 32;
    for (i32 at = (blockIdx.x * blockDim.x + threadIdx.x) / 32; at < values_count; at += warps)
        found[32 * at + lane] = warp_insertion(offsets, count, values[at]);
}
