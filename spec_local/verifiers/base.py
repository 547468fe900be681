"""The interface of a verifier, and exact-match verification, which is lossless for every proposal."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spec_local.core.proposal import ROOT, Drawing, Proposal
from spec_local.core.rng import Rng
from spec_local.core.sampling import Distribution

Floats = NDArray[np.float64]

MainDistribution = Callable[[int], Distribution]
"""The main model's distribution after a node of a proposal (`ROOT`: after the context), on demand."""

Rule = Callable[[Proposal, MainDistribution, int, Rng], tuple[list[int], int]]
"""``rule(proposal, p, n_vocab, rng) -> (accepted path, next token)``"""


@dataclass(frozen=True, slots=True)
class Verifier:
    """An acceptance rule, and the way of drawing sibling nodes for which it is lossless.

    Nodes that were chosen rather than drawn have no probabilities: every verifier accepts them by exact
    match. A verifier for chosen nodes needs no rule of its own; it accepts all nodes by exact match.
    """

    drawing: Drawing
    _rule: Rule | None = None

    def __call__(
        self, proposal: Proposal, p: MainDistribution, n_vocab: int, rng: Rng, position: int = 0
    ) -> tuple[list[int], int]:
        """Return the nodes of the accepted path of a proposal, and the token after it.

        Args:
            p: the main model's distribution after a node.
            n_vocab: size of the main model's vocabulary.
            position: index in the whole history of the first token after the context.

        Raises:
            ValueError: this rule is not lossless for the way the proposal was drawn.
        """
        if proposal.drawing == "chosen" or not self._rule:
            return walk(proposal, lambda node, children, depth: p(node).draw(rng, position + depth))
        if proposal.drawing not in ("one", self.drawing):
            raise ValueError(
                f"nodes drawn {proposal.drawing!r} need another verifier: this one is for {self.drawing!r}"
            )
        return self._rule(proposal, p, n_vocab, rng)


EXACT_MATCH = Verifier("chosen")
"""The main model samples, and a draft token is accepted if it is that sample: with probability p.

Sampling depends on the position (`Rng.choose_at`), so that a seed gives the same output whatever was drafted.
Lossless for nodes selected in any way.
"""


def walk(proposal: Proposal, draw: Callable[[int, Sequence[int], int], int]) -> tuple[list[int], int]:
    """Draw a token after the root, then continue from the child with this token, until there is none.

    Args:
        draw: ``draw(node, children, depth)``: the token after a node; the root's depth is 0.

    Returns:
        the accepted path, and the token after it.
    """
    by_parent = proposal.children()
    path: list[int] = []
    node = ROOT
    while True:
        children = by_parent.get(node, ())
        token = draw(node, children, len(path))
        for child in children:
            if proposal.tokens[child] == token:
                break
        else:
            return path, token
        path.append(child)
        node = child


def residual(p: Floats, q: Floats, scale: float = 1.0) -> Floats:
    """max(scale·p − q, 0), (V,), not normalized; p itself if nothing is left (p = q up to rounding)."""
    weights = p * scale
    weights -= q
    np.maximum(weights, 0.0, out=weights)
    return weights if weights.any() else p
