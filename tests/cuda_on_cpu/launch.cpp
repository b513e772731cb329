// Runs kernels on a CPU: a server that reads launches from stdin and writes results to stdout.
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

#include "launch.h"

namespace {
using cuda_on_cpu::fail;
using cuda_on_cpu::Kernel;

constexpr char kBefore = 0x3C;  // what lies in front of an array that is not aligned

struct Array {
    char* memory;
    Word lead, size, bias;
    bool writable;
    std::vector<char> sent;
    char* data() const { return memory + lead; }
};

bool transfer(int descriptor, char* data, std::size_t size, bool out) {
    while (size) {
        ssize_t done = out ? write(descriptor, data, size) : read(descriptor, data, size);
        if (done <= 0) return false;
        data += done;
        size -= static_cast<std::size_t>(done);
    }
    return true;
}

struct Request {
    std::vector<char> bytes;
    std::size_t at = 0;

    Word word() {
        Word value;
        memcpy(&value, span(8), 8);
        return value;
    }
    const char* span(std::size_t size) {
        if (size > bytes.size() - at) fail("a request is cut off");
        at += size;
        return bytes.data() + at - size;
    }
    std::vector<char> text() {
        Word size = word();
        const char* start = span(size);
        return {start, start + size};
    }
};

Array read_array(Request& request) {
    Array array = {};
    array.lead = request.word();
    array.bias = request.word();
    array.writable = request.word();
    array.sent = request.text();
    array.size = array.sent.size();
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, array.lead + array.size)) fail("no memory for an array");
    array.memory = static_cast<char*>(memory);
    memset(array.memory, kBefore, array.lead);
    return array;
}

void read_links(Request& request, std::vector<Array>& arrays, Array& array) {
    for (Word left = request.word(); left; --left) {
        Word offset = request.word();
        const Array& to = arrays.at(request.word());
        Word address = reinterpret_cast<Word>(to.data()) - to.bias;
        memcpy(array.sent.data() + offset, &address, 8);
    }
    if (array.size) memcpy(array.data(), array.sent.data(), array.size);
    for (Word left = request.word(); left; --left) {
        Word start = request.word(), stop = request.word();
#ifdef __SANITIZE_ADDRESS__
        ASAN_POISON_MEMORY_REGION(array.data() + start, stop - start);
#else
        (void)start, (void)stop;
#endif
    }
}

void check_unchanged(const Array& array, std::size_t number) {
    for (Word at = 0; at < array.lead; ++at)
        if (array.memory[at] != kBefore) fail("array %zu: written in front of it", number);
    if (array.writable) return;
    for (Word at = 0; at < array.size; ++at)
        if (array.data()[at] != array.sent[at])
            fail("array %zu is only read, but byte %llu was changed", number, at);
}

void serve(Request& request, int out) {
    std::vector<char> name = request.text();
    const Kernel* kernel = Kernel::first;
    while (kernel && (strlen(kernel->name) != name.size() ||
                      memcmp(kernel->name, name.data(), name.size())))
        kernel = kernel->next;
    if (!kernel) fail("no such kernel: %.*s", static_cast<int>(name.size()), name.data());
    launch.kernel = kernel;
    launch.grid = static_cast<unsigned>(request.word());
    launch.threads = static_cast<unsigned>(request.word());
    launch.resident = static_cast<unsigned>(request.word());
    launch.seed = request.word();
    launch.stall = request.word();
    launch.order.resize(request.word());
    for (unsigned& block : launch.order) block = static_cast<unsigned>(request.word());
    launch.steps = 0;
    launch.spins = launch.empty_ballots = 0;

    std::vector<Array> arrays(request.word());
    for (Array& array : arrays) array = read_array(request);
    for (Array& array : arrays) read_links(request, arrays, array);
    std::string signature;
    launch.arguments.clear();
    for (Word left = request.word(); left; --left) {
        signature += static_cast<char>(request.word());
        Word value = request.word();
        if (signature.back() == 'p' && value != ~Word(0)) {
            const Array& array = arrays.at(value);
            value = reinterpret_cast<Word>(array.data()) - array.bias;
        } else if (signature.back() == 'p') {
            value = 0;
        }
        launch.arguments.push_back(value);
    }
    if (signature != kernel->signature)
        fail("%s takes %s, not %s", kernel->name, kernel->signature, signature.c_str());

    launch.write_at = request.word();
    if (launch.write_at != ~Word(0)) {
        Array& array = arrays.at(request.word());
        launch.written = array.data() + request.word();
        launch.write = request.text();
        memcpy(array.sent.data() + (launch.written - array.data()), launch.write.data(),
               launch.write.size());
    }

    run_blocks();

    std::vector<char> answer(32);
    for (std::size_t number = 0; number < arrays.size(); ++number) {
        Array& array = arrays[number];
#ifdef __SANITIZE_ADDRESS__
        ASAN_UNPOISON_MEMORY_REGION(array.data(), array.size);
#endif
        check_unchanged(array, number);
        if (array.writable) answer.insert(answer.end(), array.data(), array.data() + array.size);
        free(array.memory);
    }
    const Word head[] = {answer.size() - 8, launch.spins, launch.empty_ballots, launch.steps};
    memcpy(answer.data(), head, sizeof head);
    if (!transfer(out, answer.data(), answer.size(), true)) _exit(4);
}
}  // namespace

int main() {
    for (Word size; transfer(0, reinterpret_cast<char*>(&size), 8, false);) {
        Request request;
        request.bytes.resize(size);
        if (!transfer(0, request.bytes.data(), size, false)) return 4;
        serve(request, 1);
    }
    _exit(0);
}
