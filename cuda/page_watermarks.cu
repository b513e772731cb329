// page_watermarks: committed lengths in, table written: rounding, scan, page pick and scatter in
// one launch, for batches so large that the host's own counting would come first.
#include "common.cuh"

constexpr i32 kThreads = 256;
constexpr i32 kPerThread = 4;  // at most
constexpr i32 kTileRequests = kThreads * kPerThread;
constexpr i32 kWarps = kThreads / 32;

// What a tile has told the others, in one word: epoch (30 bits), state (2), value (32).
constexpr u32 kAggregate = 1;  // value: pages of this tile
constexpr u32 kInclusive = 2;  // value: pages of this tile and of all before it

static __device__ __forceinline__ u64 told(u32 epoch, u32 state, i32 value) {
    return (static_cast<u64>((epoch << 2) | state) << 32) | static_cast<u32>(value);
}

// The word of a tile, once it says something in this epoch.
static __device__ __forceinline__ u64 listen(const u64* word, u32 epoch) {
    u64 heard;
    do {
        heard = load_word(word);
    } while (static_cast<u32>(heard >> 34) != epoch || (static_cast<u32>(heard >> 32) & 3) == 0);
    return heard;
}

// Pages of all tiles before `tile`; called by the whole block. Each thread listens to one of them,
// the nearest first: so many tiles at a time as a block has threads, and again so many before
// those while none of them knows the sum of all before it.
static __device__ __forceinline__ i32 look_back(const u64* words, u32 epoch, i32 tile) {
    // In turns, so that no thread writes what another has still to read.
    __shared__ i32 heard[2][kWarps];
    __shared__ bool whole[2][kWarps];
    i32 lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    i32 before = 0, turn = 0;
    for (i32 last = tile - 1;; last -= kThreads) {
        i32 other = last - static_cast<i32>(threadIdx.x);
        u64 word = other >= 0 ? listen(words + other, epoch) : told(epoch, kInclusive, 0);
        u32 sums = __ballot_sync(0xffffffffu, (static_cast<u32>(word >> 32) & 3) == kInclusive);
        i32 stop = sums ? __ffs(static_cast<i32>(sums)) - 1 : 31;
        i32 value = lane <= stop ? static_cast<i32>(static_cast<u32>(word)) : 0;
        for (i32 step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
        if (lane == 0) {
            heard[turn][warp] = value;
            whole[turn][warp] = sums != 0;
        }
        __syncthreads();
        for (i32 w = 0; w < kWarps; ++w) {
            before += heard[turn][w];
            if (whole[turn][w]) return before;
        }
        turn ^= 1;
    }
}

// One block a tile of `tile_requests`, at most kTileRequests: few where requests need many pages,
// so that all multiprocessors have a share. What does not depend on the tiles before is done
// before they are listened to.
//
// rows, committed, allocated: int32 (requests,). reserves: int32 (requests,), or null for
// `reserve` of all. ids: int32, the head of the free ids in the order they are handed out; at
// least as many as are needed. words: one a tile, ticket: one; never cleared: an epoch belongs
// to one launch, and tickets of earlier launches are `ticket_base`.
extern "C" __global__ void __launch_bounds__(kThreads) page_watermarks(
    i32* slots, i32* page_table, i64 row_width, i32 row_pages, i32 page_size, i32 quad_shift,
    i32 tile_pages, i32 tile_requests, i32 requests, const i32* rows, const i32* committed,
    const i32* allocated, const i32* reserves, i32 reserve, const i32* ids, u64* words,
    u32* ticket, u32 ticket_base, u32 epoch) {
    __shared__ i32 offsets[kTileRequests];
    __shared__ i64 places[kTileRequests];
    __shared__ i64 entries[kTilePages];
    __shared__ i32 page_ids[kTilePages];
    __shared__ i32 warp_sums[kWarps];
    __shared__ i32 shared_tile;
    Tables t = {slots, page_table, row_width, row_pages, page_size, quad_shift};
    i32 thread = threadIdx.x;
    // Blocks may start in any order; tickets make sure that a tile is taken only after all
    // before it were, so that waiting for them ends.
    if (thread == 0) shared_tile = static_cast<i32>(atomicAdd(ticket, 1u) - ticket_base);
    __syncthreads();
    i32 tile = shared_tile;

    i32 each = (tile_requests + kThreads - 1) / kThreads;
    i32 count[kPerThread];
    i32 mine = 0;
    for (i32 k = 0; k < kPerThread; ++k) {
        i32 local = thread * each + k;
        i32 r = tile * tile_requests + local;
        count[k] = 0;
        if (k < each && local < tile_requests && r < requests) {
            i32 first = allocated[r] / page_size;
            i64 mark = static_cast<i64>(committed[r]) + (reserves ? reserves[r] : reserve);
            i32 last = static_cast<i32>((mark + page_size - 1) / page_size);
            count[k] = max(last - first, 0);
            places[local] = static_cast<i64>(rows[r]) * row_pages + first;
        }
        mine += count[k];
    }

    // Exclusive sum over the block: within warps, then over warps.
    i32 lane = thread & 31, warp = thread / 32;
    i32 sum = mine;
    for (i32 step = 1; step < 32; step *= 2) {
        i32 other = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += other;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    i32 offset = sum - mine;
    i32 total = 0;
    for (i32 w = 0; w < kWarps; ++w) {
        if (w < warp) offset += warp_sums[w];
        total += warp_sums[w];
    }
    // The first warps have pages even where a tile has few, so the last thread tells.
    bool teller = thread == kThreads - 1;
    if (teller) store_word(words + tile, told(epoch, tile ? kAggregate : kInclusive, total));
    for (i32 k = 0; k < kPerThread; ++k) {
        i32 local = thread * each + k;
        if (k < each && local < tile_requests) offsets[local] = offset;
        offset += count[k];
    }
    __syncthreads();

    i32 before = 0, begin = 0;
    do {
        i32 pages = min(tile_pages, total - begin);
        for (i32 i = thread; i < pages; i += kThreads) {
            i32 r = insertion(offsets, 0, tile_requests, begin + i) - 1;
            entries[i] = places[r] + (begin + i - offsets[r]);
        }
        if (begin == 0 && tile > 0) {
            before = look_back(words, epoch, tile);
            if (teller) store_word(words + tile, told(epoch, kInclusive, before + total));
        }
        for (i32 i = thread; i < pages; i += kThreads) {
            i64 place = entries[i];
            i32 id = ids[before + begin + i];
            if (t.pages) t.pages[place] = id;
            entries[i] = entry_of(t, place);
            page_ids[i] = id;
        }
        __syncthreads();
        write_tile(t, entries, page_ids, pages);
        __syncthreads();
        begin += tile_pages;
    } while (begin < total);
}
