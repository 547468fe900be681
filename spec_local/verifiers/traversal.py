"""The traversal rule: block verification on trees, from the leaves up.

Weng et al. 2025 (arXiv 2505.12398). Children are drawn without replacement. On a chain it is the block rule. A
branch that falls leaves behind what main still owes, averaged over what could have been drawn below it: so the
shape of a tree may depend on draws that are made already, and on nothing that is still to be drawn.
"""

import numpy as np

from spec_local.core.proposal import ROOT, Proposal
from spec_local.core.rng import Rng
from spec_local.core.sampling import align
from spec_local.verifiers.chain import Floats, residual
from spec_local.verifiers.node import Mains, without


def traverse(proposal: Proposal, p: Mains, n_vocab: int, rng: Rng) -> tuple[list[int], int]:
    """The accepted path, and the token after it."""
    by_parent = proposal.children()
    nodes = range(ROOT, len(proposal.tokens))
    rows, columns = align([*map(p, nodes), *(proposal.distributions[node] for node in by_parent)], n_vocab)
    drafts = dict(zip(by_parent, rows[len(nodes) :], strict=True))
    tokens = np.asarray(proposal.tokens, np.intp)
    drawn = tokens if columns is None else columns.searchsorted(tokens)

    def visit(node: int, weight: float) -> tuple[list[int], int] | None:
        """What is accepted from this node on, if it stands; weight: the chance that it may."""
        here: Floats = rows[node - ROOT]
        draft = drafts.get(node)
        for child in by_parent.get(node, ()):
            token = drawn[child]
            assert draft is not None
            if draft[token] <= 0:
                raise ValueError("a drafted token has probability 0 in the draft's distribution")
            accepted = visit(child, min(1.0, weight * here[token] / draft[token]))
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
    assert accepted is not None  # the root stands with certainty
    return accepted
