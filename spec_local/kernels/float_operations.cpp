// Products of floating-point weights. They are not packed, but read in place, mostly from the memory-mapped file.
#include "operations.h"

#include <algorithm>
#include <vector>

namespace specdec {
namespace {

// Whether the kernels compute a product whatever its number of columns. They are slower with many, but a small matrix
// in F32, such as the router of a mixture of experts, takes little time, and its result decides where an answer goes.
bool is_small(const ggml_tensor *w) {
    constexpr size_t most_bytes = 4 << 20;  // a part of the caches: it is read again for each MOST_FLOAT_COLUMNS columns
    return w->type == GGML_TYPE_F32 && ggml_nbytes(w) <= most_bytes;
}

bool is_float_weights(const ggml_tensor *op) {
    FloatType type;
    const ggml_tensor *w = op->src[0], *x = op->src[1];
    return op->op == GGML_OP_MUL_MAT && float_type(w->type, type) && w->buffer && ggml_is_contiguous(w) &&
           w->ne[2] * w->ne[3] == 1 && ggml_backend_buffer_get_usage(w->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS &&
           x->type == GGML_TYPE_F32 && x->nb[0] == sizeof(float) && ggml_is_contiguous(op) &&
           (is_small(w) || ggml_nrows(x) <= std::min(most_columns(w->type), MOST_FLOAT_COLUMNS)) &&
           op->op_params[1] == 0;
}

struct FloatTraits : ggml::cpu::tensor_traits {
    // At least what ggml needs, in case it computes the operation after all.
    bool work_size(int, const ggml_tensor *op, size_t &size) override {
        size = CHOSEN_BYTES + packed_floats(op->src[0]->ne[0], ggml_nrows(op->src[1])) * sizeof(float) + LINE;
        return true;
    }

    bool compute_forward(ggml_compute_params *params, ggml_tensor *op) override {
        FloatType type;
        const ggml_tensor *w = op->src[0];
        GGML_ASSERT(float_type(w->type, type));
        const int64_t rows = w->ne[1], k = w->ne[0];
        static thread_local std::vector<const float *> columns;
        columns.clear();
        for_each_row(op->src[1], [](const char *x) { columns.push_back((const float *)x); });
        const int n = int(columns.size());
        auto *shared = (ChosenTiles *)rounded_up((size_t)params->wdata);
        auto *packed = (float *)((char *)shared + CHOSEN_BYTES);
        if ((char *)(packed + packed_floats(k, n)) > (char *)params->wdata + params->wsize) return false;
        if (params->ith == 0) *shared = chosen_tiles(rows);
        const auto part_from = [n](int first) { return std::min(n - first, int(MOST_FLOAT_COLUMNS)); };
        for (int j = params->ith * n / params->nth; j < (params->ith + 1) * n / params->nth; j++) {
            const int place = j % MOST_FLOAT_COLUMNS, first = j - place;
            kernels()->pack_floats(k, columns[j], place, part_from(first), packed + packed_floats(k, first));
        }
        if (params->ith == 0) ggml_threadpool_chunk_set(params->threadpool, params->nth);
        ggml_barrier(params->threadpool);
        const ChosenTiles chosen = *shared;
        const auto multiply = [&](int64_t begin, int64_t end) {
            for (int first = 0; first < n; first += MOST_FLOAT_COLUMNS) {
                float *y[MOST_FLOAT_COLUMNS];
                const int part = part_from(first);
                for (int j = 0; j < part; j++) y[j] = (float *)op->data + (first + j) * op->ne[0] + begin;
                kernels()->multiply_floats(type, k, (const uint8_t *)w->data + begin * w->nb[1], w->nb[1],
                                           int(end - begin), packed + packed_floats(k, first), part, y);
            }
        };
        // A multiple of the rows that are multiplied together, three or four. Of chosen tiles, three that are adjacent.
        const int64_t piece = chosen.tiles ? 3 : std::clamp<int64_t>(rows / (params->nth * 8) / 12, 1, 5) * 12;
        const int64_t all = chosen.tiles ? chosen.n : rows;
        for (int64_t task = params->ith; task * piece < all; task = ggml_threadpool_chunk_add(params->threadpool, 1)) {
            const int64_t begin = task * piece, end = std::min(begin + piece, all);
            if (!chosen.tiles) multiply(begin, end);
            for (int64_t i = begin, next; chosen.tiles && i < end; i = next) {
                for (next = i + 1; next < end && chosen[next] == chosen[next - 1] + 1;) next++;
                multiply(chosen[i] * ROWS, std::min((chosen[next - 1] + 1) * ROWS, rows));
            }
        }
        return true;
    }
};

}  // namespace

bool float_type(ggml_type from, FloatType &type) {
    switch (from) {
        case GGML_TYPE_F32: type = FloatType::F32; return true;
        case GGML_TYPE_F16: type = FloatType::F16; return true;
        case GGML_TYPE_BF16: type = FloatType::BF16; return true;
        default: return false;
    }
}

ggml::cpu::tensor_traits *float_traits(const ggml_tensor *op) {
    static FloatTraits traits;
    return is_float_weights(op) ? &traits : nullptr;
}

}  // namespace specdec
