// Copies the outputs of layers while llama.cpp computes a graph. ggml calls back for every tensor: some seven hundred
// times per token of a small model, which takes Python 1 ms.
#include "capture.h"

#include <cstdlib>
#include <cstring>

namespace {

// The index in `capture` of the layer whose output a tensor is, or -1.
int find(const specdec_capture &capture, const char *name) {
    const size_t length = std::strlen(capture.prefix);
    if (std::strncmp(name, capture.prefix, length) != 0) {
        return -1;
    }
    char *end;
    const long layer = std::strtol(name + length, &end, 10);
    if (end == name + length || *end) {
        return -1;
    }
    for (int i = 0; i < capture.n_layers; ++i) {
        if (capture.layers[i] == layer) {
            return i;
        }
    }
    return -1;
}

}  // namespace

bool specdec_capture_tensor(ggml_tensor *tensor, bool ask, void *data) {
    specdec_capture &capture = *static_cast<specdec_capture *>(data);
    const int i = find(capture, ggml_get_name(tensor));
    if (i < 0 || ask) {
        return i >= 0;
    }
    const size_t n_bytes = ggml_nbytes(tensor), row_bytes = capture.width * sizeof(float);
    const int64_t n = n_bytes / row_bytes;
    if (n_bytes % row_bytes || capture.counts[i] + n > capture.n_rows) {
        capture.unexpected = i;
        return false;  // stops the computation
    }
    float *states = capture.states + (i * capture.n_rows + capture.counts[i]) * capture.width;
    ggml_backend_tensor_get(tensor, states, 0, n_bytes);
    capture.counts[i] += n;
    return true;
}
