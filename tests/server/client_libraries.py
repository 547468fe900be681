"""Use specdec serve with a library for OpenAI's, Anthropic's or ollama's API, in an environment of its own.

    .venv/libraries/bin/python client_libraries.py LIBRARY ADDRESS TEXT

TEXT is the answer of the model ``main`` to `QUESTION` with 16 tokens at temperature 0. For ollama, there is
a model ``caller`` besides, which thinks, and then asks for the weather in Rome.
"""

import asyncio
import json
import os
import sys
from typing import Literal

from pydantic import BaseModel

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise it is downloaded
os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"

QUESTION = "one two three"
MESSAGES = [{"role": "user", "content": QUESTION}]


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Rome", "Oslo"]


class Fact(BaseModel):
    yes: bool
    n: Literal[1, 2, 3]


def use_litellm(address, text):
    import litellm

    tool = {"type": "function", "function": {"name": "weather", "parameters": Weather.model_json_schema()}}
    for model, base in (("openai/main", f"{address}/v1"), ("anthropic/main", address)):
        options = {
            "model": model,
            "api_base": base,
            "api_key": "none",
            "messages": MESSAGES,
            "temperature": 0,
        }
        short = options | {"max_tokens": 16}
        assert litellm.completion(**short).choices[0].message.content == text
        parts = litellm.completion(**short, stream=True)
        assert "".join(part.choices[0].delta.content or "" for part in parts) == text
        called = litellm.completion(**options, max_tokens=100, tools=[tool], tool_choice="required")
        (call,) = called.choices[0].message.tool_calls
        Weather.model_validate_json(call.function.arguments)
        parts = litellm.completion(
            **options, max_tokens=100, tools=[tool], tool_choice="required", stream=True
        )
        calls = [call for part in parts for call in part.choices[0].delta.tool_calls or ()]
        Weather.model_validate_json("".join(call.function.arguments or "" for call in calls))


def use_langchain(address, text):
    from langchain_openai import ChatOpenAI

    options = {"base_url": f"{address}/v1", "api_key": "none", "model": "main", "temperature": 0}
    for more in ({}, {"use_responses_api": True}):
        short = ChatOpenAI(**options, max_tokens=16, **more)
        assert short.invoke(QUESTION).text == text
        assert "".join(part.text for part in short.stream(QUESTION)) == text
        longer = ChatOpenAI(**options, max_tokens=100, **more)
        (call,) = longer.bind_tools([Weather], tool_choice="any").invoke("The weather?").tool_calls
        Weather.model_validate(call["args"])
        for method in ("json_schema", "function_calling"):
            assert isinstance(longer.with_structured_output(Fact, method=method).invoke("Really?"), Fact)
        both = longer.bind_tools([Weather], response_format=Fact, strict=True).invoke("Really?")
        assert both.tool_calls or Fact.model_validate_json(both.text)


def use_ollama(address, text):
    import ollama

    client = ollama.Client(host=address)
    short = {"temperature": 0, "num_predict": 16}
    assert client.chat("main", MESSAGES, options=short).message.content == text
    parts = list(client.chat("main", MESSAGES, options=short, stream=True))
    assert "".join(part.message.content for part in parts) == text
    assert (parts[-1].done_reason, parts[-1].eval_count) == ("length", 16)
    assert client.generate("main", QUESTION, options=short).response == text
    parts = client.generate("main", QUESTION, options=short, stream=True)
    assert "".join(part.response for part in parts) == text
    answer = client.chat(
        "main", MESSAGES, format=Fact.model_json_schema(), options=short | {"num_predict": 100}
    )
    Fact.model_validate_json(answer.message.content)
    picture = [{"role": "user", "content": QUESTION, "images": [b"\x89PNG"]}]
    (found,) = client.chat(
        "main", picture, options={"num_predict": 1}, logprobs=True, top_logprobs=2
    ).logprobs
    assert len(found.top_logprobs) == 2

    def weather(city: str) -> str:
        """The weather.

        Args:
            city: where.
        """
        return f"rain in {city}"

    for stream in (False, True):
        given = client.chat(
            "caller", MESSAGES, tools=[weather], think=True, stream=stream, options={"temperature": 0}
        )
        parts = list(given) if stream else [given]
        assert "".join(part.message.thinking or "" for part in parts)
        (call,) = (call for part in parts for call in part.message.tool_calls or ())
        assert call.function.arguments == {"city": "Rome"}
    said = ollama.Message(role="assistant", tool_calls=[call])
    result = {"role": "tool", "tool_name": call.function.name, "content": weather(**call.function.arguments)}
    assert client.chat("caller", [*MESSAGES, said, result], tools=[weather]).done
    assert not client.chat("caller", MESSAGES, think=False, options={"num_predict": 4}).message.thinking
    assert client.generate("caller", "def f(", suffix="return a", options={"num_predict": 4}).done
    assert client.generate("caller", "def f(", raw=True, options={"num_predict": 4}).done
    first, second = client.list().models
    assert (first.model, second.model, first.details.format) == ("main:latest", "caller:latest", "gguf")
    shown = client.show("caller")
    assert shown.capabilities == ["completion", "tools", "insert", "thinking"]
    assert shown.modelinfo["llama.context_length"] == 4096
    assert {model.model for model in client.ps().models} >= {"caller:latest"}
    assert client.generate("caller", keep_alive=0).done_reason == "unload"
    calls = (
        *(lambda: client.chat("absent", MESSAGES), lambda: client.show("absent")),
        *(lambda: next(client.chat("absent", MESSAGES, stream=True)), lambda: client.pull("main")),
        *(lambda: client.embed("main", "x"), lambda: client.delete("main")),
    )
    for ask, status in zip(calls, (404, 404, 404, 501, 501, 501), strict=True):
        try:
            ask()
        except ollama.ResponseError as error:
            found = error
        assert found.status_code == status
        assert "not found" in found.error or "this server" in found.error

    async def alone():
        async for part in await ollama.AsyncClient(host=address).chat(
            "main", MESSAGES, stream=True, options=short
        ):
            yield part.message.content

    async def joined():
        return "".join([part async for part in alone()])

    assert asyncio.run(joined()) == text


def use_langchain_ollama(address, text):
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_ollama import ChatOllama, OllamaLLM

    options = {"base_url": address, "temperature": 0}
    short = ChatOllama(model="main", num_predict=16, num_ctx=8192, validate_model_on_init=True, **options)
    assert short.invoke(QUESTION).text == text
    assert "".join(part.text for part in short.stream(QUESTION)) == text
    assert OllamaLLM(model="main", num_predict=16, **options).invoke(QUESTION) == text
    longer = ChatOllama(model="main", num_predict=100, **options)
    assert isinstance(longer.with_structured_output(Fact, method="json_schema").invoke("Really?"), Fact)
    image = {"type": "image", "base64": "aGk=", "mime_type": "image/png"}
    assert short.invoke([HumanMessage([{"type": "text", "text": "And this?"}, image])]).text
    caller = ChatOllama(model="caller", reasoning=True, **options).bind_tools([Weather])
    answer = caller.invoke(QUESTION)
    assert answer.additional_kwargs["reasoning_content"]
    (call,) = answer.tool_calls
    Weather.model_validate(call["args"])
    assert caller.invoke([HumanMessage(QUESTION), answer, ToolMessage("rain", tool_call_id=call["id"])])
    (usage,) = (part.usage_metadata for part in caller.stream(QUESTION) if part.usage_metadata)
    assert usage["input_tokens"] > 4


def use_instructor(address, text):
    import instructor
    import openai

    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai.OpenAI(base_url=f"{address}/v1", api_key="none"), mode=mode)
        options = {"model": "main", "messages": MESSAGES, "max_retries": 0}
        options |= {"max_tokens": 100, "temperature": 0}
        assert isinstance(client.chat.completions.create(**options, response_model=Fact), Fact)
        *_, last = client.chat.completions.create_partial(**options, response_model=Fact)
        Fact.model_validate(last.model_dump())


def use_pydantic_ai(address, text):
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{address}/v1", api_key="none")
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model = kind("main", provider=provider)
        short = Agent(model, model_settings={"temperature": 0, "max_tokens": 16})
        assert short.run_sync(QUESTION).output == text
        for form in (Fact, NativeOutput(Fact)):
            longer = Agent(model, output_type=form, model_settings={"max_tokens": 100, "temperature": 0})
            assert isinstance(longer.run_sync("Really?").output, Fact)


def use_openai_agents(address, text):
    import agents
    from openai import AsyncOpenAI

    async def ask(kind, **more):
        async with AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as client:
            agent = agents.Agent(name="helper", model=kind("main", client), **more)
            return (await agents.Runner.run(agent, QUESTION)).final_output

    short, longer = (agents.ModelSettings(temperature=0, max_tokens=n) for n in (16, 100))
    # Of a response that the limit has cut, the library makes an error.
    assert asyncio.run(ask(agents.OpenAIChatCompletionsModel, model_settings=short)) == text
    for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        assert isinstance(asyncio.run(ask(kind, model_settings=longer, output_type=Fact)), Fact)


USES = {
    "litellm": use_litellm,
    "langchain-openai": use_langchain,
    "instructor": use_instructor,
    "pydantic-ai": use_pydantic_ai,
    "openai-agents": use_openai_agents,
    "ollama": use_ollama,
    "langchain-ollama": use_langchain_ollama,
}

if __name__ == "__main__":
    name, address, text = sys.argv[1:]
    USES[name](address, json.loads(text))
