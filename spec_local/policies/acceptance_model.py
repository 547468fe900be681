"""Acceptance probabilities of draft tokens, learned from earlier ones."""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from spec_local.core.proposal import ROOT, Proposal
from spec_local.policies.cost_model import Floats

_MEMORY = 128.0
"""Plain steps after which what drafts did before them counts 1/e: about the length of an answer."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """The observations that an estimate rests on, to be kept between runs.

    accepted, seen: tokens, discounted, one entry for each of the estimate's bins. shift: of the prior.
    """

    accepted: Sequence[float]
    seen: Sequence[float]
    shift: float = 0.0

    def faded(self, share: float) -> "Evidence":
        """A share of it: 0 to 1."""
        return Evidence(
            [share * n for n in self.accepted], [share * n for n in self.seen], share * self.shift
        )


class Calibration:
    """Acceptance rate by a drafter's confidence: discounted Beta counts in bins of confidence.

    The prior of every bin moves with the observations in all bins, by one step of logistic
    regression each: a text that is harder than usual is harder at every confidence, and few observations
    must suffice.

    Args:
        edges: lower bounds of all bins but the first, ascending.
        prior: expected acceptance rate of each bin, 0 to 1, exclusive.
        rejections: weight of the prior: as if observed until so many tokens were rejected.
        memory: observations of a bin that count.
        rate: of the logistic regression, per observation.

    Raises:
        ValueError: there is not one prior per bin.
    """

    def __init__(
        self,
        edges: Sequence[float],
        prior: Sequence[float],
        rejections: float = 2.0,
        memory: float = 40.0,
        rate: float = 0.2,
    ) -> None:
        if len(prior) != len(edges) + 1:
            raise ValueError(f"{len(edges)} edges make {len(edges) + 1} bins, not {len(prior)}")
        self.edges, self._keep, self._rate = list(edges), 1.0 - 1.0 / memory, rate
        self._weight = [min(rejections / (1.0 - p), 80.0) for p in prior]
        self._logits = [math.log(p / (1.0 - p)) for p in prior]
        self._shift = 0.0  # of all logits
        self._accepted, self._seen = [0.0] * len(prior), [0.0] * len(prior)

    def rate(self, confidence: float) -> float:
        """Expected acceptance rate."""
        return self._mean(bisect_right(self.edges, confidence))

    def rates(self, confidence: Floats) -> Floats:
        """The same for each of many."""
        means = np.array([self._mean(i) for i in range(len(self._logits))])
        found: Floats = means[np.searchsorted(self.edges, confidence, side="right")]
        return found

    @property
    def evidence(self) -> Evidence:
        """The observations so far; one that is set must have as many bins."""
        return Evidence(self._accepted, self._seen, self._shift)

    @evidence.setter
    def evidence(self, found: Evidence) -> None:
        if len(found.accepted) != len(self._logits) or len(found.seen) != len(self._logits):
            raise ValueError(f"evidence of {len(found.seen)} bins, not {len(self._logits)}")
        self._accepted, self._seen, self._shift = list(found.accepted), list(found.seen), found.shift

    def observe(self, confidence: float, accepted: bool) -> None:
        """Count one verified token."""
        i = bisect_right(self.edges, confidence)
        self._shift = min(3.0, max(-3.0, self._shift + self._rate * (accepted - self._mean(i))))
        self._accepted[i] = self._keep * self._accepted[i] + accepted
        self._seen[i] = self._keep * self._seen[i] + 1.0

    def _mean(self, i: int) -> float:
        prior = 1.0 / (1.0 + math.exp(-self._logits[i] - self._shift))
        return (self._weight[i] * prior + self._accepted[i]) / (self._weight[i] + self._seen[i])


class RecentRate:
    """Acceptance rate of late: a Beta distribution whose evidence decays, so that doubt grows back with time.

    Args:
        accepted, rejected: pseudo-counts of the prior.
        memory: observations after which evidence counts 1/e.
    """

    def __init__(self, accepted: float, rejected: float, memory: float) -> None:
        self._prior = accepted, rejected
        self._keep = 1.0 - 1.0 / memory
        self._accepted = self._rejected = 0.0

    def observe(self, accepted: bool) -> None:
        """Count one verified token."""
        self._accepted = self._keep * self._accepted + accepted
        self._rejected = self._keep * self._rejected + (not accepted)

    @property
    def evidence(self) -> Evidence:
        """The observations so far, in one bin."""
        return Evidence([self._accepted], [self._accepted + self._rejected])

    @evidence.setter
    def evidence(self, found: Evidence) -> None:
        (self._accepted,), (seen,) = found.accepted, found.seen
        self._rejected = seen - self._accepted

    def forget(self, steps: int = 1) -> None:
        """Let evidence decay for plain steps that brought none."""
        keep = (1.0 - 1.0 / _MEMORY) ** steps
        self._accepted *= keep
        self._rejected *= keep

    @property
    def mean(self) -> float:
        """Expected acceptance rate."""
        a, b = self._counts
        return a / (a + b)

    @property
    def upper(self) -> float:
        """Upper confidence bound: one standard deviation above the mean; below 1."""
        a, b = self._counts
        n, mean = a + b, a / (a + b)
        return min(0.99, mean + math.sqrt(mean * (1.0 - mean) / (n + 1.0)))

    @property
    def _counts(self) -> tuple[float, float]:
        return self._prior[0] + self._accepted, self._prior[1] + self._rejected


def _draft() -> Calibration:
    # Means of a 0.5B draft and a 1.5B main model at temperature 0.8, top-k 40, top-p 0.95, min-p 0.05.
    edges = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97, 0.995)
    return Calibration(edges, (0.2, 0.4, 0.52, 0.63, 0.69, 0.82, 0.9, 0.96, 0.985))


def _lookup() -> Calibration:
    # A lookup's own confidence is calibrated on average: see `spec_local.lookups.base.match_confidence`.
    edges = (0.15, 0.3, 0.45, 0.6, 0.7, 0.8, 0.87, 0.92, 0.95, 0.97, 0.985)
    return Calibration(edges, (0.08, 0.22, 0.37, 0.54, 0.65, 0.75, 0.84, 0.9, 0.94, 0.96, 0.978, 0.992))


@dataclass(slots=True)
class AcceptanceModel:
    """The acceptance rates of each drafter, as learned in a session.

    Attributes:
        draft: the draft model's tokens, by its confidence.
        lookups: candidates by their source and its confidence.
        recent: the draft model's tokens lately, whatever its confidence. Prior: 4 of 5, as usual pairs reach.
        recycled: the likeliest tokens of recycling, over many answers. Prior: 2 of 5, as a 1.5B main model's
            first four recycled tokens reach on the built-in prompts.
    """

    draft: Calibration = field(default_factory=_draft)
    lookups: dict[str, Calibration] = field(default_factory=lambda: defaultdict(_lookup))
    recent: RecentRate = field(default_factory=lambda: RecentRate(4.0, 1.0, 32.0))
    recycled: RecentRate = field(default_factory=lambda: RecentRate(2.0, 3.0, 1000.0))

    def calibrated(self, candidates: Proposal) -> Proposal:
        """Candidates of a lookup, with acceptance rates in place of its confidence."""
        rates = self.lookups[candidates.source].rates(np.array(candidates.confidence))
        return replace(candidates, confidence=rates.tolist())

    def observe_draft(
        self, drafted: Sequence[int], output: Sequence[int], confidence: Sequence[float]
    ) -> None:
        """Learn from the draft model's tokens, up to the first rejected one; confidence: none for trees."""
        for i, (token, generated) in enumerate(zip(drafted, output, strict=False)):
            if i < len(confidence):
                self.draft.observe(confidence[i], token == generated)
            self.recent.observe(token == generated)
            if token != generated:
                break

    def observe_lookups(self, candidates: Sequence[Proposal], output: Sequence[int]) -> None:
        """Learn from what lookups found, whether or not it was verified."""
        for found in candidates:
            calibration = self.lookups[found.source]
            last_parent = None
            for node, accepted in outcomes(found, output):
                calibration.observe(found.confidence[node], accepted)
                if found.source == "recycling" and found.parents[node] != last_parent:
                    self.recycled.observe(accepted)
                    last_parent = found.parents[node]


def outcomes(candidates: Proposal, output: Sequence[int]) -> Iterator[tuple[int, bool]]:
    """Nodes whose parent was generated, and whether they were, too; those beyond the output are unknown."""
    position = {ROOT: 0}  # of each node's children in the output
    for node, (token, parent) in enumerate(zip(candidates.tokens, candidates.parents, strict=True)):
        at = position.get(parent)
        if at is None or at == len(output):
            if isinstance(candidates.parents, range):  # a chain: nothing further is known
                break
            continue
        yield node, token == output[at]
        if token == output[at]:
            position[node] = at + 1
