// Times a kernel's products, for kernel_cycles.py: with one tile that stays in the first-level cache, in core cycles,
// and with a matrix that does not fit into any cache, on all cores.
//
// Compile with -DKERNELS=kernels_avx2 (or another set), and link with that set's object file. Arguments: the number of
// a type and a number of columns, any number of times. Prints for each of them the cycles that a block takes (those of
// a longer row less those of a shorter one, which leaves out what surrounds the loop over blocks) and its nanoseconds
// with the matrix. Then the clock in GHz, and with AVX-512 what pipelines.py knows from measurements.
#include "layout.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

using namespace specdec;

namespace {

constexpr int ROUNDS = 600, REPEATS = 16, MULTIPLICATIONS = 4096, LATENCY = 3;
constexpr int64_t SHORT = 512, LONG = 1536, OF_MATRIX = 2048;  // weights of a row
constexpr int ROUNDS_OF_MATRIX = 6, PIECES = 8;
constexpr size_t MATRIX_BYTES = 256 << 20, MOST_PREFETCHED = 2 * SUPER_BLOCK * ROWS;

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

#define EIGHT(text) text text text text text text text text

// Print the cycles that some instructions take, repeated: the least time of many rounds.
#define PRINT_CYCLES(name, text)                                                                            \
    do {                                                                                                    \
        alignas(LINE) static uint8_t memory[LINE];                                                          \
        double least = 1e9;                                                                                 \
        for (int round = 0; round < ROUNDS; round++) {                                                      \
            const double begin = now();                                                                     \
            for (int i = 0; i < 512; i++)                                                                   \
                __asm__ volatile(EIGHT(text) ::"r"(memory) : "memory", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", \
                                 "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12");        \
            least = std::min(least, now() - begin);                                                         \
        }                                                                                                   \
        std::printf("%s: %.1f cycles\n", name, least * hertz / (512 * 8));                                  \
    } while (0)

void print_facts(double hertz) {
    PRINT_CYCLES("vpdpbusd that waits for the one before", "vpdpbusd %%zmm0, %%zmm1, %%zmm2\n");
    PRINT_CYCLES("8 independent vpdpbusd",
                 "vpdpbusd %%zmm0, %%zmm1, %%zmm2\n vpdpbusd %%zmm0, %%zmm1, %%zmm3\n"
                 "vpdpbusd %%zmm0, %%zmm1, %%zmm4\n vpdpbusd %%zmm0, %%zmm1, %%zmm5\n"
                 "vpdpbusd %%zmm0, %%zmm1, %%zmm6\n vpdpbusd %%zmm0, %%zmm1, %%zmm7\n"
                 "vpdpbusd %%zmm0, %%zmm1, %%zmm8\n vpdpbusd %%zmm0, %%zmm1, %%zmm9\n");
    PRINT_CYCLES("4 broadcast loads and 8 additions",
                 "vpbroadcastd (%0), %%zmm2\n vpaddd %%zmm0, %%zmm1, %%zmm3\n vpaddd %%zmm0, %%zmm1, %%zmm4\n"
                 "vpbroadcastd (%0), %%zmm5\n vpaddd %%zmm0, %%zmm1, %%zmm6\n vpaddd %%zmm0, %%zmm1, %%zmm7\n"
                 "vpbroadcastd (%0), %%zmm8\n vpaddd %%zmm0, %%zmm1, %%zmm9\n vpaddd %%zmm0, %%zmm1, %%zmm10\n"
                 "vpbroadcastd (%0), %%zmm11\n vpaddd %%zmm0, %%zmm1, %%zmm12\n vpaddd %%zmm0, %%zmm1, %%zmm3\n");
    PRINT_CYCLES("an addition to a total of 512 bits in memory",
                 "vmovaps (%0), %%zmm2\n vfmadd231ps %%zmm0, %%zmm1, %%zmm2\n vmovaps %%zmm2, (%0)\n");
    PRINT_CYCLES("an addition to a total of 256 bits in memory",
                 "vmovaps (%0), %%ymm2\n vfmadd231ps %%ymm0, %%ymm1, %%ymm2\n vmovaps %%ymm2, (%0)\n");
}

// Columns of activations. What the numbers are does not matter, as long as none is denormal.
Columns columns_of(const Kernels &kernels, Type type, int64_t k, int n) {
    const Columns columns = columns_at(std::aligned_alloc(LINE, rounded_up(column_bytes(type, k) * n)), type, k, n);
    std::vector<float> x(k);
    for (int64_t i = 0; i < k; i++) x[i] = float(i % 17) - 8;
    for (int j = 0; j < n; j++) kernels.quantize(type, x.data(), columns, j, 0, k / block_length(type));
    return columns;
}

// Packed weights; what is prefetched may lie behind them.
uint8_t *weights(size_t bytes) {
    auto *memory = (uint8_t *)std::aligned_alloc(LINE, rounded_up(bytes) + MOST_PREFETCHED);
    std::memset(memory, 0x3c, rounded_up(bytes) + MOST_PREFETCHED);  // 1.06 in half precision
    return memory;
}

struct Results {
    std::vector<float> values;
    std::vector<float *> columns;

    explicit Results(int n) : values(ROWS * n) {
        for (int j = 0; j < n; j++) columns.push_back(&values[j * ROWS]);
    }
};

// One tile that stays in the cache.
struct Product {
    Type type;
    int64_t k;
    uint8_t *tile;
    Columns columns;
    Results results;
    double least = 1e9;  // seconds

    Product(const Kernels &kernels, Type type, int64_t k, int n)
        : type(type), k(k), tile(weights(tile_bytes(type, k))), columns(columns_of(kernels, type, k, n)), results(n) {}

    void time(const Kernels &kernels) {
        const auto multiply = [&] { kernels.multiply(type, k, tile, columns, results.columns.data(), ROWS); };
        multiply();  // the caches and predictors are warm
        const double begin = now();
        for (int i = 0; i < REPEATS; i++) multiply();
        least = std::min(least, (now() - begin) / REPEATS);
    }
};

// Seconds of a block of a piece of a matrix in memory, multiplied by all cores.
double seconds_of_matrix(const Kernels &kernels, Type type, const uint8_t *matrix, int piece, const Columns &columns) {
    const int64_t bytes = tile_bytes(type, OF_MATRIX), tiles = MATRIX_BYTES / bytes;
    const int64_t last = tiles * (piece + 1) / PIECES, first = tiles * piece / PIECES;
    const int n_threads = int(std::thread::hardware_concurrency());
    std::atomic<int> ready{0};
    std::atomic<int64_t> next{first};  // a thread that is interrupted leaves tiles to the others
    double begin = 0;
    const auto work = [&] {
        Results results(columns.n);
        if (++ready == n_threads) begin = now();
        while (ready < n_threads) {}
        for (int64_t i; (i = next++) < last;)
            kernels.multiply(type, OF_MATRIX, matrix + i * bytes, columns, results.columns.data(), ROWS);
    };
    std::vector<std::thread> threads;
    for (int t = 1; t < n_threads; t++) threads.emplace_back(work);
    work();
    for (std::thread &thread : threads) thread.join();
    return (now() - begin) / double((last - first) * (OF_MATRIX / block_length(type)));
}

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
    uint8_t *matrix = weights(MATRIX_BYTES);
    std::vector<double> seconds(pairs.size(), 1e9);
    std::vector<Columns> columns;
    for (const auto &[p, longer] : pairs) columns.push_back(columns_of(kernels, p.type, OF_MATRIX, p.columns.n));
    for (int round = 0; round < ROUNDS_OF_MATRIX * PIECES; round++)
        for (size_t i = 0; i < pairs.size(); i++) {
            const int piece = int((round + i) % PIECES);  // another one than before, which the cache may hold
            const double took = seconds_of_matrix(kernels, pairs[i].first.type, matrix, piece, columns[i]);
            seconds[i] = std::min(seconds[i], took);
        }
    const double hertz = MULTIPLICATIONS * LATENCY / chain;
    for (size_t i = 0; i < pairs.size(); i++) {
        const auto &[shorter, longer] = pairs[i];
        const int64_t blocks = (LONG - SHORT) / block_length(longer.type);
        std::printf("%.2f %.3f\n", (longer.least - shorter.least) * hertz / double(blocks), seconds[i] * 1e9);
    }
    std::printf("%s: measured at %.2f GHz\n", kernels.name, hertz / 1e9);
    if (std::strstr(kernels.name, "avx512")) print_facts(hertz);
}
