// One launch, as launch.cpp reads it and blocks.cpp runs it.
#pragma once
#include <atomic>
#include <cstddef>
#include <vector>

#include "cuda_on_cpu.h"

using Word = unsigned long long;

struct Launch {
    const cuda_on_cpu::Kernel* kernel;
    std::vector<Word> arguments;
    unsigned grid, threads, resident;
    Word seed;
    bool stall;  // the block that comes first to an atomic goes on only when all others wait
    std::vector<unsigned> order;
    // A host's write to `written`, which comes when threads were let go on `write_at` times.
    Word write_at;
    std::atomic<Word> steps;
    char* written;
    std::vector<char> write;
    // What the kernel did: loads of a word loaded just before, ballots that nobody voted for.
    std::atomic<Word> spins, empty_ballots;
    char started, returned;  // tokens: what came before the launch, what the threads did
};
extern Launch launch;

// Run all blocks of the launch; comes back when every thread has returned.
void run_blocks();
