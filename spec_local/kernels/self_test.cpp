// Self-test: checks the kernels on this machine before they are used. It runs in a child process, since a kernel that
// does not work may also crash.
#include "operations.h"
#include "owned.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

using namespace specdec;

namespace {

constexpr int ROWS_TESTED = 37;  // not a multiple of a tile
constexpr int LENGTH = 768;
constexpr int COLUMNS_TESTED = 17;  // more than any kernel multiplies at once

// Multiply a matrix by columns through a ggml graph, as llama.cpp does, with the matrix in a buffer of the given type.
std::vector<float> through_graph(ggml_backend_buffer_type_t buffer_type, ggml_type type, const std::vector<uint8_t> &matrix,
                                 const std::vector<float> &x, int n) {
    const ggml_init_params params = {ggml_tensor_overhead() * 8 + ggml_graph_overhead(), nullptr, true};
    Owned<ggml_context> weights{ggml_init(params)}, context{ggml_init(params)};
    ggml_tensor *w = ggml_new_tensor_2d(weights.get(), type, LENGTH, ROWS_TESTED);
    Owned<ggml_backend_buffer> weights_buffer{ggml_backend_alloc_ctx_tensors_from_buft(weights.get(), buffer_type)};
    ggml_backend_buffer_set_usage(weights_buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    ggml_backend_tensor_set(w, matrix.data(), 0, matrix.size());
    ggml_tensor *columns = ggml_new_tensor_2d(context.get(), GGML_TYPE_F32, LENGTH, n);
    ggml_tensor *product = ggml_mul_mat(context.get(), w, columns);
    ggml_cgraph *graph = ggml_new_graph(context.get());
    ggml_build_forward_expand(graph, product);
    Owned<ggml_backend_buffer> buffer{
        ggml_backend_alloc_ctx_tensors_from_buft(context.get(), ggml_backend_cpu_buffer_type())};
    ggml_backend_tensor_set(columns, x.data(), 0, ggml_nbytes(columns));
    ggml_backend_tensor_memset(product, 0xff, 0, ggml_nbytes(product));  // NaN: rows that are not computed are seen
    Owned<ggml_backend> backend{ggml_backend_cpu_init()};
    ggml_backend_cpu_set_n_threads(backend.get(), 2);
    std::vector<float> y(size_t(ROWS_TESTED) * n);
    if (ggml_backend_graph_compute(backend.get(), graph) != GGML_STATUS_SUCCESS) return {};
    ggml_backend_tensor_get(product, y.data(), 0, ggml_nbytes(product));
    return y;
}

constexpr int EXPERTS = 5, USED = 3, TOKENS = 7;

// The products of a mixture of experts as llama.cpp would compute them, [TOKENS][USED][ROWS_TESTED]. Each token has an
// input for all of its experts, or one for each.
std::vector<float> through_experts(ggml_type type, const std::vector<uint8_t> &matrices, const std::vector<float> &x,
                                   int n_inputs, const std::vector<int32_t> &experts) {
    const ggml_init_params params = {ggml_tensor_overhead() * 8 + ggml_graph_overhead(), nullptr, true};
    Owned<ggml_context> weights{ggml_init(params)}, context{ggml_init(params)};
    ggml_tensor *w = ggml_new_tensor_3d(weights.get(), type, LENGTH, ROWS_TESTED, EXPERTS);
    Owned<ggml_backend_buffer> weights_buffer{ggml_backend_alloc_ctx_tensors_from_buft(weights.get(), packed_buffer_type())};
    ggml_backend_buffer_set_usage(weights_buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    ggml_backend_tensor_set(w, matrices.data(), 0, matrices.size());
    ggml_tensor *inputs = ggml_new_tensor_3d(context.get(), GGML_TYPE_F32, LENGTH, n_inputs, TOKENS);
    ggml_tensor *ids = ggml_new_tensor_2d(context.get(), GGML_TYPE_I32, USED, TOKENS);
    ggml_tensor *product = ggml_mul_mat_id(context.get(), w, inputs, ids);
    ggml_cgraph *graph = ggml_new_graph(context.get());
    ggml_build_forward_expand(graph, product);
    Owned<ggml_backend_buffer> buffer{
        ggml_backend_alloc_ctx_tensors_from_buft(context.get(), ggml_backend_cpu_buffer_type())};
    ggml_backend_tensor_set(inputs, x.data(), 0, ggml_nbytes(inputs));
    ggml_backend_tensor_set(ids, experts.data(), 0, ggml_nbytes(ids));
    Owned<ggml_backend> backend{ggml_backend_cpu_init()};
    ggml_backend_cpu_set_n_threads(backend.get(), 2);
    std::vector<float> y(TOKENS * USED * ROWS_TESTED);
    if (ggml_backend_graph_compute(backend.get(), graph) != GGML_STATUS_SUCCESS) return {};
    ggml_backend_tensor_get(product, y.data(), 0, ggml_nbytes(product));
    return y;
}

// Compare a mixture of experts with products by each expert's matrix alone.
const char *check_experts(ggml_type type) {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    const size_t matrix_bytes = ggml_row_size(type, LENGTH) * ROWS_TESTED;
    std::vector<float> dense(EXPERTS * ROWS_TESTED * LENGTH), x(TOKENS * USED * LENGTH), alone(ROWS_TESTED);
    std::vector<uint8_t> matrices(EXPERTS * matrix_bytes);
    for (float &v : dense) v = normal(random);
    for (float &v : x) v = normal(random);
    ggml_quantize_chunk(type, dense.data(), matrices.data(), 0, EXPERTS * ROWS_TESTED, LENGTH, nullptr);
    // Expert 0 has most tokens, which need several passes, and expert 3 none.
    const std::vector<int32_t> experts = {0, 1, 2, 2, 0, 4, 0, 4, 1, 1, 2, 0, 0, 2, 4, 4, 0, 1, 2, 1, 0};
    for (const int n_inputs : {1, USED}) {
        const int64_t read = specdec_kernels_experts_read();
        const std::vector<float> together = through_experts(type, matrices, x, n_inputs, experts);
        if (together.empty()) return "experts: they could not be computed";
        if (specdec_kernels_experts_read() - read != EXPERTS - 1) return "experts: each is not read once";
        for (int i = 0; i < TOKENS * USED; i++) {
            const float *input = x.data() + (n_inputs == 1 ? i / USED : i) * LENGTH;
            specdec_kernels_multiply(kernels()->name, type, ROWS_TESTED, LENGTH, 1, matrices.data() + experts[i] * matrix_bytes,
                                     input, alone.data());
            if (std::memcmp(alone.data(), together.data() + i * ROWS_TESTED, alone.size() * sizeof(float)) != 0)
                return "experts: a product differs from that of the expert alone";
        }
    }
    return nullptr;
}

constexpr int KEYS = 230, QUERY_HEADS = 4, KEY_HEADS = 2, QUERIES = 5;

// One variant of attention, and its operands. Queries are [QUERIES][QUERY_HEADS][head], keys and values
// [KEY_HEADS][KEYS][head], masks [QUERIES][KEYS].
struct AttentionCase {
    const char *name;
    ggml_type type;  // of keys and values
    int head;
    float soft_cap;
    bool has_sinks;
    std::vector<float> queries = {}, keys = {}, values = {}, masks = {};
    float sinks[QUERY_HEADS] = {1.f, -2.f, 0.5f, 3.f};
};
constexpr float SCALE = 0.125f;

// Fill in the operands, rounded to the types in which they are stored.
void randomize(AttentionCase &c) {
    std::mt19937 random(2);
    std::normal_distribution<float> normal;
    c.queries.resize(QUERIES * QUERY_HEADS * c.head);
    for (float &x : c.queries) x = 2 * normal(random);
    for (std::vector<float> *cached : {&c.keys, &c.values}) {
        cached->resize(KEY_HEADS * KEYS * c.head);
        for (float &x : *cached) x = normal(random);
        std::vector<uint8_t> stored(ggml_row_size(c.type, c.head) * KEY_HEADS * KEYS);
        ggml_quantize_chunk(c.type, cached->data(), stored.data(), 0, KEY_HEADS * KEYS, c.head, nullptr);
        ggml_get_type_traits(c.type)->to_float(stored.data(), cached->data(), cached->size());
    }
    // Each block of keys is masked for some of the queries, and the last keys more or less for all.
    c.masks.resize(QUERIES * KEYS);
    for (int j = 0; j < QUERIES; j++)
        for (int i = 0; i < KEYS; i++) {
            const int block = i / KEY_BLOCK;
            const bool hidden = (block < 3 && (j + block) % 3 == 0) || i > KEYS - 2 * QUERIES + j;
            c.masks[j * KEYS + i] = hidden ? -INFINITY : 0.f;
        }
}

// The attention of the first n queries as llama.cpp would compute it, [n][QUERY_HEADS][head].
std::vector<float> attention(const AttentionCase &c, int n) {
    const ggml_init_params params = {ggml_tensor_overhead() * 16 + ggml_graph_overhead(), nullptr, true};
    Owned<ggml_context> context{ggml_init(params)};
    ggml_tensor *queries = ggml_new_tensor_3d(context.get(), GGML_TYPE_F32, c.head, QUERY_HEADS, n);
    ggml_tensor *keys = ggml_new_tensor_3d(context.get(), c.type, c.head, KEYS, KEY_HEADS);
    ggml_tensor *values = ggml_new_tensor_3d(context.get(), c.type, c.head, KEYS, KEY_HEADS);
    ggml_tensor *masks = ggml_new_tensor_2d(context.get(), GGML_TYPE_F16, KEYS, n);
    ggml_tensor *sinks = ggml_new_tensor_1d(context.get(), GGML_TYPE_F32, QUERY_HEADS);
    ggml_tensor *result = ggml_flash_attn_ext(context.get(), ggml_permute(context.get(), queries, 0, 2, 1, 3), keys, values,
                                              masks, SCALE, 0.f, c.soft_cap);
    if (c.has_sinks) ggml_flash_attn_ext_add_sinks(result, sinks);
    ggml_cgraph *graph = ggml_new_graph(context.get());
    ggml_build_forward_expand(graph, result);
    Owned<ggml_backend_buffer> buffer{
        ggml_backend_alloc_ctx_tensors_from_buft(context.get(), ggml_backend_cpu_buffer_type())};
    const auto set = [](ggml_tensor *to, const std::vector<float> &from) {
        std::vector<uint8_t> stored(ggml_nbytes(to));
        ggml_quantize_chunk(to->type, from.data(), stored.data(), 0, ggml_nrows(to), to->ne[0], nullptr);
        ggml_backend_tensor_set(to, stored.data(), 0, stored.size());
    };
    set(keys, c.keys), set(values, c.values), set(masks, c.masks);
    ggml_backend_tensor_set(queries, c.queries.data(), 0, ggml_nbytes(queries));
    ggml_backend_tensor_set(sinks, c.sinks, 0, sizeof c.sinks);
    Owned<ggml_backend> backend{ggml_backend_cpu_init()};
    ggml_backend_cpu_set_n_threads(backend.get(), 2);
    std::vector<float> y(size_t(n) * QUERY_HEADS * c.head);
    if (ggml_backend_graph_compute(backend.get(), graph) != GGML_STATUS_SUCCESS) return {};
    ggml_backend_tensor_get(result, y.data(), 0, ggml_nbytes(result));
    return y;
}

// The largest difference of `y` from attention in double precision.
double attention_error(const AttentionCase &c, const std::vector<float> &y) {
    double largest = 0;
    for (int j = 0; j < QUERIES; j++)
        for (int h = 0; h < QUERY_HEADS; h++) {
            const float *query = &c.queries[(j * QUERY_HEADS + h) * c.head];
            const int from = h / (QUERY_HEADS / KEY_HEADS) * KEYS * c.head;
            double sum = c.has_sinks ? std::exp(double(c.sinks[h])) : 0.;
            std::vector<double> expected(c.head);
            for (int i = 0; i < KEYS; i++) {
                double x = 0;
                for (int d = 0; d < c.head; d++) x += double(query[d]) * c.keys[from + i * c.head + d];
                x *= SCALE;
                if (c.soft_cap != 0.f) x = c.soft_cap * std::tanh(x / c.soft_cap);
                const double weight = std::exp(x + c.masks[j * KEYS + i]);
                sum += weight;
                for (int d = 0; d < c.head; d++) expected[d] += weight * c.values[from + i * c.head + d];
            }
            for (int d = 0; d < c.head; d++) {
                const double apart = std::fabs(y[(j * QUERY_HEADS + h) * c.head + d] - expected[d] / sum);
                if (!(apart <= largest)) largest = apart;  // also NaN
            }
        }
    return largest;
}

// Move all keys to other places in the cache.
AttentionCase reversed(AttentionCase c) {
    const auto reverse = [](std::vector<float> &rows, int n, int length) {
        for (int first = 0; first < n; first += KEYS)
            for (int i = 0; i < KEYS / 2; i++)
                for (int d = 0; d < length; d++)
                    std::swap(rows[(first + i) * length + d], rows[(first + KEYS - 1 - i) * length + d]);
    };
    reverse(c.keys, KEY_HEADS * KEYS, c.head), reverse(c.values, KEY_HEADS * KEYS, c.head);
    reverse(c.masks, QUERIES * KEYS, 1);
    return c;
}

const char *check_attention() {
    static char message[160];
    AttentionCase cases[] = {{"attention", GGML_TYPE_F16, 64, 0.f, false},
                             {"attention with an odd head size", GGML_TYPE_F16, 33, 0.f, false},
                             {"attention to Q8_0", GGML_TYPE_Q8_0, 64, 0.f, false},
                             {"attention with a soft cap", GGML_TYPE_F16, 64, 5.f, false},
                             {"attention with sinks", GGML_TYPE_F16, 64, 0.f, true}};
    for (AttentionCase &c : cases) {
        const auto complaint = [&c](const char *what) {
            std::snprintf(message, sizeof message, "%s: %s", c.name, what);
            return message;
        };
        randomize(c);
        const std::vector<float> ours = attention(c, QUERIES);
        specdec_kernels_enable(0);
        const std::vector<float> ggmls = attention(c, QUERIES);
        specdec_kernels_enable(1);
        if (ours.empty() || ggmls.empty()) return complaint("it could not be computed");
        if (!(attention_error(c, ours) < 2e-5)) return complaint("inexact");
        // ggml adds up values in half precision, and rounds queries to 8 bits for Q8_0.
        if (!(attention_error(c, ggmls) < 0.1)) return complaint("ggml computes something else");
        const std::vector<float> elsewhere = attention(reversed(c), QUERIES);
        if (std::memcmp(elsewhere.data(), ours.data(), ours.size() * sizeof(float)) != 0)
            return complaint("a query depends on the places of the keys");
        for (int few = 1; few < QUERIES; few++) {
            const std::vector<float> y = attention(c, few);
            if (std::memcmp(y.data(), ours.data(), y.size() * sizeof(float)) != 0)
                return complaint("a query depends on how many are computed with it");
        }
    }
    return nullptr;
}

double error(const std::vector<float> &y, const std::vector<double> &expected) {
    double sum = 0;
    for (size_t i = 0; i < y.size(); i++) sum += (y[i] - expected[i]) * (y[i] - expected[i]);
    return std::sqrt(sum / y.size());
}

const char *check(ggml_type type) {
    static char message[160];
    const auto complaint = [type](const char *what) {
        std::snprintf(message, sizeof message, "%s: %s", ggml_type_name(type), what);
        return message;
    };
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<float> dense(ROWS_TESTED * LENGTH), x(COLUMNS_TESTED * LENGTH), row(LENGTH);
    for (float &v : dense) v = normal(random);
    for (float &v : x) v = normal(random);
    std::vector<uint8_t> matrix(ggml_row_size(type, LENGTH) * ROWS_TESTED);
    ggml_quantize_chunk(type, dense.data(), matrix.data(), 0, ROWS_TESTED, LENGTH, nullptr);
    std::vector<double> expected(size_t(COLUMNS_TESTED) * ROWS_TESTED);
    for (int r = 0; r < ROWS_TESTED; r++) {
        if (type == GGML_TYPE_F32) std::memcpy(row.data(), matrix.data() + r * LENGTH * sizeof(float), LENGTH * sizeof(float));
        else ggml_get_type_traits(type)->to_float(matrix.data() + r * ggml_row_size(type, LENGTH), row.data(), LENGTH);
        for (int j = 0; j < COLUMNS_TESTED; j++)
            for (int i = 0; i < LENGTH; i++) expected[j * ROWS_TESTED + r] += double(row[i]) * x[j * LENGTH + i];
    }
    std::vector<float> direct(expected.size());
    if (const char *why = specdec_kernels_multiply(kernels()->name, type, ROWS_TESTED, LENGTH, COLUMNS_TESTED,
                                                   matrix.data(), x.data(), direct.data()))
        return complaint(why);
    const bool plain = type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16;
    const auto ours = plain ? ggml_backend_cpu_buffer_type() : packed_buffer_type();
    specdec_kernels_enable(0);
    const std::vector<float> ggmls =
        through_graph(ggml_backend_cpu_buffer_type(), type, matrix, x, COLUMNS_TESTED);
    specdec_kernels_enable(1);
    // The absolute term allows for rounding to float32.
    if (!(error(direct, expected) <= 1.02 * error(ggmls, expected) + 1e-4)) return complaint("less exact than ggml's own");
    for (const int n : {1, 2, 3, 4, 5, 8, 12, 16, COLUMNS_TESTED}) {
        if (plain && n > MOST_FLOAT_COLUMNS) continue;  // computed by ggml
        const std::vector<float> y = through_graph(ours, type, matrix, x, n);
        if (y.size() != size_t(n) * ROWS_TESTED || std::memcmp(y.data(), direct.data(), y.size() * sizeof(float)) != 0)
            return complaint("a column depends on how many are computed with it");
    }
    // The first and the last of three tiles.
    const int32_t tiles[] = {0, 2};
    specdec_kernels_choose_rows(ROWS_TESTED, tiles, 2);
    const std::vector<float> some = through_graph(ours, type, matrix, x, 2);
    specdec_kernels_choose_rows(0, nullptr, 0);
    for (int i = 0; i < 2 * ROWS_TESTED; i++)
        if ((some[i] == direct[i]) == (i % ROWS_TESTED / ROWS == 1)) return complaint("other rows than the chosen ones");
    return nullptr;
}

}  // namespace

const char *specdec_kernels_self_test() {
    if (!kernels()) return "they are not installed";
    for (const ggml_type type : {GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1, GGML_TYPE_Q8_0,
                                 GGML_TYPE_IQ4_NL, GGML_TYPE_MXFP4, GGML_TYPE_Q2_K, GGML_TYPE_Q3_K, GGML_TYPE_Q4_K,
                                 GGML_TYPE_Q5_K, GGML_TYPE_Q6_K, GGML_TYPE_IQ4_XS, GGML_TYPE_F16, GGML_TYPE_BF16,
                                 GGML_TYPE_F32})
        if (const char *why = check(type)) return why;
    for (const ggml_type type : {GGML_TYPE_Q4_1, GGML_TYPE_Q8_0, GGML_TYPE_Q4_K, GGML_TYPE_Q6_K})
        if (const char *why = check_experts(type)) return why;
    return check_attention();
}
