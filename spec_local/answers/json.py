"""Answers as JSON objects, with the keys of llama.cpp's server.

Bytes that are not UTF-8 become U+FFFD in texts; the tokens identify them exactly. Reasoning
before an answer is ``reasoning_content``, and not part of ``content``.
"""

from collections.abc import Sequence
from typing import Any

from spec_local.answers.text import Done, Text
from spec_local.engine.events import FinishReason, Statistics
from spec_local.llama.model import Model
from spec_local.llama.vocabulary import Vocabulary
from spec_local.reasoning.markers import Parts, Splitter
from spec_local.text import printable

Object = dict[str, Any]
_LOWEST = -3.4e38  # JSON has no infinity


def step(main: Model, event: Text, splitter: Splitter) -> Object:
    """The object for one step: its text, its tokens, and the number of accepted draft tokens."""
    parts = splitter.feed(event.text)
    return part(
        parts.answer, parts.reasoning, event.tokens, len(event.proposal.tokens), event.n_accepted
    ) | _probabilities(main.vocabulary, [event])


def end(main: Model, event: Done, splitter: Splitter) -> Object:
    """The last object of a stream: what the splitter held back, why the answer ended, and statistics."""
    return _last(main, splitter.finish(), event)


def whole(main: Model, steps: Sequence[Text], last: Done, splitter: Splitter) -> Object:
    """A whole answer as one object."""
    parts = splitter.finish("".join(event.text for event in steps))
    return (
        _last(main, parts, last)
        | {"tokens": [token for event in steps for token in event.tokens]}
        | _probabilities(main.vocabulary, steps)
    )


def _last(main: Model, parts: Parts, event: Done) -> Object:
    return last_part(
        parts.answer, parts.reasoning, event.reason, event.stopping_word, main.name, event.statistics
    )


def part(content: str, reasoning: str, tokens: Sequence[int], n_drafted: int, n_accepted: int) -> Object:
    """The object for a part of an answer."""
    return _texts(content, reasoning) | {
        "tokens": list(tokens),
        "stop": False,
        "draft_n": n_drafted,
        "draft_n_accepted": n_accepted,
    }


def last_part(
    content: str, reasoning: str, reason: FinishReason, stopping_word: str, model: str, statistics: Statistics
) -> Object:
    """The object for the last part of an answer; model: the name of the main model."""
    stop_types = {"stop": "word" if stopping_word else "eos", "cancelled": "none"}
    return _texts(content, reasoning) | {
        "tokens": [],
        "stop": True,
        "stop_type": stop_types.get(reason, "limit"),
        "stopping_word": printable(stopping_word),
        "truncated": reason == "context",
        "model": model,
        "timings": timings(statistics),
    }


def _texts(content: str, reasoning: str) -> Object:
    return {"content": printable(content)} | (
        {"reasoning_content": printable(reasoning)} if reasoning else {}
    )


def timings(s: Statistics) -> Object:
    """Statistics of an answer: tokens, milliseconds, tokens per second, milliseconds per token."""
    return {
        "cache_n": s.cached_n,
        "prompt_n": s.prompt_n,
        "prompt_ms": 1e3 * s.prompt_s,
        "prompt_per_second": _ratio(s.prompt_n, s.prompt_s),
        "prompt_per_token_ms": _ratio(1e3 * s.prompt_s, s.prompt_n),
        "first_token_ms": 1e3 * s.first_token_s,
        "predicted_n": s.predicted_n,
        "predicted_ms": 1e3 * s.predicted_s,
        "predicted_per_second": s.tokens_per_second,
        "predicted_per_token_ms": _ratio(1e3 * s.predicted_s, s.predicted_n),
        "steps_n": s.n_steps,
        "draft_n": s.draft_n,
        "draft_n_accepted": s.draft_n_accepted,
        "tested_at": list(s.tested_at),
        "accepted_at": list(s.accepted_at),
        "steps_by": dict(s.steps_by),
        "profile_ms": {part: 1e3 * seconds for part, seconds in s.profile.items()},
        "saved_ms": {cause: 1e3 * seconds for cause, seconds in s.saved_s.items()},
    }


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0


def token(number: int, piece: bytes, logprob: float | None) -> Object:
    """The object for a token: its id, its text and bytes, and its log probability."""
    return {
        "id": number,
        "token": piece.decode("utf-8", "replace"),
        "bytes": list(piece),
        "logprob": finite(logprob),
    }


def finite(logprob: float | None) -> float:
    """A log probability as JSON can hold it; None: it is not known."""
    return max(_LOWEST if logprob is None else logprob, _LOWEST)


def _probabilities(vocabulary: Vocabulary, steps: Sequence[Text]) -> Object:
    """Log probabilities of the tokens, if they were requested."""

    def made(number: int, logprob: float) -> Object:
        return token(number, vocabulary.piece(number), logprob)

    found = [
        made(chosen.token, chosen.logprob)
        | {"top_logprobs": [made(number, logprob) for number, logprob in chosen.top]}
        for event in steps
        for chosen in event.logprobs
    ]
    return {"completion_probabilities": found} if found else {}
