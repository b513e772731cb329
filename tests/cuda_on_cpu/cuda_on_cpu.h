// The part of CUDA that the sources in cuda/ use, for g++: include this, then a .cu file unchanged.
//
// What it stands for, and what it cannot show, is in README.md beside it.
#pragma once
#include <utility>

#define __device__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)

// Under ASan shared memory is one section, swapped when another block goes on, with redzones
// around each array. Under TSan a block has an OS thread to itself, and shared memory is that
// thread's.
#ifdef __SANITIZE_THREAD__
#define __shared__ static thread_local
#else
#define __shared__ static __attribute__((section("shared_memory")))
#endif

struct uint3 {
    unsigned x, y, z;
};

namespace cuda_on_cpu {

// What a CUDA thread knows of its place.
struct Place {
    uint3 thread, block, block_size, grid_size;
};

enum Event { barrier, counting_barrier, shuffle_up, shuffle_xor, ballot };

extern __thread const Place* here;

[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
void wait_for_block(int line);
unsigned count_in_block(bool predicate, int line);
unsigned wait_for_warp(Event, unsigned mask, unsigned value, unsigned argument, int line);
void about_to_load(const void* word);  // others may run: the loop around it may wait for them
void about_to_change();                // others may run

// A kernel behind one plain interface: arguments arrive as 64-bit words.
struct Kernel {
    const char* name;
    const char* signature;  // p: pointer, i: 4-byte integer, q: 8-byte integer
    void (*run)(const unsigned long long* arguments);
    const Kernel* next;

    static const Kernel* first;
    Kernel(const char* name, const char* signature, void (*run)(const unsigned long long*))
        : name(name), signature(signature), run(run), next(first) {
        first = this;
    }
};

template <typename T>
struct Argument {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "only 4 and 8 byte integers are passed");
    static constexpr char kind = sizeof(T) == 4 ? 'i' : 'q';
    static T from(unsigned long long word) { return static_cast<T>(word); }
};

template <typename T>
struct Argument<T*> {
    static constexpr char kind = 'p';
    static T* from(unsigned long long word) { return reinterpret_cast<T*>(word); }
};

template <auto kernel>
struct Caller;

template <typename... T, void (*kernel)(T...)>
struct Caller<kernel> {
    static constexpr char signature[] = {Argument<T>::kind..., 0};

    template <std::size_t... at>
    static void unpack(const unsigned long long* words, std::index_sequence<at...>) {
        kernel(Argument<T>::from(words[at])...);
    }
    static void run(const unsigned long long* words) {
        unpack(words, std::index_sequence_for<T...>());
    }
};

}  // namespace cuda_on_cpu

#define REGISTER_KERNEL(name)                                          \
    static const cuda_on_cpu::Kernel registered_##name(                \
        #name, cuda_on_cpu::Caller<name>::signature, cuda_on_cpu::Caller<name>::run);

#define threadIdx (cuda_on_cpu::here->thread)
#define blockIdx (cuda_on_cpu::here->block)
#define blockDim (cuda_on_cpu::here->block_size)
#define gridDim (cuda_on_cpu::here->grid_size)

// A vector of four whose store insists on 16 bytes, as a GPU does. The compiler takes the
// alignment of the type for granted, so the address has to be hidden from it first.
struct alignas(16) int4 {
    int x, y, z, w;

    int4(int x, int y, int z, int w) : x(x), y(y), z(z), w(w) {}
    int4(const int4&) = default;
    int4& operator=(const int4& other) {
        unsigned long long address = reinterpret_cast<unsigned long long>(this);
        asm volatile("" : "+r"(address));
        if (address % 16) cuda_on_cpu::fail("int4 store to %#llx: not 16-byte aligned", address);
        x = other.x;
        y = other.y;
        z = other.z;
        w = other.w;
        return *this;
    }
};

static inline int4 make_int4(int x, int y, int z, int w) { return int4(x, y, z, w); }

static inline int min(int a, int b) { return b < a ? b : a; }
static inline int max(int a, int b) { return a < b ? b : a; }
// Other types would be narrowed here without a word, where a GPU takes the wider type.
template <typename A, typename B>
void min(A, B) = delete;
template <typename A, typename B>
void max(A, B) = delete;
static inline int __ffs(int word) { return __builtin_ffs(word); }

static inline void __syncthreads(int line = __builtin_LINE()) {
    cuda_on_cpu::wait_for_block(line);
}

static inline int __syncthreads_count(int predicate, int line = __builtin_LINE()) {
    return static_cast<int>(cuda_on_cpu::count_in_block(predicate != 0, line));
}

static inline int __shfl_up_sync(
    unsigned mask, int value, unsigned delta, int line = __builtin_LINE()) {
    return static_cast<int>(cuda_on_cpu::wait_for_warp(
        cuda_on_cpu::shuffle_up, mask, static_cast<unsigned>(value), delta, line));
}

static inline int __shfl_xor_sync(
    unsigned mask, int value, int lanes, int line = __builtin_LINE()) {
    return static_cast<int>(cuda_on_cpu::wait_for_warp(
        cuda_on_cpu::shuffle_xor, mask, static_cast<unsigned>(value),
        static_cast<unsigned>(lanes), line));
}

static inline unsigned __ballot_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
    return cuda_on_cpu::wait_for_warp(cuda_on_cpu::ballot, mask, predicate != 0, 0, line);
}

// Atomics order everything here; on a GPU these two order nothing.
static inline unsigned atomicAdd(unsigned* word, unsigned value) {
    cuda_on_cpu::about_to_change();
    return __atomic_fetch_add(word, value, __ATOMIC_ACQ_REL);
}

static inline unsigned atomicCAS(unsigned* word, unsigned expected, unsigned value) {
    cuda_on_cpu::about_to_change();
    __atomic_compare_exchange_n(
        word, &expected, value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    return expected;
}

static inline void __threadfence_system() {
#ifndef __SANITIZE_THREAD__
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}

namespace cuda_on_cpu {

template <typename T>
T load_word(const T* word, int order) {
    about_to_load(word);
    return __atomic_load_n(word, order);
}

template <typename T>
void store_word(T* word, T value, int order) {
    about_to_change();
    __atomic_store_n(word, value, order);
}

}  // namespace cuda_on_cpu

// What common.cuh calls where it is not compiled for a GPU.
#define __atomic_load_n(word, order) cuda_on_cpu::load_word(word, order)
#define __atomic_store_n(word, value, order) cuda_on_cpu::store_word(word, value, order)
