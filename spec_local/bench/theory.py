"""The best possible speed-up of any draft length, computed in hindsight.

Once an answer is known, the number of consecutive draft tokens that would have been accepted at each position
is known for each source. With the times of the run's own calls, the fastest division of the answer into steps
can be computed exactly. It is an upper bound for policies, which decide without this knowledge.

The draft tokens are the draft model's most probable tokens and the candidates of lookups. A run may have
drafted others: from a part of the history, with staged tokens or, above temperature 0, at random. Its own
steps are therefore among those to choose from, at the same prices, so that no run exceeds its bound. Trees,
which verify several tokens for one position, have no bound.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spec_local.core.calls import run
from spec_local.core.language_model import LanguageModel, prefill
from spec_local.core.proposal import MAX_DRAFT, Limit
from spec_local.core.timer import TimedCall
from spec_local.lookups.base import Lookup
from spec_local.policies.cost_model import CostModel


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step of a run. n: generated tokens. seconds: of the whole step. calls: of the models."""

    n: int
    seconds: float
    calls: Sequence[TimedCall]


class Prices:
    """Seconds of calls, from those of runs. A call of the main model includes all else that a step does.

    Args:
        main, draft: costs that were measured before. Sizes that do not occur are priced from these, scaled as
            those of the nearest sizes that do; a draft model that is not called, as the main model.
    """

    def __init__(self, main: CostModel, draft: CostModel | None) -> None:
        self._main = _scaled(main, main.seconds(1))
        self._before, self._ratio = draft, draft.seconds(1) / main.seconds(1) if draft else 0.0
        self._called: CostModel | None = None  # the draft model's costs, after its first call

    def observe(self, steps: Sequence[TimedStep]) -> None:
        """Record the calls of a run."""
        for step in steps:
            rest = max(0.0, step.seconds - sum(call.seconds for call in step.calls))
            for call in step.calls:
                if call.part == "main model":
                    self._main.observe(call.n, call.seconds + rest)
                elif self._before:
                    self._called = self._called or self._not_called(self._before)
                    self._called.observe(call.n, call.seconds)

    def main(self, n: int) -> float:
        """Seconds of the main model's call of n tokens."""
        return self._main.seconds(n)

    def draft(self, n: int) -> float:
        """Seconds of the draft model's call of n tokens; 0 without one."""
        return (self._called or self._not_called(self._before)).seconds(n) if self._before else 0.0

    def _not_called(self, before: CostModel) -> CostModel:
        return _scaled(before, self._ratio * self._main.seconds(1))

    def of(self, step: TimedStep) -> float:
        """Seconds of a step of a run."""
        return sum((self.main if part == "main model" else self.draft)(n) for part, n, _ in step.calls)


def _scaled(costs: CostModel, plain: float) -> CostModel:
    """Costs with `plain` seconds for one token, and estimates for more, which observed calls correct."""
    estimates = {n: max(1.0, seconds / costs.seconds(1)) for n, seconds in costs.costs.items()}
    return CostModel({1: plain}, estimates)


@dataclass(frozen=True, slots=True)
class Hindsight:
    """A run in hindsight.

    achieved: least time of its answer / that of its own steps, both at the same prices; at most 1. error: by
    how much the measured times of its steps differ from their prices, as a share of these.
    """

    achieved: float
    error: float


def hindsight(steps: Sequence[TimedStep], runs: Mapping[str, Sequence[int]], prices: Prices) -> Hindsight:
    """Compare a run with the best draft lengths.

    Args:
        steps: of the run, at least one.
        runs: run lengths by source: ``draft``, or the name of a lookup. They may lack an end token.
        prices: of the same minutes.
    """
    n = sum(step.n for step in steps)
    own = [(step.n, prices.of(step)) for step in steps]
    padded = {source: [*lengths, *[0] * n][:n] for source, lengths in runs.items()}
    draft_step = {source: prices.draft(1) if source == "draft" else 0.0 for source in runs}
    best = best_seconds(padded, prices.main, draft_step, n, MAX_DRAFT, own)
    priced = sum(seconds for _, seconds in reversed(own))  # in the order of `best`, with the same rounding
    differences = (abs(step.seconds - price) for step, (_, price) in zip(steps, own, strict=True))
    return Hindsight(best / priced, sum(differences) / priced)


def best_seconds(
    runs: Mapping[str, Sequence[int]],
    main: Callable[[int], float],
    draft_step: Mapping[str, float],
    n: int,
    max_draft: int,
    own: Sequence[tuple[int, float]] = (),
) -> float:
    """Return the least time in which n tokens can be generated.

    Args:
        runs: by source and position (0 to n − 1): the number of correct draft tokens in a row from there.
        main: seconds of a call of the main model, by its number of tokens.
        draft_step: seconds of a draft token, by source.
        n: tokens of the answer.
        max_draft: maximum number of draft tokens per step.
        own: steps of a run that generated the answer, in their order: tokens and seconds.

    Returns:
        seconds, by dynamic programming from the end: a step drafts m tokens of one source, which cost m draft
        tokens and a call of m + 1 tokens, and generates the correct ones and one token of the main model. Or
        it is the run's own step from there.
    """
    taken, start = dict[int, tuple[int, float]](), 0
    for n_tokens, seconds in own:
        taken[start] = n_tokens, seconds
        start += n_tokens
    calls = np.asarray([main(m + 1) for m in range(max_draft + 1)])
    costs = {source: calls + np.arange(max_draft + 1) * draft_step[source] for source in runs}
    # With one wrong token or more: a call of more tokens may take less time, where they fill a kernel's tile.
    ahead = {source: np.minimum.accumulate(each[::-1])[::-1].tolist() for source, each in costs.items()}
    exact, plain = {source: each.tolist() for source, each in costs.items()}, float(calls[0])
    best = [0.0] * (n + 1)
    for at in range(n - 1, -1, -1):
        found = plain + best[at + 1]
        for source, lengths in runs.items():
            correct = min(max_draft, lengths[at])
            for k in range(1, correct):
                found = min(found, exact[source][k] + best[min(n, at + k + 1)])
            found = min(found, ahead[source][correct] + best[min(n, at + correct + 1)])
        if at in taken:
            found = min(found, taken[at][1] + best[at + taken[at][0]])
        best[at] = found
    return best[0]


def run_lengths(correct: Sequence[bool]) -> list[int]:
    """The number of true values in a row from each position."""
    lengths = [0] * (len(correct) + 1)
    for at in range(len(correct) - 1, -1, -1):
        lengths[at] = lengths[at + 1] + 1 if correct[at] else 0
    return lengths[:-1]


def draft_run_lengths(
    draft: LanguageModel, prompt: Sequence[int], answer: Sequence[int], n_vocab: int
) -> list[int]:
    """Run lengths of the draft model's most probable tokens, in as few calls as its rows of logits allow.

    Args:
        n_vocab: size of the main model's vocabulary; the draft model may have more columns.

    Raises:
        BackendError: the draft model failed.
    """
    tokens = [*prompt, *answer]
    start = len(prompt) - 1  # the token after which the answer begins
    correct = [False] * len(answer)  # stays False beyond the draft model's context
    if start < draft.n_ctx:
        run(prefill(draft, tokens[:start]))
    size = min(draft.max_logits, draft.max_tokens)
    for first in range(start, min(len(tokens) - 1, draft.n_ctx), size):
        chunk = tokens[first : min(first + size, len(tokens) - 1, draft.n_ctx)]
        proposed = draft.evaluate(chunk, len(chunk))[:, :n_vocab].argmax(axis=1)
        following = np.asarray(tokens[first + 1 : first + 1 + len(chunk)])
        correct[first - start : first - start + len(chunk)] = (proposed == following).tolist()
    return run_lengths(correct)


def lookup_run_lengths(
    lookup: Lookup, prompt: Sequence[int], answer: Sequence[int], max_draft: int
) -> list[int]:
    """Run lengths of the candidates of a lookup, at most `max_draft` tokens per step."""
    history, lengths = list(prompt), []
    limit = Limit(max_draft, max_draft, 1)
    for at, token in enumerate(answer):
        candidates = lookup.find(history, limit).tokens
        correct = [a == b for a, b in zip(candidates, answer[at:], strict=False)]
        lengths.append(run_lengths([*correct, False])[0])
        history.append(token)
    return lengths
