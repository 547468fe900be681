"""The events of a generation, and its statistics."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Any, Literal

from spec_local.core.calls import TimedCall
from spec_local.core.proposal import Proposal
from spec_local.core.sampling import TokenLogprob
from spec_local.errors import InternalError, SpecLocalError

FinishReason = Literal["stop", "length", "context", "cancelled"]


@dataclass(slots=True)
class Statistics:
    """Counts and times of a generation. Times are in seconds, without those of the consumer of the events."""

    prompt_n: int = 0
    """Tokens of the prompt that the main model evaluated before the first step."""
    cached_n: int = 0
    """Tokens of the prompt that were already in the main model's cache."""
    prompt_s: float = 0.0
    """From the start to the end of the step in which both models have read the prompt."""
    first_token_s: float = 0.0
    """From the start to the first token."""
    predicted_n: int = 0
    """Generated tokens, including an end token."""
    predicted_s: float = 0.0
    """From the end of the prompt to the last token."""
    n_steps: int = 0
    """Calls of the main model after the prompt; a call counts once for each answer that takes part."""
    draft_n: int = 0
    """Draft tokens that were verified: nodes of the proposals."""
    draft_n_accepted: int = 0
    tested_at: list[int] = field(default_factory=list)
    """Number of proposals that reached position 1, 2, …"""
    accepted_at: list[int] = field(default_factory=list)
    """Number of draft tokens that were accepted at these positions."""
    steps_by: Counter[str] = field(default_factory=Counter)
    """Number of steps by source of the proposal; ``none`` if there was no proposal."""
    profile: dict[str, float] = field(default_factory=lambda: defaultdict(float), repr=False)
    """Seconds by part of a step, over all steps."""
    saved_s: dict[str, float] = field(default_factory=lambda: defaultdict(float), repr=False)
    """Seconds that drafting saved, by cause; negative: lost. Empty if the cost of a plain step is unknown.

    The causes are the sources of draft tokens, as in `steps_by`, and ``others``: this answer had no draft
    tokens and waited for those of other answers; ``searching``: the search for draft tokens in plain steps;
    ``reading``: the draft model before the first step; ``measuring``: measuring costs, before the prompt.
    `Engine` does not count them over all answers.
    """
    last_calls: Sequence[TimedCall] = field(default=(), repr=False)
    """The models' calls of the last step."""

    @property
    def tokens_per_second(self) -> float:
        return self.predicted_n / self.predicted_s if self.predicted_s else 0.0

    @property
    def tokens_per_step(self) -> float:
        return self.predicted_n / self.n_steps if self.n_steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        return self.draft_n_accepted / self.draft_n if self.draft_n else 0.0

    @property
    def system_efficiency(self) -> float:
        """Generated tokens / those that full acceptance would have generated (vLLM's measure)."""
        full = self.n_steps + sum(self.tested_at)
        return self.predicted_n / full if full else 0.0

    @property
    def net_saved_s(self) -> float:
        """Seconds that drafting saved in all."""
        return sum(self.saved_s.values())

    @property
    def plain_s(self) -> float:
        """Seconds that plain decoding would have taken, from the start of the prompt."""
        return self.prompt_s + self.predicted_s + self.net_saved_s - self.saved_s.get("measuring", 0.0)

    def __add__(self, later: "Statistics") -> "Statistics":
        """Statistics of an answer generated in two parts, where the second part re-evaluated the first."""
        counts = [each.name for each in fields(self) if each.name != "last_calls"]
        total = {name: _sum(getattr(self, name), getattr(later, name)) for name in counts}
        first_token_s = self.first_token_s or self.prompt_s + later.first_token_s
        return Statistics(**total | {"cached_n": self.cached_n, "first_token_s": first_token_s})


def _sum(first: Any, second: Any) -> Any:
    """The sum of two counts, or of the counts in two lists or mappings."""
    if isinstance(first, Counter | int | float):
        return first + second
    if isinstance(first, dict):
        return {key: first.get(key, 0.0) + second.get(key, 0.0) for key in first | second}
    return [a + b for a, b in zip_longest(first, second, fillvalue=0)]


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The prompt has been evaluated."""

    statistics: Statistics


@dataclass(frozen=True, slots=True)
class Step:
    """One call of the main model: the accepted draft tokens, then one token of its own.

    tokens: the generated tokens. proposal: the draft tokens and their parents. n_accepted: number of draft
    tokens at the start of `tokens`. logprobs: log probability of each of `tokens`, if requested.
    """

    tokens: Sequence[int]
    proposal: Proposal
    n_accepted: int
    logprobs: Sequence[TokenLogprob] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event. reason: ``stop`` (end token), ``length``, ``context`` (full) or ``cancelled``.

    It is also ``stop`` if the budget or the context ends where the constraint allows only an end token.
    """

    reason: FinishReason
    statistics: Statistics


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of an answer that cannot go on: its grammar allows no token, or its proposer failed."""

    error: SpecLocalError
    statistics: Statistics

    @property
    def exception(self) -> BaseException:
        """What to raise if no other answer is to go on."""
        return (isinstance(self.error, InternalError) and self.error.__cause__) or self.error


Event = Prefilled | Step | Finished | Failed
