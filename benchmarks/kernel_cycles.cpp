// Times a kernel's products with one tile that stays in the first-level cache, in core cycles; for kernel_cycles.py.
//
// Compile with -DKERNELS=kernels_avx2 (or another set), and link with that set's object file. Arguments: the number of a
// type and a number of columns, any number of times. Prints the clock in GHz, then for each of them the cycles that a
// block takes: those of a longer row less those of a shorter one, which leaves out what surrounds the loop over blocks.
#include "layout.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

using namespace specdec;

namespace {

constexpr int ROUNDS = 600, REPEATS = 16, MULTIPLICATIONS = 4096, LATENCY = 3;
constexpr int64_t SHORT = 512, LONG = 1536;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Seconds of a chain of multiplications, each of which takes three cycles on all x86 processors of the last ten years.
double seconds_of_chain() {
    const double begin = now();
    uint64_t x = 1;
    for (int i = 0; i < MULTIPLICATIONS; i += 8)
        __asm__ volatile("imul %0, %0\n imul %0, %0\n imul %0, %0\n imul %0, %0\n"
                         "imul %0, %0\n imul %0, %0\n imul %0, %0\n imul %0, %0" : "+r"(x));
    return now() - begin;
}

// One tile and its columns. What the numbers are does not matter, as long as none is denormal.
struct Product {
    Type type;
    int64_t k;
    uint8_t *tile;
    Columns columns;
    std::vector<float> results;
    std::vector<float *> to;
    double least = 1e9;  // seconds

    Product(const Kernels &kernels, Type type, int64_t k, int n) : type(type), k(k), results(ROWS * n) {
        const size_t bytes = rounded_up(tile_bytes(type, k)) + 2 * SUPER_BLOCK * ROWS;
        tile = (uint8_t *)std::aligned_alloc(LINE, bytes);
        std::memset(tile, 0x3c, bytes);  // 1.06 in half precision
        columns = columns_at(std::aligned_alloc(LINE, rounded_up(column_bytes(type, k) * n)), type, k, n);
        std::vector<float> x(k);
        for (int64_t i = 0; i < k; i++) x[i] = float(i % 17) - 8;
        for (int j = 0; j < n; j++) {
            kernels.quantize(type, x.data(), columns, j, 0, k / block_length(type));
            to.push_back(&results[j * ROWS]);
        }
    }

    void time(const Kernels &kernels) {
        kernels.multiply(type, k, tile, columns, to.data(), ROWS);  // the caches and predictors are warm
        const double begin = now();
        for (int i = 0; i < REPEATS; i++) kernels.multiply(type, k, tile, columns, to.data(), ROWS);
        least = std::min(least, (now() - begin) / REPEATS);
    }
};

}  // namespace

int main(int n_arguments, char **arguments) {
    const Kernels &kernels = *KERNELS();
    std::vector<std::pair<Product, Product>> pairs;
    for (int i = 1; i + 1 < n_arguments; i += 2) {
        const Type type = Type(std::atoi(arguments[i]));
        const int n = std::atoi(arguments[i + 1]);
        pairs.emplace_back(Product(kernels, type, SHORT, n), Product(kernels, type, LONG, n));
    }
    // What disturbs one run is over some rounds later: the least time of many rounds is that of an idle core.
    double chain = 1e9;
    for (int round = 0; round < ROUNDS; round++)
        for (auto &[shorter, longer] : pairs) {
            chain = std::min(chain, seconds_of_chain());
            shorter.time(kernels), longer.time(kernels);
        }
    const double hertz = MULTIPLICATIONS * LATENCY / chain;
    std::printf("%.3f\n", hertz / 1e9);
    for (auto &[shorter, longer] : pairs)
        std::printf("%.2f\n", (longer.least - shorter.least) * hertz / double((LONG - SHORT) / block_length(longer.type)));
}
