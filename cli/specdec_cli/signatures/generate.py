"""The options of `specdec generate`."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from specdec_cli import options

_Text = functools.partial(Option, rich_help_panel="Text and code")
_Output = functools.partial(Option, rich_help_panel="Output")
_Batch = functools.partial(Option, rich_help_panel="Many prompts and answers")


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
    model: options.ModelArgument = None
    prompt: Annotated[
        str | None,
        Argument(
            metavar="PROMPT",
            help="Prompt; a single argument is the prompt unless it is a model. Text from --file or a pipe "
            "precedes it.",
        ),
    ] = None
    prompt_option: options.PromptOption = None
    file: Annotated[
        list[Path] | None,
        Option(
            "--file",
            "-f",
            metavar="FILE",
            help="Text before the prompt; repeatable; - is standard input.",
        ),
    ] = None
    image: options.ImageOption = None
    system: options.SystemOption = None
    raw: Annotated[
        bool, _Text("--raw", help="Continue the text exactly as it is, without the chat template.")
    ] = False
    suffix: Annotated[
        str | None,
        _Text(metavar="TEXT", help="Fill the gap between the prompt and this text (for code models)."),
    ] = None
    suffix_file: Annotated[Path | None, _Text(metavar="FILE", help="File that contains the suffix.")] = None
    echo: Annotated[
        bool, _Text("--echo", help="Print the prompt before the answer, and the suffix after it.")
    ] = False
    as_json: Annotated[bool, Option("--json", help="Print one JSON object at the end.")] = False
    as_jsonl: Annotated[
        bool, _Output("--jsonl", help="Print a JSON object for each step as it completes.")
    ] = False
    logprobs: Annotated[
        int | None,
        _Output(
            metavar="N",
            help="Add the log probabilities of each token and of the N most probable ones to JSON output.",
        ),
    ] = None
    input_file: Annotated[
        Path | None,
        _Batch(
            "--input",
            metavar="FILE",
            help='One prompt per line, or JSON Lines with "prompt" or "messages" and optionally "id", '
            '"system", "images", "suffix", "seed" or "max_tokens"; - is standard input.',
        ),
    ] = None
    output_file: Annotated[
        Path | None,
        _Batch(
            "--output",
            "-o",
            metavar="FILE",
            help="File for one JSON object per answer; run the command again to resume and to retry failed "
            "prompts (default: standard output, without resuming).",
        ),
    ] = None
    answers: Annotated[
        int | None,
        _Batch(
            metavar="N",
            help="Number of answers to one prompt, which is read once; the seed increases by one per answer. "
            "In text output, lines with --- separate the answers.",
        ),
    ] = None
    parallel: Annotated[
        int | None,
        _Batch(
            metavar="N",
            help="Maximum number of answers at the same time (default: as many as pay off, up to 8, in half "
            "of the free memory).",
        ),
    ] = None
    show_drafts: options.ShowDraftsOption = False
    hide_thinking: Annotated[bool, options.HideThinkingOption(rich_help_panel="Output")] = False
    no_wrap: Annotated[bool, options.NoWrapOption(rich_help_panel="Output")] = False
    no_newline: Annotated[
        bool, _Output("--no-newline", help="Print the exact answer, without adding a newline at the end.")
    ] = False
    profile: Annotated[
        bool, _Output("--profile", help="Show where the time goes, and how much of it drafts save.")
    ] = False
    verbose: options.VerboseOption = 0
