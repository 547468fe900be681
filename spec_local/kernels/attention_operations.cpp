// Attention: FLASH_ATTN_EXT.
#include "operations.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace specdec {
namespace {

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
                queries[i - first] = (const float *)row(q, token, query_head, 0);
                masks[i - first] = (const uint16_t *)row(mask, token, query_head % mask->ne[2], 0);
                results[i - first] = (float *)((char *)op->data + (query_head + token * op->ne[1]) * op->nb[1]);
            }
            Attention attention = {};
            attention.length = k->ne[0], attention.value_length = v->ne[0], attention.n_keys = k->ne[1];
            attention.keys = (const uint8_t *)k->data + head * k->nb[2], attention.key_bytes = k->nb[1];
            attention.values = (const uint8_t *)v->data + head * v->nb[2], attention.value_bytes = v->nb[1];
            std::memcpy(&attention.scale, op->op_params, sizeof(float));
            attention.n = int(last - first);
            attention.queries = queries, attention.masks = masks, attention.results = results;
            kernels()->attend(attention, (float *)rounded_up((size_t)scratch.data()));
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
