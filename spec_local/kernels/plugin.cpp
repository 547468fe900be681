// Connects the kernels to llama.cpp as an "extra buffer type" of ggml's CPU backend. ggml queries extra buffer types
// first, both to place a matrix and to select the code for an operation. llama.cpp is not patched, and the work runs
// on its own threads.
#include "plugin.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace specdec {
namespace {

const Kernels *chosen = nullptr;
bool enabled = false;
ggml_backend_buffer_type buffer_type;

// Products of unpacked floating-point weights with more columns than this are left to ggml's tinyBLAS, which is then as
// fast (measured: 16).
constexpr int64_t MOST_FLOAT_COLUMNS = 8;

// ---- supported operations ----

bool is_packed(const ggml_tensor *matrix) { return matrix->buffer && matrix->buffer->buft == &buffer_type; }

bool fits(const ggml_tensor *op) {
    Type type;
    const ggml_tensor *w = op->src[0], *x = op->src[1];
    const int dimensions = op->op == GGML_OP_MUL_MAT ? 2 : op->op == GGML_OP_MUL_MAT_ID ? 3 : 0;
    return dimensions && ggml_n_dims(w) == dimensions && !w->view_src && packed_type(w, type) &&
           x->type == GGML_TYPE_F32 && x->nb[0] == sizeof(float) && ggml_is_contiguous(op) &&
           !(x->buffer && !ggml_backend_buft_is_host(x->buffer->buft));
}

bool float_type(ggml_type from, FloatType &type) {
    switch (from) {
        case GGML_TYPE_F32: type = FloatType::F32; return true;
        case GGML_TYPE_F16: type = FloatType::F16; return true;
        default: return false;  // BF16: tinyBLAS has an instruction for it and is faster
    }
}

// Whether `op` multiplies unpacked floating-point weights. These are read in place, mostly from the memory-mapped file.
bool is_float_weights(const ggml_tensor *op) {
    FloatType type;
    const ggml_tensor *w = op->src[0], *x = op->src[1];
    return op->op == GGML_OP_MUL_MAT && float_type(w->type, type) && w->buffer && ggml_is_contiguous(w) &&
           w->ne[2] * w->ne[3] == 1 && ggml_backend_buffer_get_usage(w->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS &&
           x->type == GGML_TYPE_F32 && x->nb[0] == sizeof(float) && ggml_is_contiguous(op) &&
           ggml_nrows(x) <= MOST_FLOAT_COLUMNS && op->op_params[1] == 0;
}

// ---- computation ----

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

const float *column(const ggml_tensor *x, int64_t i1, int64_t i2, int64_t i3) {
    return (const float *)((const char *)x->data + i1 * x->nb[1] + i2 * x->nb[2] + i3 * x->nb[3]);
}

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
        GGML_ASSERT(fits(op) && packed_type(w, type));
        const int64_t k = w->ne[0], rows = w->ne[1], tiles = (rows + ROWS - 1) / ROWS;
        const int64_t blocks = k / block_length(type);
        static thread_local Call call;
        call.clear();
        if (op->op == GGML_OP_MUL_MAT) {
            list_columns(op, call);
            call.close_run(0, chosen->max_columns);
        } else {
            list_experts(op, call, chosen->max_columns);
        }

        auto *work = (char *)rounded_up((size_t)params->wdata);
        GGML_ASSERT(work + column_bytes(type, k) * call.x.size() <= (char *)params->wdata + params->wsize);
        auto columns = [&](const Group &group) {
            auto *codes = (int32_t *)(work + column_bytes(type, k) * group.first);
            auto *scales = (float *)(codes + k / CODES * group.n);
            return Columns{group.n, codes, scales, (int32_t *)(scales + blocks * group.n)};
        };
        const int64_t first = params->ith * blocks / params->nth, last = (params->ith + 1) * blocks / params->nth;
        for (const Group &group : call.groups)
            for (int j = 0; j < group.n; j++)
                chosen->quantize(type, call.x[group.first + j], columns(group), j, first, last);
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
                chosen->multiply(type, k, data + t * tile, columns(group), y, int(std::min<int64_t>(ROWS, rows - t * ROWS)));
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

struct FloatTraits : ggml::cpu::tensor_traits {
    // At least what ggml needs, in case it computes the operation after all.
    bool work_size(int, const ggml_tensor *op, size_t &size) override {
        size = packed_floats(op->src[0]->ne[0], ggml_nrows(op->src[1])) * sizeof(float) + LINE;
        return true;
    }

    bool compute_forward(ggml_compute_params *params, ggml_tensor *op) override {
        FloatType type;
        const ggml_tensor *w = op->src[0];
        GGML_ASSERT(float_type(w->type, type));
        const int64_t rows = w->ne[1], k = w->ne[0];
        static thread_local Call call;
        call.clear();
        list_columns(op, call);
        const int n = int(call.x.size());
        auto *packed = (float *)rounded_up((size_t)params->wdata);
        if ((char *)(packed + packed_floats(k, n)) > (char *)params->wdata + params->wsize) return false;
        for (int j = params->ith; j < n; j += params->nth) chosen->pack_floats(k, call.x[j], j, n, packed);
        if (params->ith == 0) ggml_threadpool_chunk_set(params->threadpool, params->nth);
        ggml_barrier(params->threadpool);
        const int64_t piece = std::clamp<int64_t>(rows / (params->nth * 8), 1, 64);
        for (int64_t task = params->ith; task * piece < rows; task = ggml_threadpool_chunk_add(params->threadpool, 1)) {
            const int64_t begin = task * piece, end = std::min(begin + piece, rows);
            float *y[MOST_FLOAT_COLUMNS];
            for (int j = 0; j < n; j++) y[j] = call.y[j] + begin;
            chosen->multiply_floats(type, k, (const uint8_t *)w->data + begin * w->nb[1], w->nb[1], int(end - begin),
                                    packed, n, y);
        }
        return true;
    }
};

// Whether `op` is attention over half-precision keys and values, without a soft cap or attention sinks.
bool is_attention(const ggml_tensor *op) {
    if (op->op != GGML_OP_FLASH_ATTN_EXT) return false;
    const ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *mask = op->src[3];
    float bias, soft_cap;
    std::memcpy(&bias, op->op_params + 1, sizeof bias);
    std::memcpy(&soft_cap, op->op_params + 2, sizeof soft_cap);
    return q->type == GGML_TYPE_F32 && k->type == GGML_TYPE_F16 && v->type == GGML_TYPE_F16 && mask && !op->src[4] &&
           mask->type == GGML_TYPE_F16 && bias == 0.f && soft_cap == 0.f && q->ne[3] == 1 && k->ne[3] == 1 &&
           k->ne[0] % ROWS == 0 && v->ne[0] % ROWS == 0 && q->nb[0] == sizeof(float) && k->nb[0] == sizeof(uint16_t) &&
           v->nb[0] == sizeof(uint16_t) && k->ne[2] == v->ne[2];
}

struct AttentionTraits : ggml::cpu::tensor_traits {
    bool work_size(int, const ggml_tensor *, size_t &) override { return false; }

    bool compute_forward(ggml_compute_params *params, ggml_tensor *op) override {
        const ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *mask = op->src[3];
        const int64_t shared = q->ne[2] / k->ne[2], per_head = shared * q->ne[1];  // queries per key-value head
        // Give every thread work. Queries of one head that are computed together read its keys only once.
        const int64_t share = (per_head * k->ne[2] + params->nth - 1) / params->nth;
        const int64_t piece = std::clamp<int64_t>(std::min(share, per_head), 1, MOST_QUERIES);
        const int64_t pieces = (per_head + piece - 1) / piece;
        static thread_local std::vector<float> scratch;
        scratch.resize(attention_scratch(k->ne[0], v->ne[0]) + LINE / sizeof(float));
        if (params->ith == 0) ggml_threadpool_chunk_set(params->threadpool, params->nth);
        ggml_barrier(params->threadpool);
        for (int64_t task = params->ith; task < pieces * k->ne[2];
             task = ggml_threadpool_chunk_add(params->threadpool, 1)) {
            const int64_t head = task / pieces, first = task % pieces * piece, last = std::min(first + piece, per_head);
            const float *queries[MOST_QUERIES];
            const uint16_t *masks[MOST_QUERIES];
            float *results[MOST_QUERIES];
            for (int64_t i = first; i < last; i++) {
                const int64_t token = i / shared, query_head = head * shared + i % shared;
                queries[i - first] = column(q, token, query_head, 0);
                masks[i - first] = (const uint16_t *)column(mask, token, query_head % mask->ne[2], 0);
                results[i - first] = (float *)((char *)op->data + (query_head + token * op->ne[1]) * op->nb[1]);
            }
            Attention attention = {};
            attention.length = k->ne[0], attention.value_length = v->ne[0], attention.n_keys = k->ne[1];
            attention.keys = (const uint8_t *)k->data + head * k->nb[2], attention.key_bytes = k->nb[1];
            attention.values = (const uint8_t *)v->data + head * v->nb[2], attention.value_bytes = v->nb[1];
            std::memcpy(&attention.scale, op->op_params, sizeof(float));
            attention.n = int(last - first);
            attention.queries = queries, attention.masks = masks, attention.results = results;
            chosen->attend(attention, (float *)rounded_up((size_t)scratch.data()));
        }
        return true;
    }
};

// Attention that `AttentionTraits` does not support. For one query and 512 keys or more, ggml splits the keys among the
// threads, which changes the order of summation. Its reference implementation does not, and is what ggml uses for 2 to
// 63 queries.
struct ReferenceAttentionTraits : ggml::cpu::tensor_traits {
    bool work_size(int, const ggml_tensor *, size_t &) override { return false; }

    bool compute_forward(ggml_compute_params *params, ggml_tensor *op) override {
        ggml_compute_params reference = *params;
        reference.use_ref = true;
        ggml_compute_forward_flash_attn_ext(&reference, op);
        return true;
    }
};

PackedTraits packed_traits;
FloatTraits float_traits;
AttentionTraits attention_traits;
ReferenceAttentionTraits reference_attention_traits;

struct ExtraBufferType : ggml::cpu::extra_buffer_type {
    // The model loader passes an empty buffer; the scheduler, the buffer that holds the weights.
    bool supports_op(ggml_backend_dev_t, const ggml_tensor *op) override {
        return is_packed(op->src[0]) && (enabled || op->src[0]->buffer->size > 0) && fits(op);
    }

    ggml::cpu::tensor_traits *get_tensor_traits(const ggml_tensor *op) override {
        switch (op->op) {
            case GGML_OP_MUL_MAT:
                if (is_packed(op->src[0])) return &packed_traits;
                return enabled && is_float_weights(op) ? &float_traits : nullptr;
            case GGML_OP_MUL_MAT_ID: return is_packed(op->src[0]) ? &packed_traits : nullptr;
            case GGML_OP_FLASH_ATTN_EXT:
                if (!enabled) return nullptr;
                if (is_attention(op)) return &attention_traits;
                return op->src[0]->ne[1] == 1 ? &reference_attention_traits : nullptr;
            default: return nullptr;
        }
    }
};

// ---- the buffer type ----

ggml_status init_tensor(ggml_backend_buffer_t, ggml_tensor *) { return GGML_STATUS_SUCCESS; }

// Drop the pages of weights that were packed, if they are those of a mapped file, so that loading never holds both
// copies of all weights. They can be read again at any time. Only on Linux.
void release_mapped([[maybe_unused]] const void *data, [[maybe_unused]] size_t size) {
#ifdef __linux__
    const size_t page = 4096, begin = ((size_t)data + page - 1) / page * page, end = ((size_t)data + size) / page * page;
    std::ifstream maps("/proc/self/maps");
    for (std::string line; begin < end && std::getline(maps, line);) {
        size_t from, to;
        char permissions[5], path[2];  // only what cannot have been written to, and has a path
        if (std::sscanf(line.c_str(), "%zx-%zx %4s %*s %*s %*s %1s", &from, &to, permissions, path) != 4) continue;
        if (from <= begin && end <= to && permissions[1] == '-' && path[0] == '/')
            madvise((void *)begin, end - begin, MADV_DONTNEED);
    }
#endif
}

void set_tensor(ggml_backend_buffer_t, ggml_tensor *matrix, const void *data, size_t offset, size_t size) {
    Type type;
    GGML_ASSERT(packed_type(matrix, type) && offset == 0 && size == ggml_nbytes(matrix));
    const int64_t k = matrix->ne[0], rows = matrix->ne[1], tiles = (rows + ROWS - 1) / ROWS;
    // Pack some of the tiles of all matrices (experts), counted through.
    const auto pack_tiles = [=](int64_t begin, int64_t end) {
        while (begin < end) {
            const int64_t i = begin / tiles, first = begin % tiles, last = std::min(tiles, first + end - begin);
            pack(type, rows, k, (const uint8_t *)data + i * matrix->nb[2],
                 (uint8_t *)matrix->data + i * packed_bytes(type, rows, k), first, last);
            begin += last - first;
        }
    };
    // A few threads pack as fast as a fast disk reads. A thread is worth starting for about a megabyte.
    const auto wanted = std::min<size_t>(std::thread::hardware_concurrency(), size / (1 << 20));
    const int64_t n_threads = std::clamp<int64_t>(wanted, 1, 8), all = tiles * matrix->ne[2];
    std::vector<std::thread> threads;
    for (int64_t t = 1; t < n_threads; t++) {
        try {
            threads.emplace_back(pack_tiles, t * all / n_threads, (t + 1) * all / n_threads);
        } catch (const std::system_error &) {  // no more threads
            pack_tiles(t * all / n_threads, all);
            break;
        }
    }
    pack_tiles(0, all / n_threads);
    for (std::thread &thread : threads) thread.join();
    release_mapped(data, size);
}

ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t type, size_t size) {
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
    if (!buffer) return nullptr;
#ifdef MADV_HUGEPAGE
    // Half a gigabyte has 131,072 small pages, more than the TLB holds.
    const size_t page = 4096, begin = ((size_t)ggml_backend_buffer_get_base(buffer) + page - 1) / page * page;
    const size_t end = ((size_t)ggml_backend_buffer_get_base(buffer) + size) / page * page;
    if (end > begin) madvise((void *)begin, end - begin, MADV_HUGEPAGE);
#endif
    buffer->buft = type;
    buffer->iface.init_tensor = init_tensor;
    buffer->iface.set_tensor = set_tensor;
    buffer->iface.get_tensor = nullptr;
    buffer->iface.cpy_tensor = nullptr;
    return buffer;
}

size_t alloc_size(ggml_backend_buffer_type_t, const ggml_tensor *matrix) {
    Type type;
    if (!packed_type(matrix, type)) return ggml_nbytes(matrix);
    return packed_bytes(type, matrix->ne[1], matrix->ne[0]) * matrix->ne[2] * matrix->ne[3];
}

// Whether the structures declared in ggml_internals.h match the loaded library.
bool layout_agrees() {
    ggml_backend_buffer_type_t type = ggml_backend_cpu_buffer_type();
    if (type->iface.get_name(type) != ggml_backend_buft_name(type)) return false;
    if (type->iface.get_alignment(type) != ggml_backend_buft_get_alignment(type)) return false;
    if (!type->iface.is_host(type) || type->device != ggml_backend_buft_get_device(type)) return false;
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(type, 12345);
    if (!buffer) return false;
    ggml_backend_buffer_set_usage(buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    const bool agrees = buffer->buft == type && buffer->size == ggml_backend_buffer_get_size(buffer) &&
                        buffer->usage == GGML_BACKEND_BUFFER_USAGE_WEIGHTS &&
                        buffer->iface.get_base(buffer) == ggml_backend_buffer_get_base(buffer);
    ggml_backend_buffer_free(buffer);
    return agrees;
}

// Whether models loaded from now on can use the buffer type: ggml copies its list when it is first requested.
bool is_offered() {
    auto get = (ggml_backend_dev_get_extra_bufts_t)ggml_backend_reg_get_proc_address(ggml_backend_cpu_reg(),
                                                                                    "ggml_backend_dev_get_extra_bufts");
    if (!get) return false;
    for (ggml_backend_buffer_type_t *t = get(buffer_type.device); t && *t; t++)
        if (*t == &buffer_type) return true;
    return false;
}

const Kernels *kernels_of(const char *name) {
    for (const Kernels *k : {kernels_avx512_vnni(), kernels_avx_vnni(), kernels_avx2()})
        if (std::strcmp(k->name, name) == 0) return k;
    return nullptr;
}

bool packed_type_of(ggml_type type, Type &packed) {
    switch (type) {
        case GGML_TYPE_Q4_0: packed = Type::Q4_0; return true;
        case GGML_TYPE_Q4_1: packed = Type::Q4_1; return true;
        case GGML_TYPE_Q5_0: packed = Type::Q5_0; return true;
        case GGML_TYPE_Q8_0: packed = Type::Q8_0; return true;
        case GGML_TYPE_IQ4_NL: packed = Type::IQ4_NL; return true;
        case GGML_TYPE_Q4_K: packed = Type::Q4_K; return true;
        case GGML_TYPE_Q5_K: packed = Type::Q5_K; return true;
        case GGML_TYPE_Q6_K: packed = Type::Q6_K; return true;
        default: return false;
    }
}

}  // namespace

bool packed_type(const ggml_tensor *matrix, Type &type) {
    return packed_type_of(matrix->type, type) && matrix->ne[0] % block_length(type) == 0 && matrix->ne[3] == 1;
}

const Kernels *kernels() { return chosen; }

ggml_backend_buffer_type_t packed_buffer_type() { return &buffer_type; }

}  // namespace specdec

using namespace specdec;

const char *specdec_kernels_install(const char *instruction_set) {
    if (std::strcmp(ggml_version(), SPECDEC_GGML_VERSION) != 0 ||
        std::strncmp(ggml_commit(), SPECDEC_GGML_COMMIT, std::strlen(SPECDEC_GGML_COMMIT)) != 0)
        return "they are written for ggml " SPECDEC_GGML_VERSION " (" SPECDEC_GGML_COMMIT "), and another is installed";
    if (chosen) return "they are installed already";
    const Kernels *wanted = kernels_of(instruction_set);
    if (!wanted) return "there are none of that name";
    for (int i = 0; i < GGML_TYPE_COUNT; i++) {
        Type type;
        if (packed_type_of(ggml_type(i), type) && (ggml_type_size(ggml_type(i)) != source_bytes(type) ||
                                                   ggml_blck_size(ggml_type(i)) != block_length(type)))
            return "ggml's quantized blocks are not as expected";
    }
    if (!layout_agrees()) return "ggml's structures are not as expected";
    buffer_type.iface.get_name = [](ggml_backend_buffer_type_t) { return "CPU_SPECDEC"; };
    buffer_type.iface.alloc_buffer = alloc_buffer;
    buffer_type.iface.get_alignment = [](ggml_backend_buffer_type_t) { return LINE; };
    buffer_type.iface.get_alloc_size = alloc_size;
    buffer_type.device = ggml_backend_reg_dev_get(ggml_backend_cpu_reg(), 0);
    buffer_type.context = new ExtraBufferType;
    auto &types = ggml_backend_cpu_get_extra_buffer_types();
    types.insert(types.begin(), &buffer_type);
    if (!is_offered()) {
        types.erase(types.begin());
        return "a model was loaded before them";
    }
    chosen = wanted;
    enabled = true;
    return nullptr;
}

void specdec_kernels_enable(int on) { enabled = on && chosen; }

const char *specdec_kernels_multiply(const char *instruction_set, int type, int64_t rows, int64_t k, int n,
                                     const void *matrix, const float *x, float *y) {
    const Kernels *kernels = kernels_of(instruction_set);
    Type packed;
    if (!kernels) return "there are no kernels of that name";
    std::vector<const float *> from(n);
    std::vector<float *> to(n);
    for (int j = 0; j < n; j++) from[j] = x + j * k, to[j] = y + j * rows;
    FloatType kind;
    if (float_type(ggml_type(type), kind)) {
        std::vector<float> packed(packed_floats(k, n) + LINE);
        auto *columns = (float *)rounded_up((size_t)packed.data());
        for (int j = 0; j < n; j++) kernels->pack_floats(k, from[j], j, n, columns);
        kernels->multiply_floats(kind, k, (const uint8_t *)matrix, ggml_row_size(ggml_type(type), k), int(rows), columns,
                                 n, to.data());
        return nullptr;
    }
    if (!packed_type_of(ggml_type(type), packed) || k % block_length(packed)) return "there is no kernel for it";
    const int64_t tiles = (rows + ROWS - 1) / ROWS, blocks = k / block_length(packed);
    auto aligned = [](std::vector<uint8_t> &v) { return (uint8_t *)rounded_up((size_t)v.data()); };
    std::vector<uint8_t> weights(packed_bytes(packed, rows, k) + LINE);
    pack(packed, rows, k, (const uint8_t *)matrix, aligned(weights), 0, tiles);
    for (int first = 0; first < n; first += kernels->max_columns) {
        const int some = std::min(kernels->max_columns, n - first);
        std::vector<uint8_t> work(column_bytes(packed, k) * some + LINE);
        auto *codes = (int32_t *)aligned(work);
        auto *scales = (float *)(codes + k / CODES * some);
        const Columns columns = {some, codes, scales, (int32_t *)(scales + blocks * some)};
        for (int j = 0; j < some; j++) kernels->quantize(packed, from[first + j], columns, j, 0, blocks);
        for (int64_t t = 0; t < tiles; t++) {
            std::vector<float *> at(to.begin() + first, to.begin() + first + some);
            for (float *&p : at) p += t * ROWS;
            kernels->multiply(packed, k, aligned(weights) + t * tile_bytes(packed, k), columns, at.data(),
                              int(std::min<int64_t>(ROWS, rows - t * ROWS)));
        }
    }
    return nullptr;
}
