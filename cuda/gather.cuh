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

// Slots that a thread gathers one after the other, so that it looks for their request once.
constexpr i32 kGathered = 4;

// Entries of pages that this very launch writes come from `ids`, the others from the table, so
// that no block has to wait for another.
static __device__ __forceinline__ void gather(const Tables& t, const Gather& g, const i32* ids) {
    i64 stride = static_cast<i64>(gridDim.x) * blockDim.x * kGathered;
    i64 first = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) * kGathered;
    for (; first < g.total; first += stride) {
        i32 at = static_cast<i32>(first);
        i32 r = g.uniform ? at / g.uniform : insertion(g.offset, 0, g.requests, at) - 1;
        i32 begin = g.uniform ? r * g.uniform : g.offset[r];
        i32 end = static_cast<i32>(min(static_cast<i64>(g.total), first + kGathered));
        for (; at < end; ++at) {
            // Requests that ask for nothing lie between others.
            while (r + 1 < g.requests &&
                   at >= (g.uniform ? begin + g.uniform : g.offset[r + 1])) {
                ++r;
                begin = g.uniform ? begin + g.uniform : g.offset[r];
            }
            i32 position = g.start[r] + (at - begin);
            i32 page = position / t.page_size;
            i32 ahead = page - g.first_new[r];
            i32 slot = ahead >= 0
                           ? ids[g.new_at[r] + ahead] * t.page_size + (position - page * t.page_size)
                           : t.slots[static_cast<i64>(g.row[r]) * t.row_width + position];
            if (g.wide) static_cast<i64*>(g.out)[at] = slot;
            else static_cast<i32*>(g.out)[at] = slot;
        }
    }
}
