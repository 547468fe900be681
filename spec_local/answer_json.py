"""Answers as JSON objects, with the keys of llama.cpp's server.

Bytes that are not UTF-8 become U+FFFD in texts; the tokens identify them exactly. Reasoning
before an answer is ``reasoning_content``, and not part of ``content``.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from spec_local.core.reasoning import Parts, Splitter
from spec_local.core.text import printable
from spec_local.engine.events import Statistics
from spec_local.llama.vocabulary import Vocabulary

if TYPE_CHECKING:
    from spec_local.session import Done, Session, Text

Object = dict[str, Any]
_LOWEST = -3.4e38  # JSON has no infinity


def step(session: "Session", event: "Text", splitter: Splitter) -> Object:
    """The object for one step: its text, its tokens, and the number of accepted draft tokens."""
    return (
        _texts(splitter.feed(event.text))
        | {
            "tokens": list(event.tokens),
            "stop": False,
            "draft_n": len(event.proposal.tokens),
            "draft_n_accepted": event.n_accepted,
        }
        | _probabilities(session.main.model.vocabulary, [event])
    )


def end(session: "Session", event: "Done", splitter: Splitter) -> Object:
    """The last object of a stream: the rest of the text, the reason why the answer ended, and statistics."""
    reasons = {"stop": "word" if event.stopping_word else "eos", "cancelled": "none"}
    return _texts(splitter.finish(event.text)) | {
        "tokens": [],
        "stop": True,
        "stop_type": reasons.get(event.reason, "limit"),
        "stopping_word": printable(event.stopping_word),
        "truncated": event.reason == "context",
        "model": session.main.model.path.name,
        "timings": timings(event.statistics),
    }


def whole(session: "Session", steps: Sequence["Text"], last: "Done", splitter: Splitter) -> Object:
    """A whole answer as one object."""
    text = "".join(event.text for event in steps) + last.text
    return (
        end(session, replace(last, text=text), splitter)
        | {"tokens": [token for event in steps for token in event.tokens]}
        | _probabilities(session.main.model.vocabulary, steps)
    )


def _texts(parts: Parts) -> Object:
    reasoning = {"reasoning_content": printable(parts.reasoning)} if parts.reasoning else {}
    return {"content": printable(parts.answer)} | reasoning


def timings(s: Statistics) -> Object:
    """Statistics of an answer: tokens, milliseconds, tokens per second."""
    return {
        "cache_n": s.cached_n,
        "prompt_n": s.prompt_n,
        "prompt_ms": 1e3 * s.prompt_s,
        "first_token_ms": 1e3 * s.first_token_s,
        "predicted_n": s.predicted_n,
        "predicted_ms": 1e3 * s.predicted_s,
        "predicted_per_second": s.tokens_per_second,
        "steps_n": s.n_steps,
        "draft_n": s.draft_n,
        "draft_n_accepted": s.draft_n_accepted,
        "steps_by": dict(s.steps_by),
        "profile_ms": {part: 1e3 * seconds for part, seconds in s.profile.items()},
    }


def _probabilities(vocabulary: Vocabulary, steps: Sequence["Text"]) -> Object:
    """Log probabilities of the tokens, if they were requested."""
    found = [
        _token(vocabulary, chosen.token, chosen.logprob)
        | {"top_logprobs": [_token(vocabulary, token, logprob) for token, logprob in chosen.top]}
        for event in steps
        for chosen in event.logprobs
    ]
    return {"completion_probabilities": found} if found else {}


def _token(vocabulary: Vocabulary, token: int, logprob: float) -> Object:
    piece = vocabulary.piece(token)
    return {
        "id": token,
        "token": piece.decode("utf-8", "replace"),
        "bytes": list(piece),
        "logprob": max(logprob, _LOWEST),
    }
