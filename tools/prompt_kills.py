"""Kill servers that share a prompt cache, again and again, and compare their answers with those without one.

    python -m tools.prompt_kills --times 200                 # takes ten minutes
    python -m tools.prompt_kills --times 50 --cache DIR      # such as a small tmpfs, which gets full

Two servers run at a time, with tiny models. Every answer must be the one that was given without a cache.
"""

import argparse
import os
import random
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from spec_local.llama.tiny import write_tiny_model
from tests.prompt_reuse import TEMPLATE, start, text
from tests.tiny_architectures import write_tiny

N_PROMPTS = 12


def body(i: int) -> dict[str, Any]:
    """A prompt of some hundred tokens; several begin in the same way."""
    messages = [
        {"role": "system", "content": text(120, i % 3)},
        {"role": "user", "content": text(20 + 10 * (i % 4), 100 + i)},
    ]
    return {"messages": messages, "max_tokens": 24, "temperature": 0}


def answer(address: str, i: int) -> str:
    """The answer to a prompt; its client gives up with an error if the server does."""
    response = httpx.post(address + "/v1/chat/completions", json=body(i), timeout=60)
    response.raise_for_status()
    message = response.json()["choices"][0]["message"]
    return (message.get("reasoning_content") or "") + (message["content"] or "")


def kill(process: "subprocess.Popen[str]") -> None:
    """Kill a server, and its process with the models, at once."""
    for each in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
        each.kill()
    process.wait()


def main() -> None:
    """Print the number of kills, of answers, of wrong ones, and of tokens from the cache."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--cache", type=Path, help="folder of the cache")
    parser.add_argument(
        "--limit", default="8MiB", help="of the cache on disk; files are deleted all the time"
    )
    given = parser.parse_args()
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"XDG_CACHE_HOME": str(given.cache or folder), "XDG_DATA_HOME": folder}
        kinds = [
            write_tiny_model(Path(folder, "dense.gguf"), n_ctx=1 << 14, chat_template=TEMPLATE),
            write_tiny(Path(folder, "hybrid.gguf"), "qwen35", n_ctx=1 << 14, chat_template=TEMPLATE),
        ]
        expected: list[list[str]] = []
        for path in kinds:
            process, address = start(path, "--prompt-cache", "off")
            expected.append([answer(address, i) for i in range(N_PROMPTS)])
            kill(process)

        n_kills = n_answers = n_wrong = 0
        servers = [start(kinds[0], "--prompt-cache", given.limit, "--parallel", "2") for _ in range(2)]
        kind_of = [0, 0]
        while n_kills < given.times:
            chosen = rng.randrange(2)
            process, address = servers[chosen]
            for _ in range(rng.randrange(1, 6)):
                i = rng.randrange(N_PROMPTS)
                n_answers += 1
                n_wrong += answer(address, i) != expected[kind_of[chosen]][i]
            time.sleep(rng.random() * 0.05)  # it writes
            kill(process)
            n_kills += 1
            kind_of[chosen] = rng.randrange(2)
            servers[chosen] = start(kinds[kind_of[chosen]], "--prompt-cache", given.limit, "--parallel", "2")
        for process, _ in servers:
            kill(process)
        print(f"{n_kills} kills, {n_answers} answers, {n_wrong} wrong")


if __name__ == "__main__":
    main()
