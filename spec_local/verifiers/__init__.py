"""Lossless acceptance rules: pure functions that take their rng.

A rule gets p and q of a proposal and says which path of it stands, and which token comes after that, so that
what is emitted has exactly main's distribution, whatever q is. To add one: a function in `node` (for the
children of one node) or a module, its name in `VERIFIERS` with the drawing that it is right for, and its
exact enumeration in ``tests/unit``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from spec_local.core.proposal import ROOT, Drawing, Proposal
from spec_local.core.rng import Rng
from spec_local.core.sampling import align
from spec_local.verifiers import node
from spec_local.verifiers.block import verify_block
from spec_local.verifiers.chain import ChainRule, Verdict
from spec_local.verifiers.node import Mains
from spec_local.verifiers.token import verify_tokens
from spec_local.verifiers.traversal import traverse


@dataclass(frozen=True, slots=True)
class Verifier:
    """A rule, and how the children that it judges must have been drawn; no rule of its own: exact_match."""

    drawing: Drawing
    _judge: Callable[[Proposal, Mains, int, Rng], tuple[list[int], int]] | None = None

    def __call__(
        self, proposal: Proposal, p: Mains, n_vocab: int, rng: Rng, place: int = 0
    ) -> tuple[list[int], int]:
        """The accepted path of a proposal, node by node, and the token after it.

        Args:
            p: main's distribution after a node.
            n_vocab: main's.
            place: of the first token that is said, counted from the start of the text.

        Raises:
            ValueError: the rule would not be lossless for children drawn so.
        """
        if proposal.drawing == "chosen" or not self._judge:
            return node.walk_by_exact_match(proposal, p, rng, place)
        if proposal.drawing not in ("one", self.drawing):
            raise ValueError(
                f"children drawn {proposal.drawing} need another rule, not one for {self.drawing}"
            )
        return self._judge(proposal, p, n_vocab, rng)


def _judge_chain(
    rule: ChainRule, proposal: Proposal, p: Mains, n_vocab: int, rng: Rng
) -> tuple[list[int], int]:
    k = len(proposal.tokens)
    q = proposal.distributions
    # The list is not kept: over a whole vocabulary, main's distributions take a megabyte each.
    rows, columns = align([*map(p, range(ROOT, k)), *(q[i] for i in range(ROOT, k - 1))], n_vocab)
    drafted = np.asarray(proposal.tokens, np.int64)
    if columns is not None:
        drafted = columns.searchsorted(drafted)
    verdict = rule(rows[None, : k + 1], rows[None, k + 1 :], drafted[None], np.array([k]), [rng])
    n = int(verdict.n_accepted[0])
    token = int(verdict.tokens[0, n])
    return list(range(n)), token if columns is None else int(columns[token])


def _walk(rule: node.NodeRule, drawing: Drawing) -> Verifier:
    return Verifier(drawing, partial(node.walk, rule))


VERIFIERS: dict[str, Verifier] = {
    "token": Verifier("one", partial(_judge_chain, verify_tokens)),
    "block": Verifier("one", partial(_judge_chain, verify_block)),
    "exact-match": Verifier("chosen"),
    "specinfer": _walk(node.with_replacement, "with replacement"),
    "sequoia": _walk(node.without_replacement, "without replacement"),
    "spectr": _walk(node.k_sequential, "with replacement"),
    "top-one": _walk(node.top_and_one, "top and one"),
    "traversal": Verifier("without replacement", traverse),
}

__all__ = ["VERIFIERS", "ChainRule", "Mains", "Verdict", "Verifier", "verify_block", "verify_tokens"]
