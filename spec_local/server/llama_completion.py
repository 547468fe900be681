"""The completions of llama.cpp's server: POST /completion and /completions."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spec_local.answers import json as answer_json
from spec_local.errors import InvalidRequest, SpecLocalError
from spec_local.server import openai_json
from spec_local.server.answer_so_far import AnswerSoFar
from spec_local.server.completions import prompts_of
from spec_local.server.events import AnswerRequest, Delta, Event, Loaded, Token
from spec_local.server.protocol import Exchange
from spec_local.server.sampling_body import Count, SamplingBody, Stops, limit, read


class _Body(SamplingBody):
    prompt: Any
    n_predict: Count | None = None
    stop: Stops | None = None
    n_probs: int | None = None
    return_tokens: bool | None = None

    def requests(self) -> list[AnswerRequest]:
        prompts = prompts_of(self.prompt)
        if len(prompts) != 1:
            raise InvalidRequest("several prompts are not supported here: give one, or use /v1/completions")
        settings = self.settings(
            max_tokens=limit(self.n_predict), stops=self.stop, logprobs=self.n_probs or None
        )
        return [
            AnswerRequest(settings, prompt=prompts[0], warnings=self.warnings(None), marks=bool(self.marks))
        ]


class LlamaCompletion(Exchange):
    """A completion.

    The objects are those of ``specdec generate --json``: see `spec_local.answers.json`.
    """

    def __init__(self, body: Mapping[str, Any], loaded: Loaded) -> None:
        given = read(_Body, body)
        self.requests, self.streams = given.requests(), bool(given.stream)
        self._probabilities, self._tokens = bool(given.n_probs), bool(given.return_tokens)
        self._model = given.model or loaded.name
        self._answer = AnswerSoFar()

    def write(self, index: int, event: Event) -> Iterator[str]:
        added = self._answer.add(event)
        if added is None:
            return
        if self._answer.ended:
            yield openai_json.data(self._last(added.content, added.reasoning))
        elif added.content or added.reasoning or added.tokens:
            yield openai_json.data(self._part(added))

    def failed(self, error: SpecLocalError) -> str:
        return openai_json.failure(error)

    def whole(self, answers: Sequence[Sequence[Event]]) -> Mapping[str, Any]:
        (events,) = answers
        answer = self._answer
        answer.add_all(events)
        tokens = [token.id for token in answer.tokens] if self._tokens else []
        last = self._last(answer.content, answer.reasoning)
        return last | {"tokens": tokens} | self._probabilities_of(answer.tokens)

    def _part(self, added: Delta) -> dict[str, Any]:
        tokens = [token.id for token in added.tokens]
        part = answer_json.part(added.content, added.reasoning, tokens, added.n_drafted, added.n_accepted)
        marks = {"specdec": openai_json.marks(added)} if self.requests[0].marks else {}
        return {"index": 0} | part | self._probabilities_of(added.tokens) | marks

    def _last(self, content: str, reasoning: str) -> dict[str, Any]:
        answer, ended = self._answer, self._answer.ended
        assert ended
        return {
            "index": 0,
            **answer_json.last_part(
                content, reasoning, ended.reason, ended.stopping_word, self._model, ended.statistics
            ),
            "tokens_predicted": ended.statistics.predicted_n,
            "tokens_evaluated": answer.n_prompt,
            "tokens_cached": answer.n_cached,
            "timings": openai_json.timings(ended),
            **openai_json.warnings(self.requests),
        }

    def _probabilities_of(self, tokens: Sequence[Token]) -> dict[str, Any]:
        if not self._probabilities or not tokens:
            return {}
        return {"completion_probabilities": [openai_json.probabilities(token) for token in tokens]}
