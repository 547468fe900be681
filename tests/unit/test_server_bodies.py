"""Any JSON object as the body of any protocol: it is accepted or refused, with an error of one line."""

import json
import pickle
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spec_local.errors import InvalidRequest
from spec_local.server.protocols import chat_completions, completions, llama_completion, messages, responses
from spec_local.server.protocols.chat_completions import ChatCompletions
from spec_local.server.protocols.completions import Completions
from spec_local.server.protocols.llama_completion import LlamaCompletion
from spec_local.server.protocols.messages import Messages
from spec_local.server.protocols.ollama import OllamaChat, OllamaGenerate
from spec_local.server.protocols.responses import Responses
from tests.server_events import ANSWER, CALLING, LOADED, THOUGHTFUL, check_requests, parsed, stream, written

OLLAMA = [OllamaChat, OllamaGenerate]
KINDS = [ChatCompletions, Completions, LlamaCompletion, Messages, Responses, *OLLAMA]
MODULES = [chat_completions, completions, llama_completion, messages, responses]
FIELDS = sorted(
    {field.alias or name for module in MODULES for name, field in module._Body.model_fields.items()}
    | {name for kind in OLLAMA for name in kind.body.model_fields}
    | {"mirostat", "typical_p", "prompt_cache_key"}
)
WORDS = """
    auto none required any tool function text json_object json_schema weather user assistant system developer
    image tool_use tool_result thinking message function_call function_call_output reasoning input_text
    output_text enabled custom allowed_tools web_search_call server_tool_use input_image
    file {} lookup off 7 -1
""".split()  # noqa: SIM905
KEYS = """
    type role content text name function arguments parameters input_schema schema json_schema format id
    call_id tool_use_id tool_call_id tool_calls input output include_usage draft_max proposer policy shape
    staged thinking display mode tools source action 1 -1 images tool_name num_predict num_ctx stop
""".split()  # noqa: SIM905
TEXTS = st.sampled_from([*WORDS, "", "\ud800", "\udcff", "\x00", 'root ::= "x"'])
NAMES = st.sampled_from(KEYS) | st.text(max_size=3)
NUMBERS = st.one_of(
    st.integers(-3, 200),
    st.floats(-2, 2),
    st.sampled_from([2**31, 2**63, 2**64, 10**30, 10**400, 2**1100, -(10**400), 1e308]),
)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=5),
    max_leaves=12,
)
VALID = {
    "messages": [{"role": "user", "content": "Why?"}],
    "prompt": "Once",
    "input": "Why?",
    "tools": [{"type": "function", "function": {"name": "weather"}, "name": "weather"}],
}


@st.composite
def bodies(draw):
    """Bodies of which some are valid, up to a field or two."""
    body = {name: value for name, value in VALID.items() if draw(st.integers(0, 5))}
    if not draw(st.integers(0, 3)):
        body.pop("tools", None)
    return body | draw(st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=3), VALUES, max_size=3))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(bodies())
@example({})
@example(VALID)
@example(VALID | {"logit_bias": {"99999999999999999999": 1}})
@example(VALID | {"logit_bias": [[[], 1]]})
@example(VALID | {"logit_bias": [[{}, False]]})
@example(VALID | {"speculative": {"proposer": []}})
@example(VALID | {"seed": 10**900})
@example(VALID | {"mirostat": []})
@example(VALID | {"top_p": float("inf")})
@example(VALID | {"user": float("nan")})
def test_any_body(kind, body):
    try:
        exchange = kind(body, LOADED)
    except InvalidRequest as error:
        text = str(error)
        assert text.isprintable(), text
        assert len(text) < 600
        text.encode()
        return
    if kind in OLLAMA and not exchange.requests:  # the model is only loaded
        assert written(exchange.whole([]))["done"]
        return
    check_requests(exchange.requests)
    pickle.loads(pickle.dumps(exchange.requests))
    assert isinstance(exchange.streams, bool)
    for answer in (ANSWER, THOUGHTFUL, CALLING):
        n = len(exchange.requests)
        text = stream(kind(body, LOADED), *[answer] * n)
        if kind in OLLAMA:
            assert [json.loads(line) for line in text.splitlines()][-1]["done"]
        else:
            parsed(text)
        json.dumps(written(kind(body, LOADED).whole([answer] * n)))


WHOLE = ("seed", "top_k", "n", "max_tokens", "max_output_tokens", "repeat_last_n", "speculative.n_max")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", ["3.0", "3e0", "30e-1", "3"])
def test_whole_numbers_have_many_spellings(kind, number):
    """JSON has one kind of number."""
    body = {name: value for name, value in VALID.items() if name != "tools"}
    number = json.loads(number)
    nested = {"speculative": {"draft_max": number}, "logit_bias": {"5": number}}
    fields = dict.fromkeys(WHOLE, number) | nested
    exchange = kind(json.loads(json.dumps(body | fields)), LOADED)
    settings = exchange.requests[0].settings
    assert (settings.seed, settings.max_tokens, settings.sampling.top_k, settings.draft_max) == (3, 3, 3, 3)
    assert settings.sampling.logit_bias == {5: 3.0}
    assert all(type(value) is int for value in (settings.seed, settings.max_tokens, settings.draft_max))
    names = {name for name, field in sys.modules[kind.__module__]._Body.model_fields.items()} - {"n_max"}
    for name in names & {*WHOLE}:
        with pytest.raises(InvalidRequest, match=name):
            kind(body | {name: 3.5}, LOADED)
    with pytest.raises(InvalidRequest, match="draft_max"):
        kind(body | {"speculative": {"draft_max": 3.5}}, LOADED)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("given", "bias", "texts"),
    [
        ({"5": 1, " x": 2, "+5": 0.5, "-1": 3, str(2**31): 3}, {5: 1.5}, [(" x", 2)]),
        ([[5, 1], ["5", 2], [5.0, False], [10**30, 3]], {5: float("-inf")}, [("5", 2)]),
        ({}, {}, []),
    ],
)
def test_biases_of_tokens_and_texts(kind, given, bias, texts):
    body = {name: value for name, value in VALID.items() if name != "tools"}
    (request,) = kind(body | {"logit_bias": given}, LOADED).requests
    assert (request.settings.sampling.logit_bias, request.text_bias) == (bias, texts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", [{"x" * 1025: 1}, [["x", 1]] * 1025])
def test_long_biases_of_texts(kind, given):
    with pytest.raises(InvalidRequest, match="give up to 1024 texts of up to 1024 characters"):
        kind(VALID | {"logit_bias": given}, LOADED)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("seed", "used"), [(-1, None), (-2, 2**64 - 2), (2**63, 2**63)])
def test_any_seed(kind, seed, used):
    body = {name: value for name, value in VALID.items() if name != "tools"}
    assert kind(body | {"seed": seed}, LOADED).requests[0].settings.seed == used


SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
FORMS = {
    "chat completions": {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    "without a type": {"function": {"name": "f", "parameters": SCHEMA}},
    "responses, Cursor": {"type": "function", "name": "f", "parameters": SCHEMA, "strict": False},
    "Anthropic": {"name": "f", "input_schema": SCHEMA},
    "Anthropic, with its type": {"type": "custom", "name": "f", "input_schema": SCHEMA},
}


@pytest.mark.parametrize("kind", [ChatCompletions, Messages, Responses, OllamaChat])
@pytest.mark.parametrize("tool", FORMS.values(), ids=FORMS)
def test_tools_in_the_form_of_another_protocol(kind, tool):
    others = [{"type": "web_search_20250305", "name": "web_search"}, {"type": "web_search"}]
    (request,) = kind(VALID | {"tools": [*others, tool]}, LOADED).requests
    assert request.tools == [FORMS["chat completions"]]


@pytest.mark.parametrize("kind", [ChatCompletions, Messages, Responses])
@pytest.mark.parametrize(
    ("given", "choice"),
    [
        ("any", "required"),
        ({"type": "auto"}, "auto"),
        ({"type": "none"}, "none"),
        ({"type": "any"}, "required"),
        ({"type": "tool", "name": "weather"}, "weather"),
        ({"type": "function", "function": {"name": "weather"}}, "weather"),
    ],
)
def test_choices_in_the_form_of_another_protocol(kind, given, choice):
    (request,) = kind(VALID | {"tool_choice": given}, LOADED).requests
    assert request.tool_choice == choice


@pytest.mark.parametrize("kind", [ChatCompletions, Completions, LlamaCompletion])
def test_timings_of_each_token(kind):
    for wanted in (False, True):
        exchange = kind(VALID | {"stream": True, "timings_per_token": wanted}, LOADED)
        timings = [data["timings"] for _, data in parsed(stream(exchange, ANSWER)) if "timings" in data]
        n_tokens = [each["predicted_n"] for each in timings]
        assert len(n_tokens) > 1 if wanted else len(n_tokens) == 1
        assert n_tokens == sorted(n_tokens)
        assert all(each["prompt_ms"] >= 0 for each in timings)


@pytest.mark.parametrize("kind", [ChatCompletions, Completions, LlamaCompletion])
def test_a_list_of_stops_with_null(kind):
    assert kind(VALID | {"stop": ["x", None]}, LOADED).requests[0].settings.stops == ["x"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_valid_body_is_valid(kind):
    kinds = {Messages: [{"name": "weather"}], Responses: [{"type": "function", "name": "weather"}]}
    check_requests(kind(VALID | {"tools": kinds.get(kind, VALID["tools"])}, LOADED).requests)


@pytest.mark.parametrize("kind", KINDS)
def test_a_question_is_not_kept_beside_its_request(kind):
    """It may have images of many megabytes."""
    question = {"messages": [{"role": "user", "content": "needle"}], "prompt": "needle", "input": "needle"}
    exchange = kind(question, LOADED)
    assert "needle" in repr(exchange.requests)
    exchange.requests = ()
    assert "needle" not in repr(vars(exchange))
