// Connects the kernels to llama.cpp as an "extra buffer type" of ggml's CPU backend. ggml queries extra buffer types
// first, both to place a matrix and to select the code for an operation. llama.cpp is not patched, and the work runs
// on its own threads.
#include "operations.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include <strings.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

namespace specdec {
namespace {

const Kernels *chosen = nullptr;
bool enabled = false, ends_only = false;
ggml_backend_buffer_type buffer_type;

// Of the thread that calls llama.cpp, which is the first of those that compute an operation.
thread_local int64_t chosen_rows = 0;
thread_local ChosenTiles chosen_now = {};

int64_t limits[GGML_TYPE_COUNT];  // see `most_columns`

bool is_packed(const ggml_tensor *matrix) { return matrix->buffer && matrix->buffer->buft == &buffer_type; }

struct ExtraBufferType : ggml::cpu::extra_buffer_type {
    // The model loader passes an empty buffer; the scheduler, the buffer that holds the weights.
    bool supports_op(ggml_backend_dev_t, const ggml_tensor *op) override {
        const ggml_tensor *matrix = op->src[0];
        const bool is_loaded = is_packed(matrix) && matrix->buffer->size > 0;
        return is_packed(matrix) && (is_loaded || (enabled && most_columns(matrix->type) > 0)) && fits_packed(op);
    }

    ggml::cpu::tensor_traits *get_tensor_traits(const ggml_tensor *op) override {
        switch (op->op) {
            case GGML_OP_MUL_MAT:
                if (is_packed(op->src[0])) return packed_traits();
                return enabled ? float_traits(op) : nullptr;
            case GGML_OP_MUL_MAT_ID: return is_packed(op->src[0]) ? packed_traits() : nullptr;
            case GGML_OP_FLASH_ATTN_EXT: return enabled ? attention_traits(op) : nullptr;
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
    if (ends_only) {
        pack_tiles(0, 1);
        pack_tiles(tiles * matrix->ne[2] - 1, tiles * matrix->ne[2]);
        return;
    }
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
    for (ggml_backend_buffer_type_t *t = extra_buffer_types(); t && *t; t++)
        if (*t == &buffer_type) return true;
    return false;
}

const Kernels *kernels_of(const char *name) {
    for (const Kernels *k : {kernels_avx512_vnni(), kernels_avx_vnni(), kernels_avx2(), kernels_neon_i8mm(),
                             kernels_neon_dotprod()})
        if (k && std::strcmp(k->name, name) == 0) return k;
    return nullptr;
}

bool packed_type_of(ggml_type type, Type &packed) {
    switch (type) {
        case GGML_TYPE_Q4_0: packed = Type::Q4_0; return true;
        case GGML_TYPE_Q4_1: packed = Type::Q4_1; return true;
        case GGML_TYPE_Q5_0: packed = Type::Q5_0; return true;
        case GGML_TYPE_Q5_1: packed = Type::Q5_1; return true;
        case GGML_TYPE_Q8_0: packed = Type::Q8_0; return true;
        case GGML_TYPE_IQ4_NL: packed = Type::IQ4_NL; return true;
        case GGML_TYPE_MXFP4: packed = Type::MXFP4; return true;
        case GGML_TYPE_Q2_K: packed = Type::Q2_K; return true;
        case GGML_TYPE_Q3_K: packed = Type::Q3_K; return true;
        case GGML_TYPE_Q4_K: packed = Type::Q4_K; return true;
        case GGML_TYPE_Q5_K: packed = Type::Q5_K; return true;
        case GGML_TYPE_Q6_K: packed = Type::Q6_K; return true;
        case GGML_TYPE_IQ4_XS: packed = Type::IQ4_XS; return true;
        default: return false;
    }
}

}  // namespace

bool packed_type(const ggml_tensor *matrix, Type &type) {
    return packed_type_of(matrix->type, type) && matrix->ne[0] % block_length(type) == 0 && matrix->ne[3] == 1;
}

const Kernels *kernels() { return chosen; }

ggml_backend_buffer_type_t *extra_buffer_types() {
    auto get = (ggml_backend_dev_get_extra_bufts_t)ggml_backend_reg_get_proc_address(ggml_backend_cpu_reg(),
                                                                                    "ggml_backend_dev_get_extra_bufts");
    return get ? get(buffer_type.device) : nullptr;
}

int64_t most_columns(ggml_type type) { return limits[type]; }

ChosenTiles chosen_tiles(int64_t rows) { return chosen_now.tiles && rows == chosen_rows ? chosen_now : all_tiles(rows); }

ggml_type type_named(const char *name) {
    int i = 0;
    while (i < GGML_TYPE_COUNT && !(ggml_type_name(ggml_type(i)) && strcasecmp(ggml_type_name(ggml_type(i)), name) == 0)) i++;
    return ggml_type(i);
}

ggml_backend_buffer_type_t packed_buffer_type() { return &buffer_type; }

}  // namespace specdec

using namespace specdec;

const char *specdec_kernels_install(const char *instruction_set) {
    // A build on a machine without git does not know its commit.
    bool is_commit = std::strncmp(ggml_commit(), SPECDEC_GGML_COMMIT, std::strlen(SPECDEC_GGML_COMMIT)) == 0 ||
                     std::strcmp(ggml_commit(), "unknown") == 0;
    if (std::strcmp(ggml_version(), SPECDEC_GGML_VERSION) != 0 || !is_commit)
        return "they are written for ggml " SPECDEC_GGML_VERSION " (" SPECDEC_GGML_COMMIT "), and another is installed";
    if (chosen) return "they are installed already";
    const Kernels *wanted = kernels_of(instruction_set);
    if (!wanted) return "they were not compiled";
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
    std::fill(std::begin(limits), std::end(limits), std::numeric_limits<int64_t>::max());
    chosen = wanted;
    enabled = true;
    return nullptr;
}

void specdec_kernels_enable(int on) { enabled = on && chosen; }

void specdec_kernels_pack_ends(int on) { ends_only = on; }

void specdec_kernels_limit(const char *type, int64_t most) {
    if (type_named(type) != GGML_TYPE_COUNT) limits[type_named(type)] = most;
}

void specdec_kernels_read_as(int packed, int floats) { reading = {AHEADS[packed], ROWS_TOGETHER[floats]}; }

void specdec_kernels_choose_rows(int64_t rows, const int32_t *tiles, int64_t n_tiles) {
    chosen_rows = rows;
    chosen_now = {tiles, n_tiles};
}

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
    const int most = kernels->max_columns(packed);
    for (int first = 0; first < n; first += most) {
        const int some = std::min(most, n - first);
        std::vector<uint8_t> work(column_bytes(packed, k) * some + LINE);
        const Columns columns = columns_at(aligned(work), packed, k, some);
        for (int j = 0; j < some; j++) kernels->quantize(packed, from[first + j], columns, j, 0, blocks);
        kernels->multiply(packed, k, aligned(weights), columns, to.data() + first, int(rows));
    }
    return nullptr;
}
