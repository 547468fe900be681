// Tests the kernels of an instruction set: the self-test, then products of random matrices of all types, in many shapes,
// against double precision. `tools/test_arm64.py` compiles it for Arm, and for this machine.
//
//   products INSTRUCTION_SET    one line per type: its name, products, largest error, a digest of the results' bits
//   products                    the words of the auxiliary vector that tell an Arm processor's features
#include "plugin.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include <sys/auxv.h>

#include "ggml.h"

namespace {

constexpr int MOST_COLUMNS = 17;  // more than any kernel multiplies at once
constexpr double BOUND = 2e-6;    // of the sum of the absolute values of the products, which are added in single precision

// A type, and where its blocks have numbers in half precision, which random bits could make infinite.
struct Tested {
    ggml_type type;
    std::vector<int> scales;
};
const Tested TESTED[] = {
    {GGML_TYPE_Q4_0, {0}},         {GGML_TYPE_Q4_1, {0, 2}},      {GGML_TYPE_Q5_0, {0}},    {GGML_TYPE_Q5_1, {0, 2}},
    {GGML_TYPE_Q8_0, {0}},         {GGML_TYPE_IQ4_NL, {0}},       {GGML_TYPE_MXFP4, {}},    {GGML_TYPE_Q2_K, {80, 82}},
    {GGML_TYPE_Q3_K, {108}},       {GGML_TYPE_Q4_K, {0, 2}},      {GGML_TYPE_Q5_K, {0, 2}}, {GGML_TYPE_Q6_K, {208}},
    {GGML_TYPE_IQ4_XS, {0}},       {GGML_TYPE_F16, {0}},          {GGML_TYPE_BF16, {}},     {GGML_TYPE_F32, {}},
};

std::mt19937 random_bits(1);

// The same on all machines, unlike the distributions of <random>: a multiple of 2^-15 from -1 to 1.
float random_number() { return float(int(random_bits() % 65537) - 32768) / 32768; }

bool is_plain(ggml_type t) { return t == GGML_TYPE_F32 || t == GGML_TYPE_F16 || t == GGML_TYPE_BF16; }

std::vector<uint8_t> random_matrix(const Tested &tested, int rows, int k) {
    const ggml_type t = tested.type;
    const size_t size = ggml_type_size(t), blocks = size_t(rows) * k / ggml_blck_size(t);
    std::vector<uint8_t> matrix(size * blocks);
    for (uint8_t &byte : matrix) byte = uint8_t(random_bits());
    for (size_t b = 0; b < blocks; b++) {
        uint8_t *block = matrix.data() + b * size;
        const float number = random_number();
        const ggml_bf16_t short_number = ggml_fp32_to_bf16(number);
        if (t == GGML_TYPE_MXFP4) block[0] = uint8_t(118 + random_bits() % 14);  // a power of two
        if (t == GGML_TYPE_F32) std::memcpy(block, &number, sizeof number);
        if (t == GGML_TYPE_BF16) std::memcpy(block, &short_number, sizeof short_number);
        for (const int at : tested.scales) {
            const ggml_fp16_t scale = ggml_fp32_to_fp16(random_number() / 8);
            std::memcpy(block + at, &scale, sizeof scale);
        }
    }
    return matrix;
}

// Activations as the kernels round them: to 8 bits, with a scale in single precision for each block.
std::vector<double> rounded(const std::vector<float> &x, int block) {
    std::vector<double> values(x.size());
    for (size_t first = 0; first < x.size(); first += block) {
        float largest = 0;
        for (int i = 0; i < block; i++) largest = std::max(largest, std::fabs(x[first + i]));
        for (int i = 0; i < block && largest > 0; i++)
            values[first + i] = double(std::nearbyint(x[first + i] * (127.f / largest))) * (largest / 127.f);
    }
    return values;
}

struct Outcome {
    int products = 0;
    double error = 0;  // largest, as a share of the sum of absolute values
    uint64_t digest = 0xcbf29ce484222325;

    void add(const std::vector<float> &y) {
        for (const float number : y) {
            uint32_t bits;
            std::memcpy(&bits, &number, sizeof bits);
            digest = (digest ^ bits) * 0x100000001b3;
        }
    }
};

// Multiply a matrix of some shape by 1 ... MOST_COLUMNS columns. Returns the error if there is one.
const char *test(const char *instruction_set, const Tested &tested, int rows, int k, Outcome &outcome) {
    const std::vector<uint8_t> matrix = random_matrix(tested, rows, k);
    std::vector<float> dense(size_t(rows) * k), x(size_t(MOST_COLUMNS) * k);
    if (tested.type == GGML_TYPE_F32) std::memcpy(dense.data(), matrix.data(), matrix.size());
    else ggml_get_type_traits(tested.type)->to_float(matrix.data(), dense.data(), dense.size());
    const float magnitude = std::ldexp(1.f, int(random_bits() % 41) - 20);
    for (float &v : x) v = random_number() * magnitude;
    std::fill(x.begin(), x.begin() + k, 0.f);  // the first column
    const std::vector<double> read =
        is_plain(tested.type) ? std::vector<double>(x.begin(), x.end()) : rounded(x, ggml_blck_size(tested.type));
    for (int n = 1; n <= MOST_COLUMNS; n++) {
        std::vector<float> y(size_t(n) * rows, 7.f);
        if (const char *why = specdec_kernels_multiply(instruction_set, tested.type, rows, k, n, matrix.data(),
                                                       x.data() + size_t(MOST_COLUMNS - n) * k, y.data()))
            return why;
        for (int j = 0; j < n; j++)
            for (int r = 0; r < rows; r++) {
                double sum = 0, size = 0;
                for (int i = 0; i < k; i++) {
                    const double product = read[size_t(MOST_COLUMNS - n + j) * k + i] * dense[size_t(r) * k + i];
                    sum += product, size += std::fabs(product);
                }
                const double apart = std::fabs(y[size_t(j) * rows + r] - sum);
                if (!(apart <= BOUND * size * std::sqrt(std::max(1., k / 256.)))) return "inexact";  // or NaN
                if (size > 0) outcome.error = std::max(outcome.error, apart / size);
            }
        outcome.add(y);
        outcome.products++;
    }
    return nullptr;
}

}  // namespace

int main(int n_arguments, char **arguments) {
    if (n_arguments < 2) {
        std::printf("%lu %lu\n", getauxval(16), getauxval(26));
        return 0;
    }
    const char *instruction_set = arguments[1], *why = specdec_kernels_install(instruction_set);
    if (!why) why = specdec_kernels_self_test();
    if (why) {
        std::printf("self-test: %s\n", why);
        return 1;
    }
    for (const Tested &tested : TESTED) {
        Outcome outcome;
        const int block = ggml_blck_size(tested.type);
        const std::vector<int> lengths =
            is_plain(tested.type) ? std::vector<int>{1, 3, 33, 100, 1030} : std::vector<int>{block, 2 * block, 5 * block};
        for (const int rows : {1, 16, 37})
            for (const int k : lengths)
                if ((why = test(instruction_set, tested, rows, k, outcome))) {
                    std::printf("%s, %d rows of %d: %s\n", ggml_type_name(tested.type), rows, k, why);
                    return 1;
                }
        std::printf("%s %d %.2g %016llx\n", ggml_type_name(tested.type), outcome.products, outcome.error,
                    (unsigned long long)outcome.digest);
    }
    return 0;
}
