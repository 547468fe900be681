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
        std::vector<std::thread> threads;
        const auto begin = std::chrono::steady_clock::now();
        for (size_t t = 0; t < n_threads; t++)
            threads.emplace_back([&, t] {
                uint64_t sum = 0;
                for (size_t i = t * n / n_threads; i < (t + 1) * n / n_threads; i++) sum += memory[i];
                total += sum;  // so that the compiler does not leave the loop out
            });
        for (std::thread &thread : threads) thread.join();
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
        if (total == n * (n - 1) / 2) rates.push_back(double(n * sizeof(uint64_t)) / took.count() / 1e9);
    }
    std::sort(rates.begin(), rates.end());
    std::printf("%.2f\n", rates.at(rates.size() / 2));
}
