"""Lookup candidates with calibrated acceptance rates: their values, parts, and merged trees."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spec_local.core.proposal import ROOT, Proposal, is_chain
from spec_local.policies.acceptance_model import Floats


@dataclass(frozen=True, slots=True)
class Judged:
    """A candidate tree, and of each node the probability that it is accepted if its parent is."""

    tokens: Sequence[int]
    parents: Sequence[int]
    acceptance: Floats
    source: str

    @property
    def is_chain(self) -> bool:
        return isinstance(self.parents, range) or is_chain(self.parents)

    @property
    def values(self) -> Floats:
        """Of each node the probability that it is accepted: the product along its path."""
        if self.is_chain:
            product: Floats = self.acceptance.cumprod()
            return product
        values: list[float] = []
        for parent, acceptance in zip(self.parents, self.acceptance.tolist(), strict=True):
            values.append(acceptance if parent == ROOT else acceptance * values[parent])
        return np.array(values)

    def part(self, nodes: Sequence[int]) -> Proposal:
        """The proposal of some nodes, all of their ancestors among them."""
        if self.is_chain:
            return Proposal(self.tokens[: len(nodes)], self.parents[: len(nodes)], source=self.source)
        return Proposal(self.tokens, self.parents, source=self.source).part(nodes)


def merged(several: Sequence[Judged]) -> Judged:
    """One tree of all; a path that several lookups found takes the highest acceptance."""
    tokens: list[int] = []
    parents: list[int] = []
    acceptance: list[float] = []
    known: dict[tuple[int, int], int] = {}
    for judged in several:
        numbers = {ROOT: ROOT}
        for node, (token, parent) in enumerate(zip(judged.tokens, judged.parents, strict=True)):
            p, key = float(judged.acceptance[node]), (numbers[parent], token)
            if key not in known:
                known[key] = len(tokens)
                tokens.append(token)
                parents.append(numbers[parent])
                acceptance.append(p)
            numbers[node] = known[key]
            acceptance[numbers[node]] = max(acceptance[numbers[node]], p)
    return Judged(tokens, parents, np.array(acceptance), several[0].source)
