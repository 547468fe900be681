// Products of packed matrices: MUL_MAT, and MUL_MAT_ID for mixtures of experts.
#include "operations.h"

#include <algorithm>
#include <vector>

namespace specdec {
namespace {

// One matrix of a call, and the groups [first, last) of columns to multiply it by.
struct Run {
    int64_t matrix;
    size_t first, last;
};

struct Group {
    size_t first;  // index into `Call::x` of its first column
    int n;
};

// The work of one operation. Every thread builds its own copy.
struct Call {
    std::vector<const float *> x;
    std::vector<float *> y;
    std::vector<Group> groups;
    std::vector<Run> runs;

    void clear() { x.clear(), y.clear(), groups.clear(), runs.clear(); }

    void add(const float *from, float *to) { x.push_back(from), y.push_back(to); }

    // Assign the columns added since the last run to a matrix, in groups of nearly equal size, at most `most`.
    void close_run(int64_t matrix, int most) {
        const size_t begin = groups.empty() ? 0 : groups.back().first + groups.back().n, n = x.size() - begin;
        if (n == 0) return;
        const size_t count = (n + most - 1) / most, first = groups.size();
        for (size_t i = 0; i < count; i++)
            groups.push_back({begin + i * n / count, int((i + 1) * n / count - i * n / count)});
        runs.push_back({matrix, first, groups.size()});
    }
};

const float *column(const ggml_tensor *x, int64_t i1, int64_t i2, int64_t i3) { return (const float *)row(x, i1, i2, i3); }

void list_columns(const ggml_tensor *op, Call &call) {
    const ggml_tensor *x = op->src[1];
    auto *y = (float *)op->data;
    for (int64_t i3 = 0; i3 < x->ne[3]; i3++)
        for (int64_t i2 = 0; i2 < x->ne[2]; i2++)
            for (int64_t i1 = 0; i1 < x->ne[1]; i1++, y += op->ne[0]) call.add(column(x, i1, i2, i3), y);
}

// Mixtures of experts: slot s of token t is routed to expert ids[t][s].
void list_experts(const ggml_tensor *op, Call &call, int most) {
    const ggml_tensor *w = op->src[0], *x = op->src[1], *ids = op->src[2];
    auto expert = [ids](int64_t slot, int64_t token) {
        return *(const int32_t *)((const char *)ids->data + slot * ids->nb[0] + token * ids->nb[1]);
    };
    // A counting sort by expert, then by token.
    static thread_local std::vector<size_t> next;
    static thread_local std::vector<std::pair<int32_t, int32_t>> sorted;  // token, slot
    next.assign(w->ne[2] + 1, 0);
    for (int64_t t = 0; t < ids->ne[1]; t++)
        for (int64_t s = 0; s < ids->ne[0]; s++) {
            GGML_ASSERT(expert(s, t) >= 0 && expert(s, t) < w->ne[2]);
            next[expert(s, t) + 1]++;
        }
    for (int64_t e = 0; e < w->ne[2]; e++) next[e + 1] += next[e];
    sorted.resize(ids->ne[0] * ids->ne[1]);
    for (int64_t t = 0; t < ids->ne[1]; t++)
        for (int64_t s = 0; s < ids->ne[0]; s++) sorted[next[expert(s, t)]++] = {int32_t(t), int32_t(s)};
    size_t i = 0;
    for (int64_t e = 0; e < w->ne[2]; e++) {  // `next[e]` is now the end of expert e's columns
        for (; i < next[e]; i++) {
            const auto [t, s] = sorted[i];
            call.add(column(x, s % x->ne[1], t, 0), (float *)((char *)op->data + s * op->nb[1] + t * op->nb[2]));
        }
        call.close_run(e, most);
    }
}

int64_t n_columns(const ggml_tensor *op) {
    return op->op == GGML_OP_MUL_MAT_ID ? ggml_nelements(op->src[2]) : ggml_nrows(op->src[1]);
}
struct PackedTraits : ggml::cpu::tensor_traits {
    bool work_size(int, const ggml_tensor *op, size_t &size) override {
        Type type;
        GGML_ASSERT(packed_type(op->src[0], type));
        size = column_bytes(type, op->src[0]->ne[0]) * n_columns(op) + LINE;
        return true;
    }

    bool compute_forward(ggml_compute_params *params, ggml_tensor *op) override {
        Type type;
        const ggml_tensor *w = op->src[0];
        GGML_ASSERT(fits_packed(op) && packed_type(w, type));
        const int64_t k = w->ne[0], rows = w->ne[1], tiles = (rows + ROWS - 1) / ROWS;
        const int64_t blocks = k / block_length(type);
        static thread_local Call call;
        call.clear();
        if (op->op == GGML_OP_MUL_MAT) {
            list_columns(op, call);
            call.close_run(0, kernels()->max_columns);
        } else {
            list_experts(op, call, kernels()->max_columns);
        }

        auto *work = (char *)rounded_up((size_t)params->wdata);
        GGML_ASSERT(work + column_bytes(type, k) * call.x.size() <= (char *)params->wdata + params->wsize);
        auto columns = [&](const Group &group) {
            return columns_at(work + column_bytes(type, k) * group.first, type, k, group.n);
        };
        const int64_t first = params->ith * blocks / params->nth, last = (params->ith + 1) * blocks / params->nth;
        for (const Group &group : call.groups)
            for (int j = 0; j < group.n; j++)
                kernels()->quantize(type, call.x[group.first + j], columns(group), j, first, last);
        if (params->ith == 0) ggml_threadpool_chunk_set(params->threadpool, params->nth);
        ggml_barrier(params->threadpool);

        // Threads take pieces of the rows as they become free: eight pieces per thread, to balance cores of different
        // speeds. A piece and a group's columns must fit in the second-level cache, since a long prompt reads a piece
        // many times.
        constexpr size_t piece_bytes = 256 * 1024;
        const int64_t most = std::max<int64_t>(1, piece_bytes / tile_bytes(type, k));
        const int64_t share = std::max<int64_t>(1, tiles / (params->nth * 8));
        const int64_t piece = std::min({most, share, int64_t(64)}), pieces = (tiles + piece - 1) / piece;
        const size_t tile = tile_bytes(type, k), matrix = packed_bytes(type, rows, k);
        for (int64_t task = params->ith; task < pieces * int64_t(call.runs.size());
             task = ggml_threadpool_chunk_add(params->threadpool, 1)) {
            const Run &run = call.runs[task / pieces];
            const int64_t begin = task % pieces * piece, end = std::min(begin + piece, tiles);
            const auto *data = (const uint8_t *)w->data + run.matrix * matrix;
            auto multiply = [&](int64_t t, const Group &group) {
                float *y[16];
                GGML_ASSERT(group.n <= 16);
                for (int j = 0; j < group.n; j++) y[j] = call.y[group.first + j] + t * ROWS;
                kernels()->multiply(type, k, data + t * tile, columns(group), y, int(std::min<int64_t>(ROWS, rows - t * ROWS)));
            };
            // With few groups, a tile is read from memory once and used while it is cached. With many, the columns of a
            // group are reused from the cache too.
            if (run.last - run.first <= 2) {
                for (int64_t t = begin; t < end; t++)
                    for (size_t g = run.first; g < run.last; g++) multiply(t, call.groups[g]);
            } else {
                for (size_t g = run.first; g < run.last; g++)
                    for (int64_t t = begin; t < end; t++) multiply(t, call.groups[g]);
            }
        }
        return true;
    }
};

}  // namespace

bool fits_packed(const ggml_tensor *op) {
    Type type;
    const ggml_tensor *w = op->src[0], *x = op->src[1];
    const int dimensions = op->op == GGML_OP_MUL_MAT ? 2 : op->op == GGML_OP_MUL_MAT_ID ? 3 : 0;
    return dimensions && ggml_n_dims(w) == dimensions && !w->view_src && packed_type(w, type) &&
           x->type == GGML_TYPE_F32 && x->nb[0] == sizeof(float) && ggml_is_contiguous(op) &&
           !(x->buffer && !ggml_backend_buft_is_host(x->buffer->buft));
}

ggml::cpu::tensor_traits *packed_traits() {
    static PackedTraits traits;
    return &traits;
}

}  // namespace specdec
