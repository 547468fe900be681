"""The completions of llama.cpp's server: POST /completion, /completions and /infill."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from spec_local.answers import json as answer_json
from spec_local.errors import InvalidRequest, SpecLocalError
from spec_local.server.protocols import errors, openai_json
from spec_local.server.protocols.completions import Prompts, prompts_of, text_requests
from spec_local.server.protocols.openai_exchange import MAX_CHOICES
from spec_local.server.protocols.protocol import Exchange
from spec_local.server.protocols.request_images import RequestImages
from spec_local.server.protocols.sampling_body import Part, SamplingBody, Stops, limit
from spec_local.server.supervision.events import AnswerRequest, Delta, Event, Infill, Loaded, Reading, Token
from spec_local.settings import MAX_LOGPROBS, GenerationSettings


class _Body(SamplingBody):
    prompt: Prompts
    stop: Stops | None = None
    n_probs: int | None = None
    logprobs: Any = None
    post_sampling_probs: bool | None = None
    return_tokens: bool | None = None
    response_fields: list[str] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    n_cmpl: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None

    def requests(self, loaded: Loaded) -> list[AnswerRequest]:
        prompts = prompts_of(self.prompt, images=RequestImages.of(loaded))
        n = self.n_cmpl or self.n or 1
        return text_requests(prompts, self._settings(), n, parse_special=True, **self.more())

    def _settings(self) -> GenerationSettings:
        n_probs = self.n_probs
        if n_probs is None and type(self.logprobs) is int:  # OpenAI's name
            n_probs = self.logprobs
        return self.settings(
            max_tokens=limit(self.most),
            stops=self.stop,
            logprobs=min(n_probs, MAX_LOGPROBS) if n_probs and n_probs > 0 else None,  # "at most n_probs"
            sampled_logprobs=bool(self.post_sampling_probs),
        )

    def more(self) -> dict[str, Any]:
        return super().more() | {"warnings": self.warnings(None)}


class _File(Part):
    filename: str = "tmp"
    text: str = ""


class _InfillBody(_Body):
    prompt: Any = ""
    input_prefix: Prompts
    input_suffix: Prompts
    input_extra: list[_File] | None = None

    def requests(self, loaded: Loaded) -> list[AnswerRequest]:
        (prefix, *others), (suffix, *more) = prompts_of(self.input_prefix), prompts_of(self.input_suffix)
        if others or more:
            raise InvalidRequest("input_prefix and input_suffix are lists of texts: give one text for each")
        if not isinstance(self.prompt, str):
            raise InvalidRequest("prompt is not supported: give text")
        extra = [(file.filename, file.text) for file in self.input_extra or ()]
        gap = Infill(prefix, suffix, self.prompt, extra)
        return [AnswerRequest(self._settings(), infill=gap, **self.more())]


class LlamaCompletion(Exchange):
    """Completions of one or several prompts; the names of control tokens in them are these tokens.

    The objects are those of ``specdec generate --json``: see `spec_local.answers.json`.
    """

    body: ClassVar[type[_Body]] = _Body

    def reading(self, index: int, event: Reading) -> Iterator[str]:
        if self._given.return_progress:
            part = {"index": index, **answer_json.part("", "", [], 0, 0)}
            yield openai_json.data(part | openai_json.progress(event))

    def write(self, index: int, event: Event) -> Iterator[str]:
        answer = self._answers[index]
        added = answer.add(event)
        if added is None:
            if found := openai_json.warnings(self.requests):  # the client need not wait for the answer
                yield openai_json.data({"index": index, **answer_json.part("", "", [], 0, 0), **found})
            return
        if answer.ended:
            yield openai_json.data(self._selected(self._last(index, added.content, added.reasoning)))
        elif added.content or added.reasoning or added.tokens:
            yield openai_json.data(self._part(index, added))

    @classmethod
    def refused(cls, error: SpecLocalError) -> str:
        return openai_json.data(errors.body_for("/completion", error))

    def whole(self, answers: Sequence[Sequence[Event]]) -> Mapping[str, Any] | Sequence[Any]:
        results = [self._result(index, events) for index, events in enumerate(answers)]
        return results if len(results) > 1 else results[0]

    def _result(self, index: int, events: Sequence[Event]) -> dict[str, Any]:
        answer = self._answers[index]
        answer.add_all(events)
        tokens = [token.id for token in answer.tokens] if self._given.return_tokens else []
        last = self._last(index, answer.content, answer.reasoning)
        return self._selected(last | {"tokens": tokens} | self._probabilities_of(answer.tokens))

    def _part(self, index: int, added: Delta) -> dict[str, Any]:
        tokens = [token.id for token in added.tokens]
        part = answer_json.part(added.content, added.reasoning, tokens, added.n_drafted, added.n_accepted)
        marks = {"specdec": openai_json.marks(added)} if self.requests[0].marks else {}
        timings = openai_json.timings_so_far(self._answers[index]) if self._given.timings_per_token else {}
        return {"index": index} | part | self._probabilities_of(added.tokens) | marks | timings

    def _last(self, index: int, content: str, reasoning: str) -> dict[str, Any]:
        answer = self._answers[index]
        ended = answer.ended
        assert ended
        return {
            "index": index,
            **answer_json.last_part(
                content, reasoning, ended.reason, ended.stopping_word, self.model, ended.statistics
            ),
            "tokens_predicted": ended.statistics.predicted_n,
            "tokens_evaluated": answer.n_prompt,
            "tokens_cached": answer.n_cached,
            "timings": openai_json.timings(ended),
            **openai_json.warnings(self.requests),
        }

    def _selected(self, result: dict[str, Any]) -> dict[str, Any]:
        """The fields that the body asks for, by their paths, such as ``timings/prompt_n``."""
        if not self._given.response_fields:
            return result
        selected = {}
        for path in self._given.response_fields:
            value: Any = result
            for key in path.split("/"):
                value = value.get(key) if isinstance(value, dict) else None
            if value is not None:
                selected[path] = value
        return selected

    def _probabilities_of(self, tokens: Sequence[Token]) -> dict[str, Any]:
        settings = self.requests[0].settings
        if settings.logprobs is None or not tokens:
            return {}
        sampled = settings.sampled_logprobs
        return {
            "completion_probabilities": [openai_json.probabilities(each, sampled=sampled) for each in tokens]
        }


class LlamaInfill(LlamaCompletion):
    """The text that fills a gap in a file: POST /infill."""

    body = _InfillBody
