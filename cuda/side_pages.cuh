// Pages of a second group: its own table, and the map from slots of the main group to its slots.
#pragma once
#include "common.cuh"

// Page i has id `ids[i]` (0: entries read 0). It is written at `places[i]` of the table `slots`,
// row * row_pages + number (-1: nowhere), and the map sends the slots of page `mains[i]` of the
// main group to its own (0: the map stays).
struct SidePages {
    i32* slots;         // (rows, row_width), or null
    i32* map;           // (pages of the main group + 1, page_size), or null
    i32 pages;
    const i64* places;  // (pages,)
    const i32* ids;     // (pages,)
    const i32* mains;   // (pages,)
};

static __device__ __forceinline__ void write_side(const Tables& t, const SidePages& side) {
    i64 size = t.page_size;
    bool quads = t.quad_shift > -2;
    i64 parts = quads ? size / 4 : size;
    i64 total = side.pages * parts;
    i64 stride = static_cast<i64>(gridDim.x) * blockDim.x;
    for (i64 at = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; at < total;
         at += stride) {
        i64 page = at / parts;
        i64 offset = (at - page * parts) * (quads ? 4 : 1);
        i32 id = side.ids[page];
        i64 place = side.places[page];
        i64 main = side.mains[page];
        i32 slot = id ? static_cast<i32>(id * size + offset) : 0;
        i32 step = id ? 1 : 0;
        i32* shown = side.slots && place >= 0 ? side.slots + entry_of(t, place) + offset : nullptr;
        i32* mapped = side.map && main ? side.map + main * size + offset : nullptr;
        if (quads) {
            int4 four = make_int4(slot, slot + step, slot + 2 * step, slot + 3 * step);
            if (shown) *reinterpret_cast<int4*>(shown) = four;
            if (mapped) *reinterpret_cast<int4*>(mapped) = four;
        } else {
            if (shown) *shown = slot;
            if (mapped) *mapped = slot;
        }
    }
}
