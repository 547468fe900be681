// Which tokens of a call are routed to which experts.
#pragma once

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

#include "ggml.h"

namespace specdec {

// One of the experts of a token.
struct Slot {
    int32_t expert, token, slot;

    bool operator<(const Slot &other) const {
        return std::tie(expert, token, slot) < std::tie(other.expert, other.token, other.slot);
    }
};

// List all slots of a call by expert, so that an expert's weights are read once for all of its tokens. `ids` has a
// column per token.
inline void list_by_expert(const ggml_tensor *ids, int64_t n_experts, std::vector<Slot> &slots) {
    slots.clear();
    for (int64_t t = 0; t < ids->ne[1]; t++)
        for (int64_t s = 0; s < ids->ne[0]; s++) {
            const auto expert = *(const int32_t *)((const char *)ids->data + s * ids->nb[0] + t * ids->nb[1]);
            GGML_ASSERT(expert >= 0 && expert < n_experts);
            slots.push_back({expert, int32_t(t), int32_t(s)});
        }
    std::sort(slots.begin(), slots.end());
}

}  // namespace specdec
