"""Of all options, the one with the highest expected tokens per second."""

from dataclasses import dataclass

import numpy as np

from spec_local.policies.cost_model import CallCosts, Floats, chain_seconds


@dataclass(frozen=True, slots=True)
class ExpectedStep:
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


def best_prefix(values: Floats, seconds: Floats, plain: float = 1.0) -> ExpectedStep:
    """The best number of nodes to verify, 0 included; of equals the smallest.

    OPT-Tree (Wang et al. 2024, arXiv 2406.17276) and EAGLE-2 (Li et al. 2024, arXiv 2406.16858) verify the n
    most valuable nodes of a drafted tree; here n maximizes expected tokens per second.

    Args:
        values: of each node the probability that it is accepted, in the order in which they would be taken.
        seconds: of a step that verifies 0, 1, … nodes, up to the maximum.
        plain: tokens of a step that verifies none: 1 for each request.
    """
    tokens = np.empty(min(len(values) + 1, len(seconds)))
    tokens[0], tokens[1:] = plain, values[: len(tokens) - 1]
    tokens = tokens.cumsum()
    n = int((tokens / seconds[: len(tokens)]).argmax())
    return ExpectedStep(float(tokens[n]), float(seconds[n]), n)


def best_chain(
    acceptance: float, main: CallCosts, draft: CallCosts | None, n_max: int, n_unread: int = 1, least: int = 0
) -> ExpectedStep:
    """The best chain, at one acceptance rate for all of its tokens.

    Args:
        main, draft: seconds a call; draft None: draft tokens cost nothing, as those of a lookup.
        n_max, least: maximum and minimum number of draft tokens.
        n_unread: tokens that the draft model's first call reads.
    """
    seconds = main.first(n_max + 1)[1:] + (chain_seconds(draft, n_unread, n_max) if draft else 0.0)
    seconds[:least] = np.inf
    return best_prefix(acceptance ** np.arange(1.0, n_max + 1.0), seconds)


def could_gain(main: CallCosts, draft: CallCosts, n_max: int) -> bool:
    """Return whether a draft model would gain at 95 % acceptance; one that would not is never asked."""
    return best_chain(0.95, main, draft, n_max).rate > 1.02 / main.seconds(1)
