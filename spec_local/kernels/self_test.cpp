// Self-test: checks the kernels on this machine before they are used. It runs in a child process, since a kernel that
// does not work may also crash.
#include "plugin.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

using namespace specdec;

namespace {

constexpr int ROWS_TESTED = 37;  // not a multiple of a tile
constexpr int LENGTH = 768;
constexpr int COLUMNS_TESTED = 17;  // more than any kernel multiplies at once

struct Freed {
    void operator()(ggml_context *p) const { ggml_free(p); }
    void operator()(ggml_backend *p) const { ggml_backend_free(p); }
    void operator()(ggml_backend_buffer *p) const { ggml_backend_buffer_free(p); }
};
template <class T>
using Owned = std::unique_ptr<T, Freed>;

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

constexpr int HEAD = 64, KEYS = 230, QUERY_HEADS = 4, KEY_HEADS = 2;

// Attention of the first n queries as llama.cpp would compute it, [n][QUERY_HEADS][HEAD].
std::vector<float> attention(const std::vector<float> &q, const std::vector<ggml_fp16_t> &k,
                             const std::vector<ggml_fp16_t> &v, const std::vector<ggml_fp16_t> &mask, int n) {
    const ggml_init_params params = {ggml_tensor_overhead() * 16 + ggml_graph_overhead(), nullptr, true};
    Owned<ggml_context> context{ggml_init(params)};
    ggml_tensor *queries = ggml_new_tensor_3d(context.get(), GGML_TYPE_F32, HEAD, QUERY_HEADS, n);
    ggml_tensor *keys = ggml_new_tensor_3d(context.get(), GGML_TYPE_F16, HEAD, KEYS, KEY_HEADS);
    ggml_tensor *values = ggml_new_tensor_3d(context.get(), GGML_TYPE_F16, HEAD, KEYS, KEY_HEADS);
    ggml_tensor *masks = ggml_new_tensor_2d(context.get(), GGML_TYPE_F16, KEYS, n);
    ggml_tensor *result = ggml_flash_attn_ext(context.get(), ggml_permute(context.get(), queries, 0, 2, 1, 3), keys, values,
                                              masks, 0.125f, 0.f, 0.f);
    ggml_cgraph *graph = ggml_new_graph(context.get());
    ggml_build_forward_expand(graph, result);
    Owned<ggml_backend_buffer> buffer{
        ggml_backend_alloc_ctx_tensors_from_buft(context.get(), ggml_backend_cpu_buffer_type())};
    ggml_backend_tensor_set(queries, q.data(), 0, ggml_nbytes(queries));
    ggml_backend_tensor_set(keys, k.data(), 0, ggml_nbytes(keys));
    ggml_backend_tensor_set(values, v.data(), 0, ggml_nbytes(values));
    ggml_backend_tensor_set(masks, mask.data(), 0, ggml_nbytes(masks));
    Owned<ggml_backend> backend{ggml_backend_cpu_init()};
    ggml_backend_cpu_set_n_threads(backend.get(), 2);
    std::vector<float> y(size_t(n) * QUERY_HEADS * HEAD);
    if (ggml_backend_graph_compute(backend.get(), graph) != GGML_STATUS_SUCCESS) return {};
    ggml_backend_tensor_get(result, y.data(), 0, ggml_nbytes(result));
    return y;
}

const char *check_attention() {
    constexpr int n = 5;
    std::mt19937 random(2);
    std::normal_distribution<float> normal;
    std::vector<float> q(n * QUERY_HEADS * HEAD);
    std::vector<ggml_fp16_t> k(KEY_HEADS * KEYS * HEAD), v(k.size()), mask(n * KEYS);
    for (float &x : q) x = 2 * normal(random);
    for (ggml_fp16_t &x : k) x = ggml_fp32_to_fp16(normal(random));
    for (ggml_fp16_t &x : v) x = ggml_fp32_to_fp16(normal(random));
    // Each block of keys is masked for some of the queries, and the last keys more or less for all.
    const auto hidden = [](int query, int key) {
        const int block = key / KEY_BLOCK;
        return (block < 3 && (query + block) % 3 == 0) || key > KEYS - 2 * n + query;
    };
    for (int j = 0; j < n; j++)
        for (int i = 0; i < KEYS; i++) mask[j * KEYS + i] = ggml_fp32_to_fp16(hidden(j, i) ? -INFINITY : 0.f);
    const std::vector<float> ours = attention(q, k, v, mask, n);
    specdec_kernels_enable(0);
    const std::vector<float> ggmls = attention(q, k, v, mask, n);
    specdec_kernels_enable(1);
    if (ours.empty() || ggmls.empty()) return "attention: it could not be computed";
    for (size_t i = 0; i < ours.size(); i++)  // ggml adds up values in half precision
        if (!(std::fabs(ours[i] - ggmls[i]) < 0.02f)) return "attention: the result differs from ggml's";
    for (int few = 1; few < n; few++) {
        const std::vector<float> y = attention(q, k, v, mask, few);
        if (std::memcmp(y.data(), ours.data(), y.size() * sizeof(float)) != 0)
            return "attention: a query depends on how many are computed with it";
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
    const bool plain = type == GGML_TYPE_F32 || type == GGML_TYPE_F16;
    const auto ours = plain ? ggml_backend_cpu_buffer_type() : packed_buffer_type();
    specdec_kernels_enable(0);
    const std::vector<float> ggmls =
        through_graph(ggml_backend_cpu_buffer_type(), type, matrix, x, COLUMNS_TESTED);
    specdec_kernels_enable(1);
    // The absolute term allows for rounding to float32.
    if (!(error(direct, expected) <= 1.02 * error(ggmls, expected) + 1e-4)) return complaint("less exact than ggml's own");
    for (const int n : {1, 2, 3, 4, 5, 8, 12, 16, COLUMNS_TESTED}) {
        if (plain && n > 8) continue;  // computed by ggml
        const std::vector<float> y = through_graph(ours, type, matrix, x, n);
        if (y.size() != size_t(n) * ROWS_TESTED || std::memcmp(y.data(), direct.data(), y.size() * sizeof(float)) != 0)
            return complaint("a column depends on how many are computed with it");
    }
    return nullptr;
}

}  // namespace

const char *specdec_kernels_self_test() {
    if (!kernels()) return "they are not installed";
    for (const ggml_type type : {GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q5_0, GGML_TYPE_Q8_0, GGML_TYPE_IQ4_NL,
                                 GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K, GGML_TYPE_F16, GGML_TYPE_F32})
        if (const char *why = check(type)) return why;
    for (const ggml_type type : {GGML_TYPE_Q4_1, GGML_TYPE_Q8_0, GGML_TYPE_Q4_K, GGML_TYPE_Q6_K})
        if (const char *why = check_experts(type)) return why;
    return check_attention();
}
