"""The options of `specdec generate`."""

import functools
from dataclasses import dataclass
from pathlib import Path

from specdec_cli import options
from specdec_cli.parameters import argument, option

_text = functools.partial(option, rich_help_panel="Text and code")
_output = functools.partial(option, rich_help_panel="Output")
_batch = functools.partial(option, rich_help_panel="Many prompts and answers")


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
