"""Tiny models that always generate the same text, such as reasoning and an answer."""

import itertools

import numpy as np

from spec_local.llama import tiny
from tests.chat_templates import THINKING_TEMPLATES

_LOGIT = 30  # of the next token of the script; those of all others are far below

THOUGHT, ANSWER = "Hm, what?\n\nThe sky", "It is\n\nblue."
_MARKERS = ["<think>", "</think>"]
# Without the last two, llama.cpp takes <|end|> for the end of an answer.
CHANNELS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"]
_THOUGHT = ("Hm, ", "what?", "\n\nThe", " sky")
_ANSWER = ("It is", "\n\nblue.")
_THINKING = {  # the last token before the script, and its tokens; no token occurs twice
    "both markers": ("<0x0A>", ["<think>\n", *_THOUGHT, "\n</th", "ink>\n\n", *_ANSWER]),
    "opened": ("<0x0A>", [*_THOUGHT, "\n</th", "ink>\n\n", *_ANSWER]),
    "channels": (
        "assistant",
        [
            *("<|channel|>", "analysis<|mess", "age|>", *_THOUGHT, "<|end|>"),
            *("<|start|>", "assistant<|channel|>final", "<|message|>", *_ANSWER),
        ],
    ),
}
_THINKING["kept"] = _THINKING["both markers"]


def write_thinking_model(path, kind):
    """Write a model with one of `THINKING_TEMPLATES` that always generates `THOUGHT` and `ANSWER`."""
    before, script = _THINKING[kind]
    return write_scripted_model(path, THINKING_TEMPLATES[kind], before, script, _markers(kind))


def closing_tokens(kind):
    """The tokens with which such a model begins to close its reasoning."""
    tokens, *_ = tiny.vocabulary(list(dict.fromkeys([*_markers(kind), *_THINKING[kind][1]])))
    return [tokens.index(text) for text in ("\n</th", "</think>", "<|end|>") if text in tokens]


def _markers(kind):
    return CHANNELS if kind == "channels" else _MARKERS


def write_scripted_model(path, template, before, script, more=(), control=()):
    """Write a model that generates a script, and then ends its answer.

    A token determines the next one: nothing but its embedding reaches the output.

    Args:
        path: of the file.
        template: chat template.
        before: the last token of the prompt.
        script: different texts, each of which becomes a token.
        more: further texts that become tokens.
        control: texts among them that become control tokens.
    """
    extra = list(dict.fromkeys([*more, *script]))
    tokens, *_ = tiny.vocabulary(extra)
    ids = [tokens.index(text) for text in (before, *script)]

    def scripted(name, shape, scale, seed, noise):
        made = tiny.random_weights(name, shape, scale, seed, noise)
        embeddings = tiny.random_weights("token_embd.weight", (len(tokens), shape[-1]), 1.0, seed, noise)
        if name == "output.weight":
            made[:] = 0
            for token, following in itertools.pairwise(ids):
                made[following] += _LOGIT / shape[1] * embeddings[token]
        elif name == "ends":  # of </s> and <|im_end|>
            made[:] = np.stack([_LOGIT / shape[1] * embeddings[ids[-1]], np.zeros(shape[1])])
        elif name.endswith(("attn_output.weight", "ffn_down.weight")):
            made[:] = 0
        return made

    return tiny.write_tiny_model(
        path,
        n_layers=1,
        tensor_type="F32",
        n_ctx=4096,
        extra_tokens=extra,
        control=control,
        end_scale=1.0,
        chat_template=template,
        weights=scripted,
    )


def write_calling_model(path, template):
    """Write a model that always thinks `THOUGHT`, and then asks for the weather in Rome.

    It also fills gaps, with anything.

    Args:
        template: of `TOOL_TEMPLATES`, which ends with the start of an answer.
    """
    script = [
        *_THOUGHT,
        "\n</th",
        "ink>\n\n",
        '<tool_call>\n{"name": "weather", ',
        '"arguments": {"city": "Ro',
    ]
    gaps = [f"<|fim_{part}|>" for part in ("prefix", "suffix", "middle")]
    off = "{% if enable_thinking is defined and not enable_thinking %}{{ '</think>\n' }}{% endif %}"
    opened = template.removesuffix("\n' }}") + "\n<think>\n' }}" + off
    return write_scripted_model(path, opened, "<0x0A>", [*script, 'me"}}\n</tool', "_call>"], gaps)
