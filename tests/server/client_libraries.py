"""Use specdec serve with a library on top of OpenAI's or Anthropic's client, in an environment of its own.

    .venv/libraries/bin/python client_libraries.py LIBRARY ADDRESS TEXT

TEXT is the answer to `QUESTION` with 16 tokens at temperature 0.
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
        options = {"model": model, "api_base": base, "api_key": "none", "messages": MESSAGES}
        short = options | {"temperature": 0, "max_tokens": 16}
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

    options = {"base_url": f"{address}/v1", "api_key": "none", "model": "main"}
    for more in ({}, {"use_responses_api": True}):
        short = ChatOpenAI(**options, temperature=0, max_tokens=16, **more)
        assert short.invoke(QUESTION).text == text
        assert "".join(part.text for part in short.stream(QUESTION)) == text
        longer = ChatOpenAI(**options, max_tokens=100, **more)
        (call,) = longer.bind_tools([Weather], tool_choice="any").invoke("The weather?").tool_calls
        Weather.model_validate(call["args"])
        for method in ("json_schema", "function_calling"):
            assert isinstance(longer.with_structured_output(Fact, method=method).invoke("Really?"), Fact)
        both = longer.bind_tools([Weather], response_format=Fact, strict=True).invoke("Really?")
        assert both.tool_calls or Fact.model_validate_json(both.text)


def use_instructor(address, text):
    import instructor
    import openai

    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai.OpenAI(base_url=f"{address}/v1", api_key="none"), mode=mode)
        options = {"model": "main", "messages": MESSAGES, "max_retries": 0, "max_tokens": 100}
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
            longer = Agent(model, output_type=form, model_settings={"max_tokens": 100})
            assert isinstance(longer.run_sync("Really?").output, Fact)


def use_openai_agents(address, text):
    import agents
    from openai import AsyncOpenAI

    async def ask(kind, **more):
        async with AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as client:
            agent = agents.Agent(name="helper", model=kind("main", client), **more)
            return (await agents.Runner.run(agent, QUESTION)).final_output

    short, longer = agents.ModelSettings(temperature=0, max_tokens=16), agents.ModelSettings(max_tokens=100)
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
}

if __name__ == "__main__":
    name, address, text = sys.argv[1:]
    USES[name](address, json.loads(text))
