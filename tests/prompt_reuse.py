"""Replay conversations against a server, and count the prompt tokens that it reads and those it needs to.

    python -m tests.prompt_reuse            # all of them, with tiny models, in minutes

Needed are the tokens of a prompt after its longest common beginning with what was there before: an earlier
prompt and its answer. The first prompt of a replay is not counted.
"""

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from spec_local.core.sequence import common_prefix
from spec_local.llama.tiny import write_tiny_model
from tests.tiny_architectures import write_tiny

TEMPLATE = (
    "{%- set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% set system = messages[0].content if messages and messages[0].role == 'system' else '' %}"
    "{% if tools or system %}<|im_start|>system\n{% if tools %}# Tools\n"
    "{% for t in tools %}{{ t | tojson }}\n{% endfor %}\n{% endif %}{{ system }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n{% if loop.index0 > ns.last %}"
    "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "<|im_end|>\n{% endif %}{% endfor %}<|im_start|>assistant\n<think>\n"
)
"""As that of Qwen3.5: it opens the reasoning, and drops that of answers before the last question."""
CONTROL = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

Body = dict[str, object]
_WORDS = Path(__file__).read_text(encoding="utf-8").split()


def text(n_words: int, seed: int) -> str:
    """Some words, which begin with those that make them differ from others."""
    start = seed * 37 % len(_WORDS)
    words = itertools.islice(itertools.cycle(_WORDS[start:] + _WORDS[:start]), n_words)
    return f"{seed}: " + " ".join(words)


@dataclass
class Replay:
    """A server, what was sent to it, and the tokens that it has read and needed to read."""

    address: str
    known: list[list[int]] = field(default_factory=list)
    n_read: int = 0
    n_needed: int = 0

    def send(self, body: Body, path: str = "/v1/chat/completions", constant: Body | None = None) -> str:
        """Send a request; returns the text of the answer, which ends after some tokens.

        constant: the same without what changes from request to request; it says which tokens are needed.
        """
        prompt = self._tokens(self._prompt(constant or body, path))
        answer = httpx.post(
            self.address + path, json=body | {"max_tokens": 24, "temperature": 0}, timeout=600
        )
        assert answer.status_code == 200, answer.text
        reply = answer.json()
        if path == "/v1/messages":
            usage = reply["usage"]
            n_read = usage["input_tokens"]
            said = "".join(block.get("thinking") or block.get("text") or "" for block in reply["content"])
        else:
            usage = reply["usage"]
            n_read = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
            message = reply["choices"][0]["message"]
            said = (message.get("reasoning_content") or "") + (message["content"] or "")
        if self.known:
            self.n_read += n_read
            self.n_needed += len(prompt) - max(common_prefix(prompt, known) for known in self.known)
        self.known.append(prompt + self._tokens(said))
        return said

    def _prompt(self, body: Body, path: str) -> str:
        """The text of a prompt as it should be, without what the server leaves out."""
        if path == "/v1/messages":
            body = _as_openai(body)
        reply = httpx.post(self.address + "/apply-template", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        return str(reply.json()["prompt"])

    def _tokens(self, prompt: str) -> list[int]:
        body = {"content": prompt, "add_special": False, "parse_special": True}
        return list(httpx.post(self.address + "/tokenize", json=body, timeout=60).json()["tokens"])


def _as_openai(body: Any) -> Body:
    """A request to /v1/messages as one to /v1/chat/completions."""
    system = "\n".join(block["text"] for block in body["system"])
    messages: list[Body] = [{"role": "system", "content": system}]
    for message in body["messages"]:
        (block,) = message["content"] if isinstance(message["content"], list) else [message["content"]]
        if isinstance(block, str):
            messages.append(message)
        elif block["type"] == "tool_use":
            call = {"name": block["name"], "arguments": json.dumps(block["input"])}
            call = {"id": block["id"], "type": "function", "function": call}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        else:
            result = {"role": "tool", "content": block["content"], "tool_call_id": block["tool_use_id"]}
            messages.append(result)
    tools = [
        {"type": "function", "function": {"name": tool["name"], "description": tool["description"],
         "parameters": tool["input_schema"]}}
        for tool in body["tools"]
    ]  # fmt: skip
    return {"messages": messages, "tools": tools}


def turns(replay: Replay, n: int, system: int, seed: int, said: int = 40) -> Iterator[None]:
    """A conversation whose client sends back the answers without their reasoning."""
    messages: list[Body] = [{"role": "system", "content": text(system, 1000 + seed)}]
    for i in range(n):
        messages.append({"role": "user", "content": text(30, 10 * seed + i)})
        replay.send({"messages": messages})
        messages.append({"role": "assistant", "content": text(said, 500 + 10 * seed + i)})
        yield


def reasoning(replay: Replay) -> None:
    """Six turns, with reasoning that the template drops."""
    for _ in turns(replay, 6, 200, 1):
        pass


def tool_loop(replay: Replay) -> None:
    """Calls and results, within which the reasoning is kept, then another question."""
    messages: list[Body] = [
        {"role": "system", "content": text(150, 3)},
        {"role": "user", "content": text(40, 4)},
    ]
    tools = [{"type": "function", "function": {"name": "look", "description": text(60, 5), "parameters": {}}}]
    for i in range(8):
        replay.send({"messages": messages, "tools": tools})
        call = {"name": "look", "arguments": json.dumps({"at": text(6, i)})}
        messages.append(
            {"role": "assistant", "content": "", "reasoning_content": text(30, 700 + i),
             "tool_calls": [{"id": f"call{i:05}", "type": "function", "function": call}]}
        )  # fmt: skip
        messages.append({"role": "tool", "content": text(50, 800 + i), "tool_call_id": f"call{i:05}"})
        if i == 5:
            messages.append({"role": "assistant", "content": text(30, 900)})
            messages.append({"role": "user", "content": text(30, 901)})


def shared_system(replay: Replay) -> None:
    """Four conversations with one system prompt."""
    for i in range(4):
        messages = [
            {"role": "system", "content": text(500, 9)},
            {"role": "user", "content": text(40, 20 + i)},
        ]
        replay.send({"messages": messages})


def edited(replay: Replay) -> None:
    """The last message is edited, three times."""
    messages: list[Body] = [{"role": "system", "content": text(300, 3)}]
    for i in range(3):
        messages += [
            {"role": "user", "content": text(40, i)},
            {"role": "assistant", "content": text(60, 40 + i)},
        ]
    for i in range(4):
        replay.send({"messages": [*messages, {"role": "user", "content": text(40, 90 + i)}]})


def conversations(replay: Replay, n: int = 12, sizes: tuple[int, ...] = (800, 2000)) -> None:
    """Conversations that take turns, more than there are rows."""
    for size in sizes:
        running = [turns(replay, 4, size * 2 // 5, 100 * size + i) for i in range(n)]
        for _ in range(4):
            for each in running:
                next(each)


def agent(replay: Replay, noise: str) -> None:
    """The 16 requests of an agent whose system prompt begins with another line in each."""
    tools = [
        {"name": f"tool{i}", "description": text(80, 60 + i), "input_schema": {"type": "object"}}
        for i in range(6)
    ]
    messages: list[Body] = [{"role": "user", "content": text(60, 70)}]
    for i in range(16):
        lines = {
            "": [],
            "header": [f"x-anthropic-billing-header: cc_version=2.0; cch={i * 7919:05x}"],
            "time": [f"Current time: {datetime.now(UTC).isoformat(timespec='seconds')}"],
        }[noise]
        if noise == "time":
            time.sleep(1.1)  # so that it changes
        body: Body = {"model": "m", "tools": tools, "messages": messages}
        own = [{"type": "text", "text": text(300, 71)}]
        changing: list[Body] = [{"type": "text", "text": line} for line in lines]
        replay.send(body | {"system": changing + own}, "/v1/messages", body | {"system": own})
        call = {"type": "tool_use", "id": f"toolu_{i}", "name": "tool1", "input": {"n": i}}
        result = {"type": "tool_result", "tool_use_id": f"toolu_{i}", "content": text(40, 200 + i)}
        messages = [
            *messages,
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ]


def start(main: Path, *options: str) -> tuple[subprocess.Popen[str], str]:
    """Start a server; returns its process and address."""
    arguments = ["serve", "--main", str(main), "--port", "0", "--ctx", "16384", *options]
    process = subprocess.Popen(
        [sys.executable, "-m", "specdec_cli", *arguments], stderr=subprocess.PIPE, text=True, env=os.environ
    )
    assert process.stderr
    for line in process.stderr:
        print(f"    {line}", end="")
        if " serves " in line:
            return process, re.search(r"http://\S+", line)[0]  # type: ignore[index]
    raise SystemExit("the server did not start")


HYBRIDS = ("qwen35", "granitehybrid", "mamba2", "lfm2")
REPLAYS = {
    "12 conversations": (("dense", "qwen35"), conversations),
    "reasoning": (HYBRIDS, reasoning),
    "tool loop": (HYBRIDS, tool_loop),
    "shared system prompt": (HYBRIDS, shared_system),
    "last message edited": (HYBRIDS, edited),
    "agent": (("dense", "qwen35"), lambda replay: agent(replay, "")),
    "agent, header": (("dense", "qwen35"), lambda replay: agent(replay, "header")),
    "agent, time": (("dense", "qwen35"), lambda replay: agent(replay, "time")),
}


def main() -> None:
    """Print tokens read and needed for each replay and kind of model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="replays whose name contains this")
    parser.add_argument("--model", default="", help="models whose name contains this")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"XDG_CACHE_HOME": folder, "XDG_DATA_HOME": folder}
        models = {
            "dense": write_tiny_model(Path(folder, "dense.gguf"), n_ctx=1 << 15, chat_template=TEMPLATE)
        }
        for name in HYBRIDS:
            path = Path(folder, f"{name}.gguf")
            models[name] = write_tiny(path, name, n_ctx=1 << 15, chat_template=TEMPLATE)
        for name, (kinds, replay) in REPLAYS.items():
            for kind in kinds:
                if given.only not in name or given.model not in kind:
                    continue
                process, address = start(models[kind], "--parallel", "4")
                try:
                    counted = Replay(address)
                    replay(counted)
                finally:
                    process.terminate()
                    process.wait(30)
                ratio = counted.n_read / counted.n_needed
                print(
                    f"{name:24} {kind:14} {counted.n_read:7} read {counted.n_needed:7} needed {ratio:6.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
