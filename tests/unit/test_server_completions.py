"""The completions of OpenAI and of llama.cpp's server, which continue texts without a chat template."""

import json

import pytest
from openai.types import Completion

from spec_local.core.sampling import SamplingSettings
from spec_local.engine.events import Statistics
from spec_local.errors import BackendError, InvalidRequest
from spec_local.server.protocols.completions import Completions
from spec_local.server.protocols.llama_completion import LlamaCompletion, LlamaInfill
from spec_local.server.supervision.events import Delta, Ended, Infill, Reading
from spec_local.settings import GenerationSettings
from tests.server_events import (
    ANSWER,
    BROKEN,
    HELD_BACK,
    HELLO,
    LOADED,
    STARTED,
    TEXT,
    ended,
    parsed,
    stream,
    written,
)


def exchange(prompt="Once", **more):
    return Completions({"prompt": prompt} | more, LOADED)


def llama(prompt="Once", **more):
    return LlamaCompletion({"prompt": prompt} | more, LOADED)


def chunks(exchange, *answers):
    """The parts of a stream. OpenAI's types do not know that parts have no reason."""
    *found, (_, done) = parsed(stream(exchange, *answers))
    assert done == "[DONE]"
    for _, data in found:
        filled = [choice | {"finish_reason": choice["finish_reason"] or "stop"} for choice in data["choices"]]
        Completion.model_validate(data | {"choices": filled})
    return [data for _, data in found]


def whole(exchange, *answers):
    return Completion.model_validate(written(exchange.whole(answers)))


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        ("", [""]),
        (" \n", [" \n"]),
        (["a", "b"], ["a", "b"]),
        (["a", "\t"], ["a", "\t"]),
        ([1, 2], [[1, 2]]),
        ([1.0, 2e0], [[1, 2]]),
        ([[1], [3.0]], [[1], [3]]),
        (["a", [3]], ["a", [3]]),
        ([1, "a", 2], [[1, "a", 2]]),  # a list with a number is one prompt
        ([["a", 1], "b"], [["a", 1], "b"]),
        ({"prompt_string": "a"}, ["a"]),
    ],
)
def test_prompts(prompt, prompts):
    requests = exchange(prompt).requests
    assert [request.prompt for request in requests] == prompts
    assert all(not request.messages and request.suffix is None for request in requests)


def test_settings():
    (request,) = exchange(max_tokens=0, stop=["a", "b"], logprobs=2, suffix="!", seed=4, best_of=1).requests
    assert request.settings == GenerationSettings(max_tokens=0, stops=["a", "b"], logprobs=2, seed=4)
    assert request.suffix == "!"
    assert exchange().requests[0].settings == GenerationSettings()


@pytest.mark.parametrize(
    "prompt",
    [
        [],
        [[]],
        [-1],
        [True],
        [1.5],
        [[1], 2],
        [2**31],
        {"prompt_string": "a", "multimodal_data": ["eA=="]},
        None,
    ],
    ids=str,
)
def test_prompts_that_are_neither_text_nor_tokens(prompt):
    with pytest.raises(InvalidRequest, match="prompt is not supported: give text, token ids, or a list"):
        exchange(prompt)


@pytest.mark.parametrize(
    ("more", "part"),
    [
        ({"echo": True}, "echo is not supported"),
        ({"best_of": 2}, "best_of is not supported"),
        ({"prompt": [1], "suffix": "x"}, "suffix needs a prompt of text"),
        ({"prompt": ["a"] * 65, "n": 2}, "130 answers are too many: give at most 128"),
        ({"logprobs": "1"}, "logprobs: give a valid integer"),
    ],
)
def test_errors(more, part):
    with pytest.raises(InvalidRequest, match=part):
        exchange(**more)


def test_the_prompt_is_needed():
    """By llama.cpp's server; OpenAI's continues an empty one."""
    with pytest.raises(InvalidRequest, match="prompt is missing"):
        LlamaCompletion({}, LOADED)
    assert [request.prompt for request in Completions({}, LOADED).requests] == [""]


@pytest.mark.parametrize("make", [exchange, llama])
@pytest.mark.parametrize(
    ("given", "most"),
    [
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 3.0}, 3),
        ({"n_predict": 3e0, "max_tokens": 5, "max_completion_tokens": 4}, 3),
        ({"max_tokens": 5, "max_completion_tokens": 4}, 4),
        ({"n_predict": -1, "max_tokens": 5}, None),
        ({}, None),
    ],
)
def test_every_name_of_the_limit(make, given, most):
    assert make(**given).requests[0].settings.max_tokens == most


@pytest.mark.parametrize("make", [exchange, llama])
def test_the_end_can_be_ignored(make):
    assert make(ignore_eos=True).requests[0].ignore_end
    assert not make().requests[0].ignore_end


@pytest.mark.parametrize("make", [exchange, llama])
def test_progress_with_the_prompt(make):
    event = Reading(n_prompt=100, n_read=64, n_cached=32, seconds=0.5)
    assert list(make(stream=True).reading(0, event)) == []
    ((_, part),) = parsed("".join(make(stream=True, return_progress=True).reading(0, event)))
    assert part["prompt_progress"] == {"total": 100, "cache": 32, "processed": 64, "time_ms": 500}
    text = part["choices"][0]["text"] if make is exchange else part["content"]
    assert text == ""


def test_a_whole_response():
    found = whole(exchange(), ANSWER)
    assert [(c.index, c.text, c.finish_reason, c.logprobs) for c in found.choices] == [
        (0, TEXT, "stop", None)
    ]
    assert found.usage.total_tokens == 21
    assert found.timings["draft_n"] == 6


def test_several_prompts_and_choices():
    found = whole(exchange(["a", "b"], n=2), *[ANSWER] * 4)
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (24, 36)
    assert "timings" not in found.model_extra


def test_log_probabilities_as_lists():
    logprobs = whole(exchange(logprobs=3), ANSWER).choices[0].logprobs
    broken = ["bytes:\\xff\\x20\\x77\\xc3", "bytes:\\xb6\\x72\\x6c\\x64"]
    assert logprobs.tokens == ["Hel", "lo", "bytes:\\xe2\\x82", *broken]
    assert logprobs.token_logprobs == [-0.25] * 5
    assert logprobs.top_logprobs[0] == {"Hel": -0.25, "bytes:\\xe2\\x82": -2.5, "bytes:\\xff": -3.4e38}
    assert logprobs.text_offset == [0, 3, 5, 5, 9]


def test_a_stream():
    found = chunks(exchange(stream=True, logprobs=1, stream_options={"include_usage": True}), ANSWER)
    *parts, usage = found
    texts = [part["choices"][0]["text"] for part in parts]
    assert "".join(texts) == TEXT
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["stop"]
    offsets = [
        part["choices"][0]["logprobs"]["text_offset"] for part in parts if part["choices"][0]["logprobs"]
    ]
    assert offsets == [[0, 3], [5], [5, 9]]
    assert usage["usage"]["completion_tokens"] == 9
    assert parts[-1]["timings"]["draft_n_accepted"] == 4


def test_an_answer_without_text():
    (only,) = chunks(exchange(stream=True), [STARTED, ended("length")])
    assert only["choices"] == [{"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}]


# llama.cpp


def test_llama_settings():
    (request,) = llama(
        n_predict=7, seed=-1, stop=["x"], n_probs=2, json_schema={"type": "null"}, cache_prompt=True,
        logit_bias=[[3, False], [4, 1.5], [-1, 2], [2**40, 2]],
    ).requests  # fmt: skip
    settings = request.settings
    assert settings.sampling.logit_bias == {3: float("-inf"), 4: 1.5}
    assert (settings.max_tokens, settings.seed, settings.stops, settings.logprobs) == (7, None, ["x"], 2)
    assert settings.json_schema == '{"type": "null"}'
    assert llama(n_predict=-1, n_probs=0).requests[0].settings == GenerationSettings()
    assert llama([1, 2]).requests[0].prompt == [1, 2]


def test_llama_takes_several_prompts():
    several = llama(["a", [1, "b"]], n_cmpl=2, seed=4)
    assert [(r.prompt, r.settings.seed) for r in several.requests] == [
        ("a", 4), ("a", 5), ([1, "b"], 4), ([1, "b"], 5),
    ]  # fmt: skip
    found = written(several.whole([ANSWER] * 4))
    assert [result["index"] for result in found] == [0, 1, 2, 3]
    assert {result["content"] for result in found} == {TEXT}
    parts = [data for _, data in parsed(stream(llama(["a", "b"], stream=True), ANSWER, ANSWER))]
    for index in (0, 1):
        own = [part for part in parts if part["index"] == index]
        assert "".join(part["content"] for part in own) == TEXT
        assert [part["stop"] for part in own] == [False, False, False, True]
    with pytest.raises(InvalidRequest, match="130 answers are too many"):
        llama(["a"] * 65, n=2)


def test_control_tokens_are_parsed_by_llama_only():
    assert llama("<|im_start|>").requests[0].parse_special
    assert not exchange("<|im_start|>").requests[0].parse_special


def test_llama_infill():
    body = {
        "input_prefix": "def f(", "input_suffix": [7, "x"], "prompt": "a", "n_predict": 4,
        "input_extra": [{"filename": "a.py", "text": "x = 1"}, {"text": "y"}],
    }  # fmt: skip
    (request,) = LlamaInfill(body, LOADED).requests
    assert request.infill == Infill("def f(", [7, "x"], "a", [("a.py", "x = 1"), ("tmp", "y")])
    assert request.settings.max_tokens == 4
    for missing in ("input_prefix", "input_suffix"):
        with pytest.raises(InvalidRequest, match=f"{missing} is missing"):
            LlamaInfill({k: v for k, v in body.items() if k != missing}, LOADED)
    with pytest.raises(InvalidRequest, match="one text for each"):
        LlamaInfill(body | {"input_prefix": ["a", "b"]}, LOADED)


def test_llama_probabilities_after_sampling():
    sampled = llama(n_probs=2, post_sampling_probs=True)
    assert sampled.requests[0].settings.sampled_logprobs
    first = written(sampled.whole([ANSWER]))["completion_probabilities"][0]
    assert first["prob"] == pytest.approx(0.7788, abs=1e-4)
    assert [each["prob"] for each in first["top_probs"]] == pytest.approx([0.7788, 0.0821, 0], abs=1e-4)
    assert not {"logprob", "top_logprobs"} & {*first}


@pytest.mark.parametrize(
    ("samplers", "more", "settings"),
    [
        (
            ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
            {},
            {},
        ),
        ("edskypmxt", {}, {}),
        (["top_k", "temperature"], {}, {"top_p": 1, "min_p": 0}),
        ([], {}, {"top_k": 0, "top_p": 1, "min_p": 0, "temperature": 1}),
        (["top_k"], {"repeat_penalty": 1.5}, {"top_p": 1, "min_p": 0, "temperature": 1}),
        (["temperature", "top_k", "min_p", "top_p"], {"temperature": 0}, {"temperature": 0}),
        (["temperature", "top_p"], {"temperature": 1}, {"temperature": 1, "top_k": 0, "min_p": 0}),
        (["temperature", "top_k"], {}, {"top_p": 1, "min_p": 0}),
        (["min_p", "top_k", "infill"], {}, {"top_p": 1, "temperature": 1}),
    ],
)
def test_llama_samplers(samplers, more, settings):
    found = llama(samplers=samplers, **more).requests[0].settings.sampling
    assert found == SamplingSettings(**settings)


@pytest.mark.parametrize(
    "samplers", [["temperature", "top_p"], "tp", ["top_k", "top_k"], ["min_p", "top_p"], "tkp"]
)
def test_llama_samplers_in_another_order(samplers):
    with pytest.raises(InvalidRequest, match="samplers in this order are not supported"):
        llama(samplers=samplers)


@pytest.mark.parametrize(
    ("field", "neutral", "other"),
    [
        ("lora", [], [{"id": 0, "scale": 1}]),
        ("min_keep", 0, 5),
        ("adaptive_target", -1.0, 0.5),
    ],
)
def test_llama_fields_that_would_change_the_answer(field, neutral, other):
    assert llama(**{field: neutral}).requests == llama().requests
    with pytest.raises(InvalidRequest, match=f"{field} is not supported"):
        llama(**{field: other})


def test_llama_probabilities_by_openais_name():
    assert llama(logprobs=3).requests[0].settings.logprobs == 3
    assert [llama(n_probs=n).requests[0].settings.logprobs for n in (100, 20, 0, -1)] == [20, 20, None, None]
    assert "completion_probabilities" in written(llama(logprobs=1).whole([ANSWER]))


def test_llama_whole():
    found = written(llama(return_tokens=True, n_probs=1).whole([ANSWER]))
    assert {key: found[key] for key in ("content", "tokens", "stop", "stop_type", "truncated", "model")} == {
        "content": TEXT,
        "tokens": [3, 4, 5, 6, 7],
        "stop": True,
        "stop_type": "eos",
        "truncated": False,
        "model": "tiny.gguf",
    }
    assert (found["tokens_predicted"], found["tokens_evaluated"], found["tokens_cached"]) == (9, 12, 5)
    assert found["timings"]["predicted_n"] == 9
    assert found["completion_probabilities"][0]["bytes"] == list(b"Hel")
    assert written(llama().whole([ANSWER]))["tokens"] == []
    assert "completion_probabilities" not in llama().whole([ANSWER])


@pytest.mark.parametrize(
    ("last", "stop_type"),
    [
        (ended(stopping_word="END"), "word"),
        (ended("length"), "limit"),
        (ended("context"), "limit"),
        (Ended(Delta(), "cancelled", Statistics()), "none"),
    ],
)
def test_llama_stop_types(last, stop_type):
    found = written(llama().whole([[STARTED, last]]))
    assert (found["stop_type"], found["stopping_word"]) == (stop_type, last.stopping_word)
    assert found["truncated"] == (last.reason == "context")


def test_llama_stream():
    events = [data for _, data in parsed(stream(llama(stream=True), ANSWER))]
    assert "".join(event["content"] for event in events) == TEXT
    assert [event["stop"] for event in events] == [False, False, False, True]
    assert [event["tokens"] for event in events] == [[3, 4], [5], [6, 7], []]
    assert (events[0]["draft_n"], events[0]["draft_n_accepted"]) == (3, 1)
    assert events[-1]["timings"]["draft_n"] == 6


def test_marks():
    assert "specdec" in json.loads(next(llama(marks=True).write(0, HELLO)).removeprefix("data: "))
    marked = exchange(marks=True)
    assert marked.requests[0].marks
    found = chunks(marked, [STARTED, HELLO, HELD_BACK, BROKEN])
    assert [chunk["specdec"]["draft_n"] for chunk in found] == [3, 2, 0]


@pytest.mark.parametrize("make", [exchange, llama])
def test_a_failure_in_a_stream(make):
    ((name, data),) = parsed("".join(make().failed(BackendError("it crashed: try again"))))
    assert name == ""
    assert (data["error"]["message"], data["error"]["type"]) == ("it crashed: try again", "server_error")


@pytest.mark.parametrize("make", [exchange, llama])
def test_warnings_name_what_is_not_enforced(make):
    found = make(json_schema={"type": "array", "uniqueItems": True})
    assert json.loads(found.requests[0].settings.json_schema) == {"type": "array"}
    warnings = ["json_schema: uniqueItems at # is not supported and not enforced"]
    assert found.whole([ANSWER])["warnings"] == warnings
    (*_, last) = make(json_schema={"uniqueItems": True}, stream=True).write(0, ANSWER[-1])
    assert json.loads(last.removeprefix("data: "))["warnings"] == warnings


@pytest.mark.parametrize(("given", "n"), [(False, None), (True, 0), (2, 2)])
def test_logprobs_as_in_chats(given, n):
    assert Completions({"prompt": "Once", "logprobs": given}, LOADED).requests[0].settings.logprobs == n
