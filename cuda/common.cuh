// What the kernels share: how a table is addressed, and how a tile of pages is written.
//
// The sources need only threadIdx, blockIdx, barriers, warp shuffles, atomics and fences, so that
// the very same text also runs on a CPU (tests/cuda_on_cpu). NVRTC has no standard headers here,
// hence the plain types.
#pragma once

typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

static_assert(sizeof(i32) == 4 && sizeof(i64) == 8, "slots are 32 bits, addresses 64");

// Most pages that a block stages at once; a launch may ask for fewer.
constexpr i32 kTilePages = 1024;

// The device tables of one allocator.
struct Tables {
    i32* slots;      // req_to_token, (rows, row_width)
    i32* pages;      // page ids, (rows, row_pages); null where nobody wants them
    i64 row_width;   // slots in a row
    i32 row_pages;   // whole pages in a row
    i32 page_size;   // slots in a page
    i32 quad_shift;  // log2(page_size / 4) where 16-byte stores are aligned, -1 where not a
                     // power of two, -2 where not aligned
};

// The entry of `slots` where the page with flat number `where` begins.
static __device__ __forceinline__ i64 entry_of(const Tables& t, i64 where) {
    if (t.row_width == static_cast<i64>(t.row_pages) * t.page_size) return where * t.page_size;
    i64 row = where / t.row_pages;
    return row * t.row_width + (where - row * t.row_pages) * t.page_size;
}

// The number of entries of the ascending `offsets[first, last)` that are at most `value`, plus
// `first`: where `value` would be inserted behind its equals.
static __device__ __forceinline__ i32 insertion(
    const i32* offsets, i32 first, i32 last, i32 value) {
    while (first < last) {
        i32 middle = first + (last - first) / 2;
        if (offsets[middle] <= value) first = middle + 1;
        else last = middle;
    }
    return first;
}

// A word that other blocks read and write. It says all by itself, so that nothing else has to be
// seen in order with it.
static __device__ __forceinline__ u64 load_word(const u64* word) {
#ifdef __CUDA_ARCH__
    u64 value;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
#else
    return __atomic_load_n(word, __ATOMIC_RELAXED);
#endif
}

static __device__ __forceinline__ void store_word(u64* word, u64 value) {
#ifdef __CUDA_ARCH__
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
#else
    __atomic_store_n(word, value, __ATOMIC_RELAXED);
#endif
}

// Write the slots of `count` pages: page i has id `ids[i]` and begins at entry `entries[i]`.
// Both lie in shared memory; every thread of the block takes part.
static __device__ __forceinline__ void write_tile(
    const Tables& t, const i64* entries, const i32* ids, i32 count) {
    i32 size = t.page_size;
    if (t.quad_shift > -2) {
        i32 quads = size / 4;
        i32 total = count * quads;
        for (i32 at = threadIdx.x; at < total; at += blockDim.x) {
            i32 page = t.quad_shift >= 0 ? at >> t.quad_shift : at / quads;
            i32 offset = 4 * (at - page * quads);
            i32 slot = ids[page] * size + offset;
            int4 four = make_int4(slot, slot + 1, slot + 2, slot + 3);
            *reinterpret_cast<int4*>(t.slots + entries[page] + offset) = four;
        }
        return;
    }
    i32 total = count * size;
    for (i32 at = threadIdx.x; at < total; at += blockDim.x) {
        i32 page = at / size;
        i32 offset = at - page * size;
        t.slots[entries[page] + offset] = ids[page] * size + offset;
    }
}
