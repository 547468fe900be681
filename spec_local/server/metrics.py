"""Counters for Prometheus; those of speculative decoding are named as vLLM names them."""

import functools
from collections.abc import Callable, Sequence
from typing import get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from spec_local.models.head_versions import Data, HeadVersion
from spec_local.server.learning.idle_training import Learner
from spec_local.server.supervision.events import Ended, Event

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
disable_created_metrics()  # type: ignore[no-untyped-call]  # when each counter was created, which doubles the text
_FIRST_TOKEN_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)
_ANSWER_S = (0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)


class Metrics:
    """Counts answers as they end.

    Args:
        running, waiting: return the number of answers that run, and that wait for their turn.
    """

    def __init__(self, running: Callable[[], int], waiting: Callable[[], int]) -> None:
        self._registry = registry = CollectorRegistry()

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"specdec:{name}", text, labels, registry=registry)

        self._gauge("num_requests_running", "Answers that are being generated.").set_function(running)
        self._gauge("num_requests_waiting", "Answers that wait for their turn.").set_function(waiting)
        self._answers = counter(
            "request_success", "Answers by the reason of their end.", ("finished_reason",)
        )
        self._prompt = counter("prompt_tokens", "Prompt tokens, evaluated or cached.")
        self._cached = counter("prefix_cache_hits", "Prompt tokens that were in the cache.")
        self._reread = counter(
            "prompt_tokens_reread", "Prompt tokens that a recent prompt had, but not the cache."
        )
        self._generated = counter("generation_tokens", "Generated tokens.")
        self._drafts = counter("spec_decode_num_drafts", "Steps with draft tokens.")
        self._drafted = counter("spec_decode_num_draft_tokens", "Draft tokens that were verified.")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Draft tokens that were accepted.")
        self._positions = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by position.", ("position",)
        )
        self._steps = counter("steps", "Steps by the source of their draft tokens.", ("proposer",))
        self._saved = counter("drafting_saved_seconds", "Net savings of drafting in answers.", ("cause",))
        self._lost = counter("drafting_lost_seconds", "Net losses of drafting in answers.", ("cause",))
        self._gains = counter("drafting_gain", "Answers by what drafts gained.", ("gain",))
        self._first = Histogram(
            "specdec:time_to_first_token_seconds",
            "From the start of the prompt to the first token.",
            buckets=_FIRST_TOKEN_S,
            registry=registry,
        )
        self._whole = Histogram(
            "specdec:e2e_request_latency_seconds",
            "From the request to the end of the answer.",
            buckets=_ANSWER_S,
            registry=registry,
        )

    def add_learning(self, learner: Callable[[], Learner | None], is_training: Callable[[], bool]) -> None:
        """Count what a model has learned, too.

        Args:
            learner: returns what is known of the model that was used last.
            is_training: returns whether a head is trained now.
        """

        def of_current(fact: Callable[[HeadVersion], float]) -> Callable[[], float]:
            return lambda: fact(found.current) if (found := learner()) and found.current else 0

        text = "Number of the version of the head that has learned from answers; 0: there is none."
        self._gauge("draft_head_version", text).set_function(of_current(lambda version: version.number))
        text = "Answers that this version has learned from."
        self._gauge("learned_answers", text).set_function(of_current(lambda version: version.n_answers))
        text = "Acceptance of this version's first draft token, on held-out answers and on built-in prompts."
        accepted = self._gauge("draft_head_acceptance", text, ["data"])
        for data in get_args(Data):
            accepted.labels(data).set_function(of_current(functools.partial(_acceptance, data)))
        text = "1 while a head is trained, 0 also while that is paused."
        self._gauge("training_running", text).set_function(is_training)

    def _gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        return Gauge(f"specdec:{name}", text, labels, registry=self._registry)

    def observe(self, event: Event, seconds: float) -> None:
        """Count the last event of an answer, so many seconds after the request."""
        if not isinstance(event, Ended):
            self._answers.labels("error").inc()
            return
        s = event.statistics
        self._answers.labels(event.reason).inc()
        self._whole.observe(seconds)
        # The first step evaluates the last token of a prompt whose other tokens have been read.
        self._prompt.inc(s.prompt_n + s.cached_n + bool(s.prompt_s))
        self._cached.inc(s.cached_n)
        self._reread.inc(event.n_reread)
        if event.gain:
            self._gains.labels(event.gain.kind).inc()
        self._generated.inc(s.predicted_n)
        if s.first_token_s:
            self._first.observe(s.first_token_s)
        self._drafts.inc(sum(n for source, n in s.steps_by.items() if source != "none"))
        self._drafted.inc(s.draft_n)
        self._accepted.inc(s.draft_n_accepted)
        for position, n in enumerate(s.accepted_at):
            self._positions.labels(str(position)).inc(n)
        for source, n in s.steps_by.items():
            self._steps.labels(source).inc(n)
        for cause, saved in s.saved_s.items():
            (self._saved if saved > 0 else self._lost).labels(cause).inc(abs(saved))

    def text(self) -> bytes:
        """All counters in Prometheus's text format."""
        return generate_latest(self._registry)


def _acceptance(data: Data, version: HeadVersion) -> float:
    return version.after.get(data, 0.0)
