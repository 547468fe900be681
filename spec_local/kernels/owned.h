// Objects of ggml that are freed where their owner ends.
#pragma once

#include <memory>

#include "ggml_internals.h"

namespace specdec {

struct Freed {
    void operator()(ggml_context *p) const { ggml_free(p); }
    void operator()(ggml_backend *p) const { ggml_backend_free(p); }
    void operator()(ggml_backend_buffer *p) const { ggml_backend_buffer_free(p); }
};
template <class T>
using Owned = std::unique_ptr<T, Freed>;

}  // namespace specdec
