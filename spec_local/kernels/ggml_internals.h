// The few structures of ggml that its installed headers do not declare, as they are in the llama.cpp version that this
// project is pinned to. `layout_agrees` checks them against ggml's public functions in a child process before any model
// is loaded. Any other version is rejected by its version number.
#pragma once

#include <vector>

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#define SPECDEC_GGML_VERSION "0.25.3"
#define SPECDEC_GGML_COMMIT "0c1e570"

extern "C" {

struct ggml_backend_buffer_type_i {
    const char *(*get_name)(ggml_backend_buffer_type_t);
    ggml_backend_buffer_t (*alloc_buffer)(ggml_backend_buffer_type_t, size_t size);
    size_t (*get_alignment)(ggml_backend_buffer_type_t);
    size_t (*get_max_size)(ggml_backend_buffer_type_t);
    size_t (*get_alloc_size)(ggml_backend_buffer_type_t, const ggml_tensor *);
    bool (*is_host)(ggml_backend_buffer_type_t);
};

struct ggml_backend_buffer_type {
    ggml_backend_buffer_type_i iface;
    ggml_backend_dev_t device;
    void *context;
};

struct ggml_backend_buffer_i {
    void (*free_buffer)(ggml_backend_buffer_t);
    void *(*get_base)(ggml_backend_buffer_t);
    ggml_status (*init_tensor)(ggml_backend_buffer_t, ggml_tensor *);
    void (*memset_tensor)(ggml_backend_buffer_t, ggml_tensor *, uint8_t value, size_t offset, size_t size);
    void (*set_tensor)(ggml_backend_buffer_t, ggml_tensor *, const void *data, size_t offset, size_t size);
    void (*get_tensor)(ggml_backend_buffer_t, const ggml_tensor *, void *data, size_t offset, size_t size);
    void (*set_tensor_2d)(ggml_backend_buffer_t, ggml_tensor *, const void *, size_t, size_t, size_t, size_t, size_t);
    void (*get_tensor_2d)(ggml_backend_buffer_t, const ggml_tensor *, void *, size_t, size_t, size_t, size_t, size_t);
    bool (*cpy_tensor)(ggml_backend_buffer_t, const ggml_tensor *source, ggml_tensor *target);
    void (*clear)(ggml_backend_buffer_t, uint8_t value);
    void (*reset)(ggml_backend_buffer_t);
};

struct ggml_backend_buffer {
    ggml_backend_buffer_i iface;
    ggml_backend_buffer_type_t buft;
    void *context;
    size_t size;
    ggml_backend_buffer_usage usage;
};

struct ggml_compute_params {
    int ith, nth;  // index of this thread, and number of threads
    size_t wsize;  // bytes of the work buffer, which the threads share
    void *wdata;
    ggml_threadpool *threadpool;
    bool use_ref;  // use the reference implementation of an operation
};

void ggml_barrier(ggml_threadpool *);
void ggml_threadpool_chunk_set(ggml_threadpool *, int value);
int ggml_threadpool_chunk_add(ggml_threadpool *, int value);
void ggml_compute_forward_flash_attn_ext(const ggml_compute_params *, ggml_tensor *);
}

std::vector<ggml_backend_buffer_type_t> &ggml_backend_cpu_get_extra_buffer_types();

namespace ggml::cpu {

class tensor_traits {
  public:
    virtual ~tensor_traits();
    virtual bool work_size(int n_threads, const ggml_tensor *op, size_t &size) = 0;
    virtual bool compute_forward(ggml_compute_params *params, ggml_tensor *op) = 0;
};

class extra_buffer_type {
  public:
    virtual ~extra_buffer_type();
    virtual bool supports_op(ggml_backend_dev_t dev, const ggml_tensor *op) = 0;
    virtual tensor_traits *get_tensor_traits(const ggml_tensor *op) = 0;
};

}  // namespace ggml::cpu
