// row_digest: hashes ranges of the tables, so that the host can tell whether they say what it says.
#include "common.cuh"

// Entries [start, start + length) of one of the four arrays.
struct Range {
    i64 start;
    i32 length;
    i32 array;
};
static_assert(sizeof(Range) == 16, "the host writes this layout");

constexpr i32 kDigestThreads = 256;
// Blocks of a multiprocessor: few enough that a thread has registers for all that it loads ahead.
constexpr i32 kDigestBlocks = 5;
// Loads of 16 bytes that a thread has on their way at a time.
constexpr i32 kAhead = 4;
constexpr u64 kStep = 0x9E3779B97F4A7C15ull;
constexpr u64 kMix = 0xD6E8FEB86659FD93ull;

// The weight of an entry, by (its place in the range + 1) * kStep: odd, so that one wrong entry
// always shows. sgalloc/device/row_digest.py has the same in NumPy.
static __device__ __forceinline__ u64 weight(u64 stepped) {
    stepped ^= stepped >> 32;
    stepped *= kMix;
    return (stepped ^ (stepped >> 32)) | 1;
}

static __device__ __forceinline__ u64 weighted(i32 entry, u64 stepped) {
    return static_cast<u32>(entry) * weight(stepped);
}

// Read once and not soon again: it should not push out of the cache what others will read.
static __device__ __forceinline__ int4 load_four(const i32* entries) {
#ifdef __CUDA_ARCH__
    return __ldcs(reinterpret_cast<const int4*>(entries));
#else
    return *reinterpret_cast<const int4*>(entries);
#endif
}

static __device__ __forceinline__ u64 weighted_four(const int4& four, u64 stepped) {
    return weighted(four.x, stepped) + weighted(four.y, stepped + kStep) +
           weighted(four.z, stepped + 2 * kStep) + weighted(four.w, stepped + 3 * kStep);
}

// The part of this thread in the digest of entries [0, count).
static __device__ __forceinline__ u64 share_of(const i32* entries, i32 count) {
    i32 thread = static_cast<i32>(threadIdx.x);
    i32 threads = static_cast<i32>(blockDim.x);
    i32 off = static_cast<i32>(reinterpret_cast<u64>(entries) / 4 % 4);
    i32 head = (4 - off) % 4;        // before the first whole quad
    i32 quads = (count - head) / 4;  // none where the range ends before
    const i32* next = entries + head + 4ll * thread;
    i64 stride = 4ll * threads;
    u64 stepped = static_cast<u64>(head + 4ll * thread + 1) * kStep;
    u64 far = static_cast<u64>(stride) * kStep;
    u64 sum = 0;
    i32 left = quads - thread;  // quads from this thread's next one to the last
    for (; left > (kAhead - 1) * threads; left -= kAhead * threads) {
        int4 one = load_four(next), two = load_four(next + stride);
        int4 three = load_four(next + 2 * stride), four = load_four(next + 3 * stride);
        sum += weighted_four(one, stepped);
        sum += weighted_four(two, stepped + far);
        sum += weighted_four(three, stepped + 2 * far);
        sum += weighted_four(four, stepped + 3 * far);
        next += kAhead * stride;
        stepped += kAhead * far;
    }
    for (; left > 0; left -= threads) {
        sum += weighted_four(load_four(next), stepped);
        next += stride;
        stepped += far;
    }
    // What lies before the first whole quad and behind the last one, a thread each.
    i32 rest = count - 4 * quads;
    for (i32 n = thread; n < rest; n += threads) {
        i32 place = n < head ? n : n + 4 * quads;
        sum += weighted(entries[place], (static_cast<u64>(place) + 1) * kStep);
    }
    return sum;
}

static __device__ __forceinline__ u64 sum_of_warp(u64 sum) {
    for (i32 lanes = 16; lanes; lanes /= 2) {
        u32 low = static_cast<u32>(sum), high = static_cast<u32>(sum >> 32);
        u32 other_low = static_cast<u32>(__shfl_xor_sync(~0u, static_cast<i32>(low), lanes));
        u32 other_high = static_cast<u32>(__shfl_xor_sync(~0u, static_cast<i32>(high), lanes));
        sum += static_cast<u64>(other_high) << 32 | other_low;
    }
    return sum;
}

// A block a range. digests: (count,): of each range the sum of entry * weight, modulo 2**64, an
// entry taken as 32 bits without sign. Any of the arrays may be null where no range names it.
//
// ranges and digests may lie in mapped memory: each is read, or written, once.
extern "C" __global__ void __launch_bounds__(kDigestThreads, kDigestBlocks) row_digest(
    const i32* slots, const i32* side_slots, const i32* map, const i32* pages,
    const Range* ranges, i32 count, u64* digests) {
    __shared__ Range range;
    __shared__ u64 sums[kDigestThreads / 32];
    i32 thread = static_cast<i32>(threadIdx.x);
    for (i32 at = static_cast<i32>(blockIdx.x); at < count; at += static_cast<i32>(gridDim.x)) {
        if (thread == 0) range = ranges[at];
        __syncthreads();
        const i32* array = range.array == 0   ? slots
                           : range.array == 1 ? side_slots
                           : range.array == 2 ? map
                                              : pages;
        u64 sum = sum_of_warp(share_of(array + range.start, range.length));
        if (thread % 32 == 0) sums[thread / 32] = sum;
        __syncthreads();
        if (thread == 0) {
            u64 whole = 0;
            for (i32 warp = 0; warp < static_cast<i32>(blockDim.x) / 32; warp++) whole += sums[warp];
            digests[at] = whole;
        }
    }
}
