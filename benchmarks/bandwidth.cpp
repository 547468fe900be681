// Reads memory with all threads, and does nothing else with it, for bandwidth.py.
//
// Arguments: number of bytes, threads and rounds. Prints the median gigabytes per second.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

constexpr int LANES = 16;

int main(int, char **arguments) {
    const size_t bytes = std::strtoull(arguments[1], nullptr, 10), n_threads = std::strtoull(arguments[2], nullptr, 10);
    const size_t page = 2 << 20, n = bytes / page * page / sizeof(uint64_t);
    auto *memory = (uint64_t *)std::aligned_alloc(page, n * sizeof(uint64_t));
#ifdef MADV_HUGEPAGE
    madvise(memory, n * sizeof(uint64_t), MADV_HUGEPAGE);  // as the kernels do for weights
#endif
    for (size_t i = 0; i < n; i++) memory[i] = i;
    std::vector<double> rates;
    for (int round = 0; round < std::atoi(arguments[3]); round++) {
        std::atomic<uint64_t> total{0};
        std::atomic<size_t> ready{0};
        std::chrono::steady_clock::time_point begin;
        const auto read = [&, n](size_t thread) {
            if (++ready == n_threads) begin = std::chrono::steady_clock::now();
            while (ready < n_threads) {}
            uint64_t sums[LANES] = {};  // several, so that no addition waits for the one before
            const uint64_t *end = memory + (thread + 1) * n / n_threads / LANES * LANES;
            for (const uint64_t *p = memory + thread * n / n_threads / LANES * LANES; p < end; p += LANES)
                for (int i = 0; i < LANES; i++) sums[i] += p[i];
            for (const uint64_t sum : sums) total += sum;  // used, so that the compiler does not leave the loop out
        };
        std::vector<std::thread> threads;
        for (size_t t = 1; t < n_threads; t++) threads.emplace_back(read, t);
        read(0);
        for (std::thread &thread : threads) thread.join();
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
        if (total == n * (n - 1) / 2) rates.push_back(double(n * sizeof(uint64_t)) / took.count() / 1e9);
    }
    std::sort(rates.begin(), rates.end());
    std::printf("%.2f\n", rates.at(rates.size() / 2));
}
