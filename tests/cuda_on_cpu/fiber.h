// A CUDA thread as a fiber, and the OS thread that runs it; the sanitizers hear of each switch.
#pragma once
#include <sys/mman.h>
#include <ucontext.h>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef UNDER_TSAN  // only the kernels are instrumented then, so that no race is the emulation's
#include <sanitizer/tsan_interface.h>
#endif

#include "launch.h"

constexpr std::size_t kStack = 64 << 10, kGuard = 4 << 10;

struct Block;

enum class State { ready, at_barrier, at_warp, returned };

struct Fiber {
    cuda_on_cpu::Place place;
    State state;
    cuda_on_cpu::Event event;
    unsigned value, argument;
    int line;
    unsigned barriers;   // how many it has passed
    const void* loaded;  // the word that it loaded last, if it did nothing since
    Block* block;
    char *before, *after;  // tokens: of the last block in the same place, and of this one
    ucontext_t context;
    char* stack;
    void* fake_stack;
    void* tsan;
};

// One OS thread that runs fibers.
struct Processor {
    ucontext_t context;
    const void* stack;
    std::size_t stack_size;
    void* fake_stack;
    void* tsan;
    Fiber* running;
    Block* mapped;  // whose shared memory is in the section
    Word changes;   // of words, by atomics: what a thread that loads a word may wait for
    Word random;

    Word draw(Word below) {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        return (random >> 11) % below;
    }
};
inline thread_local Processor* processor;

#if defined(__SANITIZE_ADDRESS__)
inline void leaving(void** fake_stack, const void* stack, std::size_t size, void*) {
    __sanitizer_start_switch_fiber(fake_stack, stack, size);
}
inline void entered(void* fake_stack, const void** stack, std::size_t* size) {
    __sanitizer_finish_switch_fiber(fake_stack, stack, size);
}
inline void release(void*) {}
inline void acquire(void*) {}
#elif defined(UNDER_TSAN)
inline void leaving(void**, const void*, std::size_t, void* tsan) {
    __tsan_switch_to_fiber(tsan, __tsan_switch_to_fiber_no_sync);
}
inline void entered(void*, const void**, std::size_t*) {}
inline void release(void* token) { __tsan_release(token); }
inline void acquire(void* token) { __tsan_acquire(token); }
#endif

inline void resume(Fiber& fiber) {
    processor->running = &fiber;
    cuda_on_cpu::here = &fiber.place;
    leaving(&processor->fake_stack, fiber.stack, kStack, fiber.tsan);
    swapcontext(&processor->context, &fiber.context);
    entered(processor->fake_stack, nullptr, nullptr);
}

// Not inlined: a fiber may come back, for the next launch, in another OS thread.
__attribute__((noinline)) inline void leave(Fiber& fiber) {
    leaving(&fiber.fake_stack, processor->stack, processor->stack_size, processor->tsan);
    swapcontext(&fiber.context, &processor->context);
    entered(fiber.fake_stack, &processor->stack, &processor->stack_size);
}

inline void run_fiber() {
    entered(nullptr, &processor->stack, &processor->stack_size);
    Fiber& fiber = *processor->running;
    for (;;) {
        acquire(&launch.started);
        acquire(fiber.before);
        launch.kernel->run(launch.arguments.data());
        release(fiber.after);
        release(&launch.returned);
        fiber.state = State::returned;
        leave(fiber);
    }
}
