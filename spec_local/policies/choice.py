"""Of all options, the one with the highest expected tokens per second."""

from dataclasses import dataclass

import numpy as np

from spec_local.policies.acceptance_model import Floats
from spec_local.policies.cost_model import CallCosts, chain_seconds


@dataclass(frozen=True, slots=True)
class Step:
    """The expected tokens and time of a step.

    Attributes:
        tokens: generated, the main model's own included.
        seconds: of all calls.
        n: draft tokens.
    """

    tokens: float
    seconds: float
    n: int = 0

    @property
    def rate(self) -> float:
        """Expected tokens per second."""
        return self.tokens / self.seconds


def best_prefix(values: Floats, seconds: Floats, plain: float = 1.0) -> Step:
    """The best number of nodes to verify, 0 included; of equals the smallest.

    OPT-Tree (Wang et al. 2024, arXiv 2406.17276) and EAGLE-2 (Li et al. 2024, arXiv 2406.16858) verify the n
    most valuable nodes of a drafted tree; here n maximizes expected tokens per second.

    Args:
        values: of each node the probability that it is accepted, in the order in which they would be taken.
        seconds: of a step that verifies 0, 1, … nodes, up to the maximum.
        plain: tokens of a step that verifies none: 1 for each request.
    """
    tokens = np.concatenate(([plain], plain + values.cumsum()))[: len(seconds)]
    n = int((tokens / seconds[: len(tokens)]).argmax())
    return Step(float(tokens[n]), float(seconds[n]), n)


def best_chain(
    acceptance: float, main: CallCosts, draft: CallCosts | None, n_max: int, n_unread: int = 1
) -> Step:
    """The best chain of at least one draft token, at one acceptance rate for all.

    Args:
        main, draft: seconds a call; draft None: draft tokens cost nothing, as those of a lookup.
        n_max: maximum number of draft tokens, at least 1.
        n_unread: tokens that the draft model's first call reads.
    """
    n = np.arange(1, n_max + 1)
    seconds = main.first(n_max + 1)[2:]
    if draft:
        seconds = seconds + chain_seconds(draft, n_unread, n_max)
    tokens = 1.0 + np.cumsum(acceptance**n)
    best = int((tokens / seconds).argmax())
    return Step(float(tokens[best]), float(seconds[best]), best + 1)
