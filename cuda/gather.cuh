// Positions to slots: out_cache_loc.
#pragma once
#include "common.cuh"

// Slots asked for: positions [start[r], start[r] + its count) of each request r, flat, in order.
struct Gather {
    i32 requests;
    i32 total;            // slots in all
    i32 uniform;          // slots of each request where all have as many, else 0
    i32 wide;             // whether `out` is int64
    void* out;            // (total,)
    const i32* row;       // (requests,)
    const i32* start;     // (requests,)
    const i32* offset;    // (requests,) exclusive sums of the counts; unused where uniform
    const i32* first_new; // (requests,) number of the first page that this launch writes
    const i32* new_at;    // (requests,) its place in `ids`
};

// Entries of pages that this very launch writes come from `ids`, the others from the table, so
// that no block has to wait for another.
static __device__ __forceinline__ void gather(const Tables& t, const Gather& g, const i32* ids) {
    // Unsigned, since the last stride may pass 2**31.
    u32 stride = gridDim.x * blockDim.x;
    u32 total = static_cast<u32>(g.total);
    for (u32 next = blockIdx.x * blockDim.x + threadIdx.x; next < total; next += stride) {
        i32 at = static_cast<i32>(next);
        i32 r, position;
        if (g.uniform) {
            r = at / g.uniform;
            position = g.start[r] + (at - r * g.uniform);
        } else {
            r = insertion(g.offset, 0, g.requests, at) - 1;
            position = g.start[r] + (at - g.offset[r]);
        }
        i32 page = position / t.page_size;
        i32 ahead = page - g.first_new[r];
        i32 slot = ahead >= 0
                       ? ids[g.new_at[r] + ahead] * t.page_size + (position - page * t.page_size)
                       : t.slots[static_cast<i64>(g.row[r]) * t.row_width + position];
        if (g.wide) static_cast<i64*>(g.out)[at] = slot;
        else static_cast<i32*>(g.out)[at] = slot;
    }
}
