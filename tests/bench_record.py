"""The record of a benchmark about its machine and models."""

RECORD = {
    "specdec": "0.1.0",
    "date": "2026-01-02T03:04:05+00:00",
    "models": {"main": {"file": "m.gguf", "description": "tiny", "bytes": 2_000_000, "sha256": "ab" * 32}},
    "context": 256,
    "processor": "Abacus 9",
    "cores": 2,
    "system": "Linux",
    "threads": 1,
    "llama_cpp": "0.3.36 libggml.so:1:2",
    "cpu_kernels": "avx2",
}
