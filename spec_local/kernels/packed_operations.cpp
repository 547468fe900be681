// Products of packed matrices: MUL_MAT, and MUL_MAT_ID for mixtures of experts.
#include "expert_lists.h"
#include "operations.h"

#include <algorithm>
#include <atomic>
#include <vector>

namespace specdec {
namespace {

// One matrix of a call, and the groups [first, last) of columns to multiply it by.
struct Run {
    int64_t matrix;
    size_t first, last;
};

struct Group {
    size_t first;  // its first column, counted through all groups
    int n;
};

// The work of one operation. Every thread builds its own copy.
struct Call {
    std::vector<const float *> inputs;  // activations
    size_t n_copies;                    // columns with the same input: experts of a token that share it
    std::vector<size_t> columns;        // `n_copies` of each input, counted through all groups
    std::vector<float *> y;             // results of each column
    std::vector<size_t> group_of;       // each column
    std::vector<Group> groups;
    std::vector<Run> runs;

    void clear(size_t copies) {
        n_copies = copies;
        inputs.clear(), columns.clear(), y.clear(), group_of.clear(), groups.clear(), runs.clear();
    }

    // Assign the columns added since the last run to a matrix, in groups of nearly equal size, at most `most`.
    void close_run(int64_t matrix, int most) {
        const size_t begin = groups.empty() ? 0 : groups.back().first + groups.back().n, n = y.size() - begin;
        if (n == 0) return;
        const size_t count = (n + most - 1) / most, first = groups.size();
        for (size_t i = 0; i < count; i++) {
            groups.push_back({begin + i * n / count, int((i + 1) * n / count - i * n / count)});
            group_of.resize(groups.back().first + groups.back().n, groups.size() - 1);
        }
        runs.push_back({matrix, first, groups.size()});
    }
};

void list_columns(const ggml_tensor *op, Call &call) {
    auto *y = (float *)op->data;
    call.clear(1);
    for_each_row(op->src[1], [&call, &y, op](const char *x) {
        call.columns.push_back(call.inputs.size());
        call.inputs.push_back((const float *)x);
        call.y.push_back(y);
        y += op->ne[0];
    });
}

// Mixtures of experts: slot s of a token has input s % x->ne[1]. That is one input for all slots, or one for each.
void list_experts(const ggml_tensor *op, Call &call, int most) {
    const ggml_tensor *x = op->src[1], *ids = op->src[2];
    const int64_t n_inputs = x->ne[1];
    static thread_local std::vector<Slot> slots;
    list_by_expert(ids, op->src[0]->ne[2], slots);
    call.clear(ids->ne[0] / n_inputs);
    for (int64_t t = 0; t < ids->ne[1]; t++)
        for (int64_t i = 0; i < n_inputs; i++) call.inputs.push_back((const float *)row(x, i, t, 0));
    call.columns.resize(slots.size());
    for (size_t i = 0; i < slots.size(); i++) {
        const auto [expert, t, s] = slots[i];
        call.columns[(t * n_inputs + s % n_inputs) * call.n_copies + s / n_inputs] = i;
        call.y.push_back((float *)((char *)op->data + s * op->nb[1] + t * op->nb[2]));
        if (i + 1 == slots.size() || slots[i + 1].expert != expert) call.close_run(expert, most);
    }
}

// The rounded activations of all groups, one after the other.
struct WorkBuffer {
    Type type;
    int64_t k;
    char *start;

    int64_t blocks() const { return k / block_length(type); }

    Columns columns(const Group &group) const {
        return columns_at(start + column_bytes(type, k) * group.first, type, k, group.n);
    }
};

// Round a thread's share of the activations: each input once, then copy it to its other columns. The blocks are numbered
// with the first of each input, then the second of each, so that threads share them equally, and rarely write to the same
// cache lines.
void round_inputs(const Call &call, const WorkBuffer &buffer, int thread, int n_threads) {
    const int64_t n = call.inputs.size(), all = n * buffer.blocks();
    const int64_t begin = thread * all / n_threads, end = (thread + 1) * all / n_threads;
    for (int64_t i = 0; i < n; i++) {
        const int64_t first = (begin + n - 1 - i) / n, last = (end + n - 1 - i) / n;
        if (first == last) continue;
        Columns rounded = {};
        int from = 0;
        for (size_t c = 0; c < call.n_copies; c++) {
            const size_t column = call.columns[i * call.n_copies + c];
            const Group &group = call.groups[call.group_of[column]];
            const Columns to = buffer.columns(group);
            const int j = int(column - group.first);
            if (c == 0) {
                kernels()->quantize(buffer.type, call.inputs[i], to, j, first, last);
                rounded = to, from = j;
            } else {
                kernels()->copy_column(buffer.type, rounded, from, to, j, first, last);
            }
        }
    }
}

std::atomic<int64_t> experts_read = 0;

// Threads take pieces of a matrix's rows as they become free: so many per thread, to balance cores of different speeds. The
// first lines of a piece are not prefetched: with eight pieces per thread, calls of up to eight tokens take 1.02 to 1.04 of
// the time (Zen 5), and as much more with pieces of 256 kB.
constexpr int PIECES = 4;
constexpr int64_t READ_ONCE_BYTES = 1024 * 1024;
// With several groups of columns, as in a prompt, a piece is read once for each, from the second-level cache.
constexpr int64_t CACHED_BYTES = 256 * 1024;

int64_t n_columns(const ggml_tensor *op) {
    return op->op == GGML_OP_MUL_MAT_ID ? ggml_nelements(op->src[2]) : ggml_nrows(op->src[1]);
}

struct PackedTraits : ggml::cpu::tensor_traits {
    bool work_size(int, const ggml_tensor *op, size_t &size) override {
        Type type;
        GGML_ASSERT(packed_type(op->src[0], type));
        size = CHOSEN_BYTES + column_bytes(type, op->src[0]->ne[0]) * n_columns(op) + LINE;
        return true;
    }

    bool compute_forward(ggml_compute_params *params, ggml_tensor *op) override {
        Type type;
        const ggml_tensor *w = op->src[0];
        GGML_ASSERT(fits_packed(op) && packed_type(w, type));
        const int64_t k = w->ne[0], rows = w->ne[1];
        static thread_local Call call;
        if (op->op == GGML_OP_MUL_MAT) {
            list_columns(op, call);
            call.close_run(0, kernels()->max_columns(type));
        } else {
            list_experts(op, call, kernels()->max_columns(type));
            if (params->ith == 0) experts_read += call.runs.size();
        }

        auto *shared = (ChosenTiles *)rounded_up((size_t)params->wdata);
        if (params->ith == 0) *shared = op->op == GGML_OP_MUL_MAT ? chosen_tiles(rows) : all_tiles(rows);
        const WorkBuffer buffer = {type, k, (char *)shared + CHOSEN_BYTES};
        GGML_ASSERT(buffer.start + column_bytes(type, k) * call.y.size() <= (char *)params->wdata + params->wsize);
        round_inputs(call, buffer, params->ith, params->nth);
        if (params->ith == 0) ggml_threadpool_chunk_set(params->threadpool, params->nth);
        ggml_barrier(params->threadpool);
        const ChosenTiles chosen = *shared;
        const int64_t tiles = chosen.n;

        const bool read_once = call.groups.size() == call.runs.size();
        const int64_t most = std::max<int64_t>(1, (read_once ? READ_ONCE_BYTES : CACHED_BYTES) / tile_bytes(type, k));
        const int64_t share = std::max<int64_t>(1, tiles * int64_t(call.runs.size()) / (params->nth * PIECES));
        const int64_t wanted = std::min(most, share), count = (tiles + wanted - 1) / wanted, equal = (tiles + count - 1) / count;
        // An even number, since two tiles that follow one another are multiplied together.
        const int64_t piece = equal > 1 ? (equal + 1) / 2 * 2 : 1, pieces = (tiles + piece - 1) / piece;
        const size_t tile = tile_bytes(type, k), matrix = packed_bytes(type, rows, k);
        for (int64_t task = params->ith; task < pieces * int64_t(call.runs.size());
             task = ggml_threadpool_chunk_add(params->threadpool, 1)) {
            const Run &run = call.runs[task / pieces];
            const int64_t begin = task % pieces * piece, end = std::min(begin + piece, tiles);
            const auto *data = (const uint8_t *)w->data + run.matrix * matrix;
            // A piece stays in the second-level cache, and the columns of a group are reused from there too. The first group
            // reads tiles from memory, which is fastest one after the other; the next ones take two that follow one another.
            for (size_t g = run.first; g < run.last; g++) {
                const Group &group = call.groups[g];
                GGML_ASSERT(group.n <= MOST_COLUMNS);
                for (int64_t i = begin, n; i < end; i += n) {
                    const int64_t t = chosen[i];
                    n = g > run.first && i + 1 < end && chosen[i + 1] == t + 1 ? 2 : 1;
                    float *y[MOST_COLUMNS];
                    for (int j = 0; j < group.n; j++) y[j] = call.y[group.first + j] + t * ROWS;
                    kernels()->multiply(type, k, data + t * tile, buffer.columns(group), y, int(std::min(n * ROWS, rows - t * ROWS)));
                }
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

int64_t specdec_kernels_experts_read(void) { return specdec::experts_read; }
