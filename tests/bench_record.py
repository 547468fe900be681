"""The record of a benchmark about its machine and models, and a reader of reports."""

RECORD = {
    "specdec": "0.1.0",
    "date": "2026-01-02T03:04:05+00:00",
    "models": {"main": {"file": "m.gguf", "description": "tiny", "bytes": 2_000_000, "sha256": "ab" * 32}},
    "context": 256,
    "processor": "Abacus 9",
    "cores": 2,
    "system": "Linux",
    "threads": 1,
    "device": "MTL (draft: CPU)",
    "llama_cpp": "1.2.3 libggml.so:1:2",
    "cpu_kernels": "avx2",
    "logits_vary": [],
    "kernel_choice": {"Q4_K": {"most_tokens": None, "speeds": {"1": 1.2}, "summary": "1.20 at one token"}},
}


def cells(report, start):
    """The cells of the rows of a Markdown report that start with a text."""
    lines = [line for line in report.splitlines() if line.startswith(f"| {start} ")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
