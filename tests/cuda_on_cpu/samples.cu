// Small kernels that the emulation is tried on: some are right, most are wrong on purpose.
#include "common.cuh"

extern "C" __global__ void warp_operations(i32* up, i32* across, u32* votes) {
    i32 at = blockIdx.x * blockDim.x + threadIdx.x;
    for (u32 step = 0; step < 32; ++step) {
        i32 value = 1000 * static_cast<i32>(step) + at;
        up[32 * at + static_cast<i32>(step)] = __shfl_up_sync(0xffffffffu, value, step);
        across[32 * at + static_cast<i32>(step)] =
            __shfl_xor_sync(0xffffffffu, value, static_cast<i32>(step));
        votes[32 * at + static_cast<i32>(step)] =
            __ballot_sync(0xffffffffu, (at >> (step % 5)) & 1);
    }
}

extern "C" __global__ void count_by_barrier(const i32* asked, i32* counts) {
    __shared__ i32 values[256];
    i32 at = blockIdx.x * blockDim.x + threadIdx.x;
    values[threadIdx.x] = asked[at];
    i32 count = __syncthreads_count(asked[at]);
    // Orders as a barrier does: another thread's value is there.
    i32 other = values[blockDim.x - 1 - threadIdx.x];
    counts[at] = 1000 * count + __syncthreads_count(other == 2);
}

extern "C" __global__ void count_and_barrier(i32* out) {
    if (threadIdx.x < 5) out[0] = __syncthreads_count(1);
    else __syncthreads();
}

extern "C" __global__ void reverse_by_barrier(i32* out) {
    __shared__ i32 values[256];
    i32 thread = threadIdx.x, size = blockDim.x;
    values[thread] = 10 * (blockIdx.x * size + thread);
    __syncthreads();
    out[blockIdx.x * size + thread] = values[size - 1 - thread];
}

extern "C" __global__ void reverse_without_barrier(i32* out) {
    __shared__ i32 values[256];
    i32 thread = threadIdx.x, size = blockDim.x;
    values[thread] = 10 * (blockIdx.x * size + thread);
    out[blockIdx.x * size + thread] = values[size - 1 - thread];
}

extern "C" __global__ void read_unwritten(i32* out) {
    __shared__ i32 values[256];
    if (threadIdx.x == 0) values[0] = 7;
    __syncthreads();
    out[threadIdx.x] = values[threadIdx.x];
}

extern "C" __global__ void some_return_early() {
    if (threadIdx.x % 3 == 0) return;
    __syncthreads();
}

extern "C" __global__ void barriers_in_branches() {
    if (threadIdx.x < 5) __syncthreads();
    else
        __syncthreads();
}

extern "C" __global__ void lanes_diverge(i32* out) {
    i32 value = threadIdx.x;
    if (threadIdx.x < 16) value = __shfl_up_sync(0xffffffffu, value, 1);
    else value = __shfl_xor_sync(0xffffffffu, value, 1);
    out[threadIdx.x] = value;
}

extern "C" __global__ void mask_of_half(i32* out) {
    out[threadIdx.x] = __shfl_up_sync(0xffffu, static_cast<i32>(threadIdx.x), 1);
}

extern "C" __global__ void past_shared(i32 at) {
    __shared__ i32 values[100];
    __shared__ i32 others[200];
    i32* pointer = at < 0 ? others : values;
    others[0] = 1;
    pointer[at] = others[0];
    __syncthreads();
}

extern "C" __global__ void write_at(i32* out, i64 at) { out[at] = 1; }

extern "C" __global__ void read_at(const i32* in, i64 at, i32* out) { out[0] = in[at]; }

extern "C" __global__ void four_at(i32* out, i64 at) {
    *reinterpret_cast<int4*>(out + at) = make_int4(1, 2, 3, 4);
}

// In order with what was written before, which `load_word` and `store_word` are not.
static __device__ u64 load_acquire(const u64* word) {
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

static __device__ void store_release(u64* word, u64 value) {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

extern "C" __global__ void wait_in_vain(const u64* word) {
    while (load_acquire(word) == 0) {}
}

extern "C" __global__ void loop_for_ever(volatile i32* out) {
    for (;;) *out = 1;
}

// Block b waits for block b + 1: only blocks that run at a time can come to an end.
extern "C" __global__ void wait_for_the_next(u64* words) {
    if (threadIdx.x == 0) {
        if (blockIdx.x + 1 < gridDim.x)
            while (load_acquire(words + blockIdx.x + 1) == 0) {}
        store_release(words + blockIdx.x, 1);
    }
}

extern "C" __global__ void count_blocks(u32* count, i32* seen) {
    if (threadIdx.x == 0) seen[blockIdx.x] = static_cast<i32>(atomicAdd(count, 1u));
}

// Without a race only because the word is read and written in order.
extern "C" __global__ void hand_over(i32* data, u64* word, i32* out) {
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        *data = 5;
        store_release(word, 1);
    }
    if (blockIdx.x == 1 && threadIdx.x == 0) {
        while (load_acquire(word) == 0) {}
        *out = *data;
    }
}

extern "C" __global__ void both_write(i32* out) {
    if (threadIdx.x == 0) out[0] = 5;
}
