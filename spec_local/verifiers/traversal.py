"""Traversal verification: block verification on trees, from the leaves up.

Weng et al. 2025 (arXiv 2505.12398). Children are drawn without replacement. On a chain, it equals block
verification. A rejected branch leaves a residual of p that is averaged over all possible draws below it, so
the shape of a tree may depend on earlier draws but not on later ones.
"""

import numpy as np

from spec_local.core.proposal import ROOT, Proposal
from spec_local.core.rng import Rng
from spec_local.core.sampling import align
from spec_local.verifiers.base import Floats, MainDistribution, Verifier, residual
from spec_local.verifiers.tree import ratio, without


def traversal_rule(proposal: Proposal, p: MainDistribution, n_vocab: int, rng: Rng) -> tuple[list[int], int]:
    """See `spec_local.verifiers.base.Rule`."""
    by_parent = proposal.children()
    nodes = range(ROOT, len(proposal.tokens))
    rows, columns = align([*map(p, nodes), *(proposal.distributions[node] for node in by_parent)], n_vocab)
    drafts = dict(zip(by_parent, rows[len(nodes) :], strict=True))
    tokens = np.asarray(proposal.tokens, np.intp)
    drawn = tokens if columns is None else columns.searchsorted(tokens)

    def visit(node: int, weight: float) -> tuple[list[int], int] | None:
        """The accepted path below a node and the token after it; None: the node is rejected.

        weight: as in block verification, the probability that the path to the node may still be accepted.
        """
        here: Floats = rows[node - ROOT]
        draft = drafts.get(node)
        for child in by_parent.get(node, ()):
            token = drawn[child]
            assert draft is not None
            accepted = visit(child, min(1.0, weight * ratio(here, draft, token)))
            if accepted:
                return [child, *accepted[0]], accepted[1]
            left = residual(here, draft, weight)
            total = float(np.maximum(here * weight - draft, 0.0).sum())
            here = left / left.sum()
            denominator = total + (1.0 - weight)
            weight = total / denominator if denominator > 0 else 1.0
            draft = without(draft, token)
        if not rng.accept(weight):
            return None
        token = rng.choose(here)
        return [], token if columns is None else int(columns[token])

    accepted = visit(ROOT, 1.0)
    assert accepted is not None  # the root has weight 1
    return accepted


VERIFIER = Verifier("without replacement", traversal_rule)
