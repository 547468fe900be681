"""The answers of `specdec generate` on standard output, as text or as JSON: one, or several to one prompt."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spec_local.answers import json as answer_json
from spec_local.answers.running import ChatPrompt, OnRead
from spec_local.answers.text import Done, NumberedEvent, Text
from spec_local.chat.request import ChatRequest
from spec_local.engine.events import Failed, Prefilled, Statistics
from spec_local.reasoning.markers import Splitter
from spec_local.settings import GenerationSettings
from spec_local.text import printable
from specdec_cli import answer_view, render, thinking_view
from specdec_cli.signatures.answers import GenerateOptions

if TYPE_CHECKING:
    from spec_local.session import Session

_SEPARATOR = "---\n"  # the line between two answers


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt, and how to answer it. splitter: returns a new one, for one answer."""

    session: "Session"
    prompt: Sequence[int] | ChatPrompt
    splitter: Callable[[], Splitter]
    settings: GenerationSettings
    cancelled: Callable[[], bool]
    options: GenerateOptions


def print_answer(asked: Asked, request: ChatRequest) -> Done:
    """Print one answer, and return its last event."""
    options = asked.options
    events = answer_view.reading(
        lambda on_read: asked.session.generate(
            asked.prompt, asked.settings, cancelled=asked.cancelled, on_read=on_read
        ),
        in_one_piece=options.as_json,
    )
    if not (options.as_json or options.as_jsonl):
        return _print_text(asked, events, request)
    output = _JsonAnswer(asked, of_last={"prompt": printable(request.prompt)} if options.echo else {})
    for event in events:
        output.show(event)
    assert isinstance(event, Done)
    return event


def _print_text(asked: Asked, events: Iterator[Prefilled | Text | Done], request: ChatRequest) -> Done:
    """Print the answer as it is generated, between the prompt and the suffix if they are to be echoed."""
    options, on_terminal = asked.options, render.width() is not None
    continues = request.raw or request.suffix is not None
    wrap = not (options.no_wrap or continues or options.echo)  # these begin in any column
    piece = asked.session.main.model.vocabulary.piece
    view = answer_view.view(piece, show_drafts=options.show_drafts, wrap=wrap)
    view = thinking_view.before(view, asked.splitter, hidden=options.hide_thinking, wrap=wrap)
    if isinstance(view, answer_view.DraftsView):
        render.note(view.legend)
    for event in events:
        if isinstance(event, Text):
            view.show(event)
        elif isinstance(event, Done):
            view.end("")
        elif options.echo:  # Prefilled: the prompt has been evaluated, so nothing can fail before the answer
            render.answer(request.prompt if continues else request.prompt + "\n\n")
    assert isinstance(event, Done)
    if options.echo and request.suffix:
        render.answer(request.suffix)
    if not (options.no_newline or (continues and not on_terminal)):
        render.end_answer()
    render.notes(view.notes())
    return event


def print_answers(asked: Asked, n_answers: int, n_parallel: int, totals: Statistics) -> list[Done]:
    """Print several answers, whose seeds increase by one, and return their last events.

    As text, they are printed in order and without reasoning: the first one as it is generated, and each of
    the others once the one before it is complete. JSON objects have an ``index``, and are printed as
    they are complete: one for each answer, or one for each step of each answer.

    Args:
        n_parallel: maximum number of answers at the same time.
        totals: receives the statistics of all.

    Raises:
        SpecLocalError: an answer has failed.
    """
    prompt, options = asked.prompt, asked.options
    n_prompt = len(prompt.tokens if isinstance(prompt, ChatPrompt) else prompt)
    if options.as_json or options.as_jsonl:
        objects = [_JsonAnswer(asked, {"index": index}) for index in range(n_answers)]
    else:
        texts = _Texts([asked.splitter() for _ in range(n_answers)])
    ends: list[Done] = []

    def generate(on_read: OnRead) -> Iterator[NumberedEvent]:
        return asked.session.generate_many(
            [prompt] * n_answers,
            asked.settings,
            n_parallel=n_parallel,
            totals=totals,
            cancelled=lambda index: asked.cancelled(),
            on_read=lambda index, n_read, n_cached: on_read(n_read, n_prompt, 0),
        )

    for index, event in answer_view.reading(generate, in_one_piece=options.as_json):
        if isinstance(event, Failed):
            raise event.error
        if options.as_json or options.as_jsonl:
            objects[index].show(event)
        elif isinstance(event, Text):
            texts.add(index, event.text)
        elif isinstance(event, Done):
            texts.end(index)
        if isinstance(event, Done):
            ends.append(event)
    return ends


class _JsonAnswer:
    """Prints an answer as JSON: one object when it is complete, or, with --jsonl, one for each step.

    Args:
        more: a part of each object. of_last: of the last one.
    """

    def __init__(
        self, asked: Asked, more: Mapping[str, object] = {}, of_last: Mapping[str, object] = {}
    ) -> None:
        self._model, self._splitter = asked.session.main.model, asked.splitter()
        self._streamed, self._more, self._of_last = asked.options.as_jsonl, more, of_last
        self._steps: list[Text] = []

    def show(self, event: object) -> None:
        """Print an event, or keep it until the end; only text and the end of the answer are shown."""
        if isinstance(event, Text) and self._streamed:
            render.write_object({**self._more, **answer_json.step(self._model, event, self._splitter)})
        elif isinstance(event, Text):
            self._steps.append(event)
        elif isinstance(event, Done):
            last = (
                answer_json.end(self._model, event, self._splitter)
                if self._streamed
                else answer_json.whole(self._model, self._steps, event, self._splitter)
            )
            render.write_object({**self._more, **self._of_last, **last})


class _Texts:
    """Prints texts one after another that are generated at the same time."""

    def __init__(self, splitters: Sequence[Splitter]) -> None:
        self._splitters = splitters
        self._waiting = [""] * len(splitters)
        self._complete = [False] * len(splitters)
        self._current, self._ends_line = 0, True

    def add(self, index: int, text: str) -> None:
        """Add to one of the texts, and print what can be printed now."""
        self._waiting[index] += self._splitters[index].feed(text).answer
        self._print()

    def end(self, index: int) -> None:
        """Complete one of the texts."""
        self._waiting[index] += self._splitters[index].finish().answer
        self._complete[index] = True
        self._print()

    def _print(self) -> None:
        while self._current < len(self._waiting):
            self._show(self._waiting[self._current])
            self._waiting[self._current] = ""
            if not self._complete[self._current]:
                return
            if not self._ends_line:
                self._show("\n")
            self._current += 1
            if self._current < len(self._waiting):
                self._show(_SEPARATOR)

    def _show(self, text: str) -> None:
        if text:
            render.answer(text)
            self._ends_line = text.endswith("\n")
