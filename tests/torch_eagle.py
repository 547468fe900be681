"""EAGLE-3 heads in PyTorch, as their training programs evaluate them, and tiny ones in each layout."""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn.functional import rms_norm, silu

from tests.tiny_heads import N_EMBD

N_VOCAB, N_DRAFTED = 823, 300
"""Of the main model of `tests.tiny_heads`, and of a head that drafts a part of its tokens."""


@dataclass(frozen=True)
class TinyEagle:
    """A head. config, tensors: of its folder. layers: those of a main model of 8 whose inputs it reads."""

    config: dict
    tensors: dict[str, np.ndarray]
    layers: tuple[int, ...] = (2, 4, 5)
    settings: dict = field(default_factory=dict)  # what the reference needs of the config, wherever it is

    def logits(self, embeddings, tokens, states, drafted):
        """The logits after a history and after each of the draft tokens after it, one row each.

        embeddings: the main model's, of all tokens. states: outputs of the three layers together, of all
        tokens of the history but the last.
        """
        found, pairs, output = [], self._fused(torch.tensor(states)), None
        tokens = [*tokens[1:]]
        for token in [None, *drafted]:
            if token is not None:
                tokens.append(token)
                read = self._norm("norm", output[-1:]) if self.settings.get("norms_output") else output[-1:]
                pairs = torch.cat([pairs, read])
            output = self._decoded(torch.tensor(self._own("embed_tokens", embeddings))[tokens], pairs)
            found.append(self._predicted(output[-1]))
        return np.array(found)

    def block(self, embeddings, tokens, states, n):
        """The logits for each of n draft tokens of a block after a history; arguments as of `logits`."""
        mask = torch.tensor(self.tensors["mask_hidden"].reshape(1, -1))
        states = torch.cat([torch.tensor(states), mask.repeat(n - 1, 1)])
        tokens = [*tokens[1:], *[self.settings["mask"]] * (n - 1)]
        own = torch.tensor(self._own("embed_tokens", embeddings))
        output = self._decoded(own[tokens], self._fused(states))
        return np.array([self._predicted(row) for row in output[-n:]])

    def _own(self, name, default=None, layer=0):
        """A tensor by its name without prefixes."""
        prefixes = (f"layers.{layer}.", f"model.layers.{layer}.")
        for prefix in prefixes if layer else ("", "model.", "midlayer.", *prefixes):
            if (values := self.tensors.get(f"{prefix}{name}.weight")) is not None:
                return values
        return default

    def _linear(self, name, values, layer=0):
        return values @ torch.tensor(self._own(name, layer=layer)).T

    def _norm(self, name, values, layer=0):
        weight = torch.tensor(self._own(name, layer=layer))
        return rms_norm(values, weight.shape, weight, self.settings.get("eps", 1e-6))

    def _fused(self, states):
        if self.settings.get("norms_input"):
            states = self._norm("input_norm", states)
        if self.settings.get("norms_each"):
            parts = enumerate(states.chunk(3, -1))
            states = torch.cat([self._norm(f"fc_norm.{i}", part) for i, part in parts], -1)
        return self._linear("fc", states)

    def _decoded(self, embeddings, states):
        normed = self._norm("hidden_norm", states)
        residual = normed if self.settings.get("norms_residual") else states
        both = torch.cat([self._norm("input_layernorm", embeddings), normed], -1)
        states = self._with_mlp(residual + self._attention(both))
        for layer in range(1, self.settings.get("n_layers", 1)):
            attention = self._attention(self._norm("input_layernorm", states, layer), layer)
            states = self._with_mlp(states + attention, layer)
        return states

    def _with_mlp(self, states, layer=0):
        values = self._norm("post_attention_layernorm", states, layer)
        gate = silu(self._linear("mlp.gate_proj", values, layer))
        return states + self._linear(
            "mlp.down_proj", gate * self._linear("mlp.up_proj", values, layer), layer
        )

    def _attention(self, inputs, layer=0):
        n_heads, n_kv, n = self.settings.get("n_heads", 4), self.settings.get("n_kv", 2), len(inputs)
        query, key, value = (self._linear(f"self_attn.{each}_proj", inputs, layer) for each in "qkv")
        query = self._rotated(query.reshape(n, n_heads, -1).transpose(0, 1))
        key = self._rotated(key.reshape(n, n_kv, -1).transpose(0, 1)).repeat_interleave(n_heads // n_kv, 0)
        value = value.reshape(n, n_kv, -1).transpose(0, 1).repeat_interleave(n_heads // n_kv, 0)
        scores = query @ key.transpose(1, 2) / math.sqrt(query.shape[-1])
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -math.inf)
        found = (scores.softmax(-1) @ value).transpose(0, 1).reshape(n, -1)
        return self._linear("self_attn.o_proj", found, layer)

    def _rotated(self, values):
        width = values.shape[-1]
        frequencies, scale = self._frequencies(width)
        angles = torch.outer(torch.arange(values.shape[1]).float(), frequencies).repeat(1, 2)
        turned = torch.cat([-values[..., width // 2 :], values[..., : width // 2]], -1)
        return scale * (values * angles.cos() + turned * angles.sin())

    def _frequencies(self, width):
        """The frequencies of RoPE, and the factor of its values, as in transformers."""
        base, scaling = self.settings.get("base", 10000.0), self.settings.get("scaling", {})
        plain = base ** -(torch.arange(0, width, 2) / width)
        factor, n = scaling.get("factor"), scaling.get("original_max_position_embeddings")
        match scaling.get("rope_type", scaling.get("type")):
            case "linear":
                return plain / factor, 1.0
            case "llama3":
                low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
                found = []
                for frequency in plain.tolist():
                    length = 2 * math.pi / frequency
                    if length < n / high:
                        found.append(frequency)
                    elif length > n / low:
                        found.append(frequency / factor)
                    else:
                        smooth = (n / length - low) / (high - low)
                        found.append((1 - smooth) * frequency / factor + smooth * frequency)
                return torch.tensor(found), 1.0
            case "yarn":
                low, high = (
                    width * math.log(n / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (32, 1)
                )
                low, high = max(math.floor(low), 0), min(math.ceil(high), width - 1)
                ramp = ((torch.arange(width // 2) - low) / (high - low)).clamp(0, 1)
                return plain * (1 - ramp) + plain / factor * ramp, 0.1 * math.log(factor) + 1
        return plain, 1.0

    def _predicted(self, output):
        logits = self._linear("lm_head", self._norm("norm", output)).numpy()
        if "d2t" not in self.tensors:
            return logits
        found = np.full(N_VOCAB, -np.inf, np.float32)
        found[self.tensors["d2t"] + np.arange(len(logits))] = logits
        return found


def layer_shapes(inputs, head=16, width=N_EMBD, n_ff=96, n_heads=4):
    """The shapes of the tensors of a layer with two heads of keys, whose attention has so many inputs."""
    return {
        "self_attn.q_proj": (n_heads * head, inputs),
        "self_attn.k_proj": (2 * head, inputs),
        "self_attn.v_proj": (2 * head, inputs),
        "self_attn.o_proj": (width, n_heads * head),
        "mlp.gate_proj": (n_ff, width),
        "mlp.up_proj": (n_ff, width),
        "mlp.down_proj": (width, n_ff),
        "input_layernorm": (width,),
        "hidden_norm": (width,),
        "post_attention_layernorm": (width,),
    }


def _tensors(prefix, head=16, own=(), drafts_all=False, width=N_EMBD, later=()):
    """Random tensors of a head with four attention heads.

    prefix: of the names of the layer's tensors. head: width of an attention head. own: further tensors.
    later: prefixes of further layers.
    """
    rng = np.random.default_rng(0)
    shapes = {f"{prefix}{name}": shape for name, shape in layer_shapes(2 * width, head, width).items()}
    for each in later:
        shapes |= {f"{each}{name}": shape for name, shape in layer_shapes(width, head, width).items()}
    shapes |= {
        "fc": (width, 3 * N_EMBD),
        "norm": (width,),
        "lm_head": (N_VOCAB if drafts_all else N_DRAFTED, width),
    }
    sizes = {"embed_tokens": (N_VOCAB, width), "input_norm": (3 * N_EMBD,)}
    shapes |= {name: sizes.get(name, (N_EMBD,)) for name in own}
    if later:
        del shapes[f"{later[-1]}hidden_norm"]  # which vLLM's layers have, and do not use
    found = {}
    for name, shape in shapes.items():
        values = rng.normal(size=shape)
        scale = 3 if "q_proj" in name else 1.5  # so that attention chooses
        values = 1 + 0.2 * values if len(shape) == 1 else scale * shape[1] ** -0.5 * values
        found[f"{name}.weight"] = values.astype(np.float32)
    if not drafts_all:
        chosen = np.sort(rng.choice(N_VOCAB, N_DRAFTED, replace=False))
        found["d2t"] = (chosen - np.arange(N_DRAFTED)).astype(np.int64)
        found["t2d"] = np.isin(np.arange(N_VOCAB), chosen)
    return found


_SHAPE = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": N_EMBD,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": N_VOCAB,
    "draft_vocab_size": N_DRAFTED,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32}
_LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_LINEAR = {"type": "linear", "factor": 4.0}


def _masked(tensors, shape=(1,)):
    """The same, with what takes the place of unknown states."""
    values = np.random.default_rng(7).normal(size=(*shape, 3 * N_EMBD)).astype(np.float32)
    return {**tensors, "mask_hidden": values}


MASK = 44
_NORMS = [f"fc_norm.{i}" for i in range(3)]


def tiny_layered_eagles() -> dict[str, TinyEagle]:
    """Heads with several layers, and such as draft blocks, in the layouts of the programs that write them."""
    eps = {"eps": 1e-5}
    vllm = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_SHAPE,
        "num_hidden_layers": 3,
        "rope_theta": 500.0,
    }
    later = ["layers.1.", "layers.2."]
    speculators = {
        "transformer_layer_config": {**_SHAPE, "num_hidden_layers": 2, "rope_scaling": _LLAMA3},
        "draft_vocab_size": N_DRAFTED,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 6],
        "norm_before_residual": True,
    }
    proposal = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}]}
    whole = {key: value for key, value in vllm.items() if key != "draft_vocab_size"}
    three, base = {"n_layers": 3, **eps}, {"base": 500.0}
    return {
        "vLLM": TinyEagle(vllm, _tensors("layers.0.", later=later), settings={**three, **base}),
        "vLLM, midlayer": TinyEagle(vllm, _tensors("midlayer.", later=later), settings={**three, **base}),
        "speculators": TinyEagle(
            {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", **speculators},
            _tensors("layers.0.", later=["layers.1."]),
            (1, 3, 6),
            {"n_layers": 2, "scaling": _LLAMA3, "norms_residual": True, **eps},
        ),
        "EAGLE-3.1": TinyEagle(
            {**vllm, "num_hidden_layers": 1, "fc_norm": True, "norm_output": True},
            _tensors("layers.0.", own=_NORMS),
            settings={"norms_each": True, "norms_output": True, **eps, **base},
        ),
        "EAGLE-3.1, three layers": TinyEagle(
            {**vllm, "fc_norm": True, "norm_output": True},
            _tensors("layers.0.", own=_NORMS, later=later),
            settings={"norms_each": True, "norms_output": True, **three, **base},
        ),
        "P-EAGLE, EAGLE-3.1": TinyEagle(
            {**vllm, "pard_token": MASK, "fc_norm": True, "norm_output": True},
            _masked(_tensors("layers.0.", own=_NORMS, later=later)),
            settings={"mask": MASK, "norms_each": True, **three, **base},
        ),
        "P-EAGLE": TinyEagle(
            {**whole, "ptd_token_id": MASK},
            _masked(_tensors("layers.0.", own=["embed_tokens"], drafts_all=True, later=later)),
            settings={"mask": MASK, **three, **base},
        ),
        "P-EAGLE, norm before fc": TinyEagle(
            {**vllm, "pard_token": MASK, "parallel_drafting": True, "norm_before_fc": True},
            _masked(_tensors("layers.0.", own=["input_norm"], later=later)),
            settings={"mask": MASK, "norms_input": True, **three, **base},
        ),
        "P-EAGLE, speculators": TinyEagle(
            {
                "architectures": ["PEagleSpeculator"],
                "speculators_model_type": "peagle",
                "mask_token_id": MASK,
                "speculators_config": proposal,
                **speculators,
            },
            _masked(_tensors("layers.0.", own=["embed_tokens"], later=["layers.1."]), (1, 1)),
            (1, 3, 6),
            {"mask": MASK, "n_layers": 2, "scaling": _LLAMA3, "norms_residual": True, **eps},
        ),
        "P-EAGLE, one layer": TinyEagle(
            {**vllm, "num_hidden_layers": 1, "ptd_token_id": MASK, "rope_theta": 500.0},
            _masked(_tensors("layers.0.")),
            settings={"mask": MASK, **eps, **base},
        ),
        "P-EAGLE, the main model's matrices": TinyEagle(
            {**whole, "ptd_token_id": MASK},
            _masked(
                {
                    name: values
                    for name, values in _tensors("layers.0.", drafts_all=True, later=later).items()
                    if name != "lm_head.weight"
                }
            ),
            settings={"mask": MASK, **three, **base},
        ),
    }


def tiny_eagles() -> dict[str, TinyEagle]:
    """A head in each layout, by the program that writes it, and what is special about it."""
    speculators = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": {  # without the defaults of transformers
            key: value
            for key, value in _SHAPE.items()
            if key not in ("draft_vocab_size", "rms_norm_eps", "hidden_act")
        },
        "draft_vocab_size": N_DRAFTED,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 6],
        "norm_before_residual": True,
        "target_hidden_size": None,
    }
    modelopt = {
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
        "use_aux_hidden_state": True,
        "norm_before_fc": True,
        "parallel_draft_step": 1,
    }
    whole = {key: value for key, value in _SHAPE.items() if key != "draft_vocab_size"}
    eps = {"eps": 1e-5}
    return {
        "SafeAILab": TinyEagle(
            {"architectures": ["LlamaForCausalLM"], "rope_theta": 500.0, **_SHAPE},
            _tensors("midlayer."),
            settings={"base": 500.0, **eps},
        ),
        "SafeAILab, all tokens": TinyEagle(
            {"architectures": ["LlamaForCausalLM"], **whole},
            _tensors("midlayer.", own=["embed_tokens"], drafts_all=True),
            settings=eps,
        ),
        "SafeAILab, another width": TinyEagle(
            {
                "architectures": ["LlamaForCausalLM"],
                **_SHAPE,
                "hidden_size": 96,
                "target_hidden_size": N_EMBD,
            },
            _tensors("midlayer.", head=24, own=["embed_tokens"], width=96),
            settings=eps,
        ),
        "SpecForge": TinyEagle(
            {
                "architectures": ["LlamaForCausalLMEagle3"],
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True},
                "head_dim": 32,
                "rope_scaling": _LLAMA3,
                **_SHAPE,
            },
            _tensors("midlayer.", head=32),
            settings={"scaling": _LLAMA3, **eps},
        ),
        "speculators": TinyEagle(
            speculators,
            _tensors("layers.0.", own=["embed_tokens"]),
            (1, 3, 6),
            {"norms_residual": True},
        ),
        "AngelSlim": TinyEagle(
            {"architectures": ["Eagle3LlamaForCausalLM"], "rope_scaling": _LINEAR, **_SHAPE},
            _tensors("model.layers.0."),
            settings={"scaling": _LINEAR, **eps},
        ),
        "ModelOpt": TinyEagle(
            {
                "architectures": ["LlamaForCausalLMEagle3"],
                "eagle_config": modelopt,
                "rope_parameters": {"rope_theta": 1000.0, **_YARN},
                **_SHAPE,
            },
            _tensors("layers.0.", own=["input_norm"]),
            settings={"norms_input": True, "base": 1000.0, "scaling": _YARN, **eps},
        ),
    }
