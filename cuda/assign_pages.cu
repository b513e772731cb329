// assign_pages: write the slots of new pages into the rows that grow, then gather.
#include "common.cuh"
#include "gather.cuh"

// A step as the host lays it out, at the head of a staging slot: 128 bytes.
struct Step {
    i32 pages;        // pages to write
    i32 runs;         // runs they come in; 0: `places` has one entry a page
    i32 requests;     // the gather: see Gather
    i32 total;
    i32 uniform;
    i32 wide;
    u64 out;
    i32 places_at;    // bytes from the head of the step to each array
    i32 ids_at;
    i32 offsets_at;
    i32 row_at;
    i32 start_at;
    i32 offset_at;
    i32 first_new_at;
    i32 new_at_at;
    u32 serial;       // of a captured update: which one this is, from 1
    i32 spare[15];
};
static_assert(sizeof(Step) == 128, "the host writes this layout");

// A step in mapped memory has its arrays at fixed places, for so many pages.
constexpr i32 kFixedPages = 1024;
constexpr i32 kFixedPlaces = sizeof(Step);
constexpr i32 kFixedIds = kFixedPlaces + 8 * kFixedPages;

template <typename T>
static __device__ __forceinline__ const T* array(const Step* step, i32 at) {
    return reinterpret_cast<const T*>(reinterpret_cast<const char*>(step) + at);
}

// The header in one transaction; every thread of the block takes part.
static __device__ __forceinline__ void read_header(const Step* step, Step* header) {
    if (threadIdx.x < sizeof(Step) / 4)
        reinterpret_cast<u32*>(header)[threadIdx.x] =
            reinterpret_cast<const volatile u32*>(step)[threadIdx.x];
    __syncthreads();
}

// One place and one id a page, in device memory: a thread a store, and four on their way at once.
static __device__ __forceinline__ void write_places(
    const Tables& t, i32 pages, const i64* __restrict__ places, const i32* __restrict__ ids) {
    constexpr i32 kAhead = 4;
    bool quads = t.quad_shift > -2;
    i32 units = quads ? t.page_size / 4 : t.page_size;
    i64 total = static_cast<i64>(pages) * units;
    i64 stride = static_cast<i64>(gridDim.x) * blockDim.x;
    i64 at = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    for (; at < total; at += kAhead * stride) {
        i64 place[kAhead];
        i32 id[kAhead], unit[kAhead];
        for (i32 k = 0; k < kAhead; ++k) {
            i64 next = at + k * stride;
            if (next >= total) break;
            i32 page = t.quad_shift >= 0 ? static_cast<i32>(next >> t.quad_shift)
                                         : static_cast<i32>(next / units);
            unit[k] = static_cast<i32>(next - static_cast<i64>(page) * units);
            place[k] = places[page];
            id[k] = ids[page];
        }
        for (i32 k = 0; k < kAhead; ++k) {
            if (at + k * stride >= total) break;
            i64 entry = entry_of(t, place[k]);
            if (t.pages && unit[k] == 0) t.pages[place[k]] = id[k];
            i32 slot = id[k] * t.page_size;
            if (quads) {
                slot += 4 * unit[k];
                int4 four = make_int4(slot, slot + 1, slot + 2, slot + 3);
                *reinterpret_cast<int4*>(t.slots + entry + 4 * unit[k]) = four;
            } else {
                t.slots[entry + unit[k]] = slot + unit[k];
            }
        }
    }
}

// Runs of pages, grid-stride over tiles of `tile` pages, at most kTilePages.
//
// places: int64 (runs,), such that page i of run r has the place places[r] + i, counted over the
//         whole step. offsets: int32 (runs,), number of the first page of each run, from 0.
static __device__ __forceinline__ void write_runs(
    const Tables& t, i32 tile, i32 pages, i32 runs, const i64* places, const i32* ids,
    const i32* offsets) {
    __shared__ i64 entries[kTilePages];
    __shared__ i32 page_ids[kTilePages];
    __shared__ i64 run_places[kTilePages];
    __shared__ i32 run_offsets[kTilePages];
    __shared__ i32 bounds[2];
    for (i32 begin = blockIdx.x * tile; begin < pages; begin += gridDim.x * tile) {
        i32 count = min(tile, pages - begin);
        for (i32 which = threadIdx.x / 32; which < 2; which += blockDim.x / 32) {
            i32 found = warp_insertion(offsets, runs, which ? begin + count - 1 : begin) - 1;
            if ((threadIdx.x & 31) == 0) bounds[which] = found;
        }
        __syncthreads();
        // Every run has a page, so those of a tile are no more than its pages.
        i32 first = bounds[0], here = bounds[1] - first + 1;
        for (i32 r = threadIdx.x; r < here; r += blockDim.x) {
            run_places[r] = places[first + r];
            run_offsets[r] = offsets[first + r];
        }
        __syncthreads();
        for (i32 i = threadIdx.x; i < count; i += blockDim.x) {
            i32 page = begin + i;
            i64 place = run_places[insertion(run_offsets, 0, here, page) - 1] + page;
            i32 id = ids[page];
            if (t.pages) t.pages[place] = id;
            if (t.page_size == 1) {
                t.slots[entry_of(t, place)] = id;
            } else {
                entries[i] = entry_of(t, place);
                page_ids[i] = id;
            }
        }
        __syncthreads();
        if (t.page_size > 1) {
            write_tile(t, entries, page_ids, count);
            __syncthreads();
        }
    }
}

static __device__ __forceinline__ void gather_step(
    const Tables& t, const Step* step, const Step& header, const i32* ids) {
    if (!header.total) return;
    Gather g = {header.requests,
                header.total,
                header.uniform,
                header.wide,
                reinterpret_cast<void*>(header.out),
                array<i32>(step, header.row_at),
                array<i32>(step, header.start_at),
                array<i32>(step, header.offset_at),
                array<i32>(step, header.first_new_at),
                array<i32>(step, header.new_at_at)};
    gather(t, g, ids);
}

// Apply one step that lies where its header says.
static __device__ __forceinline__ void apply_step(const Tables& t, i32 tile, const Step* step) {
    __shared__ Step header;
    read_header(step, &header);
    const i64* places = array<i64>(step, header.places_at);
    const i32* ids = array<i32>(step, header.ids_at);
    if (header.runs) {
        const i32* offsets = array<i32>(step, header.offsets_at);
        write_runs(t, tile, header.pages, header.runs, places, ids, offsets);
    } else {
        write_places(t, header.pages, places, ids);
    }
    gather_step(t, step, header, ids);
}

extern "C" __global__ void assign_pages(
    i32* slots, i32* page_table, i64 row_width, i32 row_pages, i32 page_size, i32 quad_shift,
    i32 tile, const Step* step) {
    Tables t = {slots, page_table, row_width, row_pages, page_size, quad_shift};
    apply_step(t, tile, step);
}

// A step of places that is read from mapped memory. A read there takes as long as all the rest, so
// places and ids are read together with the header, before it is known how many there are.
//
// A block a tile of `tile` pages, at most its threads; the grid covers kFixedPages.
extern "C" __global__ void assign_mapped(
    i32* slots, i32* page_table, i64 row_width, i32 row_pages, i32 page_size, i32 quad_shift,
    i32 tile, const Step* step) {
    __shared__ Step header;
    __shared__ i64 entries[kTilePages];
    __shared__ i32 page_ids[kTilePages];
    Tables t = {slots, page_table, row_width, row_pages, page_size, quad_shift};
    const i32* ids = array<i32>(step, kFixedIds);
    i32 begin = blockIdx.x * tile;
    i32 page = begin + threadIdx.x;
    i64 place = 0;
    i32 id = 0;
    if (threadIdx.x < tile && page < kFixedPages) {
        place = array<i64>(step, kFixedPlaces)[page];
        id = ids[page];
    }
    read_header(step, &header);
    i32 count = min(tile, header.pages - begin);
    if (static_cast<i32>(threadIdx.x) < count) {
        if (t.pages) t.pages[place] = id;
        entries[threadIdx.x] = entry_of(t, place);
        page_ids[threadIdx.x] = id;
    }
    __syncthreads();
    if (count > 0) write_tile(t, entries, page_ids, count);
    gather_step(t, step, header, ids);
}

constexpr u32 kStaged = 1, kEmpty = 2;

// The same inside a graph of the caller's, which is replayed without the host: each replay
// applies the next of the steps that were staged, or nothing where none was.
//
// steps: a ring of `ring` steps, `stride` bytes apart, mapped. counters: device memory, zero at
// first: [0] steps applied, [1] blocks done with this replay, [2] what its first block found.
// applied: mapped, the host reads it.
extern "C" __global__ void replay_pages(
    i32* slots, i32* page_table, i64 row_width, i32 row_pages, i32 page_size, i32 quad_shift,
    i32 tile, const char* steps, i64 stride, u32 ring, u32* counters, volatile u32* applied) {
    Tables t = {slots, page_table, row_width, row_pages, page_size, quad_shift};
    __shared__ u32 next, found;
    if (threadIdx.x == 0) {
        next = *static_cast<volatile u32*>(counters);
        const Step* step = reinterpret_cast<const Step*>(steps + (next % ring) * stride);
        u32 mine = *static_cast<const volatile u32*>(&step->serial) == next + 1 ? kStaged : kEmpty;
        // The host may stage while this runs: the first block decides for all.
        __threadfence_system();
        u32 decided = atomicCAS(counters + 2, 0u, mine);
        found = decided ? decided : mine;
        __threadfence_system();
    }
    __syncthreads();
    u32 serial = next;
    bool staged = found == kStaged;
    const Step* step = reinterpret_cast<const Step*>(steps + (serial % ring) * stride);
    if (staged) apply_step(t, tile, step);
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system();
        if (atomicAdd(counters + 1, 1u) == gridDim.x - 1) {
            counters[1] = 0;
            counters[2] = 0;
            if (staged) {
                counters[0] = serial + 1;
                *applied = serial + 1;
            }
        }
    }
}
