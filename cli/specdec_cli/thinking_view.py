"""The reasoning before an answer: dim on a terminal, or hidden; elsewhere, only the answer is shown."""

import functools
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from spec_local.answers.text import Text
from spec_local.reasoning.markers import Parts, Splitter
from spec_local.text import counted
from specdec_cli import answer_view, render, waiting
from specdec_cli.wrapping import Unwrapped, Wrapped


class Thinking(answer_view.AnswerView):
    """Shows the reasoning, and then the answer in a view of its own.

    Args:
        view: shows the answer.
        splitter: returns that of the text; called when the first text arrives: before, a chat has no prompt.
        hidden: whether to show only how long the reasoning took.
        wrap: whether to break lines between words.
    """

    def __init__(
        self, view: answer_view.AnswerView, splitter: Callable[[], Splitter], hidden: bool, wrap: bool
    ) -> None:
        self._view, self._new_splitter = view, splitter
        self._on_terminal = sys.stdout.isatty()
        self._shown = self._on_terminal and not hidden
        self._write = Wrapped(render.answer) if wrap else Unwrapped(render.answer)
        self._style = render.DIM if render.coloured(sys.stdout) else ""
        self._n_tokens = 0
        self._has_reasoning = self._has_answer = False

    def show(self, event: Text) -> None:
        if not self._has_answer:
            self._n_tokens += len(event.tokens)
        parts = self._splitter.feed(event.text)
        self._show_reasoning(parts)
        if self._on_terminal and self._has_reasoning and not (self._shown or self._has_answer):
            waiting.say(f"thinking: {self._n_tokens:,} tokens")
        self._view.show(replace(event, text=parts.answer))

    def end(self, text: str) -> None:
        parts = self._splitter.finish(text)
        self._show_reasoning(parts)
        if self._has_reasoning and not self._has_answer:
            self._end_reasoning()
            render.note("the output ended during the reasoning: there is no answer")
        self._view.end(parts.answer)

    def notes(self) -> list[str]:
        return self._view.notes()

    @functools.cached_property
    def _splitter(self) -> Splitter:
        self._started = time.perf_counter()
        return self._new_splitter()

    def _show_reasoning(self, parts: Parts) -> None:
        if parts.reasoning:
            self._has_reasoning = True
            if self._shown:
                self._write(parts.reasoning, self._style)
        if parts.answer and not self._has_answer:
            self._has_answer = True
            if self._has_reasoning:
                self._end_reasoning()

    def _end_reasoning(self) -> None:
        if not self._on_terminal:
            return
        if self._shown:
            self._write.flush()
            render.answer("\n")
        seconds = time.perf_counter() - self._started
        render.note(f"(thought for {seconds:.1f} s, {counted(self._n_tokens, 'token')})")
        render.answer("\n")


def before(
    view: answer_view.AnswerView, splitter: Callable[[], Splitter], *, hidden: bool, wrap: bool
) -> answer_view.AnswerView:
    """Return a view of the reasoning and the answer, which is shown in the given view.

    Draft tokens are shown in the text as it was generated, with the reasoning and its markers.
    """
    return view if isinstance(view, answer_view.DraftsView) else Thinking(view, splitter, hidden, wrap)
