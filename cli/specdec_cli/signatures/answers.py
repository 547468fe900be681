"""The options of the commands that answer: run, generate, chat and serve."""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from typer import BadParameter

from specdec_cli import options
from specdec_cli.parameters import argument, option


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Chat with a model on a terminal; with a prompt or in a pipe, print one answer.

    A single argument is the prompt if it cannot be a model's name. A prompt of
    one word needs -p, or a model before it. The commands chat and generate have
    more options.

    Examples:

      specdec run qwen3-4b
      specdec run qwen3-4b "Why is the sky blue?"
      specdec run gemma3-4b --image photo.jpg "What is this?"
      git diff | specdec run coder-7b "Write a commit message."
    """

    models: options.ModelOptions
    sampling: options.SamplingOptions
    model: str | None = options.model_argument()
    prompt: str | None = argument(metavar="PROMPT", help="Prompt; text from a pipe precedes it.")
    prompt_option: str | None = options.prompt_option()
    image: list[Path] | None = options.image_option()
    system: str | None = options.system_option()
    show_drafts: bool = options.show_drafts_option()
    hide_thinking: bool = options.hide_thinking_option(rich_help_panel="Output")
    verbose: int = options.verbose_option()


_text = partial(option, rich_help_panel="Text and code")
_output = partial(option, rich_help_panel="Output")
_batch = partial(option, rich_help_panel="Many prompts and answers")


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Answer one prompt, or many prompts from a file.

    Examples:

      specdec generate "Why is the sky blue?"
      git diff | specdec generate coder-7b "Write a commit message."
      specdec generate --json "Name three colours." | jq -r .content
      head -40 f.py | specdec generate coder-7b --suffix "$(tail -n +42 f.py)"
      specdec generate --input prompts.txt --output answers.jsonl --seed 1

    In a shell loop that reads lines, add < /dev/null, or the command reads the
    lines of the loop. The exit code is 3 if an answer under a grammar or schema
    is cut short.
    """

    models: options.ModelOptions
    sampling: options.SamplingOptions
    model: str | None = options.model_argument()
    prompt: str | None = argument(
        metavar="PROMPT",
        help="Prompt; a single argument is the prompt unless it is a model. Text from --file or a pipe "
        "precedes it.",
    )
    prompt_option: str | None = options.prompt_option()
    file: list[Path] | None = option(
        "--file", "-f", metavar="FILE", help="Text before the prompt; repeatable; - is standard input."
    )
    image: list[Path] | None = options.image_option()
    system: str | None = options.system_option()
    raw: bool = _text(default=False, help="Continue the text exactly as it is, without the chat template.")
    suffix: str | None = _text(
        metavar="TEXT", help="Fill the gap between the prompt and this text (for code models)."
    )
    suffix_file: Path | None = _text(metavar="FILE", help="File that contains the suffix.")
    echo: bool = _text(default=False, help="Print the prompt before the answer, and the suffix after it.")
    as_json: bool = option("--json", default=False, help="Print one JSON object at the end.")
    as_jsonl: bool = _output(
        "--jsonl", default=False, help="Print a JSON object for each step as it completes."
    )
    logprobs: int | None = _output(
        metavar="N",
        help="Add the log probabilities of each token and of the N most probable ones to JSON output.",
    )
    input_file: Path | None = _batch(
        "--input",
        metavar="FILE",
        help='One prompt per line, or JSON Lines with "prompt" or "messages" and optionally "id", '
        '"system", "images", "suffix", "seed" or "max_tokens"; - is standard input.',
    )
    output_file: Path | None = _batch(
        "--output",
        "-o",
        metavar="FILE",
        help="File for one JSON object per answer; run the command again to resume and to retry failed "
        "prompts (default: standard output, without resuming).",
    )
    answers: int | None = _batch(
        metavar="N",
        help="Number of answers to one prompt, which is read once; the seed increases by one per answer. "
        "In text output, lines with --- separate the answers.",
    )
    parallel: int | None = _batch(
        metavar="N",
        help="Maximum number of answers at the same time (default: as many as pay off, up to 8, in half "
        "of the free memory).",
    )
    show_drafts: bool = options.show_drafts_option()
    hide_thinking: bool = options.hide_thinking_option(rich_help_panel="Output")
    no_wrap: bool = options.no_wrap_option(rich_help_panel="Output")
    no_newline: bool = _output(
        default=False, help="Print the exact answer, without adding a newline at the end."
    )
    profile: bool = _output(default=False, help="Show where the time goes, and how much of it drafts save.")
    verbose: int = options.verbose_option()


_chat = partial(option, rich_help_panel="Chat")


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Chat with a model in the terminal.

    Type /help for the commands of the chat.

    Examples:

      specdec chat
      specdec chat qwen3-4b --system "Answer in French."
      specdec chat llama-13b.gguf --draft tiny.gguf --show-drafts
      specdec chat --continue
    """

    models: options.ModelOptions
    sampling: options.SamplingOptions
    model: str | None = options.model_argument()
    draft_model: str | None = options.draft_argument()
    image: list[Path] | None = option(
        "--image",
        "--audio",
        metavar="FILE",
        help="Image or sound to send with the first message; repeatable.",
    )
    system: str | None = options.system_option()
    load: Path | None = _chat(metavar="FILE", help="Continue a conversation that was saved with /save.")
    continue_: bool = option(
        "--continue", "-C", default=False, help="Continue the last conversation on a terminal."
    )
    when_full: Literal["stop", "drop-oldest"] = _chat(
        default="stop",
        help="When the context is full, stop, or drop the oldest messages except the system message.",
    )
    show_drafts: bool = options.show_drafts_option()
    hide_thinking: bool = options.hide_thinking_option(rich_help_panel="Chat")
    markdown: bool = _chat(default=False, help="Render Markdown; each block is shown when it is complete.")
    no_wrap: bool = options.no_wrap_option(rich_help_panel="Chat")
    no_stats: bool = _chat(default=False, help="Do not print statistics after each answer.")
    verbose: int = options.verbose_option()


_server = partial(option, rich_help_panel="Server")


def _gibibytes(value: float | None) -> float | None:
    if value is not None and not 0 < value < math.inf:
        raise BadParameter(f"{value} is not a size in GiB")
    return value


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Serve models over HTTP to editors, agents and chat programs, and show a page to try them.

    Clients of OpenAI, Anthropic, Ollama or llama.cpp's server need only another
    address, such as http://localhost:8080/v1; with --port 11434, those of Ollama
    find the server by themselves. With several models, the first is loaded at the
    start and each other one at its first request; the least recently used one is
    unloaded when memory runs out. A request can override the sampling and
    speculation options.

    Examples:

      specdec serve
      specdec serve main.gguf --draft draft.gguf --port 8000
      specdec serve coder-7b qwen3-4b main.gguf --memory 8
      SPECDEC_API_KEY=secret specdec serve --host 0.0.0.0
    """

    models: options.ModelOptions
    sampler: options.SamplerOptions
    model: list[str] | None = options.named_model(
        metavar="MODEL",
        help="Main model: a file, a name or user/repo:quant. With several, each request names one.",
    )
    host: str = option(
        default="127.0.0.1", metavar="ADDRESS", help="Address to listen on; any but loopback needs --api-key."
    )
    port: int = option(default=8080, min=0, max=65535, metavar="<int>", help="Port; 0 takes any free port.")
    api_key: str | None = option(metavar="KEY", help="Key that clients must send; safer in SPECDEC_API_KEY.")
    alias: str | None = _server(
        metavar="NAME", help="Name of the model for clients (default: that of its file)."
    )
    parallel: int | None = option(
        min=1,
        metavar="<int>",
        help="Maximum number of answers at the same time (default: 8, or as memory allows).",
    )
    memory: float | None = option(
        metavar="GiB",
        callback=_gibibytes,
        help="Memory for several models together (default: half of the free memory).",
    )
    keep_alive: str | None = _server(
        metavar="TIME",
        help="Unload a model after it is idle for this time, such as 10m; 0: at once (default: never).",
    )
    queue: int = _server(
        default=64, min=0, metavar="<int>", help="Maximum number of requests that wait for their turn."
    )
    cors: list[str] | None = _server(
        metavar="ORIGIN",
        help="Origin whose web pages may use the server, such as https://HOST, or * for all; repeatable.",
    )
    allow_host: list[str] | None = _server(
        metavar="NAME", help="Another host name, or *.DOMAIN, that clients without a key may use; repeatable."
    )
    image_urls: str | None = _server(
        metavar="HOST[,HOST]",
        help="Hosts, with or without :PORT, from whose URLs images are fetched (default: none).",
    )
    max_body: int | None = _server(
        min=1,
        metavar="<int>",
        help="Maximum size of a request in MiB (default: 16, or 64 for a model that reads images).",
    )
    keep_headers: bool = _server(
        default=False,
        help="Leave billing headers and times of day in system messages as clients send them.",
    )
