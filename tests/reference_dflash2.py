"""The forward pass of a DFlash2 head in NumPy, from its file and the main model's. In float64."""

import gguf
import numpy as np

_EPS, _BASE = 1e-5, 10_000.0  # of the tiny models; the base is the default of RoPE


class ReferenceDFlash2:
    """A head without a cache: each block is evaluated with the whole history.

    Args:
        head, main: paths of the files. If there is a window of attention, it is that of the last layer.

    Attributes:
        n_drafted: number of draft tokens in a block. k: number of candidates for each.
    """

    def __init__(self, head, main):
        self._file = gguf.GGUFReader(head)
        tensors = {t.name: np.array(t.data, np.float64) for t in gguf.GGUFReader(main).tensors}
        self._main = {name: tensors[name] for name in ("token_embd.weight", "output.weight")}
        self._tensors = {t.name: np.array(t.data) for t in self._file.tensors}
        self._is_causal = self._number("attention.causal")
        self._window = self._number("attention.sliding_window")
        self.k, self.n_drafted = self._number("selector_top_k"), 1

    def close(self):
        pass

    def _number(self, key):
        field = self._file.fields.get(f"dflash.{key}")
        return int(field.contents()) if field else 0

    def _tensor(self, name):
        return self._tensors[name].astype(np.float64) if name in self._tensors else self._main[name]

    def lattice(self, tokens, states):
        """Logits (n, V) of a block of draft tokens, and a function that scores all tokens after one before.

        tokens: the history. states: the main model's, of all of its tokens but the last.
        """
        n = len(tokens) - 1
        states = np.array(states, np.float64).reshape(n, -1)
        known = _norm(states @ self._tensor("fc.weight").T) * self._tensor("enc.output_norm.weight")
        mask = int(self._file.fields["tokenizer.ggml.mask_token_id"].contents())
        block = [tokens[-1]] + [mask] * self.n_drafted
        x = self._tensor("token_embd.weight")[block]
        for i in range(self._number("block_count")):
            x = self._layer(i, x, known)
        hidden = (_norm(x) * self._tensor("output_norm.weight"))[1:]
        output = hidden @ self._tensor("output.weight").T
        if "d2t" in self._tensors:
            logits = np.full((len(hidden), len(self._main["token_embd.weight"])), -np.inf)
            logits[:, self._tensors["d2t"]] = output
        else:
            logits = output
        gates = hidden @ self._tensor("selector_hidden.weight").T
        before, after = (self._tensor(f"selector_{name}.weight") for name in ("predecessor", "successor"))
        return logits, lambda place, token: logits[place] + after @ (before[token] * gates[place])

    def _layer(self, i, x, known):
        def tensor(name):
            return self._tensor(f"blk.{i}.{name}")

        n = len(known)
        a = _norm(x) * tensor("attn_norm.weight")
        dynamic = a @ tensor("attn_conv_proj.weight").T
        a = _convolve(a, dynamic, tensor("attn_conv_base"), 0)
        positions = np.arange(n + len(x))
        head = self._number("attention.key_length")
        q = _norm((a @ tensor("attn_q.weight").T).reshape(len(x), -1, head)) * tensor("attn_q_norm.weight")
        read = np.concatenate((known, a))
        k = _norm((read @ tensor("attn_k.weight").T).reshape(n + len(x), -1, head))
        k, v = k * tensor("attn_k_norm.weight"), (read @ tensor("attn_v.weight").T).reshape(k.shape)
        q, k = _rotate(q, positions[n:]), _rotate(k, positions)
        distance = positions[n:, None] - positions
        hides = distance < 0 if self._is_causal else np.zeros(distance.shape, bool)
        if self._window and i == self._number("block_count") - 1:
            hides |= distance >= self._window
        shared = q.shape[1] // k.shape[1]
        k, v = k.repeat(shared, 1), v.repeat(shared, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / head**0.5
        weights = _softmax(np.where(hides, -np.inf, scores))
        attended = np.einsum("hqk,khd->qhd", weights, v).reshape(len(x), -1) @ tensor("attn_output.weight").T
        x = x + _convolve(attended, dynamic, tensor("attn_conv_base"), 1)
        f = _norm(x) * tensor("ffn_norm.weight")
        dynamic = f @ tensor("ffn_conv_proj.weight").T
        f = _convolve(f, dynamic, tensor("ffn_conv_base"), 0)
        gate = f @ tensor("ffn_gate.weight").T
        f = (gate / (1 + np.exp(-gate)) * (f @ tensor("ffn_up.weight").T)) @ tensor("ffn_down.weight").T
        return x + _convolve(f, dynamic, tensor("ffn_conv_base"), 1)


def _norm(x):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + _EPS)


def _softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def _rotate(x, positions):
    """RoPE of pairs of channels that are half a head apart; x (n, heads, channels)."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * _BASE ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate(
        (a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)), -1
    )


def _convolve(x, dynamic, base, side):
    """Sum over taps t: (the token's own coefficients + the base) × the channels of the token t before it.

    x (n, channels). dynamic (n, 2 × taps × groups). base (2, taps, channels).
    """
    n, width = x.shape
    n_taps = base.shape[1]
    own = dynamic.reshape(n, 2, n_taps, -1)[:, side]
    weights = own.repeat(width // own.shape[-1], axis=-1) + base[side]
    padded = np.concatenate((np.zeros((n_taps, width)), x))
    return sum(weights[:, t] * padded[n_taps - t : n_taps - t + n] for t in range(n_taps))
