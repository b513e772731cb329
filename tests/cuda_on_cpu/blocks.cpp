// Fibers in blocks: barriers, warp operations, and which thread goes on.
//
// Under ASan one OS thread runs all fibers, several blocks at a time where asked for; the same
// seed draws the same. Under TSan each block that runs has an OS thread to itself.
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "fiber.h"

Launch launch;

extern "C" char __start_shared_memory[] __attribute__((weak));
extern "C" char __stop_shared_memory[] __attribute__((weak));

using cuda_on_cpu::fail;

namespace {
constexpr unsigned kWarp = 32;
constexpr char kPoison = '\xA5';  // what shared memory holds before a block writes it

#ifndef UNDER_TSAN
// The section has redzones in it, hence the plain loop over raw words.
__attribute__((no_sanitize("address", "undefined"))) void exchange_shared(char* out, char* in) {
    std::size_t size = __stop_shared_memory - __start_shared_memory;
    for (std::size_t at = 0; at + 8 <= size; at += 8) {
        volatile Word* here = reinterpret_cast<volatile Word*>(__start_shared_memory + at);
        if (out) *reinterpret_cast<volatile Word*>(out + at) = *here;
        *here = *reinterpret_cast<volatile Word*>(in + at);
    }
}
#endif
}  // namespace

// A place for a block to run in; blocks use it one after another.
struct Block {
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::vector<Fiber*> ready;
    std::vector<unsigned> lanes_waiting;
    std::vector<char> shared;
    unsigned index = 0, threads = 0, live = 0, waiting = 0;
    unsigned rarity = 0;
    bool stalled = false;
    Word quiet = 0, quiet_since = 0;  // loads in a row, while no word was changed
    unsigned blocks = 0;  // how many ran here
    char barrier_tokens[2] = {}, tokens[2] = {};

    void start(unsigned block) {
        index = block;
        threads = live = launch.threads;
        waiting = 0;
        quiet = 0;
        stalled = false;
        rarity = 3 * static_cast<unsigned>(processor->draw(4));
        lanes_waiting.assign((threads + kWarp - 1) / kWarp, 0);
        shared.assign(__stop_shared_memory - __start_shared_memory, kPoison);
        if (processor->mapped == this) processor->mapped = nullptr;
        while (fibers.size() < threads) add_fiber();
        ready.clear();
        ++blocks;
        for (unsigned t = 0; t < threads; ++t) {
            Fiber& fiber = *fibers[t];
            fiber.place = {{t, 0, 0}, {block, 0, 0}, {threads, 1, 1}, {launch.grid, 1, 1}};
            fiber.state = State::ready;
            fiber.loaded = nullptr;
            fiber.barriers = 0;
            fiber.before = &tokens[(blocks - 1) % 2];
            fiber.after = &tokens[blocks % 2];
            ready.push_back(&fiber);
        }
    }

    void add_fiber() {
        fibers.push_back(std::make_unique<Fiber>());
        Fiber& fiber = *fibers.back();
        fiber.block = this;
        void* memory = mmap(nullptr, kGuard + kStack, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED || mprotect(memory, kGuard, PROT_NONE)) fail("no stack to be had");
        fiber.stack = static_cast<char*>(memory) + kGuard;
#ifdef UNDER_TSAN
        fiber.tsan = __tsan_create_fiber(0);
#endif
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack;
        fiber.context.uc_stack.ss_size = kStack;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, run_fiber, 0);
    }

    // Whether all of its threads have looked in vain for what others should have done.
    bool idle() const {
        return quiet_since == processor->changes && quiet > 20 * ready.size() + 64;
    }

    // Let one thread go on to its next barrier, warp operation or atomic.
    void step() {
#ifndef UNDER_TSAN
        if (processor->mapped != this) {
            exchange_shared(processor->mapped ? processor->mapped->shared.data() : nullptr,
                            shared.data());
            processor->mapped = this;
        }
#endif
        if (launch.steps++ == launch.write_at)
            memcpy(launch.written, launch.write.data(), launch.write.size());
        Word way = launch.seed % 4;  // upwards, downwards, or as it is drawn
        std::size_t at = way == 0   ? 0
                         : way == 1 ? ready.size() - 1
                                    : processor->draw(ready.size());
        Fiber& fiber = *ready[at];
        ready.erase(ready.begin() + at);
        resume(fiber);
        if (fiber.state == State::ready) {
            ready.insert(way == 1 ? ready.begin() : ready.end(), &fiber);
            return;
        }
        quiet = 0;
        if (fiber.state == State::returned) {
            --live;
        } else if (fiber.state == State::at_barrier) {
            if (++waiting == threads) release_barrier();
        } else if (++lanes_waiting[fiber.place.thread.x / kWarp] == kWarp) {
            release_warp(fiber.place.thread.x / kWarp);
        }
        if (ready.empty() && live) fail("divergence: %s", situation().c_str());
    }

    void release_barrier() {
        unsigned count = 0;
        for (unsigned t = 0; t < threads; ++t) {
            if (fibers[t]->line != fibers[0]->line || fibers[t]->event != fibers[0]->event)
                fail("divergence: %s", situation().c_str());
            count += fibers[t]->value;
        }
        waiting = 0;
        for (unsigned t = 0; t < threads; ++t) {
            fibers[t]->value = count;
            make_ready(*fibers[t]);
        }
    }

    void release_warp(unsigned warp) {
        Fiber* lanes[kWarp];
        unsigned values[kWarp], votes = 0;
        for (unsigned lane = 0; lane < kWarp; ++lane) {
            lanes[lane] = fibers[warp * kWarp + lane].get();
            values[lane] = lanes[lane]->value;
            votes |= (values[lane] ? 1u : 0u) << lane;
            if (lanes[lane]->line != lanes[0]->line || lanes[lane]->event != lanes[0]->event)
                fail("divergence: %s", situation().c_str());
        }
        if (lanes[0]->event == cuda_on_cpu::ballot && !votes) ++launch.empty_ballots;
        for (unsigned lane = 0; lane < kWarp; ++lane) {
            unsigned argument = lanes[lane]->argument, from = lane;
            if (lanes[lane]->event == cuda_on_cpu::shuffle_up && argument <= lane)
                from = lane - argument;
            if (lanes[lane]->event == cuda_on_cpu::shuffle_xor && (lane ^ argument) < kWarp)
                from = lane ^ argument;
            lanes[lane]->value =
                lanes[lane]->event == cuda_on_cpu::ballot ? votes : values[from];
            make_ready(*lanes[lane]);
        }
        lanes_waiting[warp] = 0;
    }

    void make_ready(Fiber& fiber) {
        fiber.state = State::ready;
        ready.push_back(&fiber);
    }

    // How many threads are where, for a message.
    std::string situation() const {
        static const char* const names[] = {"__syncthreads", "__syncthreads_count", "__shfl_up_sync",
                                            "__shfl_xor_sync", "__ballot_sync"};
        std::vector<std::pair<std::string, unsigned>> counts;
        for (unsigned t = 0; t < threads; ++t) {
            const Fiber& fiber = *fibers[t];
            std::string what = "run";
            if (fiber.state == State::returned) what = "have returned";
            else if (fiber.state != State::ready)
                what = std::string("wait at ") + names[fiber.event] + " in line " +
                       std::to_string(fiber.line);
            else if (fiber.loaded) what = "load a word again and again";
            auto found = std::find_if(counts.begin(), counts.end(),
                                      [&](const auto& count) { return count.first == what; });
            if (found == counts.end()) counts.emplace_back(what, 1);
            else ++found->second;
        }
        std::string text = "in block " + std::to_string(index);
        for (std::size_t at = 0; at < counts.size(); ++at)
            text += (at ? ", " : ": ") + std::to_string(counts[at].second) + " threads " +
                    counts[at].first;
        return text;
    }
};

namespace {
std::vector<std::unique_ptr<Block>> slots;

void prepare_slots() {
    while (slots.size() < launch.resident) slots.push_back(std::make_unique<Block>());
}

void enter_processor(Processor& own, Word salt) {
    own = {};
    own.random = (launch.seed + 1) * 0x9E3779B97F4A7C15ull + salt * 0xD1B54A32D192ED03ull + 1;
#ifdef UNDER_TSAN
    own.tsan = __tsan_get_current_fiber();
#endif
    processor = &own;
}

#ifndef UNDER_TSAN
// Which block goes on: rarer ones less often, a stalled one only when all others wait in vain.
Block* choose() {
    std::vector<Block*> able;
    Block *stalled = nullptr, *waiting = nullptr;
    for (std::size_t s = 0; s < launch.resident; ++s) {
        Block* slot = slots[s].get();
        if (!slot->live) continue;
        if (slot->idle()) waiting = slot;
        else if (slot->stalled) stalled = slot;
        else able.push_back(slot);
    }
    if (able.empty() && !stalled) fail("no thread gets on: %s", waiting->situation().c_str());
    if (able.empty()) return stalled;
    for (;;) {
        Block* block = able[processor->draw(able.size())];
        if (processor->draw(Word(1) << block->rarity) == 0) return block;
    }
}

#endif
}  // namespace

#ifdef UNDER_TSAN
void run_blocks() {
    prepare_slots();
    release(&launch.started);
    std::vector<std::thread> threads;
    for (std::size_t s = 0; s < launch.resident; ++s) {
        threads.emplace_back([s] {
            Processor own;
            enter_processor(own, s);
            release(&launch.started);
            for (std::size_t at = s; at < launch.order.size(); at += launch.resident) {
                slots[s]->start(launch.order[at]);
                while (slots[s]->live) slots[s]->step();
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    acquire(&launch.returned);
}
#else
void run_blocks() {
    Processor own;
    enter_processor(own, 0);
    prepare_slots();
    for (std::size_t taken = 0;;) {
        bool alive = false;
        for (std::size_t s = 0; s < launch.resident; ++s) {
            if (!slots[s]->live && taken < launch.order.size())
                slots[s]->start(launch.order[taken++]);
            alive = alive || slots[s]->live;
        }
        if (!alive) return;
        Block* block = choose();
        bool stalled = block->stalled;
        Word burst = stalled ? 1 : Word(1) << processor->draw(11);
        for (; burst && block->live && !block->idle() && block->stalled == stalled; --burst)
            block->step();
    }
}
#endif

namespace cuda_on_cpu {
__thread const Place* here;
const Kernel* Kernel::first;

void fail(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs("cuda_on_cpu: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    fflush(stderr);
    _exit(3);
}

static unsigned wait_at(Event event, unsigned value, int line) {
    Fiber& fiber = *processor->running;
    char* token = &fiber.block->barrier_tokens[fiber.barriers++ % 2];
    fiber.state = State::at_barrier;
    fiber.event = event;
    fiber.value = value;
    fiber.line = line;
    fiber.loaded = nullptr;
    release(token);
    leave(fiber);
    acquire(token);
    return fiber.value;
}

void wait_for_block(int line) { wait_at(barrier, 0, line); }

unsigned count_in_block(bool predicate, int line) {
    return wait_at(counting_barrier, predicate, line);
}

unsigned wait_for_warp(Event event, unsigned mask, unsigned value, unsigned argument, int line) {
    Fiber& fiber = *processor->running;
    if (mask != 0xffffffffu) fail("line %d: mask %#x is not that of a whole warp", line, mask);
    if (fiber.block->threads % kWarp && fiber.place.thread.x / kWarp == fiber.block->threads / kWarp)
        fail("line %d: the last warp of %u threads is not whole", line, fiber.block->threads);
    fiber.state = State::at_warp;
    fiber.event = event;
    fiber.value = value;
    fiber.argument = argument;
    fiber.line = line;
    fiber.loaded = nullptr;
    leave(fiber);
    return fiber.value;
}

void about_to_load(const void* word) {
    Fiber& fiber = *processor->running;
    if (fiber.loaded == word) ++launch.spins;
    fiber.loaded = word;
    Block& block = *fiber.block;
    if (block.quiet_since != processor->changes) block.quiet = 0;
    block.quiet_since = processor->changes;
    ++block.quiet;
    leave(fiber);
#ifdef UNDER_TSAN
    if (processor->draw(8) == 0) usleep(static_cast<unsigned>(processor->draw(50)));
    else std::this_thread::yield();
#endif
}

void about_to_change() {
    Fiber& fiber = *processor->running;
    fiber.loaded = nullptr;
    leave(fiber);
    ++processor->changes;
    if (launch.stall) {
        launch.stall = false;
        fiber.block->stalled = true;
    }
#ifdef UNDER_TSAN
    if (processor->draw(4) == 0) usleep(static_cast<unsigned>(processor->draw(200)));
#endif
}

}  // namespace cuda_on_cpu
