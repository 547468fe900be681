// The interface of capture.cpp for Python.
#pragma once

#include <cstdint>

#include "ggml-backend.h"
#include "ggml.h"

extern "C" {

// What `specdec_capture_tensor` captures, and where it stores it. Arrays are owned by the caller.
struct specdec_capture {
    const char *prefix;     // of the names of the outputs, before the layer's number
    const int32_t *layers;  // [n_layers]
    float *states;          // [n_layers][n_rows][width]
    int64_t *counts;        // [n_layers]: rows captured; the caller sets them to 0 before a call
    int64_t n_rows;
    int64_t width;
    int32_t n_layers;
    int32_t unexpected;  // index of a layer whose output has an unexpected size; the caller sets it to -1
};

// A callback for `cb_eval` of llama.cpp's context parameters. `data` is a `specdec_capture`.
bool specdec_capture_tensor(ggml_tensor *tensor, bool ask, void *data);
}
