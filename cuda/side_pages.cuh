// Pages of a second group: its own table, and the map from slots of the main group to its slots.
#pragma once
#include "common.cuh"

// Most pages of a tile: as many as the threads of a block.
constexpr i32 kSideTile = 256;

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

// Where the pages of a tile go: an entry of `slots`, or -1; and an entry of `map`, or -1.
struct SideTile {
    i64 entries[kSideTile];
    i64 mapped[kSideTile];
    i32 ids[kSideTile];
};

// Write `count` pages of a tile that lies in shared memory; every thread of the block takes part.
static __device__ __forceinline__ void write_side_tile(
    const Tables& t, i32* slots, i32* map, const SideTile& tile, i32 count) {
    i32 size = t.page_size;
    i32 width = t.quad_shift > -2 ? 4 : 1;
    i32 parts = size / width;
    i32 total = count * parts;
    for (i32 at = threadIdx.x; at < total; at += blockDim.x) {
        i32 page = t.quad_shift >= 0 ? at >> t.quad_shift : at / parts;
        i32 offset = width * (at - page * parts);
        i32 id = tile.ids[page];
        i32 step = min(id, 1);
        i32 slot = id * size + step * offset;
        i64 entry = tile.entries[page];
        i64 sent = tile.mapped[page];
        if (width == 4) {
            i32 second = slot + step;
            int4 four = make_int4(slot, second, second + step, second + 2 * step);
            if (entry >= 0) *reinterpret_cast<int4*>(slots + entry + offset) = four;
            if (sent >= 0) *reinterpret_cast<int4*>(map + sent + offset) = four;
        } else {
            if (entry >= 0) slots[entry + offset] = slot;
            if (sent >= 0) map[sent + offset] = slot;
        }
    }
}

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
