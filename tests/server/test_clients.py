"""The programs that people use with OpenAI's, Anthropic's and llama.cpp's servers, against a real server."""

import json
import subprocess
import sys

import anthropic
import jsonschema
import openai
import pytest

QUESTION = [{"role": "user", "content": "one two three"}]
WEATHER = {
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"yes": {"type": "boolean"}, "n": {"enum": [1, 2, 3]}},
    "required": ["yes", "n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as opened:
        yield opened


@pytest.fixture(scope="module")
def claude(server):
    with anthropic.Anthropic(base_url=server.address, api_key="none", max_retries=0) as opened:
        yield opened


@pytest.fixture(scope="module")
def text(server):
    """The answer to `QUESTION` at temperature 0."""
    return server.chat("one two three")["choices"][0]["message"]["content"]


def test_openai_chat(client, text):
    options = {"model": "main", "messages": QUESTION, "temperature": 0, "max_tokens": 16}
    whole = client.chat.completions.create(**options, n=2, logprobs=True, top_logprobs=2)
    assert [choice.message.content for choice in whole.choices] == [text, text]
    assert [choice.finish_reason for choice in whole.choices] == ["length", "length"]
    tokens = whole.choices[0].logprobs.content
    assert bytes(b for token in tokens for b in token.bytes).decode("utf-8", "replace") == text
    assert all(token.top_logprobs[0].logprob == token.logprob for token in tokens)  # greedy
    assert whole.usage.completion_tokens == 32
    stream = client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    *chunks, last = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert last.usage.completion_tokens == 16
    stopped = client.chat.completions.create(**options, stop=text[3:6])
    assert stopped.choices[0].message.content == text[:3]
    assert stopped.choices[0].finish_reason == "stop"


def test_openai_schema(client):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    answer = client.chat.completions.create(
        model="main", messages=QUESTION, response_format=form, max_tokens=64
    )
    jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_openai_tools(client, stream):
    tools = [{"type": "function", "function": WEATHER}]
    messages = [{"role": "user", "content": "What is the weather?"}]
    options = {"model": "main", "tools": tools, "tool_choice": "required", "max_tokens": 100}
    options |= {"parallel_tool_calls": False, "extra_body": {"speculative": False}}
    if stream:
        parts, reasons = [], []
        for chunk in client.chat.completions.create(messages=messages, **options, stream=True):
            assert not chunk.choices[0].delta.content
            parts += chunk.choices[0].delta.tool_calls or []
            reasons.append(chunk.choices[0].finish_reason)
        assert reasons[-1] == "tool_calls"
        call, *more = parts
        assert {part.index for part in parts} == {0}
        assert len(more) > 2
        call.function.arguments += "".join(part.function.arguments for part in more)
    else:
        choice = client.chat.completions.create(messages=messages, **options).choices[0]
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        history = [*messages, choice.message.model_dump(exclude_none=True), result]
        assert client.chat.completions.create(messages=history, model="main", max_tokens=4).choices
    assert call.function.name == "weather"
    jsonschema.validate(json.loads(call.function.arguments), WEATHER["parameters"])


SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}


def check_agent(calls, text, *, is_cut):
    """Check that an answer is calls or under the schema."""
    assert is_cut or bool(calls) != bool(text)
    for name, arguments in calls[:-1] if is_cut else calls:
        assert name == "weather"
        jsonschema.validate(json.loads(arguments), WEATHER["parameters"])
    if text and not is_cut:
        jsonschema.validate(json.loads(text), SCHEMA)


def test_tools_with_a_schema(client, claude):
    """As agents whose last answer has a type ask in each request."""
    for seed in range(3):
        choice = client.chat.completions.create(
            model="main",
            messages=[{"role": "user", "content": "What is the weather?"}],
            tools=[{"type": "function", "function": WEATHER}],
            response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
            seed=seed,
            max_tokens=100,
        ).choices[0]
        called = [call.function for call in choice.message.tool_calls or ()]
        check_agent(
            [(call.name, call.arguments) for call in called],
            choice.message.content,
            is_cut=choice.finish_reason == "length",
        )
    response = client.responses.create(
        model="main",
        input="What is the weather?",
        tools=[WEATHER | {"type": "function"}],
        text={"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
        max_output_tokens=100,
    )
    calls = [(item.name, item.arguments) for item in response.output if item.type == "function_call"]
    check_agent(calls, response.output_text, is_cut=response.status == "incomplete")
    message = claude.messages.create(
        model="main",
        messages=QUESTION,
        tools=[{"name": "weather", "input_schema": WEATHER["parameters"]}],
        max_tokens=100,
        extra_body={"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    )
    check_agent(
        [(block.name, json.dumps(block.input)) for block in message.content if block.type == "tool_use"],
        "".join(block.text for block in message.content if block.type == "text"),
        is_cut=message.stop_reason == "max_tokens",
    )


def test_a_forced_call_that_is_cut_is_no_content(client):
    for n in range(1, 40, 3):
        choice = client.chat.completions.create(
            model="main",
            messages=[{"role": "user", "content": "What is the weather?"}],
            tools=[{"type": "function", "function": WEATHER}],
            tool_choice={"type": "function", "function": {"name": "weather"}},
            max_tokens=n,
        ).choices[0]
        assert not choice.message.content
        if choice.finish_reason == "tool_calls":
            break
        assert choice.finish_reason == "length"


def test_openai_completions(client):
    options = {"model": "main", "prompt": ["one two", "three"], "temperature": 0, "max_tokens": 8}
    whole = client.completions.create(**options)
    streamed = {0: "", 1: ""}
    for chunk in client.completions.create(**options, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert [choice.text for choice in whole.choices] == list(streamed.values())


def test_openai_responses(client, text):
    options = {"model": "main", "input": "one two three", "temperature": 0, "max_output_tokens": 16}
    assert client.responses.create(**options).output_text == text
    events = list(client.responses.create(**options, stream=True))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == text
    assert events[-1].type in ("response.completed", "response.incomplete")


def test_openai_errors(client):
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="main", messages=QUESTION, temperature=-1)
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model="main", prompt="many " * 20_000)
    assert raised.value.code == "context_length_exceeded"
    with pytest.raises(openai.APIStatusError) as raised:
        client.embeddings.create(model="main", input="x")
    assert raised.value.status_code == 501
    assert [model.id for model in client.models.list()] == ["main"]


def test_anthropic(claude, text):
    options = {"model": "main", "messages": QUESTION, "max_tokens": 16, "extra_body": {"temperature": 0}}
    whole = claude.messages.create(**options)
    assert whole.content[0].text == text
    assert whole.stop_reason == "max_tokens"
    assert whole.usage.output_tokens == 16
    with claude.messages.stream(**options) as stream:
        assert "".join(stream.text_stream) == text
        assert stream.get_final_message().stop_reason == "max_tokens"
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        claude.messages.create(model="main", messages=QUESTION, max_tokens=-3)


def test_anthropic_tools(claude):
    tool = {"name": "weather", "description": "", "input_schema": WEATHER["parameters"]}
    options = {
        "model": "main",
        "max_tokens": 100,
        "tools": [tool],
    }
    options["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
    with claude.messages.stream(messages=QUESTION, **options) as stream:
        message = stream.get_final_message()
    assert message.stop_reason == "tool_use"
    (call,) = message.content
    jsonschema.validate(call.input, WEATHER["parameters"])
    result = [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]
    history = [
        *QUESTION,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": result},
    ]
    assert claude.messages.create(model="main", messages=history, max_tokens=4).usage.output_tokens == 4


def test_llama_cpp(server, text):
    body = {"prompt": "one two three", "n_predict": 8, "temperature": 0}
    whole = server.post("/completion", body).json()
    assert whole["timings"]["predicted_n"] == 8
    assert whole["stop_type"] == "limit"
    assert whole["timings"]["draft_n"] >= whole["timings"]["draft_n_accepted"]
    with server.stream("/completion", body | {"stream": True}) as response:
        events = [json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line]
    assert "".join(event["content"] for event in events) == whole["content"]
    assert events[-1]["stop"]


def test_llm(server, text, tmp_path, specdec):
    """The program llm, with an OpenAI-compatible endpoint as its documentation describes it."""
    model = f"- model_id: here\n  model_name: main\n  api_base: {server.address}/v1\n"
    (tmp_path / "extra-openai-models.yaml").write_text(model)
    command = [sys.executable, "-m", "llm", "-m", "here", "-o", "temperature", "0", "-o", "max_tokens", "16"]
    environment = specdec.environment | {"LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}
    for more in ([], ["--no-stream"]):
        done = subprocess.run(
            [*command, *more, "one two three"], capture_output=True, env=environment, timeout=60, check=False
        )
        assert done.stdout.decode().rstrip("\n") == text.rstrip("\n"), done.stderr.decode()


def test_a_last_answer_is_continued(client, claude, server):
    options = {"model": "main", "max_tokens": 12}
    begun = [*QUESTION, {"role": "assistant", "content": "seven \n", "prefix": True}]
    answers = [
        client.chat.completions.create(messages=messages, temperature=0, **options)
        for messages in (QUESTION, begun)
    ]
    n_begun = len(server.post("/tokenize", {"content": "seven \n"}).json()["tokens"])
    assert answers[1].usage.prompt_tokens == answers[0].usage.prompt_tokens + n_begun
    rest = answers[1].choices[0].message.content
    assert rest != answers[0].choices[0].message.content
    begun = [*QUESTION, {"role": "assistant", "content": [{"type": "text", "text": "seven \n"}]}]
    again = claude.messages.create(messages=begun, extra_body={"temperature": 0}, **options)
    assert again.content[0].text == rest
    prompt = server.post("/apply-template", {"messages": begun}).json()["prompt"]
    assert prompt.endswith("<|im_start|>assistant\nseven \n")


def test_prompts_are_counted(client, claude, server):
    tool = {"name": "weather", "description": "", "input_schema": WEATHER["parameters"]}
    options = {"model": "main", "messages": QUESTION, "system": "Be kind.", "tools": [tool]}
    usage = claude.messages.create(max_tokens=1, **options).usage
    expected = usage.input_tokens + usage.cache_read_input_tokens
    assert claude.messages.count_tokens(**options).input_tokens == expected
    options = {
        "model": "main",
        "input": "one two",
        "instructions": "Be kind.",
        "tools": [{"type": "function", **WEATHER}],
    }
    expected = client.responses.create(max_output_tokens=1, **options).usage.input_tokens
    assert client.responses.input_tokens.count(**options).input_tokens == expected
    prompt = server.post("/apply-template", {"messages": QUESTION}).json()["prompt"]
    assert prompt.endswith("<|im_start|>user\none two three<|im_end|>\n<|im_start|>assistant\n")
