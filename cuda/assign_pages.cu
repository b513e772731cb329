// assign_pages: write the slots of new pages into the rows that grow, then gather.
#include "common.cuh"
#include "gather.cuh"
#include "side_pages.cuh"

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
    i32 tile_runs_at; // see apply_step; 0: there are none
    u64 side_slots;   // the second group: see side_pages.cuh
    u64 side_map;
    i32 side_pages;
    i32 side_places_at;
    i32 side_ids_at;
    i32 side_mains_at;
    i32 spare[6];
};
static_assert(sizeof(Step) == 128, "the host writes this layout");

template <typename T>
static __device__ __forceinline__ const T* array(const Step* step, i32 at) {
    return reinterpret_cast<const T*>(reinterpret_cast<const char*>(step) + at);
}

static __device__ __forceinline__ void gather_step(
    const Tables& t, const Step* step, const i32* ids) {
    if (!step->total) return;
    Gather g = {step->requests,
                step->total,
                step->uniform,
                step->wide,
                reinterpret_cast<void*>(step->out),
                array<i32>(step, step->row_at),
                array<i32>(step, step->start_at),
                array<i32>(step, step->offset_at),
                array<i32>(step, step->first_new_at),
                array<i32>(step, step->new_at_at)};
    gather(t, g, ids);
}

static __device__ __forceinline__ void side_step(const Tables& t, const Step* step) {
    if (!step->side_pages) return;
    SidePages side = {reinterpret_cast<i32*>(step->side_slots),
                      reinterpret_cast<i32*>(step->side_map),
                      step->side_pages,
                      array<i64>(step, step->side_places_at),
                      array<i32>(step, step->side_ids_at),
                      array<i32>(step, step->side_mains_at)};
    write_side(t, side);
}

// Apply one step, grid-stride over tiles of `tile` pages, at most kTilePages.
//
// places: int64; one a page, row * row_pages + number; or, for runs, such that page i of run r
//         has the place places[r] + i, counted over the whole step.
// offsets: int32 (runs,), number of the first page of each run, ascending from 0.
// tile_runs: int32 (tiles + 1,), the run of the first page of each tile, and the last run of all.
//            Found by a search where the host did not say, at the price of a chain of loads.
static __device__ __forceinline__ void apply_step(const Tables& t, i32 tile, const Step* step) {
    __shared__ i64 entries[kTilePages];
    __shared__ i32 ids[kTilePages];
    __shared__ i32 run_bounds[2];
    i32 pages = step->pages;
    i32 runs = step->runs;
    const i64* places = array<i64>(step, step->places_at);
    const i32* page_ids = array<i32>(step, step->ids_at);
    const i32* offsets = array<i32>(step, step->offsets_at);
    const i32* tile_runs =
        runs && step->tile_runs_at ? array<i32>(step, step->tile_runs_at) + blockIdx.x : nullptr;
    for (i32 begin = blockIdx.x * tile; begin < pages; begin += gridDim.x * tile) {
        i32 count = min(tile, pages - begin);
        i32 first_run = 0, last_run = 0;
        if (tile_runs) {
            first_run = tile_runs[0];
            last_run = tile_runs[1];
            tile_runs += gridDim.x;
        } else if (runs) {
            if (threadIdx.x < 2) {
                i32 page = threadIdx.x == 0 ? begin : begin + count - 1;
                run_bounds[threadIdx.x] = insertion(offsets, 0, runs, page) - 1;
            }
            __syncthreads();
            first_run = run_bounds[0];
            last_run = run_bounds[1];
        }
        for (i32 i = threadIdx.x; i < count; i += blockDim.x) {
            i32 page = begin + i;
            i32 id = page_ids[page];  // on its way during the search
            i64 place;
            if (runs) {
                i32 run = insertion(offsets, first_run + 1, last_run + 1, page) - 1;
                place = places[run] + page;
            } else {
                place = places[page];
            }
            if (t.pages) t.pages[place] = id;
            if (t.page_size == 1) {
                t.slots[entry_of(t, place)] = id;
            } else {
                entries[i] = entry_of(t, place);
                ids[i] = id;
            }
        }
        if (t.page_size > 1) {
            __syncthreads();
            write_tile(t, entries, ids, count);
        }
        __syncthreads();
    }
    gather_step(t, step, page_ids);
}

// One launch, a kernel of its own: what the second group needs of registers would slow down all
// others.
extern "C" __global__ void assign_both(
    i32* slots, i32* page_table, i64 row_width, i32 row_pages, i32 page_size, i32 quad_shift,
    i32 tile, const Step* step) {
    Tables t = {slots, page_table, row_width, row_pages, page_size, quad_shift};
    apply_step(t, tile, step);
    side_step(t, step);
}

extern "C" __global__ void assign_pages(
    i32* slots, i32* page_table, i64 row_width, i32 row_pages, i32 page_size, i32 quad_shift,
    i32 tile, const Step* step) {
    Tables t = {slots, page_table, row_width, row_pages, page_size, quad_shift};
    apply_step(t, tile, step);
}

// A small step, read from mapped memory, where its arrays have fixed places for so many pages.
constexpr i32 kFixedPages = 1024;
constexpr i32 kFixedPlaces = sizeof(Step);
constexpr i32 kFixedIds = kFixedPlaces + 8 * kFixedPages;
constexpr i32 kFixedGather = kFixedIds + 4 * kFixedPages;
constexpr i32 kFixedSidePlaces = kFixedGather + 16 * kFixedPages;
constexpr i32 kFixedSideIds = kFixedSidePlaces + 8 * kFixedPages;
constexpr i32 kFixedSideMains = kFixedSideIds + 4 * kFixedPages;

// The page that a thread reads, of tiles of `tile`, at most the threads of a block; -1 for none.
static __device__ __forceinline__ i32 mapped_page(i32 tile) {
    i32 page = blockIdx.x * tile + threadIdx.x;
    return static_cast<i32>(threadIdx.x) < tile && page < kFixedPages ? page : -1;
}

// Put what a thread has read of the main group into shared memory; the pages of the tile.
static __device__ __forceinline__ i32 staged_pages(
    const Tables& t, i64 place, i32 id, i64* entries, i32* ids) {
    if (place >= 0) {
        if (t.pages) t.pages[place] = id;
        entries[threadIdx.x] = entry_of(t, place);
        ids[threadIdx.x] = id;
    }
    return __syncthreads_count(place >= 0);
}

// A block a tile. Reads of one line of mapped memory by many blocks wait for each other, and a
// read that depends on another costs its time again: so no header is read, and the host sets the
// places behind the last page to -1.
extern "C" __global__ void assign_mapped(
    i32* slots, i32* page_table, i64 row_width, i32 row_pages, i32 page_size, i32 quad_shift,
    i32 tile, const Step* step) {
    __shared__ i64 entries[kTilePages];
    __shared__ i32 ids[kTilePages];
    Tables t = {slots, page_table, row_width, row_pages, page_size, quad_shift};
    i32 page = mapped_page(tile);
    bool there = page >= 0;
    i64 place = there ? array<i64>(step, kFixedPlaces)[page] : -1;
    i32 id = there ? array<i32>(step, kFixedIds)[page] : 0;
    i32 count = staged_pages(t, place, id, entries, ids);
    write_tile(t, entries, ids, count);
}

// The same with pages of the second group, of which the host sets the ids behind the last to -1.
// All reads are on their way together.
extern "C" __global__ void assign_both_mapped(
    i32* slots, i32* page_table, i64 row_width, i32 row_pages, i32 page_size, i32 quad_shift,
    i32 tile, const Step* step, i32* side_slots, i32* side_map) {
    __shared__ i64 entries[kTilePages];
    __shared__ i32 ids[kTilePages];
    __shared__ SideTile side;
    Tables t = {slots, page_table, row_width, row_pages, page_size, quad_shift};
    i32 page = mapped_page(tile);
    bool there = page >= 0;
    i64 place = there ? array<i64>(step, kFixedPlaces)[page] : -1;
    i32 id = there ? array<i32>(step, kFixedIds)[page] : 0;
    i64 side_place = there ? array<i64>(step, kFixedSidePlaces)[page] : -1;
    i32 side_id = there ? array<i32>(step, kFixedSideIds)[page] : -1;
    i64 main = there ? array<i32>(step, kFixedSideMains)[page] : 0;
    if (side_id >= 0) {
        side.ids[threadIdx.x] = side_id;
        side.entries[threadIdx.x] = side_slots && side_place >= 0 ? entry_of(t, side_place) : -1;
        side.mapped[threadIdx.x] = side_map && main > 0 ? main * page_size : -1;
    }
    i32 count = staged_pages(t, place, id, entries, ids);
    i32 beside = __syncthreads_count(side_id >= 0);
    write_tile(t, entries, ids, count);
    write_side_tile(t, side_slots, side_map, side, beside);
}

constexpr u32 kStaged = 1, kEmpty = 2;

// The same inside a graph of the caller's, which is replayed without the host: each replay
// applies the next of the steps that were staged, or nothing where none was.
//
// steps: a ring of `ring` steps, `stride` bytes apart, mapped. counters: device memory, zero at
// first: [0] steps applied, [1] blocks done with this replay, [2] what its first block found.
// applied: mapped, the host reads it.
template <bool both>
static __device__ __forceinline__ void replay(
    const Tables& t, i32 tile, const char* steps, i64 stride, u32 ring, u32* counters,
    volatile u32* applied) {
    __shared__ u32 next, found;
    if (threadIdx.x == 0) {
        next = *static_cast<volatile u32*>(counters);
        // The host may stage while this runs: the first block decides for all.
        u32 decided = atomicAdd(counters + 2, 0u);
        if (!decided) {
            const Step* step = reinterpret_cast<const Step*>(steps + (next % ring) * stride);
            const volatile u32* serial = &step->serial;
            u32 mine = *serial == next + 1 ? kStaged : kEmpty;
            __threadfence_system();
            decided = atomicCAS(counters + 2, 0u, mine);
            if (!decided) decided = mine;
        }
        found = decided;
        __threadfence_system();
    }
    __syncthreads();
    u32 serial = next;
    bool staged = found == kStaged;
    const Step* step = reinterpret_cast<const Step*>(steps + (serial % ring) * stride);
    if (staged) apply_step(t, tile, step);
    if (both && staged) side_step(t, step);
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

extern "C" __global__ void replay_pages(
    i32* slots, i32* page_table, i64 row_width, i32 row_pages, i32 page_size, i32 quad_shift,
    i32 tile, const char* steps, i64 stride, u32 ring, u32* counters, volatile u32* applied) {
    Tables t = {slots, page_table, row_width, row_pages, page_size, quad_shift};
    replay<false>(t, tile, steps, stride, ring, counters, applied);
}

extern "C" __global__ void replay_both(
    i32* slots, i32* page_table, i64 row_width, i32 row_pages, i32 page_size, i32 quad_shift,
    i32 tile, const char* steps, i64 stride, u32 ring, u32* counters, volatile u32* applied) {
    Tables t = {slots, page_table, row_width, row_pages, page_size, quad_shift};
    replay<true>(t, tile, steps, stride, ring, counters, applied);
}
