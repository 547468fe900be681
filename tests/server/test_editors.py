"""What editors send to llama.cpp's server, as their sources write it."""

import json

import pytest

from spec_local.llama.tiny import write_tiny_model
from tests.chat_templates import TOOL_TEMPLATES
from tests.server.conftest import Server

PREFIX, MIDDLE, SUFFIX = "def many(of):\n    about = 1\n", "    for the", "\n    return about\n\n"
FILES = [{"text": f"one = {i}\nthe = 2\n", "time": [i, 5], "filename": f"a{i}.py"} for i in range(8)]
TIMINGS = [
    f"timings/{part}_{unit}"
    for part in ("prompt", "predicted")
    for unit in ("n", "ms", "per_token_ms", "per_second")
]
GAP = {"input_prefix": PREFIX, "input_suffix": SUFFIX, "prompt": MIDDLE}
VIM = GAP | {
    "id_slot": 0,
    "input_extra": FILES,
    "n_predict": 24,
    "stop": [],
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.9,
    "samplers": ["top_k", "top_p", "infill"],
    "stream": False,
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 250,
    "response_fields": ["content", *TIMINGS, "truncated", "tokens_cached"],
    "model": "",
}
WARM_UP = {
    "id_slot": 0,
    "input_prefix": "",
    "input_suffix": "",
    "input_extra": FILES,
    "prompt": "",
    "n_predict": 0,
    "temperature": 0.0,
    "samplers": [],
    "stream": False,
    "cache_prompt": True,
    "t_max_prompt_ms": 1,
    "t_max_predict_ms": 1,
    "response_fields": [""],
}
CHAT = [{"role": "system", "content": "You are an expert coder."}, {"role": "user", "content": "one two"}]
SAMPLED = {
    "samplers": "edkypmxt", "temperature": 0.8, "dynatemp_range": 0, "dynatemp_exponent": 1, "top_k": 40,
    "top_p": 0.95, "min_p": 0.05, "typical_p": 1, "xtc_probability": 0, "xtc_threshold": 0.1,
    "repeat_last_n": 64, "repeat_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0,
    "dry_multiplier": 0, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1,
    "timings_per_token": False,
}  # fmt: skip
FIM = f"<|fim_prefix|>{PREFIX}<|fim_suffix|>{SUFFIX}<|fim_middle|>"
BODIES = {
    "llama.vim": ("/infill", VIM),
    "llama.vim, at the start of a line": ("/infill", VIM | {"n_indent": 0, "prompt": "", "stop": ["\n"]}),
    "llama.vim, 2024": ("/infill", VIM | {"penalty_last_n": 0, "extra_context": ["the"], "top_k": 100}),
    "llama.vim warms the cache": ("/infill", WARM_UP),
    "llama.vscode": ("/infill", {k: v for k, v in VIM.items() if k not in ("id_slot", "response_fields")}),
    "llama.vscode warms the cache": ("/infill", {k: v for k, v in WARM_UP.items() if k != "response_fields"}),
    "llama.vscode, before an edit": (
        "/v1/chat/completions",
        {"messages": CHAT, "n_predict": 0, "samplers": [], "cache_prompt": True, "t_max_prompt_ms": 500,
         "t_max_predict_ms": 1},
    ),
    "llama.vscode edits": ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 8, **SAMPLED}),
    "llama.vscode, with OpenAI's protocol": (
        "/v1/completions",
        {"model": "", "prompt": FIM, "max_tokens": 8, "temperature": 0.1, "top_p": 0.99, "stream": False},
    ),
    "quickfill.nvim": (
        "/infill",
        GAP | {"input_extra": FILES, "cache_prompt": True, "max_tokens": 8, "n_predict": 8, "top_k": 30,
               "top_p": 0.4, "repeat_penalty": 1.5, "samplers": ["top_k", "top_p", "infill"],
               "logit_bias": {}, "t_max_predict_ms": 500, "stream": True, "stop": ["\n\n"]},
    ),
    "a program in Lua, whose empty lists are objects": (
        "/infill", GAP | {"input_extra": {}, "stop": {}, "samplers": {}, "logit_bias": {}, "n_predict": 4}
    ),
    "continue": (
        "/completion",
        {"prompt": FIM, "stream": True, "n_predict": 8, "frequency_penalty": None, "presence_penalty": None,
         "min_p": None, "mirostat": None, "stop": ["<|fim_prefix|>", "\n\n"], "top_k": None, "top_p": None,
         "temperature": 0.01},
    ),
    "twinny": ("/completion", {"prompt": FIM, "stream": True, "temperature": 0.2, "n_predict": 8}),
    "tabby": (
        "/completion",
        {"seed": 1721000000123, "prompt": FIM, "n_predict": 8, "temperature": 0.1, "stream": True,
         "penalty_last_n": 0, "presence_penalty": 0.0},
    ),
    "cody": (
        "/completion",
        {"prompt": FIM, "stream": True, "stop": ["\n\n"], "n_predict": 8, "temperature": 0.2, "top_k": -1,
         "top_p": 0.95, "cache_prompt": True},
    ),
    "minuet-ai.nvim": (
        "/v1/completions",
        {"model": "PLACEHOLDER", "prompt": PREFIX, "suffix": SUFFIX, "stream": True, "max_tokens": 8,
         "top_p": 0.9, "stop": ["\n\n"]},
    ),
    "avante.nvim": (
        "/v1/chat/completions",
        {"model": "x", "messages": CHAT, "stream": True, "stream_options": {"include_usage": True},
         "temperature": 0, "max_tokens": 8, "tools": []},
    ),
    "gptel": (
        "/v1/chat/completions",
        {"model": "test", "messages": CHAT, "stream": True, "temperature": 1.0, "max_tokens": 8},
    ),
    "aichat": ("/v1/chat/completions", {"model": "x", "messages": CHAT, "stream": True, "max_tokens": 8}),
    "SillyTavern": (
        "/completion",
        {"prompt": "one two", "stream": True, "n_predict": 8, "n_probs": 0, "cache_prompt": True, "seed": -1,
         "mirostat": 0, "mirostat_tau": 5, "mirostat_eta": 0.1, "tfs_z": 1, "typical_p": 1, "min_keep": 0,
         "top_a": 0, "ignore_eos": False, "nsigma": 0, "top_n_sigma": 0, "dry_sequence_breakers": ["\n"],
         "logit_bias": [], "grammar": "", "json_schema": None, "adaptive_target": -0.01,
         "samplers": ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "tfs_z", "typical_p", "top_p",
                      "min_p", "xtc", "temperature"]},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def server(specdec):
    names = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>"]
    model = write_tiny_model(
        specdec.folder / "code.gguf",
        n_layers=1,
        tensor_type="F32",
        n_ctx=1 << 13,
        extra_tokens=names,
        chat_template=TOOL_TEMPLATES["Hermes"],
    )
    with Server(specdec, model, "--draft", "none", "--ctx", 2048, "--parallel", 2) as started:
        yield started


def answer(server, path, body):
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("name", BODIES)
def test_bodies_of_editors(server, name):
    path, body = BODIES[name]
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    if body.get("stream"):
        assert '"error"' not in response.text


def test_a_body_of_llama_vim(server):
    found = answer(server, "/infill", VIM)
    assert found.keys() == {"content", *TIMINGS, "truncated", "tokens_cached"}
    assert found["timings/prompt_n"] + found["tokens_cached"] > 100
    assert found["timings/predicted_ms"] > 0


def test_the_warmed_cache_is_used(server):
    files = [{"text": f"other = {i}\n" * 20, "filename": f"b{i}.py"} for i in range(9)]
    assert answer(server, "/infill", WARM_UP | {"input_extra": files}) == {}
    warm = answer(server, "/infill", GAP | {"input_extra": files, "n_predict": 4})
    assert warm["tokens_cached"] > 900
    assert warm["timings"]["prompt_n"] < 150
    read = answer(server, "/completion", {"prompt": "they were there", "n_predict": 0})
    assert (read["content"], read["stop_type"], read["tokens_predicted"]) == ("", "limit", 0)
    assert answer(server, "/completion", {"prompt": "they were there", "n_predict": 0})["tokens_cached"] > 0


LINES = {"prompt": "one two", "n_predict": 500, "temperature": 0, "grammar": r'root ::= ("one\n"){300}'}


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/infill"])
def test_a_time_limit_ends_the_answer_with_a_line(server, path):
    gap = {"input_prefix": "", "input_suffix": ""}
    found = answer(server, path, LINES | gap | {"t_max_predict_ms": 1})
    if path == "/v1/completions":
        (choice,) = found["choices"]
        assert choice["finish_reason"] == "length"
        text, n = choice["text"], found["usage"]["completion_tokens"]
    else:
        assert (found["stop_type"], found["truncated"]) == ("limit", False)
        text, n = found["content"], found["tokens_predicted"]
    assert text.endswith("one")
    assert {*text.split("\n")} == {"one"}
    assert n < 250
    for unlimited in (0, -1, 60_000, None):
        body = LINES | gap | {"t_max_predict_ms": unlimited, "n_predict": 20}
        assert answer(server, "/completion", body)["tokens_predicted"] == 20


@pytest.mark.parametrize("stream", [False, True])
def test_lines_have_the_indentation_of_the_first_one(server, stream):
    rules = r'root ::= "one\n" "    two\n" "  the\n" "    of\n"'
    body = {"prompt": "one two", "n_predict": 100, "temperature": 0, "grammar": rules, "stream": stream}

    def text(**more):
        response = server.post("/completion", body | more)
        if not stream:
            return response.json()["content"]
        parts = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        return "".join(json.loads(part)["content"] for part in parts)

    assert text(n_indent=4) == "one\n    two"
    assert text(n_indent=2) == "one\n    two\n  the\n    of\n"
    assert text(n_indent=5) == "one"
    assert text() == "one\n    two\n  the\n    of\n"
    limited = answer(server, "/completion", body | {"n_indent": 4, "stream": False, "return_tokens": True})
    assert limited["stop_type"] == "limit"
    assert len(limited["tokens"]) == limited["tokens_predicted"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_indent", -1),
        ("n_indent", "4"),
        ("t_max_predict_ms", -5),
        ("t_max_predict_ms", "1s"),
        ("response_fields", "content"),
        ("lora", [{"id": 0, "scale": 0.5}]),
        ("samplers", ["temperature", "top_p"]),
        ("mirostat", 2),
        ("typical_p", 0.5),
        ("input_prefix", None),
        ("input_extra", [{"filename": "a.py", "text": 5}]),
        ("prompt", ["a"]),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_the_name_of_the_field(server, field, value):
    response = server.post("/infill", VIM | {field: value})
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message.startswith(field)
    assert "\n" not in message
