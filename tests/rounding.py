"""How far results may be from those of other calls, depending on where llama.cpp computes them."""

import os

IS_ON_GPU = bool(os.environ.get("SPECDEC_TEST_DEVICE"))
"""Whether the models of the tests are on a GPU: see `tests/llama/conftest.py`."""


def limit(on_cpu, on_gpu=0.15):
    """The largest difference of logits (standard deviation 3) and states of tiny models in F32 or F16.

    llama.cpp's Vulkan backend rounds the factors of products to F16: those of attention in calls of two
    tokens or more, and those of weights in calls of nine or more. The reference makes other calls. The
    largest difference that `make test-gpu` saw on lavapipe is 0.117, and below 0.02 with products of weights
    in F32.
    """
    return on_gpu if IS_ON_GPU else on_cpu
