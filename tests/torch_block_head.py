"""The forward pass of heads that draft blocks, in PyTorch (float64), on the tensors of their checkpoints."""

import math

import torch


class TorchBlockHead:
    """A head without a cache, with the names and the order of its checkpoint.

    Args:
        config, tensors: of the checkpoint.
        embeddings, output: the main model's matrices, where the head has none of its own.
    """

    def __init__(self, config, tensors, embeddings, output):
        self.config = config | config.get("transformer_layer_config", {}) | config.get("dflash_config", {})
        self._tensors = {name.removeprefix("model."): torch.from_numpy(t) for name, t in tensors.items()}
        self._tensors = {n: t.double() if t.is_floating_point() else t for n, t in self._tensors.items()}
        self._tensors.setdefault("embed_tokens.weight", torch.from_numpy(embeddings).double())
        self._tensors.setdefault("lm_head.weight", torch.from_numpy(output).double())

    def _get(self, name):
        return self._tensors[f"{name}.weight"]

    def hidden(self, states, anchor, n):
        """The normalized hidden states of a block of `n` tokens after the states (n, 3 × width)."""
        context = self._norm(torch.from_numpy(states).double() @ self._get("fc").T, "hidden_norm")
        block = [anchor] + [self.config["mask_token_id"]] * (n - 1)
        x = self._get("embed_tokens")[block] * (self.config.get("input_embedding_scale") or 1)
        for i in range(self.config["num_hidden_layers"]):
            x = self._layer(i, x, context)
        return self._norm(x, "norm")

    def logits(self, hidden):
        """Of all tokens, before the Markov model."""
        found = hidden @ self._get("lm_head").T * (self.config.get("output_multiplier") or 1)
        if cap := self.config.get("final_logit_softcapping"):
            found = cap * torch.tanh(found / cap)
        return self._of_all(found, -math.inf)

    def _of_all(self, values, missing):
        if "d2t" not in self._tensors:
            return values
        tokens = self._tensors["d2t"] + torch.arange(values.shape[-1])
        found = torch.full((*values.shape[:-1], self.config["vocab_size"]), missing, dtype=values.dtype)
        found[..., tokens] = values
        return found

    def chain(self, hidden, anchor, first):
        """Logits and confidences of DSpark, whose Markov model takes the most probable tokens.

        first: the first token of the block that is corrected.
        """
        logits, confidences, before = self.logits(hidden), [], anchor
        w1, w2 = self._get("markov_head.markov_w1"), self._get("markov_head.markov_w2")
        for i in range(first, len(hidden)):
            logits[i] += self._of_all(w2 @ w1[before], 0.0)
            weights = self._get("confidence_head.proj")[0]
            known = torch.cat([hidden[i], w1[before]])[: len(weights)]
            score = weights @ known + self._tensors["confidence_head.proj.bias"]
            confidences.append(torch.sigmoid(score).item())
            before = int(logits[i].argmax())
        return logits, confidences

    def pairs(self, hidden, place, before):
        """Scores of DFlash2 for all tokens at a place of the block, after the token `before`."""
        gate = self._get("candidate_selector.hidden_projection") @ hidden[place]
        known = self._tensors["candidate_selector.predecessor_codebook"][before] * gate
        after = self._tensors["candidate_selector.successor_codebook"]
        return self.logits(hidden)[place] + after @ known

    def _norm(self, x, name):
        scaled = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return scaled * self._get(name)

    def _layer(self, i, x, context):
        layer, config = f"layers.{i}.", self.config
        n, n_context = len(x), len(context)
        h = self._norm(x, f"{layer}input_layernorm")
        before, after = self._convolutions(f"{layer}attention_conv", h)
        h = before(h)

        def heads(name, values):
            return (values @ self._get(f"{layer}self_attn.{name}").T).reshape(
                len(values), -1, config["head_dim"]
            )

        both = torch.cat([context, h])
        q = self._rotated(self._norm(heads("q_proj", h), f"{layer}self_attn.q_norm"), n_context)
        k = self._rotated(self._norm(heads("k_proj", both), f"{layer}self_attn.k_norm"), 0)
        v = heads("v_proj", both)
        n_shared = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(n_shared, 1), v.repeat_interleave(n_shared, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * config["head_dim"] ** -0.5
        distance = n_context + torch.arange(n)[:, None] - torch.arange(n_context + n)
        hidden = distance < 0 if config.get("is_causal") or config.get("causal") else distance < -n
        first = config.get("max_window_layers", 28)
        usual = ["full_attention" if j < first else "sliding_attention" for j in range(i + 1)]
        kinds = config.get("layer_types") or usual
        if config.get("use_swa") or (config.get("use_sliding_window") and kinds[i] == "sliding_attention"):
            hidden |= distance >= (config.get("swa_window_size") or config["sliding_window"])
        scores = scores.masked_fill(hidden, -math.inf)
        if f"{layer}self_attn.sinks" in self._tensors:
            sinks = self._tensors[f"{layer}self_attn.sinks"][:, None, None].expand(-1, n, 1)
            weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        read = (
            torch.einsum("hqk,khd->qhd", weights, v).reshape(n, -1) @ self._get(f"{layer}self_attn.o_proj").T
        )
        x = x + after(read * (config.get("attention_value_scale") or 1))
        h = self._norm(x, f"{layer}post_attention_layernorm")
        before, after = self._convolutions(f"{layer}mlp_conv", h)
        h = before(h)
        gate, up = (h @ self._get(f"{layer}mlp.{name}_proj").T for name in ("gate", "up"))
        return x + after((torch.nn.functional.silu(gate) * up) @ self._get(f"{layer}mlp.down_proj").T)

    def _convolutions(self, name, h):
        """The convolutions before and after a part of a layer, whose weights depend on its input."""
        if f"{name}.base_kernel" not in self._tensors:
            return (lambda values: values,) * 2
        base = self._tensors[f"{name}.base_kernel"]
        kernel, group = self.config["conv_kernel_size"], self.config["conv_group_size"]
        own = (h @ self._get(f"{name}.kernel_projection").T).reshape(len(h), 2, kernel, -1)

        def convolution(side):
            weights = own[:, side].repeat_interleave(group, -1) + base[side]

            def apply(values):
                padded = torch.nn.functional.pad(values, (0, 0, kernel - 1, 0))
                taps = [padded[kernel - 1 - tap :][: len(values)] for tap in range(kernel)]
                return sum(weights[:, tap] * taps[tap] for tap in range(kernel))

            return apply

        return convolution(0), convolution(1)

    def _rotated(self, x, start):
        """Rotary position embedding of x (n, heads, width) from position `start` on."""
        config = self.config
        given = config.get("rope_parameters") or config.get("rope_scaling") or {}
        theta = given.get("rope_theta") or config.get("rope_theta") or 10_000.0
        part = given.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1
        n = int(x.shape[-1] * part)
        frequencies = theta ** -(torch.arange(0, n, 2).double() / n)
        kind, scale = given.get("rope_type") or given.get("type"), 1.0
        factor, original = given.get("factor"), given.get("original_max_position_embeddings")
        if kind == "linear":
            frequencies = frequencies / factor
        elif kind == "llama3":
            low, high = given["low_freq_factor"], given["high_freq_factor"]
            for j, frequency in enumerate(frequencies.tolist()):
                length = 2 * math.pi / frequency
                smooth = (original / length - low) / (high - low)
                if length > original / low:
                    frequencies[j] = frequency / factor
                elif length >= original / high:
                    frequencies[j] = (1 - smooth) * frequency / factor + smooth * frequency
        elif kind == "yarn":
            fast, slow = given.get("beta_fast") or 32, given.get("beta_slow") or 1
            bounds = [
                n * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
                for turns in (fast, slow)
            ]
            low, high = max(math.floor(bounds[0]), 0), min(math.ceil(bounds[1]), n - 1)
            ramp = ((torch.arange(n // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
            frequencies = frequencies / factor * ramp + frequencies * (1 - ramp)
            scale = given.get("attention_factor") or 0.1 * math.log(factor) + 1
        angles = (start + torch.arange(len(x)))[:, None, None] * frequencies
        sin, cos = angles.sin() * scale, angles.cos() * scale
        if config.get("rope_is_neox_style", True):
            a, b = x[..., : n // 2], x[..., n // 2 : n]
            turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        else:
            a, b = x[..., 0:n:2], x[..., 1:n:2]
            turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        return torch.cat([turned, x[..., n:]], -1)
