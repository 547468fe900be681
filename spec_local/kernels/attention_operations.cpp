// Attention: FLASH_ATTN_EXT.
#include "operations.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace specdec {
namespace {

bool cache_type(const ggml_tensor *x, CacheType &type) {
    switch (x->type) {
        case GGML_TYPE_F16: type = CacheType::F16; return true;
        case GGML_TYPE_Q8_0: type = CacheType::Q8_0; return x->ne[0] % BLOCK == 0;
        default: return false;
    }
}

float parameter(const ggml_tensor *op, int i) {
    float value;
    std::memcpy(&value, op->op_params + i, sizeof value);
    return value;
}

// Whether the kernels compute `op`: attention over keys and values of certain types, without a position bias (ALiBi).
bool is_attention(const ggml_tensor *op) {
    if (op->op != GGML_OP_FLASH_ATTN_EXT) return false;
    const ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *mask = op->src[3];
    CacheType type;
    return q->type == GGML_TYPE_F32 && q->nb[0] == sizeof(float) && cache_type(k, type) && cache_type(v, type) && mask &&
           mask->type == GGML_TYPE_F16 && parameter(op, 1) == 0.f && q->ne[3] == 1 && k->ne[3] == 1 &&
           k->nb[0] == ggml_type_size(k->type) && v->nb[0] == ggml_type_size(v->type) && k->ne[2] == v->ne[2];
}

struct AttentionTraits : ggml::cpu::tensor_traits {
    bool work_size(int, const ggml_tensor *, size_t &) override { return false; }

    bool compute_forward(ggml_compute_params *params, ggml_tensor *op) override {
        const ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *mask = op->src[3];
        const int64_t shared = q->ne[2] / k->ne[2], per_head = shared * q->ne[1];  // queries per key-value head
        // Give every thread work. Queries of one head that are computed together read its keys only once.
        const int64_t share = (per_head * k->ne[2] + params->nth - 1) / params->nth;
        const int64_t most = std::clamp<int64_t>(std::min(share, per_head), 1, MOST_QUERIES);
        const int64_t pieces = (per_head + most - 1) / most, piece = (per_head + pieces - 1) / pieces;
        static thread_local std::vector<char> scratch;
        scratch.resize(attention_scratch(k->ne[0], v->ne[0]) + LINE);
        if (params->ith == 0) ggml_threadpool_chunk_set(params->threadpool, params->nth);
        ggml_barrier(params->threadpool);
        for (int64_t task = params->ith; task < pieces * k->ne[2];
             task = ggml_threadpool_chunk_add(params->threadpool, 1)) {
            const int64_t head = task / pieces, first = task % pieces * piece, last = std::min(first + piece, per_head);
            const float *queries[MOST_QUERIES];
            const uint16_t *masks[MOST_QUERIES];
            float *results[MOST_QUERIES], sinks[MOST_QUERIES];
            for (int64_t i = first; i < last; i++) {
                const int64_t token = i / shared, query_head = head * shared + i % shared;
                queries[i - first] = (const float *)row(q, token, query_head, 0);
                masks[i - first] = (const uint16_t *)row(mask, token, query_head % mask->ne[2], 0);
                if (op->src[4]) sinks[i - first] = ((const float *)op->src[4]->data)[query_head];
                results[i - first] = (float *)((char *)op->data + (query_head + token * op->ne[1]) * op->nb[1]);
            }
            Attention attention = {};
            attention.length = k->ne[0], attention.value_length = v->ne[0], attention.n_keys = k->ne[1];
            attention.keys = (const uint8_t *)k->data + head * k->nb[2], attention.key_bytes = k->nb[1];
            attention.values = (const uint8_t *)v->data + head * v->nb[2], attention.value_bytes = v->nb[1];
            cache_type(k, attention.key_type), cache_type(v, attention.value_type);
            attention.scale = parameter(op, 0), attention.soft_cap = parameter(op, 2);
            attention.n = int(last - first), attention.sinks = op->src[4] ? sinks : nullptr;
            attention.queries = queries, attention.masks = masks, attention.results = results;
            kernels()->attend(attention, (void *)rounded_up((size_t)scratch.data()));
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

}  // namespace

ggml::cpu::tensor_traits *attention_traits(const ggml_tensor *op) {
    static AttentionTraits traits;
    static ReferenceAttentionTraits reference;
    if (is_attention(op)) return &traits;
    return op->src[0]->ne[1] == 1 ? &reference : nullptr;
}

}  // namespace specdec
