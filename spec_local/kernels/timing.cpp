// Times products with the installed kernels, and with what llama.cpp would use without them or with weights that are read in
// another way.
#include "owned.h"
#include "plugin.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <vector>

using namespace specdec;

namespace {

ggml_init_params room_for(int64_t n_tensors) {
    return {size_t(n_tensors) * (ggml_tensor_overhead() + ggml_graph_overhead()), nullptr, true};
}

// Whether a matrix in an empty buffer of this type could be multiplied, as llama.cpp's loader asks.
bool is_usable(ggml_backend_buffer_type_t buffer_type, ggml_type type, int64_t rows, int64_t k) {
    const Owned<ggml_context> context(ggml_init(room_for(3)));
    const Owned<ggml_backend_buffer> empty(ggml_backend_buft_alloc_buffer(buffer_type, 0));
    ggml_tensor *matrix = ggml_new_tensor_2d(context.get(), type, k, rows);
    matrix->buffer = empty.get();
    ggml_tensor *product = ggml_mul_mat(context.get(), matrix, ggml_new_tensor_2d(context.get(), GGML_TYPE_F32, k, 512));
    return empty && ggml_backend_dev_supports_op(packed_buffer_type()->device, product);
}

// The buffer type that the loader selects for a matrix, with the kernels or without.
ggml_backend_buffer_type_t selected(bool ours, ggml_type type, int64_t rows, int64_t k) {
    for (ggml_backend_buffer_type_t *t = extra_buffer_types(); t && *t; t++)
        if ((ours || *t != packed_buffer_type()) && is_usable(*t, type, rows, k)) return *t;
    return ggml_backend_cpu_buffer_type();
}

// A matrix and its products with various numbers of columns.
struct Products {
    Owned<ggml_context> context, matrix_context;
    Owned<ggml_backend_buffer> buffer, matrix_buffer;
    std::vector<ggml_cgraph *> graphs;

    Products(bool ours, ggml_type type, int64_t rows, int64_t k, const std::vector<uint8_t> &data, const int *sizes,
             int n_sizes)
        : context(ggml_init(room_for(3 * n_sizes))), matrix_context(ggml_init(room_for(1))) {
        ggml_tensor *matrix = ggml_new_tensor_2d(matrix_context.get(), type, k, rows);
        matrix_buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(matrix_context.get(), selected(ours, type, rows, k)));
        if (!matrix_buffer) return;
        ggml_backend_buffer_set_usage(matrix_buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        ggml_backend_tensor_set(matrix, data.data(), 0, data.size());
        for (int i = 0; i < n_sizes; i++) {
            ggml_tensor *x = ggml_new_tensor_2d(context.get(), GGML_TYPE_F32, k, sizes[i]);
            graphs.push_back(ggml_new_graph(context.get()));
            ggml_build_forward_expand(graphs.back(), ggml_mul_mat(context.get(), matrix, x));
        }
        buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(context.get(), ggml_backend_cpu_buffer_type()));
        if (!buffer) return;
        for (ggml_tensor *x = ggml_get_first_tensor(context.get()); x; x = ggml_get_next_tensor(context.get(), x))
            for (int64_t i = 0; i < ggml_nelements(x); i++) ((float *)x->data)[i] = float(i * 104729 % 2001 - 1000) / 1000;
    }
};

}  // namespace

const char *specdec_kernels_time(const char *name, int64_t rows, int64_t k, const int *sizes, int n_sizes, int threads,
                                 int rounds, int readings, double *seconds) {
    const ggml_type type = type_named(name);
    if (!kernels()) return "they are not installed";
    if (type == GGML_TYPE_COUNT) return "there is no type of this name";
    constexpr int64_t SOME = 16;  // rows that are quantized, which is slow; the others repeat them
    if (rows < SOME || k % ggml_blck_size(type)) return "the matrix has too few rows or no whole blocks";
    std::vector<float> dense(SOME * k);
    for (size_t i = 0; i < dense.size(); i++) dense[i] = float(int64_t(i) * 7919 % 2001 - 1000) / 1000;
    std::vector<uint8_t> data(ggml_row_size(type, k) * rows);
    ggml_quantize_chunk(type, dense.data(), data.data(), 0, SOME, k, nullptr);
    const size_t some = ggml_row_size(type, k) * SOME;
    for (size_t i = some; i < data.size(); i += some) std::memcpy(&data[i], data.data(), std::min(some, data.size() - i));
    const Products with(true, type, rows, k, data, sizes, n_sizes);
    std::optional<Products> without;
    if (!readings) without.emplace(false, type, rows, k, data, sizes, n_sizes);
    if (!with.buffer || (without && !without->buffer)) return "there is not enough memory";
    const Owned<ggml_backend> backend(ggml_backend_cpu_init());
    ggml_backend_cpu_set_n_threads(backend.get(), threads);
    const char *error = nullptr;
    for (int round = -1; round < rounds && !error; round++)  // the first one is not timed
        for (int i = 0; i < n_sizes; i++)
            for (const int which : {round % 2 == 0, round % 2 != 0}) {
                if (readings) specdec_kernels_read_as(which, which);
                else specdec_kernels_enable(which == 0);
                const Products &products = without && which == 1 ? *without : with;
                const auto begin = std::chrono::steady_clock::now();
                if (ggml_backend_graph_compute(backend.get(), products.graphs[i]) != GGML_STATUS_SUCCESS)
                    error = "a product could not be computed";
                const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
                if (round >= 0) seconds[(round * n_sizes + i) * 2 + which] = took.count();
            }
    if (readings) specdec_kernels_read_as(0, 0);
    else specdec_kernels_enable(1);
    return error;
}
