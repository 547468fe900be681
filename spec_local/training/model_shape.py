"""The measures of a draft: all that llama's architecture leaves open."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Of a transformer as llama.cpp's ``llama`` architecture has it, with the embeddings tied to the output.

    n_vocab, n_layers, n_ctx: counts. n_embd, n_ff: widths. n_head, n_head_kv: of attention; head_dim: width of a head, all
    of which is turned. rope_base: base of the positions' frequencies. eps: of the norms (RMS).
    """

    n_vocab: int
    n_embd: int
    n_layers: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    rope_base: float = 10000.0
    eps: float = 1e-5
    n_ctx: int = 2048
