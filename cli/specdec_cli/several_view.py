"""`specdec generate --answers N`: several answers to one prompt."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from specdec_cli import progress, render

if TYPE_CHECKING:
    from spec_local.answers.running import OnRead
    from spec_local.answers.text import RowEvent
    from spec_local.engine.events import Statistics
    from spec_local.reasoning.markers import Splitter
    from spec_local.session import ChatPrompt, Done, Session
    from spec_local.settings import GenerationSettings

SEPARATOR = "---\n"
"""The line between two answers on standard output."""


def answer(
    session: "Session",
    prompt: "Sequence[int] | ChatPrompt",
    n_answers: int,
    settings: "GenerationSettings",
    splitter: "Callable[[], Splitter]",
    *,
    max_rows: int,
    totals: "Statistics",
    cancelled: Callable[[], bool],
    as_json: bool = False,
    as_jsonl: bool = False,
) -> list["Done"]:
    """Print several answers, whose seeds increase by one, and return their last events.

    As text, they are printed in order and without reasoning: the first one as it is generated, and each of
    the others once the one before it is complete. JSON objects have an ``index``, and are printed as
    they are complete: one for each answer, or one for each step of each answer.

    Args:
        splitter: returns a new one, for one of the answers.

    Raises:
        SpecLocalError: an answer has failed.
    """
    from spec_local.answers import json as answer_json
    from spec_local.engine.events import Failed
    from spec_local.session import ChatPrompt, Done, Text

    steps: list[list[Text]] = [[] for _ in range(n_answers)]
    ends: list[Done] = []
    main = session.main.model
    splitters = [splitter() for _ in range(n_answers)]
    texts = _Texts(n_answers)
    n_prompt = len(prompt.tokens if isinstance(prompt, ChatPrompt) else prompt)

    def generate(on_read: "OnRead") -> "Iterator[RowEvent]":
        return session.generate_many(
            [prompt] * n_answers,
            settings,
            max_rows=max_rows,
            totals=totals,
            cancelled=lambda index: cancelled(),
            on_read=lambda index, n_read, n_cached: on_read(n_read, n_prompt, 0),
        )

    for index, event in progress.reading(generate, in_one_piece=as_json):
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Text):
            if as_jsonl:
                render.write_object({"index": index, **answer_json.step(main, event, splitters[index])})
            elif as_json:
                steps[index].append(event)
            else:
                texts.add(index, splitters[index].feed(event.text).answer)
        elif isinstance(event, Done):
            ends.append(event)
            if as_jsonl:
                render.write_object({"index": index, **answer_json.end(main, event, splitters[index])})
            elif as_json:
                whole = answer_json.whole(main, steps[index], event, splitters[index])
                render.write_object({"index": index, **whole})
            else:
                texts.add(index, splitters[index].finish().answer, is_last=True)
    return ends


class _Texts:
    """Prints texts one after another that are generated at the same time."""

    def __init__(self, n: int) -> None:
        self._waiting = [""] * n
        self._complete = [False] * n
        self._current, self._ends_line = 0, True

    def add(self, index: int, text: str, *, is_last: bool = False) -> None:
        """Add to one of the texts, and print what can be printed now."""
        self._waiting[index] += text
        self._complete[index] = is_last
        while self._current < len(self._waiting):
            self._show(self._waiting[self._current])
            self._waiting[self._current] = ""
            if not self._complete[self._current]:
                return
            if not self._ends_line:
                self._show("\n")
            self._current += 1
            if self._current < len(self._waiting):
                self._show(SEPARATOR)

    def _show(self, text: str) -> None:
        if text:
            render.answer(text)
            self._ends_line = text.endswith("\n")
