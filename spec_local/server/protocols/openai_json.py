"""The JSON that OpenAI's protocols share, with what llama.cpp's server adds to it."""

import json
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from spec_local import __version__
from spec_local.answers import json as answer_json
from spec_local.server.protocols.answer_so_far import AnswerSoFar
from spec_local.server.supervision.events import AnswerRequest, Delta, Ended, Reading, Token
from spec_local.text import printable

DONE = "data: [DONE]\n\n"


def data(value: Mapping[str, Any]) -> str:
    """A server-sent event without a name."""
    # In ASCII: some clients end a line at the line separators of Unicode.
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n"


def named(value: Mapping[str, Any]) -> str:
    """A server-sent event whose name is its type."""
    return f"event: {value['type']}\n{data(value)}"


def new_id(prefix: str) -> str:
    """An id that no other response has."""
    return prefix + secrets.token_hex(12)


def head(prefix: str, kind: str, model: str) -> dict[str, Any]:
    """The first keys of a response and of each part of a stream."""
    return {
        "id": new_id(prefix),
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": f"specdec-{__version__}",
    }


def finish_reason(answer: AnswerSoFar) -> str:
    """The reason why an answer ended."""
    if answer.ended and answer.ended.reason in ("length", "context"):
        return "length"
    return "tool_calls" if answer.calls else "stop"


def usage(prompts: Sequence[AnswerSoFar], answers: Sequence[AnswerSoFar]) -> dict[str, Any]:
    """Tokens of answers; prompts: the first answer to each prompt, which counts once."""
    n_prompt = sum(answer.n_prompt for answer in prompts)
    n_generated = sum(answer.statistics.predicted_n for answer in answers)
    n_drafted = sum(answer.statistics.draft_n for answer in answers)
    n_accepted = sum(answer.statistics.draft_n_accepted for answer in answers)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_generated,
        "total_tokens": n_prompt + n_generated,
        "prompt_tokens_details": {"cached_tokens": sum(answer.n_cached for answer in prompts)},
        "completion_tokens_details": {
            "reasoning_tokens": sum(answer.n_reasoning for answer in answers),
            "accepted_prediction_tokens": n_accepted,
            "rejected_prediction_tokens": n_drafted - n_accepted,
        },
    }


def timings(ended: Ended) -> dict[str, Any]:
    """`answer_json.timings`; if known, ``plain_ms`` of a step without draft tokens, and ``gain``."""
    made = answer_json.timings(ended.statistics)
    if ended.plain_seconds is not None:
        made["plain_ms"] = 1e3 * ended.plain_seconds
    if ended.gain:
        made["gain"] = {"words": ended.gain.words, "times": ended.gain.times}
    return made


def timings_so_far(answer: AnswerSoFar) -> dict[str, Any]:
    """The timings of an answer that goes on, which llama.cpp's server calls ``timings_per_token``."""
    return {"timings": answer_json.timings(answer.statistics_so_far())}


def progress(event: Reading) -> dict[str, Any]:
    """How much of a prompt has been read, and for how long: ``prompt_progress``, as llama.cpp's server."""
    return {
        "prompt_progress": {
            "total": event.n_prompt,
            "cache": event.n_cached,
            "processed": event.n_read,
            "time_ms": round(1e3 * event.seconds),
        }
    }


def warnings(requests: Sequence[AnswerRequest], ended: Ended | None = None) -> dict[str, Any]:
    """The warnings about the request of a response, and about an answer that has ended, if there are any."""
    found = [*requests[0].warnings] if requests else []
    if ended and ended.reasoning_closed_at:
        found.append(
            f"the reasoning was closed after {ended.reasoning_closed_at} tokens to leave room for the "
            "answer: give thinking_budget_tokens, a larger max_tokens, or turn thinking off"
        )
    return {"warnings": found} if found else {}


def marks(added: Delta) -> dict[str, Any]:
    """The spans of text that were drafted, and by what."""
    return {
        "spans": [
            {
                "text": printable(span.text),
                "kind": span.kind,
                "rejected": [printable(text) for text in span.rejected],
            }
            for span in added.spans
        ],
        "proposer": added.source,
        "draft_n": added.n_drafted,
        "draft_n_accepted": added.n_accepted,
        "draft_depth": added.draft_depth,
    }


def probabilities(token: Token, *, sampled: bool = False) -> dict[str, Any]:
    """A token, and the most probable ones in its place.

    Args:
        sampled: write probabilities and not their logarithms, as llama.cpp's server does after sampling.
    """

    def made(each: Token) -> dict[str, Any]:
        made = answer_json.token(each.id, each.piece, each.logprob)
        return made | {"prob": math.exp(made.pop("logprob"))} if sampled else made

    return made(token) | {f"top_{'probs' if sampled else 'logprobs'}": [made(other) for other in token.top]}
